"""Digests of files and of arrays: xxHash's where it is installed, which is ten times as fast, else SHA-256."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "algorithm_of",
    "default_algorithm",
    "digest_of_array",
    "digest_of_bytes",
    "digest_of_ends",
    "digest_of_file",
]

_PIECE = 1 << 22
_END = 1 << 16


def default_algorithm() -> str:
    """Return xxh3_128 where xxhash is installed, else sha256."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return "sha256"
    return "xxh3_128"


def algorithm_of(digest: str) -> str:
    """Return the algorithm of a digest "algorithm:hex"."""
    return digest.partition(":")[0]


def digest_of_bytes(data: bytes, algorithm: str | None = None) -> str:
    """Return "algorithm:hex" of bytes. Raises as `digest_of_file`."""
    name, hasher = _hasher(algorithm)
    hasher.update(data)
    return f"{name}:{hasher.hexdigest()}"


def digest_of_file(path: Path, algorithm: str | None = None) -> str:
    """Return "algorithm:hex" of a file's bytes.

    Raises:
        ImportError: the algorithm needs a library that is not installed.
        ValueError: an unknown algorithm.
    """
    name, hasher = _hasher(algorithm)
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            hasher.update(piece)
    return f"{name}:{hasher.hexdigest()}"


def digest_of_ends(path: Path, algorithm: str | None = None) -> str:
    """Return "algorithm:hex" of a file's first and last 64 KiB and of its length. Raises as `digest_of_file`.

    It takes two small reads, and tells files of one size apart.
    """
    name, hasher = _hasher(algorithm)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        hasher.update(f"{size}\0".encode())
        for start in sorted({0, max(0, size - _END)}):
            file.seek(start)
            hasher.update(file.read(_END))
    return f"{name}:{hasher.hexdigest()}"


def digest_of_array(array: np.ndarray, about: str = "", algorithm: str | None = None) -> str:
    """Return "algorithm:hex" of an array's dtype, shape and values, and of what else is said about it.

    It is the same on machines of either byte order. Raises as `digest_of_file`.

    Example:
        >>> digest_of_array(np.zeros(2), "w", "sha256")[:16]
        'sha256:465c0cc0f'
    """
    name, hasher = _hasher(algorithm)
    dtype = array.dtype
    if sys.byteorder == "big" if dtype.isnative else sys.byteorder == "little":
        array = array.astype(dtype.newbyteorder("<"))
    hasher.update(f"{about}\0{dtype.name}\0{array.shape}\0".encode())
    hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return f"{name}:{hasher.hexdigest()}"


def _hasher(algorithm: str | None) -> tuple[str, Any]:
    algorithm = algorithm or default_algorithm()
    if algorithm == "sha256":
        return algorithm, hashlib.sha256()
    if algorithm == "xxh3_128":
        import xxhash

        return algorithm, xxhash.xxh3_128()
    raise ValueError(f"unknown digest algorithm {algorithm!r}")
