"""Datasets of an HDF5 file by name: all of them, or one; never by a link that leaves the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import h5py

__all__ = ["Refused", "all_names", "find"]

_SOFT_LINKS = 16  # followed one after the other, at most


class Refused(Exception):
    """What a file holds is not read, for this reason."""


def all_names(file: h5py.File) -> tuple[list[str], list[str]]:
    """Return the names of all datasets that have rows, in natural order, and of all others.

    A soft link is another name of what is seen elsewhere.

    Raises:
        Refused: for a link to another file.
    """
    import h5py

    rows: list[str] = []
    others: list[str] = []
    visited = {file["/"]}

    def walk(group: h5py.Group, prefix: str) -> Iterator[tuple[str, h5py.Dataset]]:
        for key in group:
            link = group.get(key, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                raise Refused(f"an external link at {prefix}{key}, to {link.filename}")
            if not isinstance(link, h5py.HardLink):
                continue
            item = group[key]
            if isinstance(item, h5py.Group):
                if item not in visited:  # a group may be reached on several ways, or from inside itself
                    visited.add(item)
                    yield from walk(item, f"{prefix}{key}/")
            elif isinstance(item, h5py.Dataset):
                yield f"{prefix}{key}", item

    for name, dataset in walk(file, ""):
        (rows if dataset.shape else others).append(name)
    return rows, others


def find(file: h5py.File, name: str) -> h5py.Dataset | None:
    """Return the dataset of a name like "group/x", or None if there is none.

    Raises:
        Refused: when the way to it leads through a link to another file, or through soft links without end.
    """
    import h5py

    item = _follow(file, name, _SOFT_LINKS)
    return item if isinstance(item, h5py.Dataset) else None


def _follow(group: Any, name: str, soft_links: int) -> Any:
    import h5py

    item: Any = group.file if name.startswith("/") else group
    for step in name.split("/"):
        if step in ("", "."):
            continue
        if not isinstance(item, h5py.Group):
            return None
        link = item.get(step, getlink=True)
        if link is None:
            return None
        if isinstance(link, h5py.ExternalLink):
            raise Refused(f"an external link at {item.name.rstrip('/')}/{step}, to {link.filename}")
        if isinstance(link, h5py.SoftLink):
            if not soft_links:
                raise Refused(f"too many soft links, at {item.name.rstrip('/')}/{step}")
            item = _follow(item, link.path, soft_links - 1)
        else:
            item = item[step]
    return item
