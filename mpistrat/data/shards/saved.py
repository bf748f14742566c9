"""Rows of any structure saved as a set of shards, whose names of fields tell the structure.

A part of a dict is a group, or a field, of its key; of a tuple "(0)", "(1)" and so on; an array that stands alone is "()".
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base import nest, partition
from ...base.agree import Ranks
from ...base.errors import explain
from ...cluster.topology import given_comm
from ..files.hdf5 import HDF5Rows
from ..nodes.batch import refuse_batches
from ..nodes.node import INFINITE, Node
from ..nodes.order import Reindexed, Take
from ..spec import ArraySpec, is_ragged, stack_rows
from .files import PathLike, manifest_path
from .manifest import read_manifest
from .set_writer import SetWriter, set_pattern
from .settings import ShardSettings

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["load", "save"]

_SAVE, _LOAD = "Dataset.save", "Dataset.load"
_ALONE, _PLACE = "()", re.compile(r"\((\d*)\)")
_TOGETHER = 64  # rows that are written together


def save(node: Node, epoch: int, path: PathLike, compression: str | None, comm: MPI.Intracomm | None) -> None:
    """Write the rows of an epoch; see `Dataset.save`. Collective over `comm`."""
    ranks = Ranks(given_comm(comm, _SAVE), _SAVE)
    with ranks.together():
        names = nest.flatten(_names(_check(node).row_spec, ()))
        settings = _settings(node.row_spec, compression)
        node.check()
    with SetWriter(_SAVE, path, settings, comm) as writer:
        rows = _share(node, epoch, ranks)
        written = False
        while (together := list(itertools.islice(rows, _TOGETHER))) or (not written and ranks.rank == 0):
            columns = nest.flatten(stack_rows(together, node.row_spec))
            writer.write(dict(zip(names, columns, strict=True)), _SAVE, "dataset")
            written = True


def _check(node: Node) -> Node:
    refuse_batches(_SAVE, node)
    if node.cardinality() == INFINITE:
        remedy = "Save the dataset without repeat(), or take() what is wanted."
        raise ValueError(explain(_SAVE, "", expected="a dataset with an end", got="one without", remedy=remedy))
    return node


def _settings(row_spec: Any, compression: str | None) -> ShardSettings:
    if compression not in (None, "NONE", "GZIP"):
        raise ValueError(explain(_SAVE, "compression", expected="None, 'NONE' or 'GZIP'", got=repr(compression)))
    if compression == "GZIP":
        return ShardSettings(compression="gzip")
    varies = any(is_ragged(leaf) or leaf.dtype.kind in "OU" for leaf in nest.flatten(row_spec))
    return ShardSettings(layout="chunked" if varies else None)


def _share(node: Node, epoch: int, ranks: Ranks) -> Iterator[Any]:
    """The rows that this rank writes."""
    if not node.random_access:
        return iter(node.elements(epoch)) if ranks.rank == 0 else iter(())
    low, high = partition.block(node.cardinality(), ranks.size, ranks.rank)
    return Reindexed(node, Take(high)).elements(epoch, low)  # which reads none behind


def _names(structure: Any, above: tuple[str, ...]) -> Any:
    """The names of the fields, in the structure of the rows."""
    if isinstance(structure, Mapping):
        for key in structure:
            if not isinstance(key, str) or not key or "/" in key or _PLACE.fullmatch(key):
                expected = "keys that are names of HDF5, not empty, without a slash, and are not like '(0)'"
                raise ValueError(explain(_SAVE, "", expected=expected, got=repr(key)))
        return {key: _names(part, (*above, key)) for key, part in structure.items()}
    if isinstance(structure, (tuple, list)):
        return tuple(_names(part, (*above, f"({place})")) for place, part in enumerate(structure))
    if nest.is_nested(structure):
        expected = "arrays in tuples, lists and dicts"
        raise ValueError(explain(_SAVE, "", expected=expected, got=f"a {type(structure).__name__}"))
    return "/".join(above) or _ALONE


def load(path: PathLike, element_spec: Any) -> Node:
    """The rows of a saved set; see `Dataset.load`."""
    try:
        manifest = read_manifest(manifest_path(set_pattern(_LOAD, path)))
    except (FileNotFoundError, NotADirectoryError):
        expected, got = "a path at which Dataset.save has written", f"{os.fspath(path)!r}, where there is no such set"
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
    """What `_names` returned."""
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
