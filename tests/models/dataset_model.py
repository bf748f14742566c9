"""Every operator of Dataset beside what it does to lists: a model of any chain of them.

`chained`, or `begin` and then `apply` as often as one likes, return a dataset and its model: a function of the epoch that
returns the elements, as numbers or lists of numbers. Random orders are permute's, BlockOrder's and random_words', which
have tests of their own; the draws of sample_from_datasets are those among datasets that tell nothing but which they are.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import mpistrat as ms
from mpistrat.data import INFINITE, ArraySpec, Dataset, Options, from_arrays, from_generator, from_map_style
from mpistrat.data.permutation import BlockOrder, permute, random_words

Model = Callable[[int], list[Any]]
Both = tuple[Dataset, Model]
Chain = list[tuple[str, int, int]]

SOURCES = ["arrays", "chunks", "generator", "samples"]
NUMBER = ArraySpec((), np.int64)
ENOUGH = 64  # elements of an endless dataset in its model, of which few are left once it ends again
WEIGHTS = [(1.0, 1.0), (1.0, 3.0), (1.0, 0.0), (0.0, 1.0)]


def listed(elements: Any) -> list[Any]:
    return [np.asarray(element).tolist() for element in elements]


class Chunks(type(Dataset.range(1).node)):  # type: ignore[misc]
    """Rows that are read in chunks of three, as those of compressed files are."""

    def chunk_starts(self) -> np.ndarray:
        return np.append(np.arange(0, self.cardinality(), 3), self.cardinality())


class Samples:
    """An object with a length and items, of which several can be asked for at once."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> int:
        return int(self.rows[row])

    def __getitems__(self, rows: list[int]) -> list[int]:
        return [self[row] for row in rows]


def made_anew(node: Any) -> Any:
    """Every node of a chain made anew over those below."""
    return node.rebuild([made_anew(parent) for parent in node.parents])


def begin(n: int, source: str, factor: int = 1) -> Both:
    """Rows 0, factor, 2 factor …; those of a generator also tell the epoch."""
    rows = factor * np.arange(n)
    if source == "generator":
        numbers = from_generator(lambda epoch: iter(rows + 1000 * epoch), NUMBER)
        return numbers, lambda epoch: (rows + 1000 * epoch).tolist()
    if source == "samples":
        return from_map_style(
            Samples(rows) if n % 2 else rows.tolist(), element_spec=NUMBER
        ), lambda epoch: rows.tolist()
    return Dataset(Chunks(rows, n)) if source == "chunks" else from_arrays(rows), lambda epoch: rows.tolist()


def chained(n: int, source: str, chain: Chain) -> Both:
    """Rows and one operator after the other, each a name and two numbers."""
    dataset, model = begin(n, source)
    for name, a, b in chain:
        dataset, model = apply(dataset, model, name, a, b)
    return dataset, model


def has_spec(dataset: Dataset) -> bool:
    """Whether it can tell what its elements look like; a function that is never called, or always fails, shows nothing."""
    try:
        _ = dataset.element_spec
    except ZeroDivisionError:  # of `fails`, for every row
        return False
    except ValueError as error:
        assert "at least one element below" in str(error)
        return False
    return True


def each(function: Callable[[int], int], element: Any) -> Any:
    return [function(x) for x in element] if isinstance(element, list) else function(element)


def total(element: Any) -> int:
    return sum(element) if isinstance(element, list) else element


def first_ones(elements: list[Any]) -> list[Any]:
    return [element for i, element in enumerate(elements) if element not in elements[:i]]


def cut(rows: list[Any], size: int, drop: bool = False) -> list[list[Any]]:
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [batch for batch in batches if len(batch) == size or not drop]


def fails(x: Any, divisor: int, rest: int) -> Any:
    if x.sum() % divisor == rest:
        raise ZeroDivisionError
    return x


def in_turn(rows: list[Any], sizes: list[int], drop: bool) -> list[list[Any]]:
    left, batches, turn = list(rows), [], itertools.cycle(sizes)
    while left:
        size = next(turn)
        batches.append(left[:size])
        left = left[size:]
        if drop and len(batches[-1]) < size:
            return batches[:-1]
    return batches


def resampled(
    rows: list[int], target: Sequence[float], initial: Sequence[float] | None, key: tuple[int, int]
) -> list[int]:
    """Each row that comes is with probability m the next of all, else the next that is left when row i stays with
    probability (r_i - m) / (max r - m); r = target / initial, m = min r. Estimates begin with ten rows of each class."""

    def ratio(seen: int) -> list[float]:
        counts = [10 + sum(row % 2 == c for row in rows[:seen]) for c in (0, 1)]
        shares = initial or [count / sum(counts) for count in counts]
        return [want / max(have, float(np.finfo(np.float32).tiny)) for want, have in zip(target, shares, strict=True)]

    words, left = random_words((*key, 0)), []
    for i, row in enumerate(rows):
        r = ratio(min(len(rows), 32 * (i // 32 + 1)))
        accept = (r[row % 2] - min(r)) / (max(r) - min(r)) if max(r) > min(r) else 1.0
        if next(words) < accept * 2**64:
            left.append(row)
    assert len(rows) <= 32  # all are counted before the first comes
    r = ratio(len(rows))
    m = min(r) if max(r) > min(r) else 1.0
    every, result = list(rows), []
    for word in random_words((*key, 1)):
        source = every if word < m * 2**64 else left
        if not source:
            return result
        result.append(source.pop(0))
    raise AssertionError


def chosen(pieces: list[list[Any]], choices: list[int], stop: bool) -> list[Any]:
    left, result = [list(piece) for piece in pieces], []
    for choice in choices:
        if left[choice]:
            result.append(left[choice].pop(0))
        elif stop:
            break
    return result


def windows(elements: list[Any], size: int, shift: int, stride: int, drop: bool) -> list[list[Any]]:
    found = [elements[start::stride][:size] for start in range(0, len(elements), shift)]
    return [window for window in found if len(window) == size or not drop]


def grouped(elements: list[Any], key_of: Callable[[Any], int], size: int) -> list[list[Any]]:
    """By the number of the element that completes a group; the incomplete ones are last, by key."""
    keys = [key_of(element) for element in elements]
    found = []
    for key in set(keys):
        places = [place for place, other in enumerate(keys) if other == key]
        for part in cut(places, size):
            when = (0, part[-1]) if len(part) == size else (1, key)
            found.append((when, [elements[place] for place in part]))
    return [group for _, group in sorted(found, key=lambda each: each[0])]


def interleaved(pieces: list[list[Any]], cycle: int, block: int) -> list[Any]:
    """TF's loop (kernels/data/interleave_dataset_op.cc), element by element."""
    waiting, places = list(pieces), [None] * cycle  # type: ignore[var-annotated]
    result, at, taken = [], 0, 0

    def advance() -> None:
        nonlocal at, taken
        at, taken = (at + 1) % cycle, 0

    while waiting or any(place is not None for place in places):
        if places[at] is not None:
            if places[at]:
                result.append(places[at].pop(0))
                taken += 1
                if taken == block:
                    advance()
            else:
                places[at] = None
                advance()
        elif waiting:
            places[at] = list(waiting.pop(0))
        else:
            advance()
    return result


def through_buffer(elements: list[Any], size: int, seed: int, epoch: int) -> list[Any]:
    """A buffer is filled, and each element that goes from a random place makes room for the next."""
    words, buffer, result = random_words((seed, epoch)), elements[:size], []
    for element in elements[size:]:
        place = next(words) % size
        result.append(buffer[place])
        buffer[place] = element
    while buffer:
        place = next(words) % len(buffer)
        result.append(buffer[place])
        buffer[place] = buffer[-1]
        buffer.pop()
    return result


def shuffle(dataset: Dataset, model: Model, a: int, b: int) -> Both:
    """Full, in blocks or in a buffer; with and without a buffer_size, a mode, and orders that differ between epochs."""
    block, anew = dataset.node.random_access and a == 2, a != 3
    size = b + 1 if a in (1, 2) or not dataset.node.random_access else None
    made = dataset.shuffle(size, seed=b, reshuffle_each_epoch=anew, mode="block" if block else "auto")
    chunks = dataset.node.chunk_starts() if dataset.node.batching is None else None

    def shuffled(epoch: int) -> list[Any]:
        elements, key = model(epoch), epoch if anew else 0
        every = np.arange(len(elements))
        if not dataset.node.random_access:
            return through_buffer(elements, b + 1, b, key)
        if chunks is None and not block:
            order = permute(every, every.size, seed=b, epoch=key)
        else:  # rows that lie in no chunks go 64 together
            starts = np.append(np.arange(0, every.size, 64), every.size) if chunks is None else chunks
            order = BlockOrder(starts, size or every.size + 1, seed=b).rows(key, every)
        return [elements[i] for i in order]

    return made, shuffled


def sample(both: Sequence[Both], weights: Sequence[float], seed: int, stop: bool) -> Both:
    """Who is drawn from is taken from datasets as long and as well known as these, that tell their number."""
    counts = [dataset.cardinality() for dataset, _ in both]

    def who(number: int, rows: list[Any]) -> Dataset:
        if counts[number] == INFINITE:
            return from_arrays(np.array([number])).repeat()
        if counts[number] >= 0:
            return from_arrays(np.full(counts[number], number))
        return from_generator(lambda: iter([number] * len(rows)), NUMBER)

    def sampled(epoch: int) -> list[Any]:
        pieces = [model(epoch) for _, model in both]
        numbers = [who(number, rows) for number, rows in enumerate(pieces)]
        draws = ms.data.sample_from_datasets(numbers, weights, seed=seed, stop_on_empty_dataset=stop).node.elements(
            epoch
        )
        drawn = [int(number) for number in itertools.islice(draws, ENOUGH if INFINITE in counts else None)]
        found = collections.Counter(drawn)
        for number, rows in enumerate(pieces):  # without a stop everything comes
            assert found[number] <= (len(rows) if weights[number] else 0)
            assert stop or INFINITE in counts or found[number] == (len(rows) if weights[number] else 0)
        left = [iter(rows) for rows in pieces]
        return [next(left[number]) for number in drawn]

    datasets = [dataset for dataset, _ in both]
    return ms.data.sample_from_datasets(datasets, weights, seed=seed, stop_on_empty_dataset=stop), sampled


def endless(dataset: Dataset, model: Model) -> Both:
    """Repeated without end, which is as far as the first pass without an element."""

    def passes(epoch: int) -> list[Any]:
        elements: list[Any] = []
        for number in itertools.count(epoch):
            following = model(number)
            elements += following
            if not following or len(elements) >= ENOUGH:
                return elements[:ENOUGH]
        raise AssertionError

    return dataset.repeat(), passes


def ragged(dataset: Dataset, model: Model) -> Both:
    """Rows that differ in length: as many times itself as the number's remainder says."""
    return dataset.map(lambda x: np.full(int(x) % 4, x), element_spec=ArraySpec((None,), np.int64)), lambda epoch: [
        [x] * (x % 4) for x in model(epoch)
    ]


def pad(batch: list[list[int]]) -> list[int]:
    """One number a row that tells what it is and how wide its batch is."""
    width = max(map(len, batch))
    return [sum(row) - (width - len(row)) + 100 * width for row in batch]


def apply(dataset: Dataset, model: Model, name: str, a: int, b: int) -> Both:
    """One operator on both; what does not fit rows (or batches) leaves them as they are."""
    dataset, model = _apply(dataset, model, name, a, b)
    return dataset, functools.cache(model)


def _apply(dataset: Dataset, model: Model, name: str, a: int, b: int) -> Both:
    batched = dataset.node.batching is not None
    other, others = begin(b + 2, SOURCES[a % 3], 7)
    if batched:
        other, others = other.batch(3), lambda epoch, rows=others: cut(rows(epoch), 3)
    if name == "take":
        return dataset.take(3 * a), lambda epoch: model(epoch)[: 3 * a]
    if name == "skip":
        return dataset.skip(a), lambda epoch: model(epoch)[a:]
    if name == "shard":
        return dataset.shard(b + 1, a % (b + 1)), lambda epoch: model(epoch)[a % (b + 1) :: b + 1]
    if name == "repeat":
        return dataset.repeat(a), lambda epoch: [x for i in range(a) for x in model(epoch * a + i)]
    if name == "repeat without end":  # and something behind it, until it ends again
        whole, passes = apply(*endless(dataset, model), AFTER_ENDLESS[(4 * a + b) % len(AFTER_ENDLESS)], a, b)
        return whole.take(6), lambda epoch: passes(epoch)[:6]
    if name == "map":
        return dataset.map(lambda x: x * a + b, num_parallel_calls=b or None), lambda epoch: [
            each(lambda x: x * a + b, element) for element in model(epoch)
        ]
    if name == "filter":
        return dataset.filter(lambda x: x.sum() % (a + 1) != 0), lambda epoch: [
            element for element in model(epoch) if total(element) % (a + 1) != 0
        ]
    if name == "take_while":
        return dataset.take_while(lambda x: x.sum() % (b + 4) != a), lambda epoch: list(
            itertools.takewhile(lambda element: total(element) % (b + 4) != a, model(epoch))
        )
    if name == "unique":
        return dataset.map(lambda x: x % (a + 2)).unique(), lambda epoch: first_ones(
            [each(lambda x: x % (a + 2), element) for element in model(epoch)]
        )
    if name == "cast":
        return dataset.cast(("f8", "i4", "f4", "c16")[a]).cast({}).cast("i8"), model
    if name == "prefetch":
        return dataset.prefetch(a), model
    if name == "with_options":
        return dataset.with_options(Options("data" if a else None)), model
    if name == "cache":
        whole_rows = dataset.node.random_access and not batched
        return dataset.cache(("rank", "node", "job", "rank")[a] if whole_rows else "rank"), lambda epoch: model(0)
    if name == "concatenate":
        return dataset.concatenate(other, other), lambda epoch: model(epoch) + others(epoch) + others(epoch)
    if name == "sample_from_datasets":
        return sample([(dataset, model), (other, others)], WEIGHTS[a], b, b % 2 == 1)
    if name == "shuffle":
        return shuffle(dataset, model, a, b)
    if name == "zip" and batched:  # with itself in another way, so that the lengths of the batches agree
        return ms.data.zip({"x": dataset, "y": dataset.map(lambda x: 2 * x)}).map(
            lambda e: e["x"] + e["y"]
        ), lambda epoch: [each(lambda x: 3 * x, batch) for batch in model(epoch)]
    if name == "ignore_errors":
        return dataset.map(lambda x: fails(x, a + 2, b)).ignore_errors(), lambda epoch: [
            element for element in model(epoch) if total(element) % (a + 2) != b
        ]
    if name == "scan":  # the sum of what came before, added
        return dataset.scan(np.int64(b), lambda state, x: (state + x.sum() * a, x + state)), lambda epoch: [
            each(lambda x, state=state: x + state, element)
            for state, element in zip(
                itertools.accumulate((total(x) * a for x in model(epoch)), initial=b), model(epoch), strict=False
            )
        ]
    if name == "choose_from_datasets":
        choices = begin(5, SOURCES[a % 3])[0].map(lambda x: (x + b) % 2)
        return Dataset.choose_from_datasets([dataset, other], choices, b < 2), lambda epoch: chosen(
            [model(epoch), others(epoch)],
            [(x + 1000 * epoch * (SOURCES[a % 3] == "generator") + b) % 2 for x in range(5)],
            b < 2,
        )
    if name == "window":
        made = dataset.window(a + 1, b or None, 1 + b % 2, drop_remainder=a > 1)
        return made.flat_map(lambda window: window), lambda epoch: [
            element for window in windows(model(epoch), a + 1, b or a + 1, 1 + b % 2, a > 1) for element in window
        ]
    if name == "group_by_window":
        return dataset.group_by_window(lambda x: x.sum() % (b + 1), lambda key, ds: ds, a + 1), lambda epoch: [
            element for group in grouped(model(epoch), lambda x: total(x) % (b + 1), a + 1) for element in group
        ]
    return (_apply_to_batches if batched else _apply_to_rows)(dataset, model, name, a, b)


def _apply_to_batches(dataset: Dataset, model: Model, name: str, a: int, b: int) -> Both:
    if name == "unbatch":
        return dataset.unbatch(), lambda epoch: [row for batch in model(epoch) for row in batch]
    if name == "interleave":
        return dataset.interleave(from_arrays, a + 1, b + 1), lambda epoch: interleaved(model(epoch), a + 1, b + 1)
    if name == "rebatch":
        sizes = ([1, 2], [3], [2, 1, 4], [2])[a]
        return dataset.rebatch(sizes, drop_remainder=b > 1), lambda epoch: in_turn(
            [row for batch in model(epoch) for row in batch], sizes, b > 1
        )
    if name == "flat_map" and model(0):  # else nothing would tell in epoch 0 that it gives batches
        return dataset.flat_map(lambda batch: from_arrays(batch).batch(b + 1)), lambda epoch: [
            part for batch in model(epoch) for part in cut(batch, b + 1)
        ]
    return dataset, model


def _apply_to_rows(dataset: Dataset, model: Model, name: str, a: int, b: int) -> Both:
    other, others = begin(b + 2, SOURCES[a % 3], 7)
    if name == "batch":
        return dataset.batch(a + 1, drop_remainder=b > 1), lambda epoch: cut(model(epoch), a + 1, b > 1)
    if name == "padded_batch":
        return dataset.padded_batch(a + 1, drop_remainder=b > 1), lambda epoch: cut(model(epoch), a + 1, b > 1)
    if name == "padded_batch of ragged rows":  # with something in between that takes them
        rows, row_model = apply(*ragged(dataset, model), TAKES_RAGGED[(4 * a + b) % len(TAKES_RAGGED)], a, b)
        return rows.padded_batch(b + 1, None, -1).map(lambda batch: batch.sum(axis=1) + 100 * batch.shape[1]), (
            lambda epoch: [pad(batch) for batch in cut(row_model(epoch), b + 1)]
        )
    if name == "bucket_by_sequence_length":
        rows, row_model = ragged(dataset, model)
        made = rows.bucket_by_sequence_length(len, [2], [b + 1, b + 1], drop_remainder=a > 1)
        return made.map(lambda batch: batch.sum(axis=1) + 100 * batch.shape[1]), lambda epoch: [
            [sum(row) + 100 * max(map(len, batch)) for row in batch]
            for batch in grouped(row_model(epoch), lambda row: int(len(row) >= 2), b + 1)
            if len(batch) == b + 1 or a <= 1
        ]
    if name == "ragged_batch":
        rows, row_model = ragged(dataset, model)
        made = rows.ragged_batch(b + 1, drop_remainder=a > 1).map(lambda batch: np.array([x.sum() for x in batch], int))
        return made, lambda epoch: [[sum(row) for row in batch] for batch in cut(row_model(epoch), b + 1, a > 1)]
    if name == "rejection_resample":
        shares = [(0.5, 0.5), (0.2, 0.8), (0.0, 1.0), (0.9, 0.1)]
        made = dataset.take(32).rejection_resample(lambda x: x % 2, shares[a], shares[b] if b else None, seed=a)
        return made.map(lambda number, x: 10 * x + number), lambda epoch: [
            10 * x + x % 2 for x in resampled(model(epoch)[:32], shares[a], shares[b] if b else None, (a, epoch))
        ]
    if name == "enumerate":
        return dataset.enumerate().map(lambda i, x: 50 * i + x), lambda epoch: [
            50 * i + x for i, x in enumerate(model(epoch))
        ]
    if name == "sliding_window":
        length, horizon, shift, stride = a + 1, b % 3, 1 + (a + b) % 3, 1 + b % 2
        made = dataset.sliding_window(length, horizon, shift, stride)
        summed = made.map(lambda x, y: x.sum() - y.sum()) if horizon else made.map(lambda x: x.sum())
        return summed, lambda epoch: [
            sum(window[:length]) - sum(window[length:])
            for window in windows(model(epoch), length + horizon, shift, stride, True)
        ]
    if name == "zip":
        return ms.data.zip(dataset, other).map(lambda x, y: x - y), lambda epoch: [
            x - y for x, y in zip(model(epoch), others(epoch), strict=False)
        ]
    if name == "interleave":
        return dataset.interleave(
            lambda x: from_arrays(np.full(int(x) % 4, x)), a + 1, b + 1
        ), lambda epoch: interleaved([[x] * (x % 4) for x in model(epoch)], a + 1, b + 1)
    if name == "flat_map":
        return dataset.flat_map(lambda x: from_arrays(np.stack([x, -x]))), lambda epoch: [
            y for x in model(epoch) for y in (x, -x)
        ]
    if name == "unbatch":  # of arrays that are no batches
        return dataset.map(lambda x: np.stack([x, 2 * x])).unbatch(), lambda epoch: [
            y for x in model(epoch) for y in (x, 2 * x)
        ]
    return dataset, model


NAMES = [
    "take", "skip", "shard", "repeat", "repeat without end", "map", "filter", "prefetch", "with_options", "cache",
    "concatenate", "sample_from_datasets", "shuffle", "batch", "padded_batch", "padded_batch of ragged rows", "unbatch",
    "enumerate", "zip", "interleave", "flat_map", "take_while", "unique", "window", "sliding_window", "group_by_window",
    "scan", "choose_from_datasets", "ignore_errors", "rebatch", "ragged_batch", "rejection_resample", "bucket_by_sequence_length",
    "cast",
]  # fmt: skip
TAKES_RAGGED = ["take", "skip", "shard", "repeat", "filter", "prefetch", "with_options", "cache", "shuffle", "cast"]
AFTER_ENDLESS = [
    "take", "skip", "shard", "repeat", "map", "prefetch", "with_options", "concatenate", "sample_from_datasets", "batch",
    "padded_batch", "unbatch", "enumerate", "zip", "flat_map", "cast",
]  # fmt: skip
