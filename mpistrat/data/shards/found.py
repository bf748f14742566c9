"""What was found in files, as bytes for other ranks: JSON, never pickle, compressed; some 100 bytes a file."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files.codecs import Pipeline
from ..files.handles import ShardFile
from ..files.storage import Chunks, Contiguous, Layout, OnlyHDF5, Pointers, Storage
from .look import Found, Shard, Unfit
from .manifest import fields_from_json, fields_to_json

__all__ = ["from_bytes", "to_bytes"]


def to_bytes(found: dict[int, Found]) -> bytes:
    """Return what was found in files, by their numbers in the set, as bytes."""
    document = {number: _to_json(one) for number, one in found.items()}
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 1)


def from_bytes(data: bytes, paths: Sequence[Path]) -> dict[int, Found]:
    """Return what `to_bytes` was given, of files that have these paths here."""
    document = json.loads(zlib.decompress(data))
    return {int(number): _from_json(one, paths[int(number)]) for number, one in document.items()}


def _to_json(found: Found) -> Any:
    if isinstance(found, Unfit):
        return {"unfit": found.text, "unopened": found.unopened}
    return {
        "file": [found.file.inode, found.file.bytes, found.file.changed],
        "storages": {name: _storage_to_json(storage) for name, storage in found.storages.items()},
        "sources": list(map(str, found.sources)),
        "left_out": found.left_out,
        "notes": found.notes,
        "sample": found.sample.hex(),
        "problem": found.problem,
    }


def _from_json(document: Any, path: Path) -> Found:
    if "unfit" in document:
        return Unfit(document["unfit"], document["unopened"])
    file = ShardFile(path, *document["file"])
    storages = {name: _storage_from_json(storage, file) for name, storage in document["storages"].items()}
    return Shard(
        file, storages, frozenset(map(Path, document["sources"])), tuple(document["left_out"]),
        tuple(document["notes"]), bytes.fromhex(document["sample"]), document["problem"],
    )  # fmt: skip


def _storage_to_json(storage: Storage) -> Any:
    numbers = [storage.rows, storage.row_bytes, storage.block_rows, storage.chunk_rows]
    return [storage.name, fields_to_json({"": storage.field})[""], *numbers, _layout_to_json(storage.layout)]


def _storage_from_json(document: Any, file: ShardFile) -> Storage:
    name, field, rows, row_bytes, block_rows, chunk_rows, layout = document
    shape = fields_from_json({"": field})[""]
    return Storage(file, name, shape, rows, row_bytes, block_rows, chunk_rows, _layout_from_json(layout, file))


def _layout_to_json(layout: Layout) -> Any:
    if isinstance(layout, Contiguous):
        return layout.offset
    if isinstance(layout, OnlyHDF5):
        return layout.reason
    if isinstance(layout, Pointers):
        return {"pointers": _storage_to_json(layout.storage)}
    arrays = [_array_to_json(array) for array in (layout.offsets, layout.sizes, layout.masks, layout.fill)]
    return {"chunks": [layout.rows, layout.row_bytes, layout.pipeline.filters, *arrays]}


def _layout_from_json(document: Any, file: ShardFile) -> Layout:
    if isinstance(document, int):
        return Contiguous(document)
    if isinstance(document, str):
        return OnlyHDF5(document)
    if "pointers" in document:
        return Pointers(_storage_from_json(document["pointers"], file))
    rows, row_bytes, filters, *arrays = document["chunks"]
    pipeline = Pipeline.undoing([(code, parameter) for code, parameter in filters])
    if isinstance(pipeline, str):
        return OnlyHDF5(pipeline)
    offsets, sizes, masks, fill = map(_array_from_json, arrays)
    return Chunks(rows, row_bytes, pipeline, offsets, sizes, masks, fill)


def _array_to_json(array: NDArray[Any]) -> Any:
    return [array.dtype.str, base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def _array_from_json(document: Any) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(document[1]), document[0]).copy()
