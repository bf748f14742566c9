"""Sets of HDF5 files: written from other files, described, checked."""

from ..command import Group

__all__ = ["COMMAND"]

COMMAND = Group(
    "write, describe and check sets of HDF5 files",
    {
        "write": "shards.write:COMMAND",
        "info": "shards.info:COMMAND",
        "check": "shards.check:COMMAND",
    },
)
