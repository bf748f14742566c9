"""Datasets of an HDF5 file by name: all of them, or one; never by a link that leaves the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import h5py

__all__ = ["Refused", "all_names", "find", "find_group"]

_SOFT_LINKS = 16  # followed one after the other, at most
_DEPTH = 64  # of groups in groups, at most


class Refused(Exception):
    """What a file holds is not read, for this reason."""


def all_names(file: h5py.File) -> tuple[list[str], list[str]]:
    """Return the names of all datasets that have rows, in natural order, and what is left out, each with the reason.

    A soft link is another name of what is seen elsewhere, if it leads to anything.

    Raises:
        Refused: for a link to another file, and for groups that are nested too deep.
    """
    import h5py

    rows: list[str] = []
    left_out: list[str] = []
    visited = {file["/"]}

    def walk(group: h5py.Group, prefix: str, depth: int = 1) -> Iterator[tuple[str, h5py.Dataset]]:
        if depth > _DEPTH:
            raise Refused(f"groups nested more than {_DEPTH} deep, at {prefix[:60]}…")
        for key in group:
            link = group.get(key, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                raise Refused(f"an external link at {prefix}{key}, to {link.filename}")
            if isinstance(link, h5py.SoftLink):
                why = _broken(group, link.path)
                if why:
                    left_out.append(f"{prefix}{key} ({why})")
                continue
            item = group[key]
            if isinstance(item, h5py.Group):
                if item not in visited:  # a group may be reached on several ways, or from inside itself
                    visited.add(item)
                    yield from walk(item, f"{prefix}{key}/", depth + 1)
            elif isinstance(item, h5py.Dataset):
                yield f"{prefix}{key}", item

    for name, dataset in walk(file, ""):
        if dataset.shape:
            rows.append(name)
        else:
            left_out.append(f"{name} (no rows)")
    return rows, left_out


def _broken(group: h5py.Group, path: str) -> str:
    """Why a soft link of a group leads to nothing that is read; empty where it leads to something."""
    try:
        return "a link to nothing" if _follow(group, path, _SOFT_LINKS) is None else ""
    except Refused as refused:
        return str(refused)


def find(file: h5py.File, name: str) -> h5py.Dataset | None:
    """Return the dataset of a name like "group/x", or None if there is none.

    Raises:
        Refused: when the way to it leads through a link to another file, or through soft links without end.
    """
    import h5py

    item = _follow(file, name, _SOFT_LINKS)
    return item if isinstance(item, h5py.Dataset) else None


def find_group(file: h5py.File, name: str) -> h5py.Group | None:
    """Return the group of a name like "group/x", or None if there is none. Raises as `find`."""
    import h5py

    item = _follow(file, name, _SOFT_LINKS)
    return item if isinstance(item, h5py.Group) else None


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
