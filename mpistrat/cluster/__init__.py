"""Who and where am I: the cluster's description, roles, resolvers, topology and devices."""

from .cluster_resolver import ClusterResolver
from .cluster_spec import ClusterSpec
from .mpi import MPIClusterResolver
from .simple import SimpleClusterResolver
from .slurm import SlurmClusterResolver
from .tf_config import TFConfigClusterResolver
from .topology import Topology
from .union import UnionClusterResolver, UnionResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "Topology",
    "UnionClusterResolver",
    "UnionResolver",
]
