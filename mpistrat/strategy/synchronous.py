"""The strategies whose ranks step together, and the default strategy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, final

from ..base import context
from ..base.agree import gather_text, together
from ..base.devices import default_devices
from ..base.errors import ClusterError, explain
from ..base.options import CommunicationOptions, LocalSteps, StepOptions
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
    """One replica on one device (TF: tf.distribute.OneDeviceStrategy), to test a program before distributing it.

    Args:
        device: such as "cpu:0" or "gpu:1"; default the first GPU, else the CPU.
        comm: communicator of one rank; default COMM_WORLD.
        communication_options, cross_device_ops: accepted as for the other strategies, without effect; the log reports it once.
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
            remedy = "Use MirroredStrategy for several"
            text = explain("OneDeviceStrategy", "replicas", expected="None or 1", got=repr(replicas), remedy=remedy)
            raise ValueError(text)
        devices = default_devices(0, 1)[:1] if device is None else (device,)
        super().__init__(assemble(self, ONE_DEVICE, comm, devices, cross_device_ops, communication_options))


@final
class MirroredStrategy(Strategy):
    """Synchronous training on one node: any number of ranks, any number of devices on each (TF: MirroredStrategy).

    Creation is collective over `comm`. Every device of every rank is a replica. The ranks share one copy of the variables; each
    updates its own slice of them.

    Args:
        devices: this rank's, such as ["gpu:0", "gpu:1"]; default: the GPU of the rank's number on the node, all GPUs for a
            single rank, else the CPU. Ranks may have different numbers of devices.
        cross_device_ops: the reduction algorithm, such as `ms.NcclAllReduce()`; default: the chooser's table.
        comm: communicator, duplicated here; default COMM_WORLD.
        num_gpus: instead of devices: this rank's first `num_gpus` GPUs, 0 for the CPU.
        replicas: instead of devices: this number of replicas on the CPUs of all ranks together. Sums are in the order of
            replicas, so results have the same bits on any number of ranks, as after `ms.survive` or `mpistrat resize`, except
            for gradients clipped by their norm.
        communication_options: as for MultiWorkerMirroredStrategy. On one node `wire` has no effect; the log reports it once.

    Raises:
        ValueError: both devices and num_gpus.
        LayoutError: on every rank: they are on several nodes.
        DeviceError: on every rank: a device does not exist.
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
    """Variables stored and updated by the node's leader, steps on all devices of all ranks (TF: CentralStorageStrategy).

    Creation is collective over `comm`. The numbers are those of MirroredStrategy.

    Args:
        compute_devices: this rank's, one replica each; default as for MirroredStrategy.
        parameter_device: the device of the variables; default the CPU.
        comm: communicator, duplicated here; default COMM_WORLD.
        communication_options, cross_device_ops, replicas: as for MirroredStrategy; replicas instead of compute_devices.

    Raises:
        LayoutError: on every rank: they are on several nodes.
        DeviceError: on every rank: a device does not exist.
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

    Creation is collective over `comm`. Every device of every rank is a replica. The ranks of a node share one copy of the
    variables; each updates its own slice, and only slices are sent between nodes.

    Args:
        cluster_resolver: the tasks; default TF_CONFIG if it is set, else MPI. It must describe as many workers as there are
            ranks, and no parameter servers. Ranks are numbered as in the cluster, the chief first, then the workers; without
            tasks, as in MPI.
        communication_options: bytes_per_pack, timeout_seconds and implementation of every reduction without its own; wire: the
            form in which steps send float32 between nodes, "bfloat16" or "int8", which changes results. It needs divided slots,
            see `sharded_slots`, and divides them in jobs with snapshots, too.
        comm: communicator, duplicated here; default COMM_WORLD.
        devices, cross_device_ops, replicas: as for MirroredStrategy; on several nodes, too.
        sharded_slots: True: an optimizer's slots of each weight are on one node only, which updates it and sends the others the
            new weight; False: on every node. None: True on 2 to 64 nodes, unless the job takes snapshots in memory (`mpistrat
            run --restarts`), `replicas` is given, or cross_device_ops is neither the default nor HierarchicalAllReduce. Slots
            of small arrays, and on GPUs, are always on every node.
        local_steps: `ms.LocalSteps`, or its number of updates: each node takes this many alone, its ranks in sync, before all
            nodes average their changes. Results differ from synchronous training: see "Local steps" in the guide. Only on CPUs,
            and not with `replicas` or sharded_slots=True; without effect on one node. None: all nodes step together.
        sharded_gradients: True: gradients are submitted bucket by bucket, by `optimizer.begin`, and the rest by
            `apply_gradients`; a rank stores its part of the sums only, see "Sharded gradients" in the guide. It divides slots,
            too. Only on CPUs, and not with `replicas`, `local_steps`, sharded_slots=False or wire="int8".

    Raises:
        ValueError: on every rank: a wire on several nodes with `local_steps`, `replicas`, `sharded_slots=False`, or another
            algorithm than AUTO and HIERARCHICAL.
        ClusterError: on every rank: the resolver's cluster does not fit the ranks, or differs between them, or two ranks are
            the same task.
        DeviceError: on every rank: a device does not exist; GPUs with local_steps.
        TypeError, ValueError: on every rank: invalid local_steps, or options that local_steps or sharded_gradients exclude.
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
                order=order, replicas=replicas,
                step=StepOptions(sharded_slots, local_steps, sharded_gradients=sharded_gradients or None),
            )
        )  # fmt: skip
        self.cluster_resolver = resolver or MPIClusterResolver(self.comm)


def _check_cluster(resolver: ClusterResolver, size: int) -> None:
    """Raise ClusterError unless the resolver describes `size` workers; an empty cluster fits any number."""
    spec = resolver.cluster_spec()
    if not spec:
        return
    if "ps" in spec.jobs and spec.num_tasks("ps"):
        remedy = "Use ParameterServerStrategy for parameter servers, or remove their ranks from comm and the cluster"
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
    """The strategy outside every scope, from `ms.get_strategy()`. It is this process alone."""

    def __init__(self) -> None:
        group = ProcessGroup.single()
        ops = MpiAllReduce()
        ops.bind(group)
        super().__init__(StrategyExtended(self, group, ops, distributed=False, is_default=True))


def set_strategy(strategy: Strategy | None) -> None:
    """Make a strategy the current one outside every scope, in all threads; None resets.

    Raises:
        ContextError: inside a scope.
        TypeError: it is not a strategy.
    """
    if strategy is None:
        context.set_global(None)
        return
    extended = getattr(strategy, "extended", None)
    if extended is None:
        raise TypeError(explain("set_strategy", "strategy", expected="a Strategy or None", got=repr(strategy)))
    context.set_global(None if extended.is_default else extended.frame)
