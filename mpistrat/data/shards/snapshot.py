"""Rows that are kept in a set of shards once they have been made, for this run and for later ones."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.agree import together
from ...base.errors import explain
from ..nodes.batch import refuse_batches, require_end
from ..nodes.node import Addresses, Below, Node
from ..nodes.stage import Stage, one_address
from ..spec import ArraySpec
from .files import PathLike, manifest_path
from .saved import load, save
from .set_writer import set_pattern

if TYPE_CHECKING:
    from ...comm.process_group import ProcessGroup

__all__ = ["snapshot"]

FUNCTION = "Dataset.snapshot"


@final
class Snapshot(Stage):
    """The rows of epoch 0, out of files. They are written when something is first read, or the ranks meet."""

    def __init__(self, parent: Node, path: PathLike, compression: str | None) -> None:
        super().__init__(parent, path, compression)
        self._path, self._compression = Path(path).absolute(), compression
        self._stored: Node | None = None
        self._lock = threading.Lock()

    @property
    def _there(self) -> bool:
        return manifest_path(set_pattern(FUNCTION, self._path)).exists()

    def _load(self) -> Node:
        stored, parent = load(self._path, None), self._parent
        remedy = "The files are of another dataset: remove them, or name another path."
        wanted, found = nest.map_structure(_as_stored, parent.row_spec), stored.row_spec
        if (nest.paths(wanted), nest.flatten(wanted)) != (nest.paths(found), nest.flatten(found)):
            expected, got = f"rows of {wanted} in {self._path}", f"{found}"
            raise ValueError(explain(FUNCTION, "path", expected=expected, got=got, remedy=remedy))
        counts = parent.cardinality(), stored.cardinality()
        if counts[0] >= 0 and counts[0] != counts[1]:
            expected, got = f"{counts[0]} rows in {self._path}", f"{counts[1]}"
            raise ValueError(explain(FUNCTION, "path", expected=expected, got=got, remedy=remedy))
        return stored

    def _rows(self) -> Node:
        """The rows in files, written by this rank alone where they are not there."""
        with self._lock:
            if self._stored is None:
                if not self._there:
                    save(self._parent, 0, self._path, self._compression, None)
                self._stored = self._load()
            return self._stored

    def bind(self, group: ProcessGroup) -> Node:
        """The rows in files, written by all ranks together where not all see them. Collective."""
        parent = self._parent.bind(group)  # also where this rank has read before, which others may not have
        known = self._stored is not None or self._there
        there = group.exchange("distribute_dataset", str(int(known)), detail="snapshot")
        if "0" in there:
            save(parent, 0, self._path, self._compression, group.comm)
        with together(functools.partial(group.exchange, "distribute_dataset", detail="snapshot read")):
            self._stored = self._stored or self._load()
        return self._stored

    def locate(self, epoch: int, position: int) -> Addresses:
        return one_address(epoch, position)

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        return [(self._rows(), (epochs, positions), None)]

    def chunk_starts(self) -> NDArray[np.int64] | None:
        return None if self._stored is None else self._stored.chunk_starts()

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        return self._rows().elements(epoch, start)

    def describe(self) -> str:
        return f"snapshot({str(self._path)!r})"


def _as_stored(spec: ArraySpec) -> ArraySpec:
    return ArraySpec(spec.shape, object) if spec.dtype.kind == "U" else spec


def snapshot(parent: Node, path: PathLike, compression: str | None) -> Node:
    """The rows of a node, kept in files; see `Dataset.snapshot`."""
    refuse_batches(FUNCTION, parent)
    require_end(FUNCTION, parent, "Call repeat after snapshot.")
    if compression not in ("AUTO", "NONE", "GZIP", None):
        raise ValueError(explain(FUNCTION, "compression", expected="'AUTO', 'GZIP' or None", got=repr(compression)))
    return Snapshot(parent, path, None if compression == "AUTO" else compression)
