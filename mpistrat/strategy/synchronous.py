"""The strategies whose ranks step together, and the default strategy that is current outside every scope."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, final

from ..base import context
from ..base.agree import gather_text, together
from ..base.devices import default_devices
from ..base.errors import ClusterError, explain
from ..base.options import CommunicationOptions, LocalSteps
from ..cluster.resolvers import ClusterResolver, MPIClusterResolver, TFConfigClusterResolver
from ..cluster.resolvers.tf_config import warn_unused
from ..cluster.spec import worker_count
from ..cluster.tasks import own_task, ranks_by_task
from ..cluster.topology import Topology
from ..comm.process_group import ProcessGroup
from ..cross_device.mpi import MpiAllReduce
from ..cross_device.ops import CrossDeviceOps
from .assemble import CENTRAL_STORAGE, MIRRORED, MULTI_WORKER_MIRRORED, ONE_DEVICE, assemble
from .extended import StrategyExtended
from .strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "CentralStorageStrategy",
    "DefaultStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "set_strategy",
]


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device (TF: tf.distribute.OneDeviceStrategy). For trying a program out before it is spread.

    Args:
        device: such as "cpu:0" or "gpu:1"; default the first GPU, else the CPU.
        comm: communicator of one rank; default COMM_WORLD.
        communication_options, cross_device_ops: as for the other strategies; they have no effect, as one replica has nothing
            to reduce, and the log says so once.
        replicas: None or 1.

    Raises:
        LayoutError: the communicator has several ranks.
        DeviceError: there is no such device.
        ValueError: another number of replicas than 1.
    """

    def __init__(
        self,
        device: str | None = None,
        comm: MPI.Intracomm | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        replicas: int | None = None,
    ) -> None:
        if replicas not in (None, 1):
            remedy = "Take MirroredStrategy for several"
            text = explain("OneDeviceStrategy", "replicas", expected="None or 1", got=repr(replicas), remedy=remedy)
            raise ValueError(text)
        devices = default_devices(0, 1)[:1] if device is None else (device,)
        super().__init__(assemble(self, ONE_DEVICE, comm, devices, cross_device_ops, communication_options))


@final
class MirroredStrategy(Strategy):
    """Synchronous training on one node: any number of ranks, any number of devices on each (TF: MirroredStrategy).

    Creation is collective over `comm`. Every device of every rank is a replica. The ranks share one copy of the
    variables; each updates its own slice of them.

    Args:
        devices: this rank's, such as ["gpu:0", "gpu:1"]; default: the GPU of the rank's number on the node, all GPUs for
            a rank that is alone, else the CPU. Ranks may have different numbers of devices.
        cross_device_ops: how values are reduced, such as `ms.NcclAllReduce()`; default: the chooser's table.
        comm: communicator, duplicated here; default COMM_WORLD.
        num_gpus: instead of devices: this rank's first so many GPUs, 0 for the CPU.
        replicas: instead of devices: so many on the CPUs of all ranks together. Sums are in the order of replicas, so
            results are the same bits on any number of ranks, as after `ms.survive` or `mpistrat resize`; all but those of
            gradients clipped by their norm.
        communication_options: as for MultiWorkerMirroredStrategy. On one node `wire` has no effect, and the log says so once.

    Raises:
        ValueError: both devices and num_gpus.
        LayoutError: on every rank, when they are on several nodes.
        DeviceError: on every rank, for a device that is not there.
    """

    def __init__(
        self,
        devices: Sequence[str] | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        comm: MPI.Intracomm | None = None,
        *,
        num_gpus: int | None = None,
        replicas: int | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        if num_gpus is not None:
            if devices is not None:
                got = f"devices={devices!r} and num_gpus={num_gpus!r}"
                raise ValueError(explain("MirroredStrategy", "num_gpus", expected="devices or num_gpus", got=got))
            devices = [f"gpu:{index}" for index in range(num_gpus)] or "cpu:0"
        super().__init__(
            assemble(self, MIRRORED, comm, devices, cross_device_ops, communication_options, replicas=replicas)
        )


@final
class CentralStorageStrategy(Strategy):
    """Variables kept and updated by the node's leader, steps on all devices of all ranks (TF: CentralStorageStrategy).

    Creation is collective over `comm`. The numbers are those of MirroredStrategy.

    Args:
        compute_devices: this rank's, one replica each; default as for MirroredStrategy.
        parameter_device: where the variables lie; default the CPU.
        comm: communicator, duplicated here; default COMM_WORLD.
        communication_options, cross_device_ops, replicas: as for MirroredStrategy; replicas instead of compute_devices.

    Raises:
        LayoutError: on every rank, when they are on several nodes.
        DeviceError: on every rank, for a device that is not there.
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | str | None = None,
        parameter_device: str | None = None,
        comm: MPI.Intracomm | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        replicas: int | None = None,
    ) -> None:
        super().__init__(
            assemble(
                self, CENTRAL_STORAGE, comm, compute_devices, cross_device_ops, communication_options,
                parameter_device=parameter_device or "cpu:0", replicas=replicas,
            )
        )  # fmt: skip


@final
class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on any number of ranks on any nodes (TF: MultiWorkerMirroredStrategy).

    Creation is collective over `comm`. Every device of every rank is a replica. The ranks of a node share one copy of
    the variables; each updates its own slice, and only slices travel between nodes.

    Args:
        cluster_resolver: who the tasks are; default what TF_CONFIG says if it is set, else MPI. It must describe as many
            workers as there are ranks, and no parameter servers. The strategy numbers its ranks as the cluster does, the
            chief first, then the workers; one without tasks leaves them as MPI has them.
        communication_options: bytes_per_pack, timeout_seconds, implementation of every reduction, unless a call says
            otherwise; wire: the form in which steps send float32 between nodes, "bfloat16" or "int8", with other numbers than
            float32's. It needs divided slots, see `sharded_slots`, which it divides in jobs with snapshots, too.
        comm: communicator, duplicated here; default COMM_WORLD.
        devices, cross_device_ops, replicas: as for MirroredStrategy; on several nodes, too.
        sharded_slots: True: what optimizers keep for each weight lies on one node only, which updates it and sends the others the
            new weight; False: on every node. None: True on 2 to 64 nodes, unless the job keeps snapshots in memory
            (`mpistrat run --restarts`), `replicas` is given, or cross_device_ops is another one than the default or
            HierarchicalAllReduce. Arrays on GPUs, and small ones, are kept by every node in any case.
        local_steps: `ms.LocalSteps`, or a number of updates, with its defaults: so many updates each node takes by itself, its
            ranks in sync, before all nodes average what they have learned. These are other numbers than those of synchronous
            training: see "Local steps" in the guide. On CPUs, without `replicas` and sharded_slots=True; on one node it has no
            effect. None: all nodes step together.
        sharded_gradients: True: gradients are handed over bucket by bucket, by `optimizer.begin`, and what is left of them by
            `apply_gradients`; a rank keeps its part of the sums only, see "Sharded gradients" in the guide. It divides slots,
            too. On CPUs, without `replicas`, `local_steps`, sharded_slots=False and wire="int8".

    Raises:
        ValueError: on every rank: a wire on several nodes with `local_steps`, `replicas`, `sharded_slots=False`, or another
            algorithm than AUTO and HIERARCHICAL.
        ClusterError: on every rank, when the resolver's cluster does not fit the ranks, or differs between them, or two
            ranks are the same task.
        DeviceError: on every rank, for a device that is not there; for GPUs with local_steps.
        TypeError, ValueError: on every rank, for local_steps that are none, or with what they, or sharded_gradients, cannot be
            combined with.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        comm: MPI.Intracomm | None = None,
        devices: Sequence[str] | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        replicas: int | None = None,
        sharded_slots: bool | None = None,
        local_steps: LocalSteps | int | None = None,
        sharded_gradients: bool = False,
    ) -> None:
        resolver = cluster_resolver

        def order(topology: Topology) -> Sequence[int]:
            nonlocal resolver
            exchange = partial(gather_text, topology.comm)
            with together(exchange):
                if resolver is None and os.environ.get("TF_CONFIG"):
                    resolver = TFConfigClusterResolver()
                task = own_task(resolver)
            tasks = exchange(task)
            if resolver is not None:
                _check_cluster(resolver, len(tasks))
            bare = isinstance(resolver, TFConfigClusterResolver) and not resolver.cluster_spec()
            if bare and topology.rank == 0:
                warn_unused(MULTI_WORKER_MIRRORED.name, len(tasks))
            jobs = ("evaluator",) if len(tasks) == 1 and "evaluator" in tasks[0] else ("chief", "master", "worker")
            return tuple(ranks_by_task(MULTI_WORKER_MIRRORED.name, tasks, resolver, jobs).values())

        super().__init__(
            assemble(
                self, MULTI_WORKER_MIRRORED, comm, devices, cross_device_ops, communication_options,
                order=order, replicas=replicas, sharded_slots=sharded_slots, local_steps=local_steps,
                sharded_gradients=sharded_gradients,
            )
        )  # fmt: skip
        self.cluster_resolver = resolver or MPIClusterResolver(self.comm)


def _check_cluster(resolver: ClusterResolver, size: int) -> None:
    """Raise ClusterError unless the resolver describes so many workers; an empty cluster fits any number."""
    spec = resolver.cluster_spec()
    if not spec:
        return
    if "ps" in spec.jobs and spec.num_tasks("ps"):
        remedy = "Parameter servers need a parameter-server strategy; leave their ranks out of comm and of the cluster"
        got = f"{spec.num_tasks('ps')} of job 'ps'"
        raise ClusterError(
            explain("MultiWorkerMirroredStrategy", "cluster_resolver", expected="no ps task", got=got, remedy=remedy)
        )
    workers = worker_count(spec, resolver.task_type or "worker")
    if workers != size:
        remedy = "Start one rank for each chief and worker, or pass the communicator of those ranks as comm="
        expected = f"as many chief and worker tasks as ranks ({size})"
        raise ClusterError(
            explain("MultiWorkerMirroredStrategy", "cluster_resolver", expected=expected, got=workers, remedy=remedy)
        )


@final
class DefaultStrategy(Strategy):
    """What `ms.get_strategy()` returns outside every scope. It is this process alone."""

    def __init__(self) -> None:
        group = ProcessGroup.single()
        ops = MpiAllReduce()
        ops.bind(group)
        super().__init__(StrategyExtended(self, group, ops, distributed=False, is_default=True))


def set_strategy(strategy: Strategy | None) -> None:
    """Make a strategy the current one outside every scope, in all threads; None resets.

    Raises:
        ContextError: inside a scope.
        TypeError: it is no strategy.
    """
    if strategy is None:
        context.set_global(None)
        return
    extended = getattr(strategy, "extended", None)
    if extended is None:
        raise TypeError(explain("set_strategy", "strategy", expected="a Strategy or None", got=repr(strategy)))
    context.set_global(None if extended.is_default else extended.frame)
