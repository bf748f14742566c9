"""The Mesh: ranks as a grid with named axes, and the collectives along one axis by which a step moves values between layouts.

An array is one of three things along an axis: equal on all ranks; split, of which each rank has a part in one dimension; or
partial, of which the sum over the ranks is meant. Each collective makes one of another, and its backward makes of the gradient
of what it returned that of what it was given:

| forward | from | to | backward |
|---|---|---|---|
| all_reduce | partial | equal | nothing: the gradient is equal |
| replicate | equal, used by each rank in its own way | the same, no message | all_reduce of partial gradients |
| all_gather | split | equal, used by each rank in its own way | reduce_scatter |
| reduce_scatter | partial | split | all_gather |
| shard | equal | split, no message | all_gather |
| reshard | split in a dimension | split in another | reshard the other way |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..arena.values import move_like
from ..base.errors import ClosedError, explain
from ..base.text import named
from ..base.types import ReduceOp
from ..comm.arrays import accumulation_dtype, as_array, check_movable, check_reducible, is_gpu, to_host
from ..comm.exchange import all_gather, all_to_all
from ..comm.process_group import ProcessGroup
from ..cross_device.auto import make_cross_device_ops
from ..cross_device.ops import CrossDeviceOps
from ..variables import DATA, Grid
from .axes import Axes
from .objects import check_root

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

__all__ = ["Mesh"]


@final
class Mesh:
    """The ranks of a MeshStrategy as a grid with named axes: `strategy.mesh`, in a step `ms.get_replica_context().mesh`.

    Its collectives are made by all ranks along an axis, the same number of times and in the same order, with arrays of one shape
    and dtype. They return new arrays; float16 and bfloat16 are summed in float32. `dim` is what NumPy calls an axis. Arrays on
    GPUs go through the host's memory, but for `all_reduce` (not yet run on a GPU).

    Attributes:
        sizes: the length of each axis, in order, the fastest last.
        at: this rank's coordinate on each.
        grid: the groups of ranks, for variables.
    """

    def __init__(self, group: ProcessGroup, axes: Axes) -> None:
        """Make the groups of ranks along each axis. Collective over the group, which closes it."""
        rank = group.topology.rank
        self.sizes, self.at = axes.sizes, axes.coordinates(rank)
        self._ranks = {axis: axes.along([axis], rank) for axis in self.sizes}
        self._groups = {axis: group.subgroup(ranks, "MeshStrategy") for axis, ranks in self._ranks.items()}
        model = [axis for axis in self.sizes if axis != DATA]
        ranks = axes.along(model, rank)
        replica = self._groups[model[0]] if len(model) == 1 else group.subgroup(ranks, "MeshStrategy")
        self.grid = Grid(self.sizes, self.at, group, replica, ranks)
        self._ops: dict[str, CrossDeviceOps] = {}
        group.attach(self)

    @property
    def data_group(self) -> ProcessGroup:
        """The ranks whose replicas step together with this one's."""
        return self._groups[DATA]

    def comm(self, axis: str) -> MPI.Intracomm | None:
        """Return the communicator of the ranks along an axis, by coordinate: a duplicate for the program's own messages.

        None for an axis of length 1.

        Raises:
            ValueError: there is no such axis.
        """
        return self._group(axis, "comm").comm

    # collectives

    def all_reduce(self, x: Any, axis: str, op: ReduceOp | str = "SUM") -> Any:
        """Return the sum, or another reduction, of the arrays along an axis, the same bits on each. Collective over the axis.

        From partial to equal.

        Args:
            x: array or number.
            axis: name of an axis.
            op: a ReduceOp, or its name.

        Raises:
            ValueError: there is no such axis.
            TypeError: what cannot be summed.
            CollectiveMismatchError: on every rank along the axis, when they pass other shapes, dtypes or reductions.

        Example:
            >>> out = mesh.all_reduce(hidden @ w2.array, "model")  # doctest: +SKIP
        """
        group = self._group(axis, "all_reduce")
        ops = self._ops.get(axis)
        if ops is None:
            ops = self._ops[axis] = make_cross_device_ops()
            ops.bind(group)
        return ops.reduce(op, x, name=self._words(axis))

    def all_reduce_backward(self, gradient: Any, axis: str) -> Any:
        """Return the gradient of what `all_reduce` summed, of that of the sum: itself. No message."""
        self._group(axis, "all_reduce_backward")
        return gradient

    def replicate(self, x: Any, axis: str) -> Any:
        """Return an array that is equal on the ranks along an axis, before each uses it in its own way: itself. No message.

        Such as the input of a layer that is split by columns (Megatron's f, whose backward is what counts).
        """
        self._group(axis, "replicate")
        return x

    def replicate_backward(self, gradient: Any, axis: str) -> Any:
        """Return the gradient of what was replicated: the sum of the ranks' gradients. Collective over the axis."""
        return self.all_reduce(gradient, axis)

    def all_gather(self, x: Any, axis: str, dim: int) -> Any:
        """Return the ranks' arrays along an axis, one behind the other in a dimension. Collective over the axis.

        From split to equal.

        Args:
            x: array, of the same shape on each rank.
            axis: name of an axis.
            dim: from 0, or from the end if it is negative.

        Raises:
            ValueError: there is no such axis or dimension.
            CollectiveMismatchError: on every rank along the axis, when they pass other shapes, dtypes or dimensions.
        """

        def exchange(group: ProcessGroup, call: Any, array: np.ndarray) -> np.ndarray:
            return _joined(all_gather(group, call, array), dim)

        return self._exchanged("all_gather", x, axis, (dim,), (), exchange)

    def all_gather_backward(self, gradient: Any, axis: str, dim: int) -> Any:
        """Return this rank's part of the gradient of what was gathered, of which each rank has what its own use of it adds.

        Collective over the axis: `reduce_scatter`. Where all ranks used it alike, and have the whole gradient, it is
        `shard(gradient, axis, dim)`.
        """
        return self.reduce_scatter(gradient, axis, dim)

    def reduce_scatter(self, x: Any, axis: str, dim: int) -> Any:
        """Return this rank's part, in a dimension, of the sum of the ranks' arrays along an axis. Collective over the axis.

        From partial to split: half of the bytes of `all_reduce`. The sums are in the order of the ranks.

        Args:
            x: array, of the same shape on each rank.
            axis: name of an axis.
            dim: from 0, or from the end if it is negative; the axis' length divides that of the dimension.

        Raises:
            ValueError: there is no such axis or dimension, or it cannot be divided.
            TypeError: what cannot be summed.
            CollectiveMismatchError: as `all_gather`.
        """

        def exchange(group: ProcessGroup, call: Any, array: np.ndarray) -> np.ndarray:
            check_reducible(array.dtype, "Mesh.reduce_scatter", "x")
            found = all_to_all(group, call, _cut(array, group.topology.size, dim))
            return found.sum(axis=0, dtype=accumulation_dtype(array.dtype)).astype(array.dtype, copy=False)

        return self._exchanged("reduce_scatter", x, axis, (dim,), (dim,), exchange)

    def reduce_scatter_backward(self, gradient: Any, axis: str, dim: int) -> Any:
        """Return the gradient of what `reduce_scatter` summed, of that of this rank's part. Collective over the axis."""
        return self.all_gather(gradient, axis, dim)

    def shard(self, x: Any, axis: str, dim: int) -> Any:
        """Return this rank's part, in a dimension, of an array that is equal on the ranks along an axis: a view. No message.

        Raises:
            ValueError: there is no such axis or dimension, or it cannot be divided.
        """
        group = self._group(axis, "shard")
        array = as_array(x, "Mesh.shard", "x")
        _check_dims("shard", array.shape, (dim,), (dim,), axis, self.sizes[axis])
        length = array.shape[dim] // group.topology.size
        low = self.at[axis] * length
        return array[(slice(None),) * (dim % array.ndim) + (slice(low, low + length),)]

    def shard_backward(self, gradient: Any, axis: str, dim: int) -> Any:
        """Return the gradient of what `shard` took a part of, of those of the parts. Collective over the axis."""
        return self.all_gather(gradient, axis, dim)

    def reshard(self, x: Any, axis: str, old: int, new: int) -> Any:
        """Return this rank's part, in dimension `new`, of an array that is split in dimension `old`. Collective over the axis.

        One all-to-all: each rank sends and receives what it holds but for its own part.

        Args:
            x: array, of the same shape on each rank.
            axis: name of an axis.
            old, new: two dimensions; the axis' length divides that of `new`.

        Raises:
            ValueError: there is no such axis or dimension, or it cannot be divided, or both are the same.
            CollectiveMismatchError: as `all_gather`.
        """

        def exchange(group: ProcessGroup, call: Any, array: np.ndarray) -> np.ndarray:
            return _joined(all_to_all(group, call, _cut(array, group.topology.size, new)), old)

        return self._exchanged("reshard", x, axis, (old, new), (new,), exchange)

    def reshard_backward(self, gradient: Any, axis: str, old: int, new: int) -> Any:
        """Return the gradient of what `reshard` was given, of that of what it returned. Collective over the axis."""
        return self.reshard(gradient, axis, new, old)

    def broadcast(self, x: Any, axis: str, root: int = 0) -> Any:
        """Return the array of one coordinate on all ranks along an axis. Collective over the axis.

        Args:
            x: array, of the same shape on each rank.
            axis: name of an axis.
            root: the coordinate whose array it is.

        Raises:
            ValueError: there is no such axis or coordinate.
            CollectiveMismatchError: as `all_gather`.
        """
        return _broadcast(self._group(axis, "broadcast"), x, root, self._words(axis))

    def broadcast_in_replica(self, x: Any, root: int) -> Any:
        """Return the array of one rank of the replica on all of them. Collective over the replica. See `broadcast`."""
        return _broadcast(self.grid.replica, x, root, named("rank", self.grid.replica_ranks, most=8))

    def _exchanged(
        self,
        function: str,
        x: Any,
        axis: str,
        said: tuple[int, ...],
        divided: tuple[int, ...],
        exchange: Callable[[ProcessGroup, Any, np.ndarray], np.ndarray],
    ) -> Any:
        """Compare a call over the ranks along an axis, and return what `exchange` makes of an array. Collective over the axis.

        Args:
            function: name of the call.
            x, axis: as given.
            said: the dimensions that were given.
            divided: those of which the axis' length must divide the array's.
            exchange: gets the group, the call that is under way, and the array on the host.
        """
        group = self._group(axis, function)
        array = as_array(x, f"Mesh.{function}", "x")
        check_movable(array.dtype, f"Mesh.{function}", "x")
        with group.collective(f"mesh.{function}", self._words(axis), array.dtype, array.shape, said) as call:
            _check_dims(function, array.shape, said, divided, axis, group.topology.size)  # the same on all ranks
            result = exchange(group, call, np.ascontiguousarray(to_host(array)))
        return move_like(result, array) if is_gpu(array) else result

    def _group(self, axis: str, function: str) -> ProcessGroup:
        group = self._groups.get(axis)
        if group is None:
            expected = f"an axis of the mesh: {', '.join(map(repr, self.sizes))}"
            raise ValueError(explain(f"Mesh.{function}", "axis", expected=expected, got=repr(axis)))
        if group.closed:
            raise ClosedError(f"Mesh.{function}: the strategy was closed")
        return group

    def _words(self, axis: str) -> str:
        """Return whose call it is, which reports of a group would number from 0."""
        return f"axis {axis}, {named('rank', self._ranks[axis], most=8)}"

    # its life

    def close(self) -> None:
        """Free the groups but that of "data", which the strategy closes. Collective; the group of all ranks calls it."""
        for ops in self._ops.values():
            ops.close()
        own = [group for axis, group in self._groups.items() if axis != DATA]
        for group in own if self.grid.replica in own else (*own, self.grid.replica):
            group.close()
            group.topology.close()

    def leave(self) -> None:
        """Nothing: each group reports its own end."""

    def abandon(self) -> None:
        """Nothing: each group is abandoned by itself."""

    def __repr__(self) -> str:
        at = ", ".join(f"{axis} {self.at[axis]} of {size}" for axis, size in self.sizes.items())
        return f"<Mesh {at}>"


def _cut(array: np.ndarray, count: int, dim: int) -> np.ndarray:
    """Return so many parts of an array in a dimension, in one array; of the first dimension a view."""
    if dim == 0:
        return array.reshape(count, array.shape[0] // count, *array.shape[1:])
    return np.stack(np.split(array, count, axis=dim))


def _joined(parts: np.ndarray, dim: int) -> np.ndarray:
    """Return the parts one behind the other in a dimension; in the first one a view."""
    if dim == 0:
        return parts.reshape(parts.shape[0] * parts.shape[1], *parts.shape[2:])
    return np.concatenate(list(parts), axis=dim)


def _broadcast(group: ProcessGroup, x: Any, root: int, words: str) -> Any:
    """Return the array of one rank of a group on all. Collective."""
    array = as_array(x, "Mesh.broadcast", "x")
    check_movable(array.dtype, "Mesh.broadcast", "x")
    check_root("Mesh.broadcast", group, root)
    with group.collective("mesh.broadcast", words, array.dtype, array.shape, f"root {root}"):
        found = np.array(to_host(array), order="C")
        group.broadcast(found, int(root))
    return move_like(found, array) if is_gpu(array) else found


def _check_dims(
    function: str, shape: tuple[int, ...], dims: tuple[int, ...], divided: tuple[int, ...], axis: str, size: int
) -> None:
    """Raise ValueError unless these are dimensions of an array, and those that will be divided can be."""
    for dim in dims:
        if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
            expected = f"a dimension of an array of shape {tuple(shape)}"
            raise ValueError(explain(f"Mesh.{function}", "dim", expected=expected, got=repr(dim)))
    if len({dim % len(shape) for dim in dims}) < len(dims):
        raise ValueError(explain(f"Mesh.{function}", "new", expected="another dimension than old", got=repr(dims[-1])))
    for dim in divided:
        if shape[dim] % size:
            expected = f"a dimension that the {size} ranks of axis {axis!r} divide"
            got = f"dimension {dim} of shape {tuple(shape)}"
            raise ValueError(explain(f"Mesh.{function}", "dim", expected=expected, got=got))
