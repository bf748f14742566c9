"""A dataset of file names."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base.arguments import integer
from ...base.errors import explain
from ..permutation import DEFAULT_SEED
from ..spec import ArraySpec
from .node import Node
from .shuffle import shuffle as shuffled
from .stage import InputRows

__all__ = ["list_files"]

Pattern = str | os.PathLike[str]


@final
class _Names(InputRows):
    """File names; ranks compare all of them."""

    def __init__(self, patterns: Sequence[str], names: Sequence[str]) -> None:
        self._patterns = patterns
        self._names = np.empty(len(names), object)
        self._names[:] = names

    @property
    def row_spec(self) -> ArraySpec:
        return ArraySpec((), object)

    def cardinality(self) -> int:
        return len(self._names)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return self._names[positions]

    def fingerprint(self) -> int:
        digest = hashlib.sha256("\0".join(self._names.tolist()).encode(errors="surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def describe(self) -> str:
        return f"list_files: {len(self._names)} names like {', '.join(self._patterns)}"


def list_files(file_pattern: Pattern | Sequence[Pattern], shuffle: bool | None = None, seed: int | None = None) -> Node:
    """Make a dataset of the names of all files that match patterns; random access.

    Each rank lists the files at once; `strategy.distribute_dataset` raises an error if the ranks' lists differ.

    Args:
        file_pattern: a pattern of `glob.glob`, or several; a file that matches two patterns appears twice.
        shuffle: whether names are in a random order, different in each epoch; None is True. Else they are sorted.
        seed: any integer, the same on every rank; None is 0 in every run (TensorFlow draws one per run).

    Raises:
        ValueError: if no file matches.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("c.py", "a.txt", "b.py"):
        ...         _ = pathlib.Path(folder, name).write_text("")
        ...     names = ms.data.Dataset.list_files(f"{folder}/*.py", shuffle=False)
        >>> [name.rpartition("/")[2] for name in names]
        ['b.py', 'c.py']
    """
    given = [file_pattern] if isinstance(file_pattern, (str, os.PathLike)) else list(file_pattern)
    patterns = [os.fspath(pattern) for pattern in given]
    names = sorted(name for pattern in patterns for name in glob.glob(pattern))
    if not names:
        expected, got = "at least one file that matches", f"none for {', '.join(patterns)} in {os.getcwd()}"
        raise ValueError(explain("Dataset.list_files", "file_pattern", expected=expected, got=got))
    seed = integer("Dataset.list_files", "seed", DEFAULT_SEED if seed is None else seed)
    node = _Names(patterns, names)
    return node if shuffle is not None and not shuffle else shuffled(node, seed=seed)
