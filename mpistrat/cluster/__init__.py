"""Who and where am I: the cluster's description, roles, resolvers, topology and devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import lazy

if TYPE_CHECKING:
    from .resolvers.clouds import (
        GCEClusterResolver,
        KubernetesClusterResolver,
        KubernetesExecutableLocation,
        SageMakerClusterResolver,
    )
    from .resolvers.mpi import MPIClusterResolver
    from .resolvers.resolver import ClusterResolver, SimpleClusterResolver, UnionClusterResolver, UnionResolver
    from .resolvers.slurm import SlurmClusterResolver
    from .resolvers.tf_config import TFConfigClusterResolver
    from .spec import ClusterSpec
    from .topology import Topology
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "MPIClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "Topology",
    "UnionClusterResolver",
    "UnionResolver",
]
