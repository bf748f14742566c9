"""How a distributed dataset meets the ranks and devices of a strategy."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from ..cluster.devices import parse
from ..comm.agree import same, together
from ..comm.draws import Draws
from ..comm.gpu import DeviceCopy
from ..comm.monitor.rank_monitor import user_place
from ..comm.process_group import ProcessGroup
from ..data import Dataset, DistributedDataset, InputContext, InputOptions, InputReplicationMode
from ..data.feed.auto_shard import auto_shard, deal_out, serve_only
from ..data.feed.distributed import Divide, Drawn, Passes, distribute
from ..data.feed.from_function import FunctionPlan, call_dataset_fn
from ..data.feed.plan import NoPlan, Workers
from ..data.nodes.node import Node
from ..errors import CollectiveMismatchError, by_rank, explain

__all__ = ["Division", "distribute_dataset", "distribute_datasets_from_function"]

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Division:
    """How a rank takes part in reading.

    Attributes:
        workers: who reads, and which of them this rank is.
        divide: returns the steps of a dataset.
        settings: of DistributedDataset.
        draws: of the ranks that draw the same batches in the same order; None for a rank that steps alone.
        within: the workers that step together, where these are not all.
    """

    workers: Workers
    divide: Divide
    settings: Mapping[str, Any]
    draws: Draws | None
    within: Workers | None = None

    @property
    def separate(self) -> bool:
        """Whether not all ranks step together."""
        return self.within is not None or self.divide is serve_only

    def drawn(self) -> Drawn | None:
        """Return who is told what is drawn from a new dataset. All ranks do it alike."""
        return None if self.draws is None else self.draws.dataset(user_place(threading.get_ident()))

    @classmethod
    def together(cls, group: ProcessGroup) -> Division:
        """Return the division of strategies whose ranks step together."""
        workers = Workers(group.topology.replicas_per_rank, group.topology.rank)
        return cls(workers, auto_shard, {"sum_over_ranks": _sum_over_ranks(group)}, _draws(group))

    @classmethod
    def alone(cls, workers: Workers, within: Workers, group: ProcessGroup, passes: Passes) -> Division:
        """Return the division of workers that don't step with all others.

        Args:
            workers: those that batches are dealt out to, each one rank or a group of them.
            within: the ranks that divide a batch.
            group: the same ranks.
            passes: who is told of passes.
        """
        # How many batches a worker is dealt depends on the number of workers.
        settings = {"passes": passes, "sum_over_ranks": _sum_over_ranks(group), "same_length": False}
        return cls(workers, functools.partial(deal_out, within=within), settings, _draws(group), within)

    @classmethod
    def serving(cls, workers: Workers, passes: Passes) -> Division:
        """Return the division of a rank that serves those who step alone."""
        return cls(workers, serve_only, {"passes": passes, "same_length": False}, None)


def distribute_dataset(
    group: ProcessGroup, dataset: Dataset, options: InputOptions | None, division: Division
) -> DistributedDataset:
    """See `Strategy.distribute_dataset`. Collective."""
    function, drawn = "distribute_dataset", division.drawn()

    def make(dataset: Dataset = dataset) -> DistributedDataset:
        settings = _checked(options, function)
        if settings.replication_mode is InputReplicationMode.PER_REPLICA:
            remedy = "PER_REPLICA is for distribute_datasets_from_function."
            got = settings.replication_mode
            raise ValueError(explain(function, "options", expected="PER_WORKER", got=got, remedy=remedy))
        told = _settings(group, settings, division, drawn)
        made = distribute(dataset, division.workers, division.divide, **told)
        if division.separate and dataset.node.traits.shares_memory:
            expected = "no shared cache: workers that step alone share none"
            remedy = "Use cache(), which every worker keeps for itself."
            shared = 'cache("node") or cache("job")'
            raise ValueError(explain(function, "dataset", expected=expected, got=shared, remedy=remedy))
        return made

    def described(made: DistributedDataset) -> tuple[str, str]:
        steps = dataset.cardinality() if division.separate else made.cardinality()
        elements = f"elements {made.element_spec}, {steps} steps in an epoch"
        alike, shown = zip(*_chain(dataset.node), (elements, elements), strict=True)
        return "\n".join(alike), "\n".join(shown)

    made = _agreed(group, function, make, described)
    bound = dataset.node.bind(group)
    return made if bound is dataset.node else make(Dataset(bound))


def distribute_datasets_from_function(
    group: ProcessGroup,
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None,
    division: Division,
) -> DistributedDataset:
    """See `Strategy.distribute_datasets_from_function`. Collective."""
    function, drawn = "distribute_datasets_from_function", division.drawn()

    def make() -> tuple[FunctionPlan | None, dict[str, Any]]:
        settings = _checked(options, function)
        mode = InputReplicationMode(settings.replication_mode)
        told = _settings(group, settings, division, drawn)
        if division.divide is serve_only:
            return None, told
        steps = call_dataset_fn(dataset_fn, division.workers, mode, division.within)
        steps.check()  # of files that are damaged every rank is told
        return steps, told

    # What each worker makes may differ; only its success is told, and its length.
    steps, settings = _agreed(group, function, make, lambda made: ("", ""))
    if steps is None:
        return DistributedDataset(NoPlan(None, division.workers), **settings)
    steps.agree(settings["sum_over_ranks"])
    return DistributedDataset(steps, **settings)


def _checked(options: Any, function: str) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        got = type(options).__name__
        raise TypeError(explain(function, "options", expected="ms.InputOptions", got=got))
    return options


def _settings(group: ProcessGroup, options: InputOptions, division: Division, drawn: Drawn | None) -> dict[str, Any]:
    devices = _devices(group.topology.devices) if options.fetch_to_device else None
    return {
        "devices": devices,
        "buffer_size": options.per_replica_buffer_size,
        "drawn": drawn,
        **division.settings,
    }


def _devices(names: Sequence[str]) -> list[DeviceCopy | None]:
    """What copies to each local replica's device; None for a CPU."""
    kinds = [parse(name) for name in names]
    return [DeviceCopy(index) if kind == "gpu" else None for kind, index in kinds]


def _draws(group: ProcessGroup) -> Draws | None:
    return group.node.draws if group.topology.size > 1 else None


def _sum_over_ranks(group: ProcessGroup) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Return what sums a small array of integers over all ranks. What it returns is collective."""

    def total(counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Collective."""
        with group.collective("input step", dtype="int64", shape=counts.shape):
            return group.all_gather_int(counts.tolist()).sum(axis=0)

    return total


def _chain(node: Node) -> Iterator[tuple[str, str]]:
    """What the ranks must have alike of each stage, and what it looks like in words."""
    for parent in node.parents:
        yield from _chain(parent)
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", node.describe())  # where a function without a name lies
    number = node.fingerprint()
    if number is None:
        yield text, text
    else:
        yield f"{type(node).__name__} {number}", f"{text} (fingerprint {number})"


def _agreed(
    group: ProcessGroup,
    function: str,
    make: Callable[[], T],
    described: Callable[[T], tuple[str, str]],
) -> T:
    """Return what `make` makes, once it has on every rank and they describe it alike. Collective.

    A description is what must be the same on every rank, and what an error shows of it.

    Raises:
        What it raised here; else an error like that of the first rank where it raised.
        CollectiveMismatchError: on every rank, when the descriptions differ.
    """
    exchange = functools.partial(group.exchange, function)
    with together(exchange):
        made = make()
        alike, shown = described(made)

    def differ(texts: Mapping[int, str]) -> CollectiveMismatchError:
        each = by_rank({rank: f"\n{text}\n" for rank, text in texts.items()})
        return CollectiveMismatchError(f"{function}: the ranks have different datasets: {each}")

    same(exchange, alike, differ, shown)
    return made
