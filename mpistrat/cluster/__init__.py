"""Who and where am I: the cluster's description, roles, resolvers, topology and devices."""

from .resolvers.mpi import MPIClusterResolver
from .resolvers.resolver import ClusterResolver, SimpleClusterResolver, UnionClusterResolver, UnionResolver
from .resolvers.slurm import SlurmClusterResolver
from .resolvers.tf_config import TFConfigClusterResolver
from .spec import ClusterSpec
from .topology import Topology

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
