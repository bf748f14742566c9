"""MeshStrategy: replicas divided over several ranks each, on a grid of ranks with named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from ..base.errors import LayoutError, explain
from ..base.options import CommunicationOptions
from ..base.text import counted
from ..base.types import Quality
from ..cluster.topology import Topology
from ..comm.arrays import as_array
from ..comm.process_group import ProcessGroup
from ..cross_device.ops import CrossDeviceOps
from ..variables import DATA
from .assemble import MESH, assemble
from .axes import Axes
from .mesh import Mesh
from .preemption import StopTogether
from .strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI

    from .input import Division

__all__ = ["MeshStrategy"]

_NAME = "MeshStrategy"


@final
class MeshStrategy(Strategy):
    """Synchronous training of replicas divided over several ranks each: data and model parallelism (TF: TPUStrategy).

    Creation is collective over `comm`. The ranks form a grid with named axes. A replica is a coordinate of the axis "data": all
    ranks with it, which get the same batches, and hold the parts of variables with a layout. Along "data" it is a
    MultiWorkerMirroredStrategy: `num_replicas_in_sync` is its length, and `reduce`, `gather` and `apply_gradients` work along
    it. The step communicates within a replica by `ms.get_replica_context().mesh`.

    A variable without a layout, and its gradient, must have the same bits on all ranks of a replica. Both are compared at the
    first step, and every MPISTRAT_CHECK_EVERY steps.

    Args:
        axes: the length of each axis, -1 for the rest; the last one is fastest, and its ranks must share a node. Default of
            "data": 1.
        comm: communicator, duplicated here; default COMM_WORLD.
        communication_options, cross_device_ops: as for MultiWorkerMirroredStrategy; for reductions along "data".
        replicas: None, or the length of "data": then sums are in the order of replicas, independent of their nodes.

    Raises:
        TypeError, ValueError: on every rank: invalid axes, or another number of replicas.
        LayoutError: on every rank: the lengths do not multiply to the number of ranks, or ranks along the last axis are on
            several nodes; or a rank has several devices.
        CollectiveMismatchError: on every rank: they pass other axes.

    Example:
        >>> strategy = ms.MeshStrategy(axes={"data": -1, "model": 4})  # doctest: +SKIP
        >>> with strategy.scope():  # doctest: +SKIP
        ...     # of shape (512, 512) on each rank
        ...     w = ms.Variable(np.zeros((512, 2048)), layout=(None, "model"))

    Attributes:
        mesh: axes, coordinates, and collectives along an axis.
    """

    mesh: Mesh

    def __init__(
        self,
        axes: Mapping[str, int],
        comm: MPI.Intracomm | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        replicas: int | None = None,
    ) -> None:
        made: list[Mesh] = []

        def make_data_group(group: ProcessGroup) -> ProcessGroup:
            lengths = Axes(axes, group.topology.size)
            lengths.check_node(group.topology)
            if replicas not in (None, lengths.sizes[DATA]):
                expected = f'None, or {lengths.sizes[DATA]}, the length of "data"'
                raise ValueError(explain(_NAME, "replicas", expected=expected, got=repr(replicas)))
            made.append(Mesh(group, lengths))
            return made[0].data_group

        extended = assemble(
            self, MESH, comm, None, cross_device_ops, communication_options,
            check=_check_devices, make_sync_group=make_data_group, axes=axes, ordered_replicas=replicas,
        )  # fmt: skip
        self.mesh = made[0]
        placement, grid = extended.placement, self.mesh.grid
        placement.grid, placement.replica_ranks = grid, grid.replica_ranks
        placement.replica = grid.replica if grid.replica.topology.size > 1 else None
        placement.lacking[Quality.WHOLE_REPLICAS] = "a mesh"
        extended.num_input_pipelines = self.mesh.sizes[DATA]
        super().__init__(extended)
        self._stop_agreement = StopTogether(extended.process_group)

    # TensorFlow's names: the logical devices of a replica are its ranks, numbered by their coordinates

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Return a value that all ranks of the replica have: itself. No message. Its gradient: `Mesh.replicate`."""
        return tensor

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """Return this rank's part of an array that all ranks of the replica have: a view. No message. Also `Mesh.shard`.

        Args:
            tensor: the array.
            partition_dimensions: the number of parts of each dimension; their product is the number of ranks.

        Raises:
            ValueError: they do not fit the array, or the ranks of the replica.
        """
        array, cuts = as_array(tensor, "experimental_split_to_logical_devices"), tuple(partition_dimensions)
        group = self.mesh.grid.replica
        fits = len(cuts) == array.ndim and math.prod(cuts) == group.topology.size
        if not fits or any(n % cut for n, cut in zip(array.shape, cuts, strict=False)):
            expected = f"numbers that divide shape {array.shape}, whose product is {group.topology.size}"
            function, argument = "experimental_split_to_logical_devices", "partition_dimensions"
            raise ValueError(explain(function, argument, expected=expected, got=repr(partition_dimensions)))
        at = np.unravel_index(group.topology.rank, cuts)
        lengths = [n // cut for n, cut in zip(array.shape, cuts, strict=True)]
        return array[tuple(slice(int(i) * n, (int(i) + 1) * n) for i, n in zip(at, lengths, strict=True))]

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Return one rank's array on all ranks of the replica. Collective over the replica. Also `Mesh.broadcast`.

        Args:
            tensor: an array, of the same shape on all of them.
            logical_device_id: the rank that sends.

        Raises:
            ValueError: there is no such rank.
            CollectiveMismatchError: on every rank of the replica: they pass other shapes, dtypes or numbers.
        """
        return self.mesh.broadcast_in_replica(tensor, root=logical_device_id)

    # hooks of the base class

    def _division(self) -> Division:
        """Return this rank's part in reading: replicas divide batches, the ranks of a replica read the same."""
        from .input import Division

        return Division.together(self.mesh.data_group)

    def describe(self) -> list[tuple[str, str]]:
        """Return the axes, as names and texts."""
        return [("axes", ", ".join(f"{axis} {length}" for axis, length in self.mesh.sizes.items()))]

    def __repr__(self) -> str:
        nodes = self._extended.topology.num_nodes
        axes = " x ".join(f"{axis} {length}" for axis, length in self.mesh.sizes.items())
        return f"<{_NAME} {'closed' if self._extended.closed else axes}, {counted(nodes, 'node')}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(explain(_NAME, "", expected="a new strategy", got="copy.deepcopy", remedy="Create one"))


def _check_devices(topology: Topology) -> None:
    """Raise LayoutError if this rank has several replicas: each rank has one part of a replica."""
    if topology.num_local_replicas != 1:
        got = f"{counted(topology.num_local_replicas, 'device')} ({', '.join(topology.devices)})"
        remedy = "Start a rank for each"
        raise LayoutError(explain(_NAME, "", expected="one device on each rank", got=got, remedy=remedy))
