"""ModelLink: the common state of a distributed model, its optimizers and its input, and their collectives."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras.src import api_export
from keras.src.saving import object_registration

from ..arena.values import checksum
from ..base import context, global_batch, log
from ..base.agree import only_differences, same, together
from ..base.distributed_values import PerReplica
from ..base.errors import BatchError, CollectiveMismatchError, by_rank, explain
from ..base.text import named
from ..comm.process_group import ProcessGroup
from ..data import DistributedDataset
from ..optimizers.foreign import write_share
from ..strategy.loss import weight_of_pass

__all__ = ["ModelLink", "arrays_of", "subclass"]


class ModelLink:
    """The link between a model, its optimizers and a strategy whose ranks take each step together.

    Args:
        strategy: the strategy. A rank computes for all of its replicas at once.
        optimizers: the methods of distributed optimizers, a class.
        readers: the ranks that divide batches, if not those of the placement.

    Attributes:
        strategy: the strategy. A rank computes for all of its replicas at once.
        rank: among those that divide batches: all; under a MeshStrategy along "data".
        size: the number of those ranks.
        root: the source of weights, files and output: rank 0, or the first that has replicas.
        writes: True on the root.
        first: True if this rank computes the same as the root, as a replica of a MeshStrategy.
        meets: True if ranks meet in each step, not only after epochs.
        alone: True if this rank has one replica.
        counts: True if this rank computes; servers do not in training, nor do workers without a batch.
        share: the factor of this rank's gradients: its share of the batch's rows.
        rowless: True if this rank has no row of the batch, and uses another one.
        some_rowless: True if any rank has none.
        in_step: True during a step of the model, whose metrics are this rank's own.
        in_epoch: True if workers step by servers, and have not met since.
        in_sum: True if gradients are summed already.
        joined: optimizers found at their update of the model, not in its attributes.
        left: the list for gradients that an update does not apply; None to apply them.
        wants_stop: True if a callback of this rank alone may have asked to stop.
        stops: True if all ranks stop after this step.
        failure: the error of a collective inside a graph.
        current: True if all ranks have rank 0's weights.
        steps: the number of steps in a call of Keras's loop.
        update: sends gradients to servers, while `fit` runs under parameter servers.
        model: a weak reference to the model.
        read: batches of training that were read while there are observers.
        seen: the step that observers see, if there are any.
        traced: True if the training step was compiled for observers.
    """

    meets = True

    def __init__(self, strategy: Any, optimizers: type[Any], readers: ProcessGroup | None = None) -> None:
        self.strategy, self.optimizers, extended = strategy, optimizers, strategy.extended
        self._group: ProcessGroup = extended.process_group
        self._readers: ProcessGroup = readers or extended.placement.group
        self.rank, self.size = self._readers.topology.rank, self._readers.topology.size
        self.root = int(extended.placement.first_worker)
        self.writes, self.first = strategy.rank == self.root, self.rank == self.root
        self._replica: ProcessGroup | None = extended.placement.replica
        self.counts = True
        self.share, self.rowless, self.some_rowless = 1.0 / self.size, False, False
        self.in_step = self.in_sum = self.in_epoch = False
        self.left: list[Any] | None = None
        self.wants_stop = self.stops = False
        self.failure: BaseException | None = None
        self.current = False
        self.steps = 1
        self.update: Any = None
        self.model: Any = None
        self.read: list[Any] = []
        self.seen: Any = None
        self.traced = False
        self.alone = len(extended.replicas) == 1
        self.joined: list[Any] = []
        # Counts of training steps: all, those before this loop, and at the last change of shares; this rank's share, 0 if equal.
        self._begun = self._start = self._changed = 0
        self._parts = 0.0
        self._drawn = 0  # when the batch of the step was drawn
        # Reused memory: new pages cost as much as the sum.
        self._staging: dict[tuple[np.dtype, int], np.ndarray] = {}

    # a step

    def begin_batch(self, rows: int | None, total: int, batch: Any, training: bool) -> None:
        """Start the step of a batch, given its rows here, None for equal ranks, and on all ranks.

        Raises:
            ValueError: on every rank, when some have no row of one of several steps in a call.
        """
        if 0 < total < self.size and self.steps > 1:
            expected, got = f"a row of each batch for {self.size} ranks", f"a batch of {total}"
            remedy = "compile with steps_per_execution=1, or leave such a batch out"
            raise ValueError(explain("fit", "x", expected=expected, got=got, remedy=remedy))
        self._begin(1.0 / self.size if rows is None else rows / total, rows == 0, 0 < total < self.size)
        if training:
            self._begin_training_step(0 if rows is None or rows * self.size == total else total)

    def begin_own_batch(self, function: str, arrays: Sequence[Any]) -> None:
        """Start the step of a batch that the program passed to a function. Collective.

        Raises:
            BatchError: replicas have unequal shares of batches, and the batch cannot be identified.
        """
        weight = self._weight_of(arrays, function)
        some_rowless = bool((self.numbers("batch", weight != 0) == 0).any())
        self._begin(weight / self.size, weight == 0, some_rowless)
        if function == "train_on_batch":
            self._begin_training_step(0 if weight == 1 else weight)

    @property
    def updates_itself(self) -> bool:
        """True on several ranks, and on one whose update observers compare with theirs; else Keras updates."""
        return self.size > 1 or bool(context.OBSERVERS)

    def begin_training(self) -> None:
        """Forget earlier steps."""
        self._start = self._begun

    def _begin(self, share: float, rowless: bool, some_rowless: bool) -> None:
        if share != self.share or rowless != self.rowless:
            _settle()
        self.share, self.rowless, self.some_rowless = share, rowless, some_rowless
        self._drawn = global_batch.now()

    def _begin_training_step(self, parts: float) -> None:
        self._begun += 1
        if parts != self._parts:
            self._changed, self._parts = self._begun, parts

    def weigher(self, optimizer: Any, compiled: bool) -> Callable[[], float]:
        """Return a function that returns the factor of this rank's gradients in the sum: in a step, its share of the batch.

        Args:
            optimizer: updates by the gradients.
            compiled: True if the sum is in a function that is being compiled.

        Raises:
            BatchError: outside of steps, when replicas have unequal shares of batches, and no batch is named.
        """
        named = global_batch.is_named()
        if compiled:
            if named:
                why, remedy = "strategy.batch has no effect in a compiled function", "Compile with run_eagerly=True"
                raise self._ambiguous(why, remedy)
            return functools.partial(self.share_of_step if self.in_step else self._share_of_compiled_loop, optimizer)
        share = self.share_of_step(optimizer) if self.in_step and not named else self._share_of_loop()
        return lambda: share

    def share_of_step(self, optimizer: Any) -> float:
        """Return the factor of this rank's gradients of the step.

        Raises:
            BatchError: they may be of several batches of different weights.
        """
        first = max(self._start, vars(optimizer).get("mpistrat_updated", 0)) + 1
        vars(optimizer)["mpistrat_updated"] = self._begun
        if self._changed > first:
            why = f"{optimizer.name} updates by what may be gradients of {self._begun - first + 1} batches of different weights"
            remedy = "Let it update in each step, with gradient_accumulation_steps=... where gradients are added up"
            raise self._ambiguous(why, remedy)
        weight = self.share * self.size
        if not all(math.isclose(other, weight) for other in global_batch.weights_since(self._drawn)):
            why, remedy = (
                "the step has drawn another batch, of another weight",
                "Draw all of a step's rows in one batch",
            )
            raise self._ambiguous(why, remedy)
        return self.share

    def _share_of_loop(self) -> float:
        try:
            return self._weight_of((), "Optimizer.apply") / self.size
        except BatchError as error:
            why = "a loop of the program's own does not show which batch they are of"
            raise self._ambiguous(why, "Pass the batch to strategy.run") from error

    def _share_of_compiled_loop(self, optimizer: Any) -> float:
        if self.strategy.extended.batches.uneven or self.share != 1.0 / self.size:
            why = f"{optimizer.name} updates in a compiled function outside of fit and train_on_batch"
            raise self._ambiguous(why, "Compile what computes the gradients, and call the optimizer outside of it")
        return 1.0 / self.size

    def _weight_of(self, arrays: Sequence[Any], function: str) -> float:
        if not self.alone and self.strategy.extended.batches.uneven:
            why, remedy = (
                f"{function} on a rank with several replicas",
                "Use fit, or start one process for each replica",
            )
            raise self._ambiguous(why, remedy)
        return weight_of_pass(self.strategy, arrays, function)

    def _ambiguous(self, why: str, remedy: str) -> BatchError:
        return BatchError(
            f"Optimizer.apply: these gradients have no weight: {why}. Ranks have unequal parts of batches (rank {self.rank}). "
            f"{remedy}; or write `with strategy.batch(x):` around an update by one batch, x being an array of it, None if it "
            "is of no distributed dataset; or give ranks equal parts (drop_remainder=True)"
        )

    def sum_gradients(
        self, *arrays: np.ndarray, weigh: Callable[[], float], of: Sequence[Any] = ()
    ) -> list[np.ndarray]:
        """Return the sums over all ranks of weighted arrays, one call per dtype. Collective; in any thread.

        The results are valid until the next call. `weigh` returns this rank's factor; `of` are the variables whose gradients the
        arrays are.
        """
        try:
            totals: list[Any] = list(arrays)
            share = weigh()
            if self.seen is not None and of:
                self.seen.gradients(of, arrays, share)
            if self.size == 1:
                return totals
            by_dtype: dict[np.dtype, list[int]] = {}
            for index, array in enumerate(arrays):
                by_dtype.setdefault(array.dtype, []).append(index)
            for dtype, members in by_dtype.items():
                flat = self._sum_of_one_dtype(dtype, [arrays[index] for index in members], share)
                low = 0
                for index in members:
                    array = arrays[index]
                    totals[index] = flat[low : low + array.size].reshape(array.shape)
                    low += array.size
            return totals
        except BaseException as error:
            self.failure = error
            raise

    def _sum_of_one_dtype(self, dtype: np.dtype, arrays: Sequence[np.ndarray], share: float) -> np.ndarray:
        """Return the concatenated sums. One more number transports this rank's request to stop."""
        ends = list(itertools.accumulate(array.size for array in arrays))
        place = (dtype, ends[-1])
        if place not in self._staging:
            self._staging[place] = np.empty(ends[-1] + 1, dtype)
        mine = self._staging[place]
        for array, end in zip(arrays, ends, strict=True):
            write_share(array, share, mine[end - array.size : end].reshape(array.shape))
        mine[-1] = self.wants_stop
        total = self._reduce(mine)
        if total[-1]:
            self.stops = True
        return total

    def _reduce(self, mine: np.ndarray) -> np.ndarray:
        """Return the sum over all ranks of a flat array. Collective."""
        if not self.alone:
            others = [np.zeros_like(mine)] * (len(self.strategy.extended.replicas) - 1)
            return np.asarray(self.strategy.reduce("SUM", PerReplica((mine, *others))))
        replica = context.get_replica_context()
        if replica is not None and replica.strategy is self.strategy:  # in strategy.run
            return np.asarray(replica.all_reduce("SUM", mine))
        return np.asarray(self.strategy.reduce("SUM", mine))

    def step(self) -> contextlib.AbstractContextManager[Any]:
        """Use this rank's own metrics in a `with` block."""
        return self._having("in_step", True)

    def left_out(self) -> contextlib.AbstractContextManager[list[Any]]:
        """Make updates in a `with` block only move their gradients to the list."""
        return self._having("left", [])

    def after_sum(self) -> contextlib.AbstractContextManager[Any]:
        """Make updates in a `with` block take gradients that are summed already."""
        return self._having("in_sum", True)

    @contextlib.contextmanager
    def _having(self, name: str, value: Any) -> Iterator[Any]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield value
        finally:
            setattr(self, name, before)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise the error of a collective inside a graph with its own type. No step runs afterwards."""
        self.failure = None
        try:
            yield
            self._begin(1.0 / self.size, False, False)
        except Exception as error:
            self.share, self.rowless = 1.0 / self.size, False
            failure = self._take_failure()
            if failure is None or failure is error:
                raise
            raise failure from None

    def _take_failure(self) -> BaseException | None:
        failure, self.failure = self.failure, None
        return failure

    # input

    def distributed(self, function: str, dataset: Any, training: bool) -> DistributedDataset:
        """Return a dataset of this rank's batches. Collective."""
        return dataset if isinstance(dataset, DistributedDataset) else self.strategy.distribute_dataset(dataset)

    def input(self, batches: Any, training: bool) -> Any:
        """Return this rank's batches for training, or not, given `KerasBatches` of all ranks."""
        return batches

    # between steps

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the sums over all ranks of arrays, as float64. Collective, one call for all."""
        _settle()
        if self.size == 1 or not arrays:
            return [np.asarray(array, np.float64) for array in arrays]
        flat = np.concatenate([np.asarray(array, np.float64).reshape(-1) for array in arrays])
        total = self._reduce(flat)
        ends = np.cumsum([np.size(array) for array in arrays])
        return [part.reshape(np.shape(array)) for part, array in zip(np.split(total, ends[:-1]), arrays, strict=True)]

    def means(self, numbers: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return the means over ranks of the numbers of a step. Collective, if there are any."""
        totals = self.sum(list(numbers.values()))
        return {name: total / self.size for name, total in zip(numbers, totals, strict=True)}

    def gather(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Return arrays of all ranks that divide batches, concatenated by rank. Collective."""
        _settle()
        gathered = []
        for array in arrays:
            with self._readers.collective("keras gather", dtype=str(array.dtype), shape=array.shape[1:]):
                parts = self._readers.all_gather_bytes(np.ascontiguousarray(array).tobytes())
            rows = [np.frombuffer(part, array.dtype).reshape(-1, *array.shape[1:]) for part in parts]
            gathered.append(np.concatenate(rows))
        return gathered

    def broadcast(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the root's arrays, with the same shapes and dtypes on all ranks. Collective, one call for all."""
        if self._group.topology.size == 1 or not arrays:
            return list(arrays)
        _settle()
        ends = list(itertools.accumulate(array.nbytes for array in arrays))
        data = np.empty(ends[-1], np.uint8)
        parts = [
            data[end - array.nbytes : end].view(array.dtype).reshape(array.shape)
            for array, end in zip(arrays, ends, strict=True)
        ]
        if self.writes:
            for part, array in zip(parts, arrays, strict=True):
                part[...] = array
        with self._group.collective("keras weights", dtype="uint8", shape=data.shape):
            self._group.broadcast(data, self.root)
        return parts

    def numbers(self, what: str, *mine: int) -> np.ndarray:
        """Return integers of all ranks, one row per rank. Collective."""
        _settle()
        with self._group.collective(f"keras {what}"):
            return np.asarray(self._group.all_gather_int(mine))

    def differ(self, arrays: Sequence[np.ndarray]) -> list[bool]:
        """Return whether ranks differ, for each array. Collective, if ranks meet in steps."""
        if not arrays:
            return []
        table = self.numbers("state of a step", *(checksum(np.ascontiguousarray(a).reshape(-1)) for a in arrays))
        return [bool(differs) for differs in (table != table[0]).any(axis=0)]

    def exchange(self, what: str, text: str) -> list[str]:
        """Return the texts of all ranks. Collective."""
        _settle()
        return self._group.exchange(f"keras {what}", text)

    def together(self, function: str) -> contextlib.AbstractContextManager[None]:
        """Exchange errors at the end of a `with` block. Collective; see `agree.together`."""
        return together(functools.partial(self._group.exchange, f"keras {function}"))

    def same(self, function: str, what: str, mine: str) -> None:
        """Check that all ranks have the same text. Collective.

        Raises:
            CollectiveMismatchError: on every rank.
        """
        _settle()

        def error(texts: dict[int, str]) -> CollectiveMismatchError:
            expected = f"the same {what} on every rank"
            return CollectiveMismatchError(
                explain(function, "", expected=expected, got=by_rank(only_differences(texts)))
            )

        same(functools.partial(self._group.exchange, f"keras {function}"), mine, error)

    def stop_together(self, wanted: bool) -> bool:
        """Return whether to stop after this step. Collective over a replica: its ranks stop after the same one.

        The next sum of gradients transports wishes to the other replicas.
        """
        if self.strategy.size == 1:
            return wanted
        if wanted and not self.stops:
            self.wants_stop = True
        if self._replica is not None:
            _settle()
            wish = self.stops or (self.size == 1 and self.wants_stop)  # else the sum of gradients has transported it
            with self._replica.collective("keras stop"):
                self.stops = bool(self._replica.agree(int(wish), "max"))
        return self.stops

    def compare_weights(self, when: str, weights: Sequence[Any]) -> None:
        """Check that all ranks have the same weights, except for rounding. Collective. `when` is for the error.

        Raises:
            CollectiveMismatchError: on every rank.
        """
        arrays = arrays_of(weights)
        if not any(self.differ(arrays)):
            return
        theirs = self.broadcast(arrays)
        pairs = zip(weights, arrays, theirs, strict=True)
        far = [weight.path for weight, mine, root in pairs if not _close(mine, root)]
        everyones = self.exchange("weights", ", ".join(far[:3]))
        ranks = [rank for rank, text in enumerate(everyones) if text]
        if ranks:
            got = f"others than rank {self.root}'s on {named('rank', ranks)}: {everyones[ranks[0]]}"
            expected = f"the same weights {when} on every rank"
            remedy = (
                "Let only Keras's optimizers update trainable weights, which average gradients over ranks, and assign numbers "
                "that all ranks have, in callbacks of all ranks; trainable=False for what each rank changes by its own rows"
            )
            raise CollectiveMismatchError(explain("fit", "", expected=expected, got=got, remedy=remedy))

    def compare_replicas(self, function: str, what: str, arrays: Iterable[Any]) -> None:
        """Check that the ranks of each replica have the same arrays. Collective, if replicas have several ranks.

        Raises:
            CollectiveMismatchError: on every rank.
        """
        if self._replica is None:
            return
        digest = checksum(*(np.ascontiguousarray(array).reshape(-1) for array in arrays))
        table = self.numbers(f"{what} of a replica", self.rank, digest)
        for replica in range(self.size):
            found = {rank: int(number) for rank, (one, number) in enumerate(table) if one == replica}
            if len(set(found.values())) > 1:
                got = by_rank({rank: f"#{number:08x}" for rank, number in found.items()})
                expected = f"the same {what} on the ranks of a replica, which compute the same"
                remedy = "Let what ranks do depend on strategy.mesh.at['data'], not on strategy.rank"
                text = explain(function, "", expected=expected, got=got, remedy=remedy)
                raise CollectiveMismatchError(text)

    def agree_on_stop(self, wanted: bool) -> bool:
        """Return whether any rank wants to stop; if only some do, log their numbers. Collective."""
        table = self.numbers("stop", int(wanted or self.wants_stop))[:, 0]
        who = [rank for rank, wants in enumerate(table) if wants]
        if who and len(who) < len(table) and not self.stops:
            log.logger.info("keras: stop_training was set by %s: all ranks stop", named("rank", who))
        return bool(who)


def arrays_of(variables: Sequence[Any]) -> list[np.ndarray]:
    """Return copies of variables' values."""
    return [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in variables]


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether arrays differ at most by rounding."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    largest = np.abs(b, where=np.isfinite(b), out=np.zeros_like(b)).max(initial=0.0)
    return bool(np.allclose(a, b, rtol=1e-3, atol=1e-3 * float(largest), equal_nan=True))


def _settle() -> None:
    """Wait for running steps: only one thread of a rank may be in a collective."""
    if keras.backend.backend() == "jax":
        import jax

        jax.effects_barrier()


def subclass(kind: type[Any], methods: type[Any]) -> type[Any]:
    """Return a class with these methods before the class's own, under its name."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made = type(kind.__name__, (methods, kind), names)
    for registered in (api_export.REGISTERED_OBJS_TO_NAMES, object_registration.GLOBAL_CUSTOM_NAMES):
        if kind in registered:
            registered[made] = registered[kind]
    return made
