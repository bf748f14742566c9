"""The datasets of a foreign file that belong together: those with the rows of its largest dataset.

netCDF, anndata, Loom and Cooler store tables of several lengths in one file, with descriptions of their axes. If the
caller names no fields, datasets that cannot be read or have other rows are left out, if the file itself shows that they
do not belong to the rows. A plain file whose datasets differ in length is an error: rows may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .objects import Refused, Unreadable, check_filters, field_of

if TYPE_CHECKING:
    import h5py

__all__ = ["belonging", "readable", "sparse_format"]

_NO_VALUES = b"This is a netCDF dimension but not a netCDF variable"
_SPARSE = ("csr_matrix", "csc_matrix", "csr", "csc")


def readable(datasets: Mapping[str, h5py.Dataset]) -> tuple[list[str], dict[str, str]]:
    """Return the names of the datasets that can be read, and why the others cannot.

    If none can, return the unreadable ones: reading their rows then raises the reason.

    Example:
        >>> readable({})
        ([], {})
    """
    names: list[str] = []
    left_out: dict[str, str] = {}
    unreadable: list[str] = []
    for name, dataset in datasets.items():
        if _has_no_values(dataset):
            left_out[name] = "a dimension without values"
            continue
        if sparse_format(dataset.parent):
            left_out[name] = "part of a sparse matrix"
            continue
        try:
            field_of(dataset)
            check_filters(dataset)
        except Unreadable as refused:
            left_out[name] = str(refused)
            unreadable.append(name)
        except Refused:  # raises an error when its rows are read
            names.append(name)
        else:
            names.append(name)
    return names or unreadable, left_out


def belonging(datasets: Mapping[str, h5py.Dataset]) -> tuple[list[str], dict[str, str]]:
    """Return the names of the datasets with the rows of the largest one, and why others are left out.

    Datasets with other rows are left out if they describe an axis (dimension scales, and variables with named
    dimensions), are elements of an anndata file, or are in groups without a dataset of these rows. Otherwise they are
    returned too.

    Example:
        >>> belonging({})
        ([], {})
    """
    if not datasets:
        return [], {}
    variables = {name: each for name, each in datasets.items() if not _is_scale(each)} or datasets
    largest = max(variables, key=lambda name: _bytes(variables[name]))
    rows = len(datasets[largest])
    groups = {_group(name) for name, dataset in variables.items() if len(dataset) == rows}
    names: list[str] = []
    left_out: dict[str, str] = {}
    for name, dataset in datasets.items():
        described = _is_scale(dataset) or "DIMENSION_LIST" in dataset.attrs or "encoding-type" in dataset.attrs
        if len(dataset) != rows and (described or _group(name) not in groups):
            left_out[name] = f"{len(dataset)} rows, unlike {largest}"
        else:
            names.append(name)
    return names, left_out


def _bytes(dataset: h5py.Dataset) -> int:
    return int(dataset.size * dataset.id.get_type().get_size())  # also for a type without a dtype


def _group(name: str) -> str:
    return name.rpartition("/")[0]


def _attribute(item: Any, name: str) -> Any:
    value = item.attrs.get(name)
    return value.encode() if isinstance(value, str) else value


def _is_scale(dataset: h5py.Dataset) -> bool:
    return bool(dataset.is_scale)


def _has_no_values(dataset: h5py.Dataset) -> bool:
    return _is_scale(dataset) and bytes(_attribute(dataset, "NAME") or b"").startswith(_NO_VALUES)


def sparse_format(group: h5py.Group) -> str | None:
    """Return "csr" or "csc" for a group that is a sparse matrix as anndata writes them, else None."""
    kinds = (_attribute(group, "encoding-type"), _attribute(group, "h5sparse_format"))
    found = [kind.decode(errors="replace") for kind in kinds if isinstance(kind, bytes)]
    return next((kind[:3] for kind in found if kind in _SPARSE), None)
