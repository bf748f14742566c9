"""Input: rows out of HDF5 shards or arrays, in a reproducible order, in batches, divided over the replicas."""

from .arrays import from_arrays
from .dataset import INFINITE, Dataset
from .distribution.distribute import DistributedDataset, DistributedIterator, InputStats
from .distribution.per_worker import InputContext, PerReplicaDataset
from .hdf5 import HDF5Dataset
from .iterator import DatasetIterator
from .options import SHARD_HINT, AutoShardPolicy, InputOptions, InputReplicationMode, Options
from .order import permute
from .shards.write import write_shards
from .spec import ArraySpec

__all__ = [
    "INFINITE",
    "SHARD_HINT",
    "ArraySpec",
    "AutoShardPolicy",
    "Dataset",
    "DatasetIterator",
    "DistributedDataset",
    "DistributedIterator",
    "HDF5Dataset",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "InputStats",
    "Options",
    "PerReplicaDataset",
    "from_arrays",
    "permute",
    "write_shards",
]
