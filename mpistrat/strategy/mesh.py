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

from ..base.errors import ClosedError, explain
from ..base.text import named
from ..base.types import ReduceOp
from ..comm.arrays import as_array
from ..comm.process_group import ProcessGroup
from ..cross_device.all_to_all import between, check_divided, checked_axis
from ..cross_device.collectives import Collectives, check_rank
from ..variables import DATA, Grid
from .axes import Axes

if TYPE_CHECKING:
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
        along = {axis: axes.along([axis], rank) for axis in self.sizes}
        groups = {axis: group.subgroup(ranks, "MeshStrategy") for axis, ranks in along.items()}
        self._labels = {axis: f"axis {axis}, {named('rank', ranks, most=8)}" for axis, ranks in along.items()}
        self._axes = {axis: Collectives(groups[axis], "Mesh", self._labels[axis]) for axis in self.sizes}
        model = [axis for axis in self.sizes if axis != DATA]
        ranks = axes.along(model, rank)
        replica = groups[model[0]] if len(model) == 1 else group.subgroup(ranks, "MeshStrategy")
        self._replica = Collectives(replica, "Mesh", named("rank", ranks, most=8))
        self.grid = Grid(self.sizes, self.at, group, replica, ranks)
        group.attach(self)

    @property
    def data_group(self) -> ProcessGroup:
        """The ranks whose replicas step together with this one's."""
        return self._axes[DATA].group

    def comm(self, axis: str) -> MPI.Intracomm | None:
        """Return the communicator of the ranks along an axis, by coordinate: a duplicate for the program's own messages.

        None for an axis of length 1.

        Raises:
            ValueError: there is no such axis.
        """
        return self._along(axis, "comm").group.comm

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
        along = self._along(axis, "all_reduce")
        return along.ops.reduce(ReduceOp.parse(op, "Mesh.all_reduce"), x, name=self._labels[axis])

    def all_reduce_backward(self, gradient: Any, axis: str) -> Any:
        """Return the gradient of what `all_reduce` summed, of that of the sum: itself. No message."""
        self._along(axis, "all_reduce_backward")
        return gradient

    def replicate(self, x: Any, axis: str) -> Any:
        """Return an array that is equal on the ranks along an axis, before each uses it in its own way: itself. No message.

        Such as the input of a layer that is split by columns (Megatron's f, whose backward is what counts).
        """
        self._along(axis, "replicate")
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
        array = as_array(x, "Mesh.all_gather", "x")
        return self._along(axis, "all_gather").all_gather(array, dim, equal=True)

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
        array = as_array(x, "Mesh.reduce_scatter", "x")
        return self._along(axis, "reduce_scatter").reduce_scatter(ReduceOp.SUM, array, dim, equal=True)

    def reduce_scatter_backward(self, gradient: Any, axis: str, dim: int) -> Any:
        """Return the gradient of what `reduce_scatter` summed, of that of this rank's part. Collective over the axis."""
        return self.all_gather(gradient, axis, dim)

    def shard(self, x: Any, axis: str, dim: int) -> Any:
        """Return this rank's part, in a dimension, of an array that is equal on the ranks along an axis: a view. No message.

        Raises:
            ValueError: there is no such axis or dimension, or it cannot be divided.
        """
        size = self._along(axis, "shard").group.topology.size
        array = as_array(x, "Mesh.shard", "x")
        along = checked_axis(array, dim, "Mesh.shard")
        check_divided(array, along, size, "Mesh.shard")
        length = array.shape[along] // size
        return between(array, along, self.at[axis] * length, (self.at[axis] + 1) * length)

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
        array = as_array(x, "Mesh.reshard", "x")
        return self._along(axis, "reshard").reshard(array, old, new)

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
        return _broadcast(self._along(axis, "broadcast"), x, root, self._labels[axis])

    def broadcast_in_replica(self, x: Any, root: int) -> Any:
        """Return the array of one rank of the replica on all of them. Collective over the replica. See `broadcast`."""
        return _broadcast(self._replica, x, root, named("rank", self.grid.replica_ranks, most=8))

    def _along(self, axis: str, function: str) -> Collectives:
        """Return the collectives of the ranks along an axis."""
        found = self._axes.get(axis)
        if found is None:
            expected = f"an axis of the mesh: {', '.join(map(repr, self.sizes))}"
            raise ValueError(explain(f"Mesh.{function}", "axis", expected=expected, got=repr(axis)))
        if found.group.closed:
            raise ClosedError(f"Mesh.{function}: the strategy was closed")
        return found

    # its life

    def close(self) -> None:
        """Free the groups but that of "data", which the strategy closes. Collective; the group of all ranks calls it."""
        for along in (*self._axes.values(), self._replica):
            along.close()
        own = [along.group for axis, along in self._axes.items() if axis != DATA]
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


def _broadcast(collectives: Collectives, x: Any, root: int, label: str) -> Any:
    """Return the array of one rank of a group on all. Collective."""
    check_rank("Mesh.broadcast", collectives.group, root)
    return collectives.ops.broadcast(x, root=int(root), name=label)
