"""The batches of distributed datasets: the total rows of each, and the weight of a replica's rows of it.

A step may use any batch: one of two datasets, one drawn ahead, one stored in a list or converted to another library's array. So a
batch is looked up in this order: by name (`strategy.batch`), by the memory of an input, among the arguments of `strategy.run`,
and by the number of rows, if all batches with as many rows here had one weight. It is never simply the last batch drawn.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from . import nest
from .distributed_values import DistributedValues
from .errors import BatchError, ContextError, explain

__all__ = [
    "HandedOut",
    "Ledger",
    "BatchPart",
    "address_of",
    "begin_step",
    "end_step",
    "global_batch_size",
    "is_named",
    "named",
    "now",
    "set_global_batch_size",
    "size_of_losses",
    "weights_since",
]

_FORGET_FROM = 1024  # number of records at which those of freed arrays are removed
_DATASETS = 64  # datasets with separate parts in a ledger, at most

_numbers, _times = itertools.count(), itertools.count()
_lock = threading.Lock()
T = TypeVar("T")


class BatchPart(NamedTuple):
    """One replica's rows of a global batch.

    Attributes:
        rows: of this replica.
        total: of all replicas.
        weight: factor of the mean over this replica's rows, in a mean over the replicas; 1 if all have equal numbers of rows.
    """

    rows: int
    total: int
    weight: float


class _Record:
    """A known array: its memory, and the part of a batch that it is."""

    __slots__ = ("array", "high", "ledger", "low", "owner", "part")

    def __init__(self, array: Any, part: BatchPart, ledger: Ledger) -> None:
        owner = _owner(array)
        self.array, self.owner = weakref.ref(array), weakref.ref(owner)
        self.part, self.ledger = part, ledger
        self.low = self.high = -1
        if owner is not array:  # the array may be freed before its memory
            self.locate(array)

    def locate(self, array: Any) -> None:
        """Record the memory of an array."""
        if isinstance(array, np.ndarray):
            self.low, self.high = _bounds(array)
        else:
            self.low = address_of(array) or 0
            self.high = self.low + int(array.nbytes)

    def has(self, address: int) -> bool:
        """Return True if an address is in the array's memory, and that was not freed."""
        if self.owner() is None:
            return False
        if self.low < 0:
            array = self.array()
            if array is None:
                return False
            self.locate(array)
        return self.low <= address < self.high


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()  # of open strategies
_arrays: dict[int, _Record] = {}  # by the id of an array
_views: dict[int, list[_Record]] = {}  # by the id of the owner of their memory: of arrays that do not own theirs
_forget_at = _FORGET_FROM


@final
class Ledger:
    """The parts of batches from the datasets of one strategy on this rank.

    Args:
        replicas: the number of replicas that step together.

    Attributes:
        of_workers: the number of replicas that are summed if a step uses batches of several workers, weighted by rows.
        uneven: True if any part weighed more or less than 1.
    """

    def __init__(self, replicas: int = 1) -> None:
        self.replicas = replicas
        self.of_workers: int | None = None
        self.uneven = False
        self._datasets: list[tuple[weakref.ref[HandedOut], set[BatchPart]]] = []
        self._ended: set[BatchPart] = set()  # of datasets that were freed
        self._watchers: list[weakref.WeakMethod[Callable[[], None]]] = []

    def join(self, dataset: HandedOut) -> set[BatchPart]:
        """Return the set for a new dataset's parts."""
        parts: set[BatchPart] = set()
        with _lock:
            _ledgers.add(self)
            if len(self._datasets) >= _DATASETS:
                self._ended.update(*(known for living, known in self._datasets if living() is None))
                self._datasets = [(living, known) for living, known in self._datasets if living() is not None]
            self._datasets.append((weakref.ref(dataset), parts))
        return parts

    def close(self) -> None:
        """Unregister the ledger of a closed strategy."""
        _ledgers.discard(self)

    def watch(self, method: Callable[[], None]) -> None:
        """Call a method at once if parts are unequal, else with the first unequal one. It is referenced weakly."""
        if self.uneven:
            method()
        else:
            self._watchers.append(weakref.WeakMethod(method))

    def become_uneven(self) -> None:
        """Record that parts are unequal."""
        self.uneven = True
        watchers, self._watchers = self._watchers, []
        for reference in watchers:
            method = reference()
            if method is not None:
                method()

    def parts(self, rows: int | None = None) -> set[BatchPart]:
        """Return the parts with this number of rows, or all. Freed datasets count only if no living one has any."""
        with _lock:
            known = [(living() is not None, parts) for living, parts in self._datasets]
            found = {part for alive, parts in known if alive for part in parts if rows in (None, part.rows)}
            freed = {part for alive, parts in known if not alive for part in parts} | self._ended
        return found or {part for part in freed if rows in (None, part.rows)}

    def weight(self, inputs: Iterable[Any], function: str, replica: int = 0, where: str = "") -> float:
        """Return the factor of a pass's gradient (of a mean over its rows) in a mean over the replicas.

        Args:
            inputs: arrays of the pass, of NumPy, CuPy, torch or JAX; other values are skipped.
            function: name of the pass's function, for the error.
            replica: the local replica.
            where: the rank in words, for the error.

        Raises:
            BatchError: parts are unequal, and the batch of the inputs is unknown.
        """
        chosen = _named.get()
        if chosen is not None:
            part = chosen[min(replica, len(chosen) - 1)]
            return 1.0 if part is None else part.weight
        total = _said_total()
        if not self.uneven and total is None:
            return 1.0
        arrays = [value for value in inputs if _has_rows(value)]
        by_memory = {record.part.weight for array in arrays for record in self._records(array)}
        weight = _one(by_memory) if by_memory else self._without_memory(arrays, total)
        if weight is None:
            raise self._unknown(arrays, by_memory, function, where)
        return weight

    def _without_memory(self, arrays: Sequence[Any], total: int | None) -> float | None:
        """Return the weight of a pass by the arguments of the step or by rows; None if it is unknown."""
        counts = {0 if 0 in array.shape else int(array.shape[0]) for array in arrays}
        given = self.given()
        if given:
            weight = _one({part.weight for part in given})
            if weight is None:
                weight = _one({part.weight for part in given if part.rows in counts})
            elif not self._agree(given, weight, arrays, counts):
                weight = None
        else:
            by_rows = {part.weight for count in counts for part in self.parts(count)}
            columns = {int(array.shape[1]) for array in arrays if _may_be_by_columns(array)} if by_rows else set()
            weight = _one(by_rows | {part.weight for count in columns for part in self.parts(count)})
            if weight is None and total and len(counts) == 1:
                weight = counts.pop() * self.replicas / total
        return 1.0 if weight is None and not self.uneven else weight

    def _agree(self, given: set[BatchPart], weight: float, arrays: Sequence[Any], counts: set[int]) -> bool:
        """Return True if inputs may be of the batch in a step's arguments: no batch of another weight has as many rows."""
        rows = {part.rows for part in given}
        if any(not rows.isdisjoint(array.shape) for array in arrays):
            return True
        return {part.weight for count in counts for part in self.parts(count)} <= {weight}

    def given(self) -> set[BatchPart]:
        """Return the parts among the arguments of the running step, by identity or by memory."""
        step = _step.get()
        return set() if step is None else {record.part for leaf in step.leaves() for record in self._records(leaf)}

    def parts_of(self, arrays: Sequence[Any]) -> set[BatchPart]:
        """Return the parts of arrays that come from a dataset, by identity."""
        return {record.part for array in arrays if (record := _record_of(array)) and record.ledger is self}

    def _records(self, value: Any) -> list[_Record]:
        """Return the records of an array that came from a dataset, or of those whose memory it is in."""
        own = _record_of(value)
        if own is not None:
            return [own] if own.ledger is self else []
        address = address_of(value)
        if address is None:
            return []
        with _lock:
            records = itertools.chain(_arrays.values(), *_views.values())
            return [record for record in records if record.ledger is self and record.has(address)]

    def _unknown(self, arrays: Sequence[Any], weights: set[float], function: str, where: str) -> BatchError:
        shapes = ", ".join(str(tuple(array.shape)) for array in arrays) or "none"
        parts = sorted((part.rows, part.total) for part in self.parts())
        listed = ", ".join(f"{rows} of {total} rows" for rows, total in parts[:6]) + (", ..." if len(parts) > 6 else "")
        why = "its inputs belong to batches of different weights" if weights else "no input identifies its batch"
        return BatchError(
            f"{function}: this pass has no weight: {why}. Input shapes: {shapes}. The replicas have unequal parts of batches "
            f"(here {listed}){where}. Use the arrays as the dataset handed them out (torch.from_numpy and views of them count), "
            "pass the batch to strategy.run, or write `with strategy.batch(x):` around the pass, x being an array of the batch; "
            "`with strategy.batch(None):` if its rows are of no distributed dataset"
        )


@final
class HandedOut:
    """The batches of one dataset. It references none of them.

    Args:
        ledger: of the dataset's strategy.
        replicas: the number of replicas that divide a batch.
        rows_of_all: returns the total rows of the workers that step separately, at a step of an epoch.

    Attributes:
        total: rows of the last batch; None before the first and after the last of an epoch.
        time: its logical time.
    """

    def __init__(
        self,
        ledger: Ledger | None = None,
        replicas: int = 1,
        rows_of_all: Callable[[int, int], int | None] | None = None,
    ) -> None:
        self._number = next(_numbers)
        self._ledger, self._replicas, self._rows_of_all = ledger or Ledger(), replicas, rows_of_all
        self._parts = self._ledger.join(self)
        self._last: tuple[BatchPart, ...] = ()
        self.total: int | None = None
        self.time = 0

    def next(self, parts: Sequence[Sequence[Any]], total: int, position: tuple[int, int] = (0, 0)) -> None:
        """Record a batch: each local replica's arrays, the rows of all replicas together, and its epoch and step."""
        ledger, divisor, replicas = self._ledger, total, self._replicas
        if ledger.of_workers is not None and self._rows_of_all is not None:
            of_all = self._rows_of_all(*position)
            if of_all:
                divisor, replicas = of_all, ledger.of_workers
        last, made = self._last, []
        for index, arrays in enumerate(parts):
            rows = int(arrays[0].shape[0]) if arrays else 0
            weight = rows * replicas / divisor if divisor else 1.0
            known = last[index] if index < len(last) else None
            part = known if known == (rows, total, weight) else BatchPart(rows, total, weight)
            made.append(part)
        if tuple(made) != last:
            self._last = tuple(made)
            with _lock:
                self._parts.update(made)
            if not ledger.uneven and any(part.weight != 1 for part in made):
                ledger.become_uneven()
        with _lock:
            for part, arrays in zip(made, parts, strict=True):
                for array in arrays:
                    _record(array, part, ledger)
            if len(_arrays) + len(_views) >= _forget_at:
                _forget()
        self._is_last(total)

    def weights_of_last(self) -> set[float]:
        """Return the weights of the local replicas' parts of the last batch."""
        return {part.weight for part in self._last}

    def say(self, total: int) -> None:
        """Record a batch of known size only."""
        self._is_last(total)

    def end(self) -> None:
        """Record the end of the epoch."""
        self.total = None

    def _is_last(self, total: int) -> None:
        self.total, self.time = total, next(_times)
        datasets = _datasets.get()
        if datasets is None:
            datasets = {}
            _datasets.set(datasets)
        if self._number not in datasets:
            for number in [number for number, dataset in datasets.items() if dataset() is None]:
                del datasets[number]
            datasets[self._number] = weakref.ref(self)


class _Step(NamedTuple):
    """The arguments of the running step, and the ledger of its strategy."""

    arguments: Any
    ledger: Ledger | None

    def leaves(self) -> list[Any]:
        return _leaves(self.arguments)


_step: ContextVar[_Step | None] = ContextVar("mpistrat_step", default=None)
_named: ContextVar[Sequence[BatchPart | None] | None] = ContextVar(
    "mpistrat_named_batch", default=None
)  # by local replica
_datasets: ContextVar[dict[int, weakref.ref[HandedOut]] | None] = ContextVar("mpistrat_handed_out", default=None)
_said: ContextVar[HandedOut | None] = ContextVar("mpistrat_said_size", default=None)  # keeps it alive


def begin_step(args: Sequence[Any], kwargs: Mapping[str, Any] | None, ledger: Ledger | None = None) -> Token[Any]:
    """Set the arguments of the step that starts; pass the token to `end_step`."""
    return _step.set(_Step((*args, kwargs) if kwargs else args, ledger))


def end_step(token: Token[Any]) -> None:
    """End the step."""
    _step.reset(token)


def is_named() -> bool:
    """Return True if `strategy.batch` names the batch of the passes here."""
    return _named.get() is not None


@contextlib.contextmanager
def named(ledger: Ledger, element: Any, function: str = "Strategy.batch") -> Iterator[None]:
    """Assign passes in the block to a batch, or with None to none.

    Raises:
        BatchError: the batch is unknown.
    """
    parts: list[BatchPart | None] = [None]
    if element is not None:
        leaves = [(leaf.values if isinstance(leaf, DistributedValues) else (leaf,)) for leaf in nest.flatten(element)]
        replicas = max((len(values) for values in leaves), default=1)
        parts = [
            _part_of([values[min(index, len(values) - 1)] for values in leaves], ledger, function)
            for index in range(replicas)
        ]
    token = _named.set(parts)
    try:
        yield
    finally:
        _named.reset(token)


def _part_of(arrays: Sequence[Any], ledger: Ledger, function: str) -> BatchPart | None:
    """Return the part that arrays belong to, None if they are unknown and all parts were equal."""
    found = {record.part for array in arrays for record in ledger._records(array)}
    if not found:
        found = {part for array in arrays if _has_rows(array) for part in ledger.parts(int(array.shape[0]))}
    if len({part.weight for part in found}) > 1 or (not found and ledger.uneven):
        raise ledger._unknown(arrays, {part.weight for part in found}, function, "")
    return found.pop() if found else None


def set_global_batch_size(examples: int | None) -> None:
    """Set the number of examples of the next steps over all replicas, if no distributed dataset does; None resets it."""
    said = _said.get()
    if said is None:
        said = HandedOut()
        _said.set(said)
    if examples is None:
        said.end()
    else:
        said.say(examples)


def global_batch_size(element: Any = None) -> int | None:
    """Return the number of rows of a global batch over all replicas.

    In a step it is that of the batch in the step's arguments, or whose memory they share. Of other arrays it is that of the
    batches with as many rows here, if all had one size. In a step without arguments, and outside of steps, it is that of the last
    batch drawn; None before the first and after the last one of an epoch, and if it is unknown.

    Args:
        element: an array of the batch, as the distributed dataset returned it, or the batch; needed if a step gets batches of
            different sizes.

    Raises:
        ContextError: the arguments of the step belong to batches of different sizes, and `element` is missing.
        ValueError: `element` is not from a distributed dataset.

    Example:
        >>> rows = ms.data.from_arrays(np.arange(5)).batch(4)
        >>> data = ms.get_strategy().distribute_dataset(rows)
        >>> [ms.context.global_batch_size(batch) for batch in list(data)]
        [4, 1]
    """
    function = "global_batch_size"
    if element is not None:
        sizes = {record.part.total for leaf in _leaves(element) for record in _known(leaf)}
        if len(sizes) == 1:
            return sizes.pop()
        got = f"parts of batches of {_listed(sizes)} rows" if sizes else "an array of another origin"
        remedy = "Pass it as the dataset returned it: arrays computed from it are unknown"
        expected = "an array of a distributed dataset"
        raise ValueError(explain(function, "element", expected=expected, got=got, remedy=remedy))
    step = _step.get()
    leaves = [] if step is None else step.leaves()
    if step is None or not leaves:
        last = max(_open(), key=lambda dataset: dataset.time, default=None)
        return None if last is None else last.total
    sizes = {record.part.total for leaf in leaves for record in _known(leaf, step.ledger)}
    counts = {int(leaf.shape[0]) for leaf in leaves if _has_rows(leaf)}
    if not sizes and step.ledger is not None:
        sizes = {part.total for count in counts for part in step.ledger.parts(count)}
    if not sizes and (said := _said_total()) is not None:
        return said
    if len(sizes) > 1:
        raise _ambiguous(function, sizes, "Pass the array whose rows count: global_batch_size(x)")
    return sizes.pop() if sizes else None


def size_of_losses(ledger: Ledger | None, count: int) -> int:
    """Return the total rows, over all replicas, of the batch to which `count` losses of one replica belong.

    Args:
        ledger: of the strategy; None outside of its steps, for the strategy whose datasets are in use.
        count: the number of losses.

    Raises:
        ContextError: it is unknown.
    """
    function = "compute_average_loss"
    if ledger is None:
        known = [each for each in list(_ledgers) if each.parts()]
        if not known:
            return count
        if len(known) > 1:
            expected, got = "a call in strategy.run, where datasets of several strategies are in use", "one outside"
            remedy = (
                "Pass global_batch_size=ms.context.global_batch_size(x), of the array x whose rows have these losses"
            )
            raise ContextError(explain(function, "global_batch_size", expected=expected, got=got, remedy=remedy))
        ledger = known[0]
    chosen = _named.get()
    if chosen is not None and chosen[0] is not None:
        return chosen[0].total
    given = ledger.given()
    sizes = {part.total for part in given}
    if len(sizes) > 1:
        sizes = {part.total for part in given if part.rows == count}
    elif not given:
        sizes = {part.total for part in ledger.parts(count)}
    if len(sizes) == 1:
        return sizes.pop()
    if given:
        remedy = "Pass global_batch_size=ms.context.global_batch_size(x), of the array x whose rows have these losses"
        raise _ambiguous(function, sizes or {part.total for part in given}, remedy)
    said = _said_total()
    if said is not None:
        return said
    if sizes or ledger.uneven:
        expected = f"arrays of a known global batch for {count} losses"
        got = f"arrays of another origin, with as many rows as batches of {_listed(sizes)} rows had here"
        if not sizes:
            got = "arrays of another origin, while replicas have unequal parts of batches"
        remedy = (
            "Pass the dataset's arrays unchanged, or global_batch_size=ms.context.global_batch_size(x) of such an array"
        )
        raise ContextError(explain(function, "global_batch_size", expected=expected, got=got, remedy=remedy))
    return count * ledger.replicas


def address_of(value: Any) -> int | None:
    """Return the address of an array of NumPy, CuPy, torch or JAX; None if it has none."""
    try:
        if isinstance(value, np.ndarray):
            return _bounds(value)[0] if value.size else None
        for name in ("data_ptr", "unsafe_buffer_pointer"):  # of torch and JAX
            pointer = getattr(value, name, None)
            if pointer is not None:
                return int(pointer()) or None
        interface = getattr(value, "__cuda_array_interface__", None)
        return None if interface is None else int(interface["data"][0]) or None
    # A traced, sparse or sharded array has no address.
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def _has_rows(value: Any) -> bool:
    return bool(getattr(value, "shape", None))


def _may_be_by_columns(array: Any) -> bool:
    """Return True if rows may be the second dimension, as in recurrent layers: the others are time, and features or tokens."""
    kind = str(array.dtype)
    return len(array.shape) > 2 or (len(array.shape) == 2 and ("int" in kind))


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """Return the addresses of an array's first byte and after its last."""
    low = int(array.__array_interface__["data"][0])
    if array.flags.contiguous:
        return low, low + array.nbytes
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)] if array.size else []
    high = low + sum(step for step in reach if step > 0) + array.itemsize
    return low + sum(step for step in reach if step < 0), high


def _owner(array: Any) -> Any:
    """Return the array that owns an array's memory and that its views keep alive."""
    while type(base := getattr(array, "base", None)) is type(array):
        array = base
    return array


def _record(array: Any, part: BatchPart, ledger: Ledger) -> None:
    """Record an array. The caller holds the lock."""
    try:
        record = _Record(array, part, ledger)
    except TypeError:  # such as a scalar, which has no weak references
        return
    _arrays[id(array)] = record
    owner = record.owner()
    if owner is not array:
        views = _views.setdefault(id(owner), [])
        views[:] = [
            known for known in views
            if known.owner() is owner and (known.array() is not None or known.high <= record.low or record.high <= known.low)
        ]  # fmt: skip
        views.append(record)


def _forget() -> None:
    """Remove records of freed arrays. The caller holds the lock."""
    global _forget_at
    for key, record in list(_arrays.items()):
        if record.array() is None:
            del _arrays[key]
    for key, records in list(_views.items()):
        if records[0].owner() is None:
            del _views[key]
    _forget_at = max(_FORGET_FROM, 2 * (len(_arrays) + len(_views)))


def _record_of(array: Any) -> _Record | None:
    """Return the record of an array that a dataset itself returned."""
    record = _arrays.get(id(array))
    return record if record is not None and record.array() is array else None


def _known(leaf: Any, ledger: Ledger | None = None) -> list[_Record]:
    """Return the record of an array from a dataset, or those of the arrays whose memory it shares."""
    own = _record_of(leaf)
    if own is not None:
        return [own]
    return [] if ledger is None else ledger._records(leaf)


def _one(values: Iterable[T]) -> T | None:
    """Return the only one of some values; None for none or several."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _ambiguous(function: str, sizes: Iterable[int], remedy: str) -> ContextError:
    expected, got = "one global batch in the arguments of the step", f"batches of {_listed(sizes)} rows in all"
    return ContextError(explain(function, "", expected=expected, got=got, remedy=remedy))


def _listed(sizes: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(sizes)))


def _leaves(value: Any) -> list[Any]:
    """Return the leaves of a nest, of all local replicas."""
    leaves: list[Any] = []
    for child in value if type(value) is tuple else (value,):
        if type(child) is np.ndarray:
            leaves.append(child)
            continue
        for leaf in nest.flatten(child):
            leaves += leaf.values if isinstance(leaf, DistributedValues) else [leaf]
    return leaves


def now() -> int:
    """Return a logical time in the order of batches; see `weights_since`."""
    return next(_times)


def weights_since(time: int) -> set[float]:
    """Return the weights of this rank's parts of the last batches, of all datasets that returned one after a time."""
    datasets = [reference() for reference in list((_datasets.get() or {}).values())]
    late = [dataset for dataset in datasets if dataset is not None and dataset.time > time]
    return set().union(*(dataset.weights_of_last() for dataset in late))


def _open() -> Iterator[HandedOut]:
    """Yield the datasets in the middle of an epoch."""
    for reference in list((_datasets.get() or {}).values()):
        dataset = reference()
        if dataset is not None and dataset.total is not None:
            yield dataset


def _said_total() -> int | None:
    said = _said.get()
    return None if said is None else said.total
