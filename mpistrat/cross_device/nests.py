"""Gather and broadcast of nests: one collective, whatever they have in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.distributed_values import PerReplica
from ..base.options import CommunicationOptions
from ..comm.arrays import dtype_name
from .ops import CrossDeviceOps
from .values import broadcast_all, check_root, counted_axis, gather_all, local_arrays, local_values, to_gather

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
    group = ops.group
    arrays = [to_gather(leaf, group, path) for leaf, path in zip(leaves, paths, strict=True)]
    own = type(ops).gather_implementation is not CrossDeviceOps.gather_implementation
    detail = ("axis", axis, len(leaves))
    with group.collective("gather", name, detail=detail, timeout=options.timeout_seconds) as ops.call:
        if own:
            return [
                ops.gather_implementation(PerReplica(values), None, counted_axis(axis, values[0].ndim), options)
                for values in arrays
            ]
        return gather_all(group, arrays, axis, paths)


def broadcast_nest(ops: CrossDeviceOps, leaves: Sequence[Any], root: int, name: str, paths: Sequence[str]) -> list[Any]:
    """Return what `CrossDeviceOps.broadcast` would for each leaf of a nest. Collective. See `gather_nest`.

    Raises:
        Exception: see `CrossDeviceOps.broadcast`.
    """
    group = ops.group
    check_root(root, group, "broadcast")
    arrays = [local_arrays(local_values(leaf, group, "broadcast"), "broadcast") for leaf in leaves]
    forms = tuple((dtype_name(values[0].dtype), tuple(values[0].shape)) for values in arrays)
    own = type(ops).broadcast_implementation is not CrossDeviceOps.broadcast_implementation
    with group.collective("broadcast", name, detail=("root", root, *forms)) as ops.call:
        if own:
            return [ops.broadcast_implementation(PerReplica(values), None, root) for values in arrays]
        return broadcast_all(group, arrays, root, paths)
