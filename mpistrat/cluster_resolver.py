"""`ms.cluster_resolver`: find the tasks of a cluster, from MPI, the batch system, a cloud or the program."""

from .cluster import ClusterSpec
from .cluster import resolvers as _resolvers
from .cluster.resolvers import *  # noqa: F403 - the names of its __all__

__all__ = ["ClusterSpec"]
__all__ += _resolvers.__all__
