"""Cluster resolvers: each returns the tasks of a job, and this process's task. `ms.cluster_resolver` exports all these names."""

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
