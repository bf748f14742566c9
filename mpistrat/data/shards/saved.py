"""Rows of any structure saved as a set of shards, and snapshots, which are saved on first use.

Field names encode the structure. An entry of a dict is a group or field with its key; of a tuple "(0)", "(1)" and so on;
a single array is "()".
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest, partition
from ...base.agree import Ranks, together
from ...base.errors import explain
from ...cluster.topology import given_comm
from ..files.hdf5 import HDF5Rows
from ..nodes.batch import refuse_batches, require_end
from ..nodes.node import INFINITE, Addresses, Below, Node
from ..nodes.order import Reindexed, Take
from ..nodes.stage import Stage, one_address
from ..spec import ArraySpec, is_ragged, stack_rows
from .files import PathLike, manifest_path, set_pattern
from .manifest import read_manifest
from .new_shard import ShardSettings
from .writer import ShardWriter

if TYPE_CHECKING:
    from mpi4py import MPI

    from ...comm.process_group import ProcessGroup

__all__ = ["load", "save", "snapshot"]

_SAVE, _LOAD, _SNAPSHOT = "Dataset.save", "Dataset.load", "Dataset.snapshot"
_ALONE, _PLACE = "()", re.compile(r"\((\d*)\)")
_TOGETHER = 64  # rows written together


def save(node: Node, epoch: int, path: PathLike, compression: str | None, comm: MPI.Intracomm | None) -> None:
    """Write the rows of an epoch. Collective over `comm`."""
    ranks = Ranks(given_comm(comm, _SAVE), _SAVE)
    with ranks.together():
        names = nest.flatten(_names(_check(node).row_spec, ()))
        settings = _settings(node.row_spec, compression)
        node.check()
    with ShardWriter._of(_SAVE, path, settings, comm) as writer:
        rows = _share(node, epoch, ranks)
        written = False
        while (together := list(itertools.islice(rows, _TOGETHER))) or (not written and ranks.rank == 0):
            columns = nest.flatten(stack_rows(together, node.row_spec))
            writer._append(dict(zip(names, columns, strict=True)), _SAVE, "dataset")
            written = True


def _check(node: Node) -> Node:
    refuse_batches(_SAVE, node)
    if node.cardinality() == INFINITE:
        remedy = "Save the dataset without repeat(), or with take()."
        raise ValueError(explain(_SAVE, "", expected="a dataset with an end", got="an endless one", remedy=remedy))
    return node


def _settings(row_spec: Any, compression: str | None) -> ShardSettings:
    if compression not in (None, "NONE", "GZIP"):
        raise ValueError(explain(_SAVE, "compression", expected="None, 'NONE' or 'GZIP'", got=repr(compression)))
    if compression == "GZIP":
        return ShardSettings(compression="gzip")
    varies = any(is_ragged(leaf) or leaf.dtype.kind in "OU" for leaf in nest.flatten(row_spec))
    return ShardSettings(layout="chunked" if varies else None)


def _share(node: Node, epoch: int, ranks: Ranks) -> Iterator[Any]:
    if not node.random_access:
        return iter(node.elements(epoch)) if ranks.rank == 0 else iter(())
    low, high = partition.block(node.cardinality(), ranks.size, ranks.rank)
    return Reindexed(node, Take(high)).elements(epoch, low)  # reads no rows after these


def _names(structure: Any, above: tuple[str, ...]) -> Any:
    """Return the field names, in the structure of the rows."""
    if isinstance(structure, Mapping):
        for key in structure:
            if not isinstance(key, str) or not key or "/" in key or _PLACE.fullmatch(key):
                expected = "keys that are valid names in HDF5: not empty, without a slash, and not like '(0)'"
                raise ValueError(explain(_SAVE, "", expected=expected, got=repr(key)))
        return {key: _names(part, (*above, key)) for key, part in structure.items()}
    if isinstance(structure, (tuple, list)):
        return tuple(_names(part, (*above, f"({place})")) for place, part in enumerate(structure))
    if nest.is_nested(structure):
        expected = "arrays in tuples, lists and dicts"
        raise ValueError(explain(_SAVE, "", expected=expected, got=f"a {type(structure).__name__}"))
    return "/".join(above) or _ALONE


def load(path: PathLike, element_spec: Any) -> Node:
    """Return the node of a saved set; see `Dataset.load`."""
    try:
        manifest = read_manifest(manifest_path(set_pattern(_LOAD, path)))
    except (FileNotFoundError, NotADirectoryError):
        expected, got = "a path written by Dataset.save", f"{os.fspath(path)!r}, where there is no such set"
        raise FileNotFoundError(explain(_LOAD, "path", expected=expected, got=got)) from None
    structure = _structure(list(manifest.fields))
    if element_spec is not None:
        saved = nest.map_structure(lambda name: _spec(manifest.fields[name]), structure)
        if saved != element_spec:
            raise ValueError(explain(_LOAD, "element_spec", expected=f"{saved}, as was saved", got=str(element_spec)))
    return HDF5Rows(Path(path), structure, "auto", "auto", "raise", None)


def _spec(field: Any) -> ArraySpec:
    return ArraySpec(field.shape, field.dtype)


def _structure(names: list[str]) -> Any:
    """Invert `_names`."""
    if names == [_ALONE]:
        return _ALONE
    tree: dict[str, Any] = {}
    for name in names:
        *groups, last = name.split("/")
        inside = tree
        for part in groups:
            inside = inside.setdefault(part, {})
        inside[last] = name
    return _packed(tree)


def _packed(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    parts = {key: _packed(part) for key, part in tree.items()}
    if all(_PLACE.fullmatch(key) for key in parts):
        return tuple(parts[f"({place})"] for place in range(len(parts)))
    return parts


@final
class DatasetSnapshot(Stage):
    """The rows of epoch 0 from files, which are written on first use or at distribution."""

    def __init__(self, parent: Node, path: PathLike, compression: str | None) -> None:
        super().__init__(parent, path, compression)
        self._path, self._compression = Path(path).absolute(), compression
        self._stored: Node | None = None
        self._lock = threading.Lock()

    @property
    def _there(self) -> bool:
        return manifest_path(set_pattern(_SNAPSHOT, self._path)).exists()

    def _load(self) -> Node:
        stored, parent = load(self._path, None), self._parent
        remedy = "The files are of another dataset: remove them, or name another path."
        wanted, found = nest.map_structure(_as_stored, parent.row_spec), stored.row_spec
        if (nest.paths(wanted), nest.flatten(wanted)) != (nest.paths(found), nest.flatten(found)):
            expected, got = f"rows of {wanted} in {self._path}", f"{found}"
            raise ValueError(explain(_SNAPSHOT, "path", expected=expected, got=got, remedy=remedy))
        counts = parent.cardinality(), stored.cardinality()
        if counts[0] >= 0 and counts[0] != counts[1]:
            expected, got = f"{counts[0]} rows in {self._path}", f"{counts[1]}"
            raise ValueError(explain(_SNAPSHOT, "path", expected=expected, got=got, remedy=remedy))
        return stored

    def _rows(self) -> Node:
        """Return the rows in files; if they do not exist, this rank writes them alone."""
        with self._lock:
            if self._stored is None:
                if not self._there:
                    save(self._parent, 0, self._path, self._compression, None)
                self._stored = self._load()
            return self._stored

    def bind(self, group: ProcessGroup) -> Node:
        """Return the rows in files; unless all ranks see them, all write them together. Collective."""
        parent = self._parent.bind(group)  # also if this rank has read before, since others may not have
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
    """Return the rows of a node, stored in files; see `Dataset.snapshot`."""
    refuse_batches(_SNAPSHOT, parent)
    require_end(_SNAPSHOT, parent, "Call repeat after snapshot.")
    if compression not in ("AUTO", "NONE", "GZIP", None):
        raise ValueError(explain(_SNAPSHOT, "compression", expected="'AUTO', 'GZIP' or None", got=repr(compression)))
    return DatasetSnapshot(parent, path, None if compression == "AUTO" else compression)
