"""How many rows a global batch has: known by the arrays that distributed datasets have handed out.

A step may get any batch, not only the one that was handed out last: of two datasets side by side, drawn ahead, or kept in
a list. So the size is looked up by the arrays among the step's arguments.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, final

import numpy as np

from ._util import nest
from .distributed_values import DistributedValues
from .errors import ContextError, explain

__all__ = [
    "HandedOut",
    "begin_step",
    "end_step",
    "global_batch_size",
    "rows_of_batch",
    "rows_of_workers",
    "set_global_batch_size",
    "size_of_losses",
]

_FORGET_FROM = 1024  # arrays that are known before those that have ended are looked for

_arguments: ContextVar[Any] = ContextVar("mpistrat_step_arguments", default=None)  # what the step was called with
_datasets: ContextVar[dict[int, weakref.ref[HandedOut]] | None] = ContextVar("mpistrat_handed_out", default=None)
_said: ContextVar[HandedOut | None] = ContextVar("mpistrat_said_size", default=None)  # keeps it alive
_numbers, _times = itertools.count(), itertools.count()
_lock = threading.Lock()
_forget_at = _FORGET_FROM


class _Batch(NamedTuple):
    """What is known of an array: its batch's rows over all replicas, which dataset handed it out, and its epoch and step."""

    array: weakref.ref[Any]
    total: int
    dataset: weakref.ref[HandedOut]
    position: tuple[int, int]


_sizes: dict[int, _Batch] = {}  # by the id of an array


@final
class HandedOut:
    """The sizes of the batches that one dataset has handed out. It holds no batch.

    Args:
        rows_of_all: returns how many rows the workers that step apart have together, at a step of an epoch.
    """

    def __init__(self, rows_of_all: Callable[[int, int], int | None] | None = None) -> None:
        self._number = next(_numbers)
        self.rows_of_all = rows_of_all
        self._totals: dict[int, set[int]] = {}  # by a replica's rows: of which global batches these were a part
        self.rows: tuple[int, ...] | None = None  # of the last batch: the local replicas', None where not known
        self.total: int | None = None  # None while none is out: before the first and after the last of an epoch
        self.time = 0

    def next(self, parts: Sequence[Sequence[Any]], total: int, position: tuple[int, int] = (0, 0)) -> None:
        """Note a batch: each local replica's arrays, the rows of all replicas together, and its epoch and step."""
        global _forget_at
        with _lock:
            own = weakref.ref(self)
            for arrays in parts:
                for array in arrays:
                    try:
                        _sizes[id(array)] = _Batch(weakref.ref(array), total, own, position)
                    except TypeError:  # no array: a scalar, say
                        continue
            if len(_sizes) >= _forget_at:
                for key, batch in list(_sizes.items()):
                    if batch.array() is None:
                        del _sizes[key]
                _forget_at = max(_FORGET_FROM, 2 * len(_sizes))
        rows = tuple([int(arrays[0].shape[0]) if arrays else 0 for arrays in parts])
        if rows != self.rows or total != self.total:
            for count in rows:
                self._totals.setdefault(count, set()).add(total)
        self._is_last(rows, total)

    def say(self, total: int) -> None:
        """Note a batch of which nothing but the size is known."""
        self._is_last(None, total)

    def end(self) -> None:
        """Note that the epoch is over."""
        self.rows = self.total = None

    def _is_last(self, rows: tuple[int, ...] | None, total: int) -> None:
        self.rows, self.total, self.time = rows, total, next(_times)
        datasets = _datasets.get()
        if datasets is None:
            datasets = {}
            _datasets.set(datasets)
        if self._number not in datasets:
            for number in [number for number, dataset in datasets.items() if dataset() is None]:
                del datasets[number]
            datasets[self._number] = weakref.ref(self)

    def has_other(self, rows: int, total: int) -> bool:
        """Return whether a replica had so many rows of a batch of another size."""
        return bool(self._totals.get(rows, {total}) - {total})


def begin_step(args: Sequence[Any], kwargs: Any) -> Token[Any]:
    """Say what a step is called with; give the token to `end_step`. Strategies do."""
    return _arguments.set((*args, kwargs) if kwargs else args)


def end_step(token: Token[Any]) -> None:
    """Say that the step is over."""
    _arguments.reset(token)


def set_global_batch_size(examples: int | None) -> None:
    """Say how many examples the next steps have over all replicas, where no distributed dataset does."""
    said = _said.get()
    if said is None:
        said = HandedOut()
        _said.set(said)
    if examples is None:
        said.end()
    else:
        said.say(examples)


def global_batch_size(element: Any = None) -> int | None:
    """Return how many rows a global batch has over all replicas, whatever part of it is here.

    In a step it is that of the batch in the step's arguments. Arrays made of a batch count as the batch that was
    handed out last and has as many rows here. Outside of steps it is that of the batch that was handed out last; None
    before the first and after the last one of an epoch, and where nobody knows.

    Args:
        element: an array of the batch that is meant, as the distributed dataset handed it out, or the batch; needed where
            a step gets batches of different sizes.

    Raises:
        ContextError: the arguments of the step belong to batches of different sizes, and no `element` says which.
        ValueError: `element` is none that a distributed dataset handed out.

    Example:
        >>> data = ms.get_strategy().distribute_dataset(ms.data.from_arrays(np.arange(5)).batch(4))
        >>> [ms.context.global_batch_size(batch) for batch in list(data)]
        [4, 1]
    """
    if element is not None:
        sizes = set(_known(_leaves(element)))
        if len(sizes) == 1:
            return sizes.pop()
        got = f"parts of batches of {_listed(sizes)} rows" if sizes else "an array of another origin"
        remedy = "Pass it as it came: what is computed from it is not known as the batch"
        expected = "an array that a distributed dataset handed out"
        raise ValueError(explain("global_batch_size", "element", expected=expected, got=got, remedy=remedy))
    given = _arguments.get()
    if given is None:
        last = max(_open(), key=lambda dataset: dataset.time, default=None)
        return None if last is None else last.total
    leaves = _leaves(given)
    sizes = set(_known(leaves))
    if not sizes:
        counts = {int(leaf.shape[0]) for leaf in leaves if getattr(leaf, "shape", ())}
        sizes = set(_may_be_of(counts))
    if len(sizes) > 1:
        raise _ambiguous("global_batch_size", sizes, "Pass the array whose rows are meant: global_batch_size(x)")
    return sizes.pop() if sizes else None


def rows_of_batch() -> tuple[int, int] | None:
    """Return how many rows of a global batch this replica has, and how many all have; None where it is not known.

    In a step it is the batch in its arguments, outside of steps that which was handed out last.
    """
    given = _arguments.get()
    if given is None:
        last = max(_open(), key=lambda dataset: dataset.time, default=None)
        return None if last is None or last.total is None or last.rows is None else (last.rows[0], last.total)
    found = {(len(leaf), batch.total) for leaf, batch in _batches(_leaves(given))}
    return found.pop() if len(found) == 1 else None


def rows_of_workers() -> int | None:
    """Return how many rows the workers have together at this step, those too that step apart; None where it is not known."""
    found = {(batch.dataset(), batch.position) for _, batch in _batches(_leaves(_arguments.get() or ()))}
    dataset, position = found.pop() if len(found) == 1 else (None, (0, 0))
    return None if dataset is None or dataset.rows_of_all is None else dataset.rows_of_all(*position)


def size_of_losses(count: int, replicas: int) -> int:
    """Return of how many rows over all replicas so many losses of one replica are a part.

    Raises:
        ContextError: it cannot be told.
    """
    known = set(_known(_leaves(_arguments.get() or ())))
    sizes = known
    if len(known) > 1:
        sizes = set(_known(leaf for leaf in _leaves(_arguments.get()) if len(leaf) == count))
    elif not known:
        sizes = set(_may_be_of({count}))
    if len(sizes) == 1:
        return sizes.pop()
    function = "compute_average_loss"
    if known or sizes:
        remedy = "Pass global_batch_size=ms.context.global_batch_size(x), of the array x whose rows have these losses"
        raise _ambiguous(function, known or sizes, remedy)
    if any(dataset.has_other(count, count * replicas) for dataset in _living()):
        expected = f"to know the global batch that {count} losses are a part of"
        got = "arrays that no distributed dataset handed out, with as many rows as batches that one did"
        remedy = "Pass the arrays as they came; or global_batch_size=, ms.context.global_batch_size(x) of an array as it came"
        raise ContextError(explain(function, "global_batch_size", expected=expected, got=got, remedy=remedy))
    return count * replicas


def _ambiguous(function: str, sizes: Iterable[int], remedy: str) -> ContextError:
    expected, got = "one global batch in the arguments of the step", f"batches of {_listed(sizes)} rows in all"
    return ContextError(explain(function, "", expected=expected, got=got, remedy=remedy))


def _listed(sizes: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(sizes)))


def _leaves(value: Any) -> list[Any]:
    """The arrays and whatever else is in a nest, of all local replicas."""
    leaves: list[Any] = []
    for child in value if type(value) is tuple else (value,):
        if type(child) is np.ndarray:
            leaves.append(child)
            continue
        for leaf in nest.flatten(child):
            leaves += leaf.values if isinstance(leaf, DistributedValues) else [leaf]
    return leaves


def _known(leaves: Iterable[Any]) -> Iterator[int]:
    """The sizes of the batches that arrays were handed out with."""
    return (batch.total for _, batch in _batches(leaves))


def _batches(leaves: Iterable[Any]) -> Iterator[tuple[Any, _Batch]]:
    """The arrays that were handed out, and what is known of them."""
    for leaf in leaves:
        batch = _sizes.get(id(leaf))
        if batch is not None and batch.array() is leaf:
            yield leaf, batch


def _living() -> Iterator[HandedOut]:
    for reference in list((_datasets.get() or {}).values()):
        dataset = reference()
        if dataset is not None:
            yield dataset


def _open() -> Iterator[HandedOut]:
    """The datasets in the midst of an epoch."""
    return (dataset for dataset in _living() if dataset.total is not None)


def _may_be_of(counts: set[int]) -> Iterator[int]:
    """The sizes of the batches of which arrays of so many rows may have been made; without counts, of all handed out last."""
    for dataset in _open():
        if dataset.total is not None and (not counts or dataset.rows is None or not counts.isdisjoint(dataset.rows)):
            yield dataset.total
