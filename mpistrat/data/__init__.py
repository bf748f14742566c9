"""Input: rows of files or arrays in a reproducible order, in batches, distributed over the replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import lazy

if TYPE_CHECKING:
    from .copies import download
    from .dataset import Dataset
    from .feed.distributed import DistributedDataset, DistributedIterator, Optional
    from .feed.feed import DatasetIterator
    from .feed.from_function import InputContext
    from .files.hdf5_dataset import HDF5Dataset
    from .files.sparse import to_csr
    from .from_files import from_groups, from_netcdf, from_sparse, from_tar, from_tfrecord, from_zarr
    from .functions import from_arrays, from_generator, from_map_style, from_tables, sample_from_datasets, zip
    from .nodes.node import INFINITE, UNKNOWN
    from .options import AUTOTUNE, SHARD_HINT, AutoShardPolicy, InputOptions, InputReplicationMode, Options
    from .permutation import permute
    from .shards.write import write_shards
    from .shards.writer import ShardWriter
    from .spec import ArraySpec, DatasetSpec
    from .stats import InputStats, StageStats
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "AUTOTUNE",
    "INFINITE",
    "SHARD_HINT",
    "UNKNOWN",
    "ArraySpec",
    "AutoShardPolicy",
    "Dataset",
    "DatasetIterator",
    "DatasetSpec",
    "DistributedDataset",
    "DistributedIterator",
    "HDF5Dataset",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "InputStats",
    "Optional",
    "Options",
    "ShardWriter",
    "StageStats",
    "download",
    "from_arrays",
    "from_generator",
    "from_groups",
    "from_map_style",
    "from_netcdf",
    "from_sparse",
    "from_tables",
    "from_tar",
    "from_tfrecord",
    "from_zarr",
    "permute",
    "sample_from_datasets",
    "to_csr",
    "write_shards",
    "zip",
]
