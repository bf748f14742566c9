"""The Mesh: ranks as a grid with named axes, and collectives along one axis, which convert values between layouts.

Along an axis of the mesh an array is equal on all ranks; or split, each rank has a part of one of its own axes; or partial, a
summand of the sum over the ranks. Each collective converts one form to another. Its backward converts the gradient of its result
to the gradient of its argument:

| forward | from | to | backward |
|---|---|---|---|
| all_reduce | partial | equal | nothing: the gradient is equal |
| replicate | equal, used differently by each rank | the same, no message | all_reduce of partial gradients |
| all_gather | split | equal, used differently by each rank | reduce_scatter |
| reduce_scatter | partial | split | all_gather |
| shard | equal | split, no message | all_gather |
| reshard | split along an array axis | split along another | reshard the other way |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ..base.errors import ClosedError, explain
from ..base.text import named
from ..base.types import ReduceOp
from ..comm.arrays import as_array
from ..comm.process_group import ProcessGroup
from ..cross_device.all_to_all import check_divided, checked_axis
from ..cross_device.collectives import Collectives, check_rank
from ..cross_device.parts import between
from ..variables import DATA, Grid
from .axes import Axes
from .old_calls import formerly

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Mesh"]


@final
class Mesh:
    """The ranks of a MeshStrategy as a grid with named axes: `strategy.mesh`, in a step `ms.get_replica_context().mesh`.

    All ranks along an axis call its collectives, the same number of times and in the same order, with arrays of one shape and
    dtype. They return new arrays; float16 and bfloat16 are summed in float32. `mesh_axis` is an axis of the mesh, `axis` an
    axis of the array, as in NumPy. Arrays on GPUs go through the host's memory, except in `all_reduce`.

    Attributes:
        sizes: the length of each axis, in order, the fastest last.
        at: this rank's coordinate on each.
        grid: the groups of ranks, for variables.
    """

    def __init__(self, group: ProcessGroup, axes: Axes) -> None:
        """Create the groups of ranks along each axis. Collective over the group, which closes it."""
        rank = group.topology.rank
        self.sizes, self.at = axes.sizes, axes.coordinates(rank)
        along = {axis: axes.along([axis], rank) for axis in self.sizes}
        groups = {axis: group.subgroup(ranks, "MeshStrategy") for axis, ranks in along.items()}
        labels = {axis: f"axis {axis}, {named('rank', ranks, most=8)}" for axis, ranks in along.items()}
        self._axes = {axis: Collectives(groups[axis], "Mesh", labels[axis]) for axis in self.sizes}
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

    @formerly(axis="mesh_axis")
    def comm(self, mesh_axis: str) -> MPI.Intracomm | None:
        """Return the communicator of the ranks along an axis, by coordinate: a duplicate for the program's own messages.

        None for an axis of length 1.

        Raises:
            ValueError: there is no such axis.
        """
        return self._along(mesh_axis, "comm").group.comm

    # collectives

    @formerly(x="value", axis="mesh_axis", op="reduce_op")
    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, *, mesh_axis: str) -> Any:
        """Return the sum, or another reduction, of the arrays along an axis, the same bits on each. Collective over the axis.

        From partial to equal.

        Args:
            reduce_op: a ReduceOp, or its name.
            value: array or number.
            mesh_axis: name of an axis of the mesh.

        Raises:
            ValueError: there is no such axis.
            TypeError: values that cannot be summed.
            CollectiveMismatchError: on every rank along the axis: they pass other shapes, dtypes or reductions.

        Example:
            >>> out = mesh.all_reduce("SUM", hidden @ w2.array, mesh_axis="model")  # doctest: +SKIP
        """
        along = self._along(mesh_axis, "all_reduce")
        return along.ops.reduce(reduce_op, value, None, None, along.label, "Mesh.all_reduce")

    @formerly(gradient="gradient", axis="mesh_axis")
    def all_reduce_backward(self, gradient: Any, *, mesh_axis: str) -> Any:
        """Return the gradient of the argument of `all_reduce` from that of its result: itself. No message."""
        self._along(mesh_axis, "all_reduce_backward")
        return gradient

    @formerly(x="value", axis="mesh_axis")
    def replicate(self, value: Any, *, mesh_axis: str) -> Any:
        """Return an array that is equal on the ranks along an axis, before each uses it differently: itself. No message.

        An example is the input of a layer split by columns (Megatron's f). Its backward communicates.
        """
        self._along(mesh_axis, "replicate")
        return value

    @formerly(gradient="gradient", axis="mesh_axis")
    def replicate_backward(self, gradient: Any, *, mesh_axis: str) -> Any:
        """Return the gradient of the replicated array: the sum of the ranks' gradients. Collective over the axis."""
        return self.all_reduce(ReduceOp.SUM, gradient, mesh_axis=mesh_axis)

    @formerly(x="value", axis="mesh_axis", dim="axis")
    def all_gather(self, value: Any, *, axis: int = 0, mesh_axis: str) -> Any:
        """Return the arrays of the ranks along an axis of the mesh, concatenated along an axis. Collective over the mesh axis.

        From split to equal.

        Args:
            value: array, of the same shape on each rank.
            axis: from 0, or from the end if it is negative.
            mesh_axis: name of an axis of the mesh.

        Raises:
            ValueError: there is no such axis.
            CollectiveMismatchError: on every rank along the axis: they pass other shapes, dtypes or axes.
        """
        array = as_array(value, "Mesh.all_gather", "value")
        return self._along(mesh_axis, "all_gather").all_gather(array, axis=axis, equal=True)

    @formerly(gradient="gradient", axis="mesh_axis", dim="axis")
    def all_gather_backward(self, gradient: Any, *, axis: int = 0, mesh_axis: str) -> Any:
        """Return this rank's part of the gradient of a gathered array, to which each rank adds its own use of it.

        Collective over the mesh axis: `reduce_scatter`. If all ranks used it equally, and have the whole gradient, it is
        `shard` of the gradient.
        """
        return self.reduce_scatter(ReduceOp.SUM, gradient, axis=axis, mesh_axis=mesh_axis)

    @formerly(x="value", axis="mesh_axis", dim="axis")
    def reduce_scatter(self, reduce_op: ReduceOp | str, value: Any, *, axis: int = 0, mesh_axis: str) -> Any:
        """Return this rank's part, along an axis, of the sum of the ranks' arrays. Collective over the mesh axis.

        From partial to split: half the bytes of `all_reduce`. The sums are in the order of the ranks.

        Args:
            reduce_op: a ReduceOp, or its name.
            value, mesh_axis: as for `all_gather`.
            axis: as for `all_gather`; the number of ranks divides its length.

        Raises:
            ValueError: there is no such axis, or it cannot be divided.
            TypeError: values that cannot be summed.
            CollectiveMismatchError: as `all_gather`.
        """
        array = as_array(value, "Mesh.reduce_scatter", "value")
        return self._along(mesh_axis, "reduce_scatter").reduce_scatter(reduce_op, array, axis=axis, equal=True)

    @formerly(gradient="gradient", axis="mesh_axis", dim="axis")
    def reduce_scatter_backward(self, gradient: Any, *, axis: int = 0, mesh_axis: str) -> Any:
        """Return the gradient of the argument of `reduce_scatter` from that of its result. Collective over the mesh axis."""
        return self.all_gather(gradient, axis=axis, mesh_axis=mesh_axis)

    @formerly(x="value", axis="mesh_axis", dim="axis")
    def shard(self, value: Any, *, axis: int = 0, mesh_axis: str) -> Any:
        """Return this rank's part, along an axis, of an array that is equal on the ranks of the mesh axis: a view. No message.

        Raises:
            ValueError: there is no such axis, or it cannot be divided.
        """
        size = self._along(mesh_axis, "shard").group.topology.size
        array = as_array(value, "Mesh.shard", "value")
        along = checked_axis(array, axis, "Mesh.shard")
        check_divided(array, along, size, "Mesh.shard")
        length = array.shape[along] // size
        return between(array, along, self.at[mesh_axis] * length, (self.at[mesh_axis] + 1) * length)

    @formerly(gradient="gradient", axis="mesh_axis", dim="axis")
    def shard_backward(self, gradient: Any, *, axis: int = 0, mesh_axis: str) -> Any:
        """Return the gradient of the argument of `shard` from those of the parts. Collective over the mesh axis."""
        return self.all_gather(gradient, axis=axis, mesh_axis=mesh_axis)

    @formerly(x="value", axis="mesh_axis", old="old", new="new")
    def reshard(self, value: Any, *, old: int, new: int, mesh_axis: str) -> Any:
        """Return this rank's part, along axis `new`, of an array that is split along axis `old`. Collective over the mesh axis.

        One all-to-all: each rank sends and receives everything except its own part.

        Args:
            value, mesh_axis: as for `all_gather`.
            old, new: two axes of the array; the number of ranks divides the length of `new`.

        Raises:
            ValueError: there is no such axis, or it cannot be divided, or both are the same.
            CollectiveMismatchError: as `all_gather`.
        """
        array = as_array(value, "Mesh.reshard", "value")
        return self._along(mesh_axis, "reshard").reshard(array, old=old, new=new)

    @formerly(gradient="gradient", axis="mesh_axis", old="old", new="new")
    def reshard_backward(self, gradient: Any, *, old: int, new: int, mesh_axis: str) -> Any:
        """Return the gradient of the argument of `reshard` from that of its result. Collective over the mesh axis."""
        return self.reshard(gradient, old=new, new=old, mesh_axis=mesh_axis)

    @formerly(x="value", axis="mesh_axis", root="root")
    def broadcast(self, value: Any, *, root: int = 0, mesh_axis: str) -> Any:
        """Return the array of one coordinate on all ranks along an axis. Collective over the axis.

        Args:
            value, mesh_axis: as for `all_gather`.
            root: the coordinate that sends.

        Raises:
            ValueError: there is no such axis or coordinate.
            CollectiveMismatchError: as `all_gather`.
        """
        return _broadcast(self._along(mesh_axis, "broadcast"), value, root)

    @formerly(x="value", root="root")
    def broadcast_in_replica(self, value: Any, *, root: int = 0) -> Any:
        """Return the array of one rank of the replica on all of them. Collective over the replica. See `broadcast`."""
        return _broadcast(self._replica, value, root)

    def _along(self, mesh_axis: str, function: str) -> Collectives:
        """Return the collectives of the ranks along an axis."""
        found = self._axes.get(mesh_axis)
        if found is None:
            expected = f"an axis of the mesh: {', '.join(map(repr, self.sizes))}"
            raise ValueError(explain(f"Mesh.{function}", "mesh_axis", expected=expected, got=repr(mesh_axis)))
        if found.group.closed:
            raise ClosedError(f"Mesh.{function}: the strategy was closed")
        return found

    # lifetime

    def close(self) -> None:
        """Free the groups except that of "data", which the strategy closes. Collective; the group of all ranks calls it."""
        for along in (*self._axes.values(), self._replica):
            along.close()
        own = [along.group for axis, along in self._axes.items() if axis != DATA]
        for group in own if self.grid.replica in own else (*own, self.grid.replica):
            group.close()
            group.topology.close()

    def leave(self) -> None:
        """Do nothing: each group reports its own end."""

    def abandon(self) -> None:
        """Do nothing: each group is abandoned separately."""

    def __repr__(self) -> str:
        at = ", ".join(f"{axis} {self.at[axis]} of {size}" for axis, size in self.sizes.items())
        return f"<Mesh {at}>"


def _broadcast(collectives: Collectives, value: Any, root: int) -> Any:
    """Return the array of one rank of a group on all. Collective."""
    check_rank("Mesh.broadcast", collectives.group, root)
    return collectives.ops.broadcast(value, None, int(root), collectives.label, "Mesh.broadcast")
