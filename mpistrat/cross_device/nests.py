"""Gather and broadcast of nests: one collective, whatever they have in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..comm.arrays import as_array, dtype_name
from ..distributed_values import PerReplica
from ..errors import explain
from ..options import CommunicationOptions
from ..types import IndexedSlices
from .ops import CrossDeviceOps
from .values import broadcast_all, gather_all, local_arrays, local_values

__all__ = ["broadcast_nest", "gather_nest"]


def gather_nest(
    ops: CrossDeviceOps,
    leaves: Sequence[Any],
    axis: int,
    options: CommunicationOptions | None,
    name: str,
    paths: Sequence[str],
) -> list[Any]:
    """Return what `CrossDeviceOps.gather` would for each leaf of a nest. Collective.

    An algorithm with a way of its own (`gather_implementation`) goes that way for each of them.

    Args:
        ops: the algorithm.
        leaves: as for `gather`.
        axis, options: see `gather`.
        name: the form of the nest, for the contract.
        paths: where each leaf is in it, for errors.

    Raises:
        Exception: see `CrossDeviceOps.gather`.
    """
    options = options or CommunicationOptions()
    ops = ops.chosen(options)
    group, arrays = ops.group, []
    for leaf, path in zip(leaves, paths, strict=True):
        values = local_values(leaf, group, "gather", repeat=False)
        if any(isinstance(value, IndexedSlices) for value in values):
            raise TypeError(explain("gather", f"value{path}", expected="arrays", got="IndexedSlices"))
        arrays.append([as_array(value, "gather", f"value{path}") for value in values])
    own = type(ops).gather_implementation is not CrossDeviceOps.gather_implementation
    detail = ("axis", axis, len(leaves))
    with group.collective("gather", name, detail=detail, timeout=options.timeout_seconds) as ops.call:
        if own:
            return [ops.gather_implementation(PerReplica(values), None, axis, options) for values in arrays]
        return gather_all(group, arrays, axis, paths)


def broadcast_nest(ops: CrossDeviceOps, leaves: Sequence[Any], root: int, name: str, paths: Sequence[str]) -> list[Any]:
    """Return what `CrossDeviceOps.broadcast` would for each leaf of a nest. Collective. See `gather_nest`.

    Raises:
        Exception: see `CrossDeviceOps.broadcast`.
    """
    group = ops.group
    total = group.topology.num_replicas
    if not 0 <= root < total:
        raise ValueError(explain("broadcast", "root", expected=f"a replica from 0 to {total - 1}", got=root))
    arrays = [local_arrays(local_values(leaf, group, "broadcast"), "broadcast") for leaf in leaves]
    forms = tuple((dtype_name(values[0].dtype), tuple(values[0].shape)) for values in arrays)
    own = type(ops).broadcast_implementation is not CrossDeviceOps.broadcast_implementation
    with group.collective("broadcast", name, detail=("root", root, *forms)) as ops.call:
        if own:
            return [ops.broadcast_implementation(PerReplica(values), None, root) for values in arrays]
        return broadcast_all(group, arrays, root, paths)
