"""Objects of an HDF5 file by name, with checks: links to other files, references and unknown filters are refused."""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files.handles import open_hdf5
from .manifest import Field

if TYPE_CHECKING:
    import h5py

    from ..files.remote import StoredPath

__all__ = [
    "Refused",
    "Unreadable",
    "all_names",
    "check_filters",
    "check_storage",
    "field_of",
    "find",
    "find_group",
    "find_id",
]

_SOFT_LINKS = 16  # most soft links to follow in a row
_DEPTH = 64  # most nested groups


class Refused(Exception):
    """The reason why a file's content is not read.

    Attributes:
        remedy: the user's fix.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


class Unreadable(Refused):
    """A dataset whose type or compression cannot be read. The rest of the file can."""


_PLUGINS = {
    307: "bzip2", 32001: "Blosc", 32004: "LZ4", 32008: "bitshuffle", 32013: "ZFP", 32015: "Zstandard", 32017: "SZ",
    32018: "FCIDECOMP", 32024: "SZ3", 32026: "Blosc2", 32028: "SPERR", 32029: "SPERR",
}  # fmt: skip


def all_names(file: h5py.File) -> tuple[list[str], list[str], list[str]]:
    """Return the names of all datasets with rows, in natural order; what is left out, each with the reason; links to other files.

    A valid soft link is another name of an object seen elsewhere.

    Raises:
        Refused: for groups nested too deep.
    """
    import h5py

    rows: list[str] = []
    left_out: list[str] = []
    external: list[str] = []
    visited = {file["/"]}

    def walk(group: h5py.Group, prefix: str, depth: int = 1) -> Iterator[tuple[str, h5py.Dataset]]:
        if depth > _DEPTH:
            raise Refused(f"groups nested more than {_DEPTH} deep, at {prefix[:60]}...")
        for key in group:
            link = group.get(key, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                external.append(f"an external link at {prefix}{key}, to {link.filename}")
                continue
            if isinstance(link, h5py.SoftLink):
                why = _broken(group, link.path)
                if why:
                    left_out.append(f"{prefix}{key} ({why})")
                continue
            item = group[key]
            if isinstance(item, h5py.Group):
                if item not in visited:  # a group may be linked several times, or from inside itself
                    visited.add(item)
                    yield from walk(item, f"{prefix}{key}/", depth + 1)
            elif isinstance(item, h5py.Dataset):
                yield f"{prefix}{key}", item

    for name, dataset in walk(file, ""):
        if dataset.shape:
            rows.append(name)
        else:
            left_out.append(f"{name} (no rows)")
    return rows, left_out, external


def _broken(group: h5py.Group, path: str) -> str:
    try:
        return "a link to nothing" if _follow(group.id, path, _SOFT_LINKS) is None else ""
    except Refused as refused:
        return str(refused)


def find(file: h5py.Group, name: str) -> h5py.Dataset | None:
    """Return the dataset of a name like "group/x"; None if there is none.

    Raises:
        Refused: when its path has a link to another file, or endless soft links.
    """
    import h5py

    item = find_id(file, name)
    return None if item is None else h5py.Dataset(item, readonly=True)


def find_id(file: h5py.Group, name: str) -> h5py.h5d.DatasetID | None:
    """Return the identifier of a dataset, which is opened faster than the dataset. See `find`."""
    import h5py

    item = _follow(file.id, name, _SOFT_LINKS)
    return item if isinstance(item, h5py.h5d.DatasetID) else None


def find_group(file: h5py.Group, name: str) -> h5py.Group | None:
    """Return the group of a name like "group/x"; None if there is none. Raises as `find`."""
    import h5py

    item = _follow(file.id, name, _SOFT_LINKS)
    return h5py.Group(item) if isinstance(item, h5py.h5g.GroupID) else None


def _follow(item: Any, name: str, soft_links: int) -> Any:
    """Return the object of a name, None if there is none; a group and the object are identifiers, which are opened fastest."""
    import h5py

    if name.startswith("/"):
        item = h5py.h5o.open(item, b"/")
    for step in name.split("/"):
        if step in ("", "."):
            continue
        key = step.encode(errors="surrogateescape")
        if not isinstance(item, h5py.h5g.GroupID) or not item.links.exists(key):
            return None
        kind = item.links.get_info(key).type
        if kind == h5py.h5l.TYPE_HARD:
            item = h5py.h5o.open(item, key)
            continue
        parent = h5py.h5i.get_name(item).decode(errors="surrogateescape").rstrip("/")
        if kind == h5py.h5l.TYPE_EXTERNAL:
            target = os.fsdecode(item.links.get_val(key)[0])
            raise Refused(f"an external link at {parent}/{step}, to {target}")
        if not soft_links:
            raise Refused(f"too many soft links, at {parent}/{step}")
        item = _follow(item, item.links.get_val(key).decode(errors="surrogateescape"), soft_links - 1)
    return item


_VIRTUAL = 8  # most nested virtual datasets


def field_of(dataset: h5py.Dataset) -> Field:
    """Return the dtype and the shape of a dataset's rows.

    Variable-length strings are `object`; rows of numbers of varying length have the shape (None,).

    Raises:
        Refused: for references, and for types without a NumPy array.
    """
    import h5py

    shape = tuple(map(int, dataset.shape[1:]))
    try:
        dtype = dataset.dtype
    except (TypeError, ValueError) as error:  # for example integers of 3 bytes
        kind = dataset.id.get_type()
        if kind.get_class() == h5py.h5t.TIME:
            raise Unreadable("values of HDF5's time type, which NumPy does not have") from None
        raise Unreadable(f"elements of {kind.get_size()} bytes for which h5py has no dtype ({error})") from None
    if dtype.subdtype is not None:  # an array in each element adds axes to the rows
        dtype, more = dtype.subdtype
        shape = (*shape, *more)
    string, base = h5py.check_string_dtype(dtype), h5py.check_vlen_dtype(dtype)
    if string is not None:
        return Field(np.dtype(object if string.length is None else dtype.str), shape)
    if base is not None:
        if not isinstance(base, np.dtype) or base.hasobject or base.kind == "V" or shape:
            raise Unreadable(f"rows of shape {shape} of variable-length {base}: numbers along one axis can be read")
        if not base.isnative:
            raise Unreadable(f"variable-length {base}, whose bytes h5py does not put in order")
        return Field(np.dtype(base.str), (None,))
    if h5py.check_ref_dtype(dtype) is not None:
        raise Unreadable("references to other objects")
    if dtype.hasobject:
        raise Unreadable(f"a structure with variable-length members or references, {dtype}")
    return Field(np.dtype(dtype.str) if dtype.fields is None and dtype.subdtype is None else dtype, shape)


def check_storage(
    dataset: h5py.Dataset, path: StoredPath, declared: Container[StoredPath], notes: list[str] | None = None
) -> set[StoredPath]:
    """Refuse a dataset with data outside the declared files, or that cannot be decoded.

    Args:
        notes: receives a text for each dataset with unwritten rows, which read as zeros.

    Returns:
        The resolved paths of the other files that a virtual dataset uses.

    Raises:
        Refused: with the reason.
    """
    found = _check(dataset, path, declared, _VIRTUAL, notes)
    return found and found - {path.resolve()}


def _check(
    dataset: h5py.Dataset, path: StoredPath, declared: Container[StoredPath], depth: int, notes: list[str] | None
) -> set[StoredPath]:
    if notes is not None and (rows := _unwritten(dataset)):
        where = f"{path}: {dataset.name.strip('/')}: {rows} of {len(dataset)} rows were never written, or not whole"
        remedy = "if they should be zeros, make the dataset with fillvalue=0; else write it again"
        notes.append(f"{where}; what is missing reads as zeros: {remedy}")

    if dataset.external:
        raise Refused(f"external storage in {dataset.external[0][0]}")
    if dataset.is_virtual and not isinstance(path, Path):
        raise Refused("a virtual dataset of a remote file: copy its files to this node first, by ms.data.download")
    if dataset.is_virtual:
        return set().union(*(_check_source(each, path, declared, depth, notes) for each in dataset.virtual_sources()))
    check_filters(dataset)
    return set()


def never_written(dataset: h5py.Dataset) -> bool:
    """Return True if all of a dataset is read as its fill value, since nothing was written.

    Raises:
        Refused: the file sets no fill value.
    """
    import h5py

    if dataset.is_virtual or dataset.external or not dataset.nbytes or dataset.id.get_storage_size():
        return False
    if dataset.id.get_create_plist().fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        raise Refused(f"{len(dataset) if dataset.shape else 1} rows that were never written")
    return True


def check_filters(dataset: h5py.Dataset) -> None:
    """Raise Unreadable if HDF5 lacks a filter of a dataset's chunks."""
    import h5py

    plist = dataset.id.get_create_plist()
    for index in range(plist.get_nfilters()):
        code, _, _, name = plist.get_filter(index)
        if not h5py.h5z.filter_avail(code):
            known = _PLUGINS.get(code, "")
            remedy = "Install the filter's plugin, and set HDF5_PLUGIN_PATH to its folder."
            if known:
                remedy = (
                    "pip install hdf5plugin, and write `import hdf5plugin` in the program; for a command, set"
                    " HDF5_PLUGIN_PATH to the folder that hdf5plugin.PLUGIN_PATH names."
                )
            said = name.decode(errors="replace") or known
            raise Unreadable(f"filter {code} ({said}), which this HDF5 does not have", remedy)


def _unwritten(dataset: h5py.Dataset) -> int:
    """Return the number of rows that read as zeros, at least partly, only because they were never written.

    Rows are not counted if the file sets a fill value, which is meant to be read, or if they are in a partly written
    chunk or contiguous dataset, where they cannot be distinguished from zeros.
    """
    import h5py

    if not dataset.nbytes or dataset.external:
        return 0
    if dataset.id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED:
        return 0
    if dataset.is_virtual:
        mapped = sum(source.vspace.get_select_npoints() for source in dataset.virtual_sources())
        missing = dataset.size - mapped
        return max(0, -(-missing * len(dataset) // dataset.size)) if dataset.shape else int(missing > 0)
    if dataset.chunks is None or not dataset.shape:
        return 0 if dataset.id.get_storage_size() else (len(dataset) if dataset.shape else 1)
    each = [-(-length // chunk) for length, chunk in zip(dataset.shape, dataset.chunks, strict=True)]
    if not hasattr(dataset.id, "get_num_chunks") or dataset.id.get_num_chunks() >= math.prod(each):
        return 0
    written = np.zeros(each[0], np.int64)  # chunks, by their rows

    def note(chunk: Any) -> None:
        written[chunk.chunk_offset[0] // dataset.chunks[0]] += 1

    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(note)
    else:
        for number in range(dataset.id.get_num_chunks()):
            note(dataset.id.get_chunk_info(number))
    lacking = np.flatnonzero(written < math.prod(each[1:]))
    starts = lacking * dataset.chunks[0]
    return int((np.minimum(starts + dataset.chunks[0], len(dataset)) - starts).sum())


def _check_source(
    source: Any, path: StoredPath, declared: Container[StoredPath], depth: int, notes: list[str] | None
) -> set[StoredPath]:
    """Refuse a source of a virtual dataset that HDF5 would search elsewhere, or replace by fill values."""
    where = f"a virtual dataset that draws from {source.dset_name} in {source.file_name}"
    if not depth:
        raise Refused(f"{where}, through too many virtual datasets")
    if source.file_name != "." and os.environ.get("HDF5_VDS_PREFIX"):
        raise Refused(f"{where}, while HDF5_VDS_PREFIX is set, which moves its sources")
    file_path = path if source.file_name == "." else (path.resolve().parent / source.file_name).resolve()
    if file_path.resolve() not in declared:
        raise Refused(f"{where}, which is not a file of this dataset")
    with open_hdf5(file_path) as file:
        found = find(file, source.dset_name)
        if found is None:
            raise Refused(f"{where}, which is not there")
        _check_extent(source, found, where)
        return {file_path.resolve()} | _check(found, file_path, declared, depth - 1, notes)


def _check_extent(source: Any, found: h5py.Dataset, where: str) -> None:
    """Refuse a source with fewer elements than the virtual dataset uses: some versions of HDF5 would fill in the rest."""
    import h5py

    if source.src_space.get_select_type() == h5py.h5s.SEL_ALL:
        enough = source.vspace.get_select_npoints() == found.size
    else:
        shape = source.src_space.shape
        enough = len(shape) == found.ndim and all(a <= b for a, b in zip(shape, found.shape, strict=True))
    if not enough:
        raise Refused(f"{where}, which has the shape {found.shape} only")
