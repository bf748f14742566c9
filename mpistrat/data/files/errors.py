"""The error of a file that is not as expected."""

from __future__ import annotations

from ...base.errors import ShardError, explain

__all__ = ["shard_error"]


def shard_error(
    where: object, expected: str, got: object, remedy: str = "", function: str = "HDF5Dataset"
) -> ShardError:
    """Return the error of a file that is not as expected.

    Example:
        >>> print(shard_error("a.h5", "a file", "no such file"))
        HDF5Dataset: a.h5: expected a file, got no such file
    """
    return ShardError(explain(function, str(where), expected=expected, got=got, remedy=remedy))
