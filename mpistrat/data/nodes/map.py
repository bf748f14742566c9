"""Operators that change elements one by one: a function of each, and its position."""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.errors import ShardError, explain
from ...base.masks import check_unmasked
from ..buffers import RowBuffers
from ..options import number_of_calls
from ..spec import ArraySpec, conform, empty_rows, row_count, spec_of_element, spec_of_rows, stack_rows, unstack_rows
from ..stats import StageStats
from .calls import CallError, Calls, check_callable, name_of
from .node import Node, Outcome, Traits, changed_outcomes
from .stage import Stage

__all__ = ["Enumerated", "Mapped", "map"]

_TRIED = 64  # elements that are tried to learn the function's result
_LONGEST_TRY = 3.0  # seconds after which no more are tried: of a broken connection each takes its time limit


def _raise(error: Exception) -> NoReturn:
    raise error


def _outcome(element: Any, error: Exception | None) -> Any:
    return element if error is None else _raise(error)


class Mapped(Stage):
    """A function of every element."""

    _noun = "element"
    _remedy = "The function must always return the new element."

    def __init__(self, parent: Node, calls: Calls, row_spec: Any = None) -> None:
        super().__init__(parent, calls, row_spec)
        self._calls = calls
        self._given = row_spec
        self._row_spec = row_spec
        self._buffers = RowBuffers()

    @property
    def counters(self) -> StageStats:
        return self._calls.counters

    @property
    def traits(self) -> Traits:
        below = self._parent.traits
        free = self._calls.parallel is not None and not self._calls.deterministic
        deterministic = below.deterministic and (self.random_access or not free)
        return below._replace(deterministic=deterministic, calls_functions=True)

    @property
    def row_spec(self) -> Any:
        if self._row_spec is None:
            self._row_spec = self._learn()
        return self._row_spec

    def _learn(self) -> Any:
        """Return the spec of the function's result for the first row, or the first batch if rows cannot be read.

        If the function fails for it, the next one is tried: `ignore_errors` may skip the first ones.
        """
        parent, failed, began = self._parent, None, time.monotonic()
        for position, read in enumerate(self._first_ones()):
            if failed is not None and time.monotonic() - began > _LONGEST_TRY:
                break
            try:
                element = read()
                made = self._calls.each([element])[0]
            except (ShardError, MemoryError):
                raise
            except CallError as error:
                failed = failed or functools.partial(self._raise, error.error, 0, position)
            except Exception as error:
                failed = failed or functools.partial(_raise, error)
            else:
                if parent.batching is None:
                    return self._spec_of(made, position)
                return spec_of_rows(self._checked(made, row_count(element), position))
        if failed is not None:
            failed()
        nothing, no_rows = np.zeros(0, np.int64), empty_rows(parent.row_spec)
        try:
            return spec_of_rows(self._batch(no_rows, 0, nothing, nothing))
        except Exception as error:
            expected = "at least one element below, to know what the function makes of it"
            raise ValueError(
                explain(self._name, "", expected=expected, got="none", remedy="Give element_spec.")
            ) from error

    def _first_ones(self) -> Iterator[Callable[[], Any]]:
        """Yield functions that return each of the first elements; of batches with random access one row."""
        parent = self._parent
        if parent.random_access:
            length = parent.cardinality()
            for position in range(_TRIED if length < 0 else min(length, _TRIED)):
                yield functools.partial(self._row_at, position)
            return
        for element, error in itertools.islice(parent.outcomes(0), _TRIED):
            yield functools.partial(_outcome, element, error)

    def _row_at(self, position: int) -> Any:
        epochs, positions = (own[:1] for own in self._parent.locate(0, position))
        rows = self._parent.gather(epochs, positions)
        return unstack_rows(rows)[0] if self._parent.batching is None else rows

    def _spec_of(self, element: Any, position: int) -> Any:
        try:
            return spec_of_element(element)
        except (TypeError, ValueError, OverflowError):
            self._check_arrays(element, position)
            raise

    def _check_arrays(self, element: Any, position: int) -> None:
        """Raise if a result is not an array, number or string, or is masked. Usually the function returned nothing."""
        for name, leaf in zip(nest.paths(element), nest.flatten(element), strict=True):
            array = check_unmasked(
                leaf, np.asanyarray(leaf), self._name, f"{self._noun} {position}{name and ' at ' + name}"
            )
            if isinstance(leaf, (str, bytes)) or not array.dtype.hasobject:
                continue
            if array.ndim and self._parent.batching is not None:  # strings, or rows that differ in length
                continue
            got = "None" if leaf is None else "an array of objects" if array.ndim else f"a {type(leaf).__name__}"
            got = f"{got}{name and ' at ' + name}"
            expected, where = "arrays, numbers or strings", f"{self._noun} {position}"
            raise ValueError(explain(self._name, where, expected=expected, got=got, remedy=self._remedy)) from None

    def _each(self, elements: list[Any], epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Any]:
        try:
            return self._calls.each(elements)
        except CallError as failed:
            self._raise(failed.error, int(epochs[failed.index]), int(positions[failed.index]))

    def _raise(self, error: BaseException, epoch: int, position: int) -> NoReturn:
        where = f"{self._name}: raised at {self._noun} {position} of epoch {epoch}"
        if isinstance(error, StopIteration):  # it would look like the end
            raise RuntimeError(f"{where}: StopIteration") from error
        if sys.version_info >= (3, 11):
            error.add_note(where)
        else:
            error.__dict__.setdefault("__notes__", []).append(where)
        raise error

    def _batch(self, rows: Any, count: int, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        epoch, row = (int(epochs[0]), int(positions[0])) if positions.size else (0, 0)
        position = row // self._parent.batching.size if self._parent.batching is not None else row
        try:
            made = self._calls.each([rows])[0]
        except CallError as failed:
            self._raise(failed.error, epoch, position)
        return self._checked(made, count, position)

    def _checked(self, made: Any, count: int, position: int) -> Any:
        if not all(type(leaf) is np.ndarray and leaf.dtype.kind != "O" for leaf in nest.flatten(made)):
            self._check_arrays(made, position)
            made = nest.map_structure(np.asarray, made)
        for name, leaf in zip(nest.paths(made), nest.flatten(made), strict=True):
            if leaf.ndim == 0 or leaf.shape[0] != count:
                expected = f"{count} rows{name and ' in ' + name}, as many as the batch has"
                remedy = "A function after batch must keep the first axis; before batch it gets single rows."
                raise ValueError(explain(self._name, "", expected=expected, got=f"shape {leaf.shape}", remedy=remedy))
        return made

    def _conform(self, element: Any, position: int) -> Any:
        if self._row_spec is None:
            self._row_spec = self._spec_of(element, position)
        try:
            return conform(element, self._row_spec)
        except TypeError:
            self._check_arrays(element, position)
            raise
        except ValueError as error:
            self._check_arrays(element, position)
            text = f"{self._name}: {self._noun} {position}: {error}, unlike the first {self._noun}"
            if self._given is not None:
                raise ValueError(f"{text[: text.rindex(',')]}, unlike element_spec") from None
            remedy = "If lengths vary, pass element_spec with None for such an axis, and use padded_batch."
            raise ValueError(f"{text}. {remedy}") from None

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        rows_only = self._parent.batching is None
        if positions.size == 0:
            return empty_rows(self.row_spec, ragged=rows_only)
        rows = self._parent.gather(epochs, positions)
        if not rows_only:
            return self._batch(rows, positions.size, epochs, positions)
        spec = self.row_spec
        made = self._each(unstack_rows(rows), epochs, positions)
        conformed = [self._conform(element, int(at)) for element, at in zip(made, positions, strict=True)]
        return stack_rows(conformed, spec, self._buffers)

    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        rows_only = self._parent.batching is None
        if self.random_access and (rows_only or self._calls.parallel is None):
            return super().elements(epoch, start)
        return self.stream(self._parent.elements(epoch, start), epoch, start)

    def outcomes(self, epoch: int) -> Iterator[Outcome]:
        if self.random_access:
            return super().outcomes(epoch)
        below = self._parent.outcomes(epoch)
        return changed_outcomes(below, lambda each, at: next(self.stream(iter([each]), epoch, at)))

    def stream(self, elements: Iterator[Any], epoch: int, start: int) -> Iterator[Any]:
        """Yield the function of each element, several ahead if calls are parallel."""
        rows_only = self._parent.batching is None
        counts: dict[int, int] = {}

        def counted() -> Iterator[Any]:
            for position, element in enumerate(elements, start):
                counts[position] = len(nest.flatten(element)[0])
                yield element

        made = self._calls.stream(elements if rows_only else counted(), start)
        while True:
            try:
                position, result = next(made)
            except StopIteration:
                return
            except CallError as failed:
                self._raise(failed.error, epoch, failed.index)
            if rows_only:
                yield self._conform(result, position)
            else:
                yield self._checked(result, counts.pop(position), position)

    @property
    def _name(self) -> str:
        return self.describe()

    def describe(self) -> str:
        calls = self._calls
        more = "" if calls.parallel is None else f", {calls.told} {'processes' if calls.processes else 'threads'}"
        return f"map({name_of(calls.function)}{more})"


class Enumerated(Stage):
    """Rows with their positions, counted from a start."""

    def __init__(self, parent: Node, start: int = 0) -> None:
        super().__init__(parent, start)
        self._start = start

    @property
    def row_spec(self) -> Any:
        return ArraySpec((), np.int64), self._parent.row_spec

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return positions + self._start, self._parent.gather(epochs, positions)

    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return ((np.int64(self._start + i), row) for i, row in enumerate(self._parent.elements(epoch, start), start))

    def describe(self) -> str:
        return f"enumerate({self._start or ''})"


def map(
    parent: Node, function: Callable[..., Any], num_parallel_calls: int | None = None,
    deterministic: bool | None = None, *, processes: bool = False, element_spec: Any = None,
) -> Node:  # fmt: skip
    """Apply a function to every element; a tuple is passed as several arguments.

    Before `batch` it is called once per row, with arrays of the row's shapes; after `batch` once per batch, which is much
    faster. In a distributed dataset a batch is this rank's slice of it, so the function must treat each row independently
    and keep the number of rows.

    An error of the function is raised with its traceback and a note of the element's position, after all earlier
    elements, for which the function may be called twice.

    Args:
        function: returns the new element, a nest of arrays, numbers or strings. It is also called once on the first row
            (on the next if that fails) to get the element's spec, and on zero rows only if the dataset is empty.
        num_parallel_calls: None calls it in the reading thread. A number starts a pool of threads, over which the rows of
            a batch, or batches read in order, are spread; AUTOTUNE uses this rank's number of cores, at most 8.
        deterministic: False yields elements that are read in order as they are ready; the iterator's state is then
            inexact and ranks would see different orders, so such a dataset cannot be distributed.
        processes: call it in that many processes (None: one) instead of threads. They start once per dataset, end with
            it, and do not use MPI. The function must be picklable, and the main program needs
            `if __name__ == "__main__":`.
        element_spec: the spec of one row of the result, a nest of `ArraySpec`, if the first row does not show it: None in
            a shape for a length that varies (see `padded_batch`).

    Raises:
        TypeError: for a function that is not callable, or cannot be sent to a process.
        RuntimeError: while reading, when a process has died; its number, pid and exit code are named.
    """
    check_callable("Dataset.map", "function", function)
    parallel = number_of_calls("Dataset.map", num_parallel_calls)
    ordered = deterministic is None or bool(deterministic)
    return Mapped(parent, Calls(function, parallel, ordered, bool(processes)), element_spec)
