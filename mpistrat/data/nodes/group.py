"""Groups of elements by a key: a dataset made of each group, and batches of rows of similar length."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ...base.arguments import integer
from ...base.errors import explain
from ..buffers import RowBuffers
from ..spec import stack_rows
from .batch import refuse_batches, require_one_shape
from .calls import call, check_callable, name_of
from .flat_map import MadeDatasets
from .node import Batching, Node
from .padding import Padding
from .sources import Held
from .streamed import Streamed

__all__ = ["bucket_by_sequence_length", "group_by_window"]

Groups = Iterator[tuple[int, list[Any]]]


def _grouped(elements: Iterable[Any], key_of: Callable[[Any], int], size_of: Callable[[int], int]) -> Groups:
    """Yield groups in TF's order: each when it is full; at the end the others, sorted by key."""
    groups: dict[int, list[Any]] = {}
    for element in elements:
        key = key_of(element)
        groups.setdefault(key, []).append(element)
        if len(groups[key]) >= size_of(key):
            yield key, groups.pop(key)
    for key in sorted(groups):
        yield key, groups.pop(key)


def _answer(function: str, argument: str, value: Any) -> int:
    answer = value.item() if getattr(value, "size", 0) == 1 else value
    return integer(function, argument, answer, remedy="The function must return an integer.")


def _by_window(
    datasets: MadeDatasets, key_of: Callable[[Any], int], size_of: Callable[[int], int], epoch: int, below: Node
) -> Iterator[Any]:
    groups = _grouped(below.elements(epoch), key_of, functools.cache(size_of))
    for number, (key, elements) in enumerate(groups):
        yield from datasets.make(number, below, key, elements).elements(epoch)


def group_by_window(
    parent: Node, dataset_of: Callable[[Node], Any], key_func: Callable[..., Any],
    reduce_func: Callable[[int, Any], Any], window_size: int | None = None,
    window_size_func: Callable[[int], Any] | None = None,
) -> Node:  # fmt: skip
    """Group elements by a key, and read the dataset that a function makes of each group.

    A group is complete when it has a window's number of elements; the next element with its key starts another. At the
    end come incomplete groups, sorted by key. It reads in order, like `filter`, with incomplete groups in memory.

    Args:
        key_func: returns an element's key, an integer; a tuple is passed as several arguments.
        reduce_func: returns a dataset, given a key and the dataset of a group. It is called once more, with the first
            element alone, to get the spec.
        window_size: elements in a group.
        window_size_func: instead, returns the number for a key; called once per key and epoch.

    Raises:
        TypeError: for functions that are not callable; while reading, for a key that is not an integer.
        ValueError: for both or neither of window_size and window_size_func, and for a size below 1.

    Example:
        >>> groups = ms.data.Dataset.range(10).group_by_window(
        ...     lambda x: x % 2, lambda key, group: group.batch(5), 5
        ... )
        >>> [batch.tolist() for batch in groups]
        [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    """
    function = "Dataset.group_by_window"
    check_callable(function, "key_func", key_func)
    check_callable(function, "reduce_func", reduce_func)
    if (window_size is None) == (window_size_func is None):
        got = "none" if window_size is None else "both"
        raise ValueError(explain(function, "window_size", expected="one of window_size, window_size_func", got=got))
    if window_size is None:
        check_callable(function, "window_size_func", window_size_func)
    else:
        window_size = integer(function, "window_size", window_size, 1)

    def key_of(element: Any) -> int:
        return _answer(function, "key_func", call(key_func, element))

    def size_of(key: int) -> int:
        size = window_size if window_size_func is None else window_size_func(key)
        return integer(function, "window_size_func", _answer(function, "window_size_func", size), 1)

    def dataset_of_group(below: Node, key: int, elements: list[Any]) -> Any:
        return reduce_func(key, dataset_of(Held(elements, below.row_spec, below.batching)))

    datasets = MadeDatasets(function, "reduce_func", dataset_of_group, lambda element: (key_of(element), [element]))
    size = window_size if window_size_func is None else name_of(window_size_func)
    text = f"group_by_window({name_of(key_func)}, {name_of(reduce_func)}, {size})"
    return datasets.streamed(text, parent, functools.partial(_by_window, datasets, key_of, size_of))


def bucket_by_sequence_length(
    parent: Node, element_length_func: Callable[..., Any], bucket_boundaries: Sequence[int],
    bucket_batch_sizes: Sequence[int], padded_shapes: Any = None, padding_values: Any = None,
    pad_to_bucket_boundary: bool = False, no_padding: bool = False, drop_remainder: bool = False,
) -> Node:  # fmt: skip
    """Combine rows of similar length into batches, padded like those of `padded_batch`.

    A batch is yielded when its bucket has enough rows; at the end come smaller ones, shortest rows first. It reads in
    order, like `filter`, with the rows of incomplete batches in memory. Batches are for all replicas together.

    Args:
        element_length_func: returns a row's length; a tuple is passed as several arguments.
        bucket_boundaries: increasing lengths, each the lower bound of a bucket after the first.
        bucket_batch_sizes: rows in a batch of each bucket, one more than boundaries.
        padded_shapes, padding_values: as for `padded_batch`.
        pad_to_bucket_boundary: pad axes that vary to the boundary minus 1, not to the longest row of the batch; rows of
            at least the last boundary raise an error then.
        no_padding: do not pad; the rows of a batch must have one shape.
        drop_remainder: drop the smaller batches at the end.

    Raises:
        ValueError: for a batched dataset, boundaries that do not increase, and another number of batch sizes.

    Example:
        >>> spec = ms.data.ArraySpec((None,), np.int64)
        >>> lengths = (1, 4, 3, 2)
        >>> rows = ms.data.from_generator(lambda: map(np.arange, lengths), spec)
        >>> batches = rows.bucket_by_sequence_length(len, [3], [2, 2])
        >>> [batch.tolist() for batch in batches]
        [[[0, 1, 2, 3], [0, 1, 2, 0]], [[0, 0], [0, 1]]]
    """
    function = "Dataset.bucket_by_sequence_length"
    check_callable(function, "element_length_func", element_length_func)
    refuse_batches(function, parent)
    boundaries = [integer(function, "bucket_boundaries", each) for each in bucket_boundaries]
    sizes = [integer(function, "bucket_batch_sizes", each, 1) for each in bucket_batch_sizes]
    if any(low >= high for low, high in itertools.pairwise(boundaries)):
        raise ValueError(explain(function, "bucket_boundaries", expected="growing lengths", got=boundaries))
    if len(sizes) != len(boundaries) + 1:
        expected = f"{len(boundaries) + 1} numbers, one more than there are boundaries"
        raise ValueError(explain(function, "bucket_batch_sizes", expected=expected, got=sizes))
    padding = None if no_padding else Padding(padded_shapes, padding_values)
    to_boundary, drop_remainder = bool(pad_to_bucket_boundary), bool(drop_remainder)
    buffers = RowBuffers()

    def row_spec(below: Node) -> Any:
        if padding is not None:
            return padding.spec(below.row_spec)
        require_one_shape(function, below.row_spec)
        return below.row_spec

    def bucket_of(row: Any) -> int:
        length = _answer(function, "element_length_func", call(element_length_func, row))
        bucket = bisect_right(boundaries, length)
        if to_boundary and bucket == len(boundaries):
            expected, got = f"lengths below {boundaries[-1]}, the last boundary", length
            raise ValueError(explain(function, "pad_to_bucket_boundary", expected=expected, got=got))
        return bucket

    def batches(epoch: int, below: Node) -> Iterator[Any]:
        for bucket, rows in _grouped(below.elements(epoch), bucket_of, sizes.__getitem__):
            if drop_remainder and len(rows) < sizes[bucket]:
                continue
            row_spec(below)  # raises for rows that differ in shape
            batch = stack_rows(rows, below.row_spec)
            if padding is not None:
                batch = padding.pad(batch, below.row_spec, buffers, boundaries[bucket] - 1 if to_boundary else None)
            yield batch

    buckets = f"boundaries={boundaries}, batch_sizes={sizes}"
    return Streamed(
        f"bucket_by_sequence_length({name_of(element_length_func)}, {buckets}, drop_remainder={drop_remainder})",
        [parent],
        batches,
        row_spec=row_spec,
        batching=lambda _: Batching(max(sizes), drop_remainder and len(set(sizes)) == 1),
    )
