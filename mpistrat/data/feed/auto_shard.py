"""Policies of distribute_dataset: the chain of stages that each worker reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...base.errors import explain
from ..files.hdf5 import HDF5Rows
from ..nodes.batch import Batches
from ..nodes.node import UNKNOWN, Below, Node
from ..nodes.order import Reindexed, ShardOrder, options_of, with_shard
from ..nodes.stage import InputRows, Stage
from ..options import AutoShardPolicy
from ..stats import StageStats
from .plan import GlobalPlan, NoPlan, Plan, SuccessiveBatches, WorkerPlan, Workers

__all__ = ["FileShard", "auto_shard", "round_robin", "serve_only"]


def auto_shard(dataset: Node, workers: Workers) -> Plan:
    """Return the steps of a dataset under the policy of its options.

    Raises:
        ValueError: if the dataset is not batched, or does not meet the policy's requirements.
    """
    policy = _policy(dataset, workers.count)
    if policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
        if workers.count > 1 and not (dataset.random_access or dataset.traits.deterministic):
            remedy = "Map with deterministic=True, or let each worker read its own: FILE, OFF or HINT."
            raise _refusal("the same elements in the same order on every worker", "map(deterministic=False)", remedy)
        return GlobalPlan(dataset, workers)
    own = _own_shard(dataset, policy, workers.count, workers.index)
    shares = [_shares(stage, workers, policy.name) for stage in _batch_stages(own)]
    own = _resized(own, shares, workers.index)
    kinds = _kinds(dataset, own, policy, workers, shares) if own.random_access else []
    return WorkerPlan(own, kinds, workers, policy.name)


def round_robin(dataset: Node, workers: Workers, within: Workers) -> Plan:
    """Return the steps of a worker that steps independently: whole batches, round-robin under AUTO and DATA.

    A batch is for one worker's replicas together. Under FILE, OFF and HINT a worker reads batches of the policy's files
    or elements. Workers may have different numbers of steps.

    Raises:
        ValueError: as `auto_shard`.
    """
    policy = _policy(dataset, workers.count)
    which = f"distributed by {policy.name}: worker {workers.index} of {workers.count}"
    if policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
        own = Reindexed(dataset, ShardOrder(workers.count, workers.index))
        return GlobalPlan(own, within, which, dealt=(dataset, workers.count))
    return GlobalPlan(_own_shard(dataset, policy, workers.count, workers.index), within, which)


def serve_only(dataset: Node, workers: Workers) -> Plan:
    """Return no steps, for a rank that only serves, after the same checks."""
    hinted = _policy(dataset, workers.count) is AutoShardPolicy.HINT
    return NoPlan(with_shard(dataset, workers.count, 0) if hinted else dataset, workers)


def _policy(dataset: Node, workers: int) -> AutoShardPolicy:
    """Return the policy of the dataset's options, or by the number of files, after checks that the dataset allows it."""
    if dataset.batching is None:
        remedy = "Add .batch(global_batch_size), the rows of all replicas together."
        raise _refusal("batches", "rows that are not batched", remedy)
    policy = cast(AutoShardPolicy, options_of(dataset).auto_shard_policy or AutoShardPolicy.AUTO)
    if dataset.traits.shard_hinted != (policy is AutoShardPolicy.HINT):
        expected = "shard(SHARD_HINT, SHARD_HINT) in the dataset under AutoShardPolicy.HINT, and only there"
        raise _refusal(expected, f"{'it' if dataset.traits.shard_hinted else 'none'} under {policy.name}")
    if policy is AutoShardPolicy.FILE_OR_DATA:
        return AutoShardPolicy.FILE if _files(dataset) >= workers else AutoShardPolicy.DATA
    return policy


def _files(dataset: Node) -> int:
    """Return the number of files to distribute; 0 if the policy FILE is impossible."""
    sources = _sources(dataset)
    by_rows = all(isinstance(stage, Batches) for stage in _batch_stages(dataset))
    if len(sources) > 1 or not isinstance(sources[0], HDF5Rows) or not by_rows:
        return 0
    return int(sources[0].file_starts().size) - 1


def _refusal(expected: str, got: str, remedy: str = "") -> ValueError:
    return ValueError(explain("distribute_dataset", "dataset", expected=expected, got=got, remedy=remedy))


def _replaced(dataset: Node, replacements: Mapping[Node, Node]) -> Node:
    """Return the chain with some stages replaced, with all below them."""
    if dataset in replacements:
        return replacements[dataset]
    return dataset.rebuild([_replaced(parent, replacements) for parent in dataset.parents])


def _own_shard(dataset: Node, policy: AutoShardPolicy, workers: int, worker: int) -> Node:
    """Return the chain that a worker reads under FILE, OFF and HINT."""
    if policy is AutoShardPolicy.OFF:
        return dataset
    if policy is AutoShardPolicy.HINT:
        return with_shard(dataset, workers, worker)
    return _own_files(dataset, workers, worker)


def _own_files(dataset: Node, workers: int, worker: int) -> Node:
    """Return the chain over files worker, worker + workers, … of its source (FILE)."""
    sources = list(_sources(dataset))
    source = sources[0]
    if len(sources) > 1 or not isinstance(source, HDF5Rows):
        got = ", ".join(each.describe() for each in sources)
        remedy = "Use DATA, or HINT with shard() where the workers' shards start."
        raise _refusal("one HDF5Dataset as the source under FILE", got, remedy)
    files = source.file_starts().size - 1
    if files < workers:
        remedy = "Write more files, start fewer ranks, or use AutoShardPolicy.DATA."
        raise _refusal(f"at least one file for each of the {workers} workers under FILE", f"{files} files", remedy)
    return _replaced(dataset, {source: FileShard(source, workers, worker)})


def _sources(dataset: Node) -> Sequence[Node]:
    return [source for parent in dataset.parents for source in _sources(parent)] or [dataset]


def _resized(dataset: Node, shares: Sequence[NDArray[np.int64]], worker: int) -> Node:
    """Return the chain with a worker's batch sizes."""
    sizes = zip(_batch_stages(dataset), shares, strict=True)
    return _replaced(dataset, {stage: stage.resized(int(share[worker])) for stage, share in sizes})


def _kinds(
    dataset: Node, own: Node, policy: AutoShardPolicy, workers: Workers, shares: Sequence[NDArray[np.int64]]
) -> Iterator[tuple[Node | SuccessiveBatches, int]]:
    """Yield a chain that workers read, or its form, and the number of workers with equal rows per step; `own` is this worker's.

    Workers with one chain have equal shares of each batch, from equally many elements. Their files may differ in rows:
    then the form is computed, without a dataset.
    """
    numbers = np.stack([*shares, *_divided(dataset, policy, workers.count)])
    columns, firsts, counts = np.unique(numbers, axis=1, return_index=True, return_counts=True)
    form = SuccessiveBatches.of(own) if policy is AutoShardPolicy.FILE else None
    rows = _batch_stages(own)[0].parents[0]
    for column, worker, count in zip(columns.T.tolist(), firsts.tolist(), counts.tolist(), strict=True):
        below = UNKNOWN if form is None else _length_over_files(rows, column[-1])
        if form is not None and below != UNKNOWN:
            yield form._replace(below=below, size=column[0]), count
        else:
            yield _resized(_own_shard(dataset, policy, workers.count, worker), shares, worker), count


def _length_over_files(node: Node, rows: int) -> int:
    """Return a chain's number of elements over files with this many rows; UNKNOWN if only the files show it."""
    if isinstance(node, FileShard):
        return rows
    return node.length_over(_length_over_files(node.parents[0], rows)) if isinstance(node, Stage) else UNKNOWN


def _divided(dataset: Node, policy: AutoShardPolicy, workers: int) -> Iterator[NDArray[np.int64]]:
    """Yield, for each sharded source, each worker's number of elements, or another number that separates larger shares."""
    numbers = np.arange(workers)
    if policy is AutoShardPolicy.FILE:
        lengths = np.diff(cast(HDF5Rows, _sources(dataset)[0]).file_starts())
        yield np.bincount(np.arange(lengths.size) % workers, lengths, workers).astype(np.int64)
    elif policy is AutoShardPolicy.HINT:
        for below in _below_hints(dataset):
            # Batches differ in rows, and in number if shares do.
            alone = below.traits.shard_hinted or below.batching is not None
            yield numbers if alone else (numbers < below.cardinality() % workers).astype(np.int64)


def _below_hints(dataset: Node) -> Iterator[Node]:
    """Yield the node below each `shard` that has SHARD_HINT."""
    if isinstance(dataset, Reindexed) and dataset.order.hinted:
        yield dataset.parents[0]
    for parent in dataset.parents:
        yield from _below_hints(parent)


def _batch_stages(dataset: Node) -> list[Any]:
    """Return the stages that make the batches: several if datasets were joined after."""
    if all(parent.batching is None for parent in dataset.parents):
        return [dataset]
    return [stage for parent in dataset.parents for stage in _batch_stages(parent)]


def _shares(stage: Node, workers: Workers, policy: str) -> NDArray[np.int64]:
    if stage.batching is None or not isinstance(stage, Batches):
        raise _refusal(f"batch() under {policy}", stage.describe(), "Use AutoShardPolicy.DATA.")
    shares = workers.shares(stage.batching.size)
    if not shares.all():
        expected = f"at least a row for each of the {workers.count} workers in a batch under {policy}"
        raise _refusal(expected, stage.describe(), "A worker without a share of the batches would never read its rows.")
    return shares


class FileShard(InputRows):
    """The rows of files index, index + num_shards, … of an HDF5 dataset, as a source without a stage below."""

    def __init__(self, source: HDF5Rows, num_shards: int, index: int) -> None:
        self._source = source
        self._num_shards, self._index = num_shards, index
        starts = source.file_starts()
        self._first = starts[:-1][index::num_shards]  # the source's row at the start of each of these files
        lengths = starts[1:][index::num_shards] - self._first
        self._starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        self._files = starts.size - 1

    @property
    def counters(self) -> StageStats | None:
        return self._source.counters

    @property
    def row_spec(self) -> Any:
        return self._source.row_spec

    def cardinality(self) -> int:
        return int(self._starts[-1])

    def _rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        file = np.searchsorted(self._starts, positions, side="right") - 1
        return positions + (self._first - self._starts[:-1])[file]

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        return [(self._source, (epochs, self._rows(positions)), None)]

    def chunk_starts(self) -> NDArray[np.int64] | None:
        starts = self._source.chunk_starts()
        if starts is None:
            return None
        kept = [self._starts]
        for first, below, above in zip(self._first, self._starts[:-1], self._starts[1:], strict=True):
            inside = starts[(starts >= first) & (starts < first + above - below)]
            kept.append(inside - first + below)
        return np.unique(np.concatenate(kept))

    def keep(self, rows: int) -> None:
        self._source.keep(rows)

    def check(self) -> None:
        self._source.check()

    def describe(self) -> str:
        shown = ", ".join(map(str, range(self._files)[self._index :: self._num_shards][:3]))
        more = ", ..." if self._first.size > 3 else ""
        return f"{self._source.describe()}; of these files {shown}{more}"
