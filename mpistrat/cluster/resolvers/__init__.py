"""Cluster resolvers: each finds the tasks of a job, and this one of them. `ms.cluster_resolver` has all names of this file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.lazy import lazy

if TYPE_CHECKING:
    from .clouds import (
        GCEClusterResolver,
        KubernetesClusterResolver,
        KubernetesExecutableLocation,
        SageMakerClusterResolver,
    )
    from .mpi import MPIClusterResolver
    from .resolver import ClusterResolver, SimpleClusterResolver, UnionClusterResolver, UnionResolver
    from .slurm import SlurmClusterResolver
    from .tf_config import TFConfigClusterResolver
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ClusterResolver",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "MPIClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionClusterResolver",
    "UnionResolver",
]
