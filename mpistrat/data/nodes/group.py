"""Elements put into groups by a key: what a function makes of each group, and batches of rows of about one length."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

from ...base.arguments import integer
from ...base.errors import explain
from ..buffers import RowBuffers
from ..spec import stack_rows
from .batch import refuse_batches, require_one_shape
from .calls import call, check_callable, name_of
from .flat_map import FlatMap
from .node import UNKNOWN, Batching, Node
from .padding import Padding
from .sources import Held
from .stage import InOrder

__all__ = ["Bucketed", "GroupedByWindow", "bucket_by_sequence_length", "group_by_window"]

Groups = Iterator[tuple[int, list[Any]]]


def _grouped(elements: Iterable[Any], key_of: Callable[[Any], int], size_of: Callable[[int], int]) -> Groups:
    """TF's order: a group comes when it is full; at the end come those that are not, by their keys."""
    groups: dict[int, list[Any]] = {}
    for element in elements:
        key = key_of(element)
        groups.setdefault(key, []).append(element)
        if len(groups[key]) >= size_of(key):
            yield key, groups.pop(key)
    for key in sorted(groups):
        yield key, groups.pop(key)


def _answer(function: str, argument: str, value: Any) -> int:
    """What a function of the user's has answered, as an integer."""
    answer = value.item() if getattr(value, "size", 0) == 1 else value
    return integer(function, argument, answer, remedy="The function must return an integer.")


@final
class GroupedByWindow(FlatMap):
    """The elements of datasets that a function makes of groups with one key."""

    _argument = "reduce_func"
    _name = "group_by_window"

    def __init__(
        self, parent: Node, dataset_of: Callable[[Node], Any], key_func: Callable[..., Any],
        reduce_func: Callable[[int, Any], Any], window_size: int | Callable[[int], Any],
    ) -> None:  # fmt: skip
        super().__init__(parent, dataset_of, key_func, reduce_func, window_size)
        self._dataset_of = dataset_of
        self._key_func, self._reduce_func = key_func, reduce_func
        self._window_size = window_size

    def _key(self, element: Any) -> int:
        return _answer("Dataset.group_by_window", "key_func", call(self._key_func, element))

    def _make_first(self, element: Any) -> Node:
        return self._make(self._key(element), [element], 0)

    def _make(self, key: int, elements: list[Any], number: int) -> Node:
        window = Held(elements, self._parent.row_spec, self._parent.batching)
        return self._checked(self._reduce_func(key, self._dataset_of(window)), number)

    def _all(self, epoch: int) -> Iterator[Any]:
        sizes: dict[int, int] = {}

        def size_of(key: int) -> int:
            if not callable(self._window_size):
                return self._window_size
            if key not in sizes:
                size = _answer("Dataset.group_by_window", "window_size_func", self._window_size(key))
                sizes[key] = integer("Dataset.group_by_window", "window_size_func", size, 1)
            return sizes[key]

        groups = _grouped(self._parent.elements(epoch), self._key, size_of)
        for number, (key, elements) in enumerate(groups):
            yield from self._make(key, elements, number).elements(epoch)

    def describe(self) -> str:
        size = name_of(self._window_size) if callable(self._window_size) else self._window_size
        return f"group_by_window({name_of(self._key_func)}, {name_of(self._reduce_func)}, {size})"


def group_by_window(
    parent: Node, dataset_of: Callable[[Node], Any], key_func: Callable[..., Any],
    reduce_func: Callable[[int, Any], Any], window_size: int | None = None,
    window_size_func: Callable[[int], Any] | None = None,
) -> Node:  # fmt: skip
    """Put elements into groups by a key, and take the elements of what a function makes of each group.

    A group is complete when it has as many elements as a window, and the next element with its key begins another. At the
    end come the groups that are not complete, in the order of their keys. It reads in order, like `filter`, and holds the
    groups that are not complete.

    Args:
        key_func: returns an element's key, an integer; a tuple is passed as several arguments.
        reduce_func: returns a dataset, of a key and the dataset of a group. It is called once more, with the first
            element alone, to learn what elements look like.
        window_size: elements in a group.
        window_size_func: instead, how many there are in a group with a key; called once a key and epoch.

    Raises:
        TypeError: for what cannot be called; while reading, for a key that is no integer.
        ValueError: for both or none of window_size and window_size_func, and for a size below 1.

    Example:
        >>> groups = ms.data.Dataset.range(10).group_by_window(lambda x: x % 2, lambda key, group: group.batch(5), 5)
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
        return GroupedByWindow(parent, dataset_of, key_func, reduce_func, window_size_func)  # type: ignore[arg-type]
    size = integer(function, "window_size", window_size, 1)
    return GroupedByWindow(parent, dataset_of, key_func, reduce_func, size)


@final
class Bucketed(InOrder):
    """Batches of rows whose lengths lie between the same boundaries.

    Args:
        length_func: tells a row's length.
        boundaries: the lengths with which a bucket begins, all but the first.
        sizes: rows in a batch of each bucket.
        padding: what rows are padded to; None for rows of one shape.
        to_boundary: whether axes that vary are padded to the longest that may be in the bucket.
        drop_remainder: whether smaller batches are left out.
    """

    def __init__(
        self, parent: Node, length_func: Callable[..., Any], boundaries: Sequence[int], sizes: Sequence[int],
        padding: Padding | None, to_boundary: bool, drop_remainder: bool,
    ) -> None:  # fmt: skip
        super().__init__(parent, length_func, boundaries, sizes, padding, to_boundary, drop_remainder)
        self._length_func = length_func
        self._boundaries, self._sizes = boundaries, sizes
        self._padding, self._to_boundary, self._drop_remainder = padding, to_boundary, drop_remainder
        self._buffers = RowBuffers()

    @property
    def batching(self) -> Batching:
        return Batching(max(self._sizes), self._drop_remainder and len(set(self._sizes)) == 1)

    @property
    def row_spec(self) -> Any:
        spec = self._parent.row_spec
        if self._padding is not None:
            return self._padding.spec(spec)
        require_one_shape("Dataset.bucket_by_sequence_length", spec)
        return spec

    def length_over(self, below: int) -> int:
        return 0 if below == 0 else UNKNOWN

    def _bucket(self, row: Any) -> int:
        length = _answer("Dataset.bucket_by_sequence_length", "element_length_func", call(self._length_func, row))
        bucket = bisect_right(self._boundaries, length)
        if self._to_boundary and bucket == len(self._boundaries):
            expected, got = f"lengths below {self._boundaries[-1]}, the last boundary", length
            raise ValueError(
                explain("Dataset.bucket_by_sequence_length", "pad_to_bucket_boundary", expected=expected, got=got)
            )
        return bucket

    def _all(self, epoch: int) -> Iterator[Any]:
        for bucket, rows in _grouped(self._parent.elements(epoch), self._bucket, self._sizes.__getitem__):
            if self._drop_remainder and len(rows) < self._sizes[bucket]:
                continue
            below, _ = self._parent.row_spec, self.row_spec  # raises for rows that are not of one shape
            batch = stack_rows(rows, below)
            if self._padding is not None:
                length = self._boundaries[bucket] - 1 if self._to_boundary else None
                batch = self._padding.pad(batch, below, self._buffers, length)
            yield batch

    def describe(self) -> str:
        buckets = f"boundaries={list(self._boundaries)}, batch_sizes={list(self._sizes)}"
        return (
            f"bucket_by_sequence_length({name_of(self._length_func)}, {buckets}, drop_remainder={self._drop_remainder})"
        )


def bucket_by_sequence_length(
    parent: Node, element_length_func: Callable[..., Any], bucket_boundaries: Sequence[int],
    bucket_batch_sizes: Sequence[int], padded_shapes: Any = None, padding_values: Any = None,
    pad_to_bucket_boundary: bool = False, no_padding: bool = False, drop_remainder: bool = False,
) -> Node:  # fmt: skip
    """Put rows of about one length into batches, padded like those of `padded_batch`.

    A batch comes when its bucket has enough rows; at the end come those that are smaller, shortest rows first. It reads in
    order, like `filter`, and holds the rows of batches that are not complete. Batches are those of all replicas together.

    Args:
        element_length_func: returns a row's length; a tuple is passed as several arguments.
        bucket_boundaries: lengths with which a bucket begins, but for the first bucket; growing.
        bucket_batch_sizes: rows in a batch of each bucket, one more than there are boundaries.
        padded_shapes, padding_values: as for `padded_batch`.
        pad_to_bucket_boundary: pad axes that vary to one less than the boundary, not to the longest row of the batch; rows
            that are as long as the last boundary are an error then.
        no_padding: the rows of a batch have one shape.
        drop_remainder: leave out the smaller batches at the end.

    Raises:
        ValueError: for a dataset that is batched already, boundaries that do not grow, and another number of batch sizes.

    Example:
        >>> spec = ms.data.ArraySpec((None,), np.int64)
        >>> rows = ms.data.from_generator(lambda: (np.arange(n) for n in (1, 4, 3, 2)), spec)
        >>> [batch.tolist() for batch in rows.bucket_by_sequence_length(len, [3], [2, 2])]
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
    return Bucketed(
        parent, element_length_func, boundaries, sizes, padding, bool(pad_to_bucket_boundary), bool(drop_remainder)
    )
