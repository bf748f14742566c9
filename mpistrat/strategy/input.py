"""Distributed datasets of a strategy: the division of a dataset among its ranks, and their comparison of it."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ..base.agree import same, together
from ..base.devices import parse
from ..base.errors import CollectiveMismatchError, by_rank, explain
from ..base.global_batch import Ledger
from ..comm.draws import Draws
from ..comm.gpu import DeviceCopy
from ..comm.monitor.rank_monitor import user_line
from ..comm.process_group import ProcessGroup
from ..data import Dataset, DistributedDataset, InputContext, InputOptions, InputReplicationMode
from ..data.feed.auto_shard import auto_shard, round_robin, serve_only
from ..data.feed.distributed import Divide, Drawn, Passes, distribute
from ..data.feed.from_function import FunctionPlan, call_dataset_fn
from ..data.feed.from_tensorflow import TensorFlowBatches, is_tensorflow, tensorflow_text
from ..data.feed.plan import NoPlan, Workers
from ..data.files.shared_look import look_together
from ..data.nodes.node import Node

__all__ = ["Distributor", "Division"]


@final
@dataclass(frozen=True)
class Division:
    """A rank's part in reading.

    Attributes:
        workers: the readers, and this rank's number among them.
        divide: returns the steps of a dataset.
        settings: of DistributedDataset.
        draws: of the ranks that draw the same batches in the same order; None for a rank that steps alone.
        within: the workers that step together, if not all.
    """

    workers: Workers
    divide: Divide
    settings: Mapping[str, Any]
    draws: Draws | None
    within: Workers | None = None

    @property
    def separate(self) -> bool:
        """True if not all ranks step together."""
        return self.within is not None or self.divide is serve_only

    def drawn(self) -> Drawn | None:
        """Return the recorder of draws from a new dataset. Call it on all ranks."""
        return None if self.draws is None else self.draws.dataset(user_line(threading.get_ident()))

    @classmethod
    def together(cls, group: ProcessGroup) -> Division:
        """Return the division of strategies whose ranks step together."""
        workers = Workers(group.topology.replicas_per_rank, group.topology.rank)
        return cls(workers, auto_shard, {"sum_over_ranks": _sum_over_ranks(group)}, _draws(group))

    @classmethod
    def alone(cls, workers: Workers, within: Workers, group: ProcessGroup, passes: Passes) -> Division:
        """Return the division of workers that don't step with all others.

        Args:
            workers: the receivers of batches, each one rank or a group of them.
            within: the ranks that divide a batch.
            group: the same ranks.
            passes: starts and ends passes.
        """
        # A worker's number of batches depends on the number of workers.
        settings = {"passes": passes, "sum_over_ranks": _sum_over_ranks(group), "same_length": False}
        return cls(workers, functools.partial(round_robin, within=within), settings, _draws(group), within)

    @classmethod
    def serving(cls, workers: Workers, passes: Passes) -> Division:
        """Return the division of a rank that serves workers, which step alone."""
        return cls(workers, serve_only, {"passes": passes, "same_length": False}, None)


@final
class Distributor:
    """The factory of a strategy's distributed datasets, used on all ranks or on none. Each call is collective.

    Args:
        group: the ranks that create a dataset together.
        division: this rank's part in reading.
        options: where batches go and how many are read ahead; as the user gave them.
        ledger: records the batches that are returned.
    """

    def __init__(
        self, group: ProcessGroup, division: Division, options: InputOptions | None, ledger: Ledger | None = None
    ) -> None:
        self._group, self._division, self._options, self._ledger = group, division, options, ledger
        self._drawn = division.drawn()

    def of_dataset(self, dataset: Any) -> DistributedDataset:
        """See `Strategy.distribute_dataset`. Collective."""
        if self._of_tensorflow(dataset):
            return self._made(functools.partial(TensorFlowBatches, dataset), "distribute_dataset")
        exchange = functools.partial(self._group.exchange, "distribute_dataset")
        look_together(dataset.node if isinstance(dataset, Dataset) else None, self._group, "distribute_dataset")
        with together(exchange):
            made = self._divided(dataset)
            alike, shown = self._described(dataset, made)
        same(exchange, alike, _different_datasets, shown)
        bound = dataset.node.bind(self._group)
        return made if bound is dataset.node else self._divided(Dataset(bound))

    def _of_tensorflow(self, dataset: Any) -> bool:
        """Return True for a tf.data.Dataset, which must be equal on all ranks. Collective where it is one."""
        found = is_tensorflow(dataset)
        if found:
            exchange = functools.partial(self._group.exchange, "distribute_dataset")
            text = tensorflow_text(dataset)
            same(exchange, text, _different_datasets, text)
        return found

    def _divided(self, dataset: Dataset) -> DistributedDataset:
        function, division = "distribute_dataset", self._division
        options = _checked(self._options, function)
        if options.replication_mode is InputReplicationMode.PER_REPLICA:
            remedy = "PER_REPLICA is for distribute_datasets_from_function."
            got = options.replication_mode
            raise ValueError(explain(function, "options", expected="PER_WORKER", got=got, remedy=remedy))
        made = distribute(dataset, division.workers, division.divide, **self._settings(options))
        if division.separate and dataset.node.traits.shares_memory:
            expected = "no shared cache, for workers that step alone"
            remedy = "Use cache(), which is separate on every worker."
            shared = 'cache("node") or cache("job")'
            raise ValueError(explain(function, "dataset", expected=expected, got=shared, remedy=remedy))
        return made

    def _described(self, dataset: Dataset, made: DistributedDataset) -> tuple[str, str]:
        """Return the text that must be the same on every rank, and the text for the error."""
        steps = dataset.cardinality() if self._division.separate else made.cardinality()
        elements = f"elements {made.element_spec}, {steps} steps in an epoch"
        alike, shown = zip(*_chain(dataset.node), (elements, elements), strict=True)
        return "\n".join(alike), "\n".join(shown)

    def from_function(self, dataset_fn: Callable[[InputContext], Any]) -> DistributedDataset:
        """See `Strategy.distribute_datasets_from_function`. Collective."""
        return self._made(dataset_fn, "distribute_datasets_from_function")

    def _made(self, dataset_fn: Callable[[InputContext], Any], function: str) -> DistributedDataset:
        division = self._division
        steps: FunctionPlan | None = None
        with together(functools.partial(self._group.exchange, function)):
            options = _checked(self._options, function)
            mode = InputReplicationMode(options.replication_mode)
            settings = self._settings(options)
            if division.divide is not serve_only:
                steps = call_dataset_fn(dataset_fn, division.workers, mode, division.within)
                steps.check()  # damaged files are an error on every rank
        if steps is None:
            return DistributedDataset(NoPlan(None, division.workers), **settings)
        steps.agree(settings["sum_over_ranks"])
        return DistributedDataset(steps, **settings)

    def _settings(self, options: InputOptions) -> dict[str, Any]:
        devices = _devices(self._group.topology.devices) if options.fetch_to_device else None
        return {
            "devices": devices,
            "buffer_size": options.per_replica_buffer_size,
            "drawn": self._drawn,
            "ledger": self._ledger,
            **self._division.settings,
        }


def _checked(options: Any, function: str) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        got = type(options).__name__
        raise TypeError(explain(function, "options", expected="ms.InputOptions", got=got))
    return options


def _devices(names: Sequence[str]) -> list[DeviceCopy | None]:
    """Return the copies to each local replica's device; None for a CPU."""
    kinds = [parse(name) for name in names]
    return [DeviceCopy(index) if kind == "gpu" else None for kind, index in kinds]


def _draws(group: ProcessGroup) -> Draws | None:
    return group.node.draws if group.topology.size > 1 else None


def _sum_over_ranks(group: ProcessGroup) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Return a function that sums a small array of integers over all ranks. The function is collective."""

    def total(counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums. Collective."""
        with group.collective("input step", dtype="int64", shape=counts.shape):
            return group.sum_int(counts.tolist())

    return total


def _chain(node: Node) -> Iterator[tuple[str, str]]:
    """Yield of each stage the text that ranks compare, and the text for errors."""
    for parent in node.parents:
        yield from _chain(parent)
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", node.describe())  # the address of a function without a name
    number = node.fingerprint()
    if number is None:
        yield text, text
    else:
        yield f"{type(node).__name__} {number}", f"{text} (fingerprint {number})"


def _different_datasets(texts: Mapping[int, str]) -> CollectiveMismatchError:
    each = by_rank({rank: f"\n{text}\n" for rank, text in texts.items()})
    return CollectiveMismatchError(f"distribute_dataset: the ranks have different datasets: {each}")
