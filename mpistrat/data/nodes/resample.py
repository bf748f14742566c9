"""Resampling of rows, so that classes have given proportions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base.arguments import integer
from ...base.errors import explain
from ...base.masks import plain_array
from ..permutation import DEFAULT_SEED, random_words
from ..spec import ArraySpec
from .batch import refuse_batches
from .calls import call, check_callable, name_of
from .node import Node
from .streamed import Streamed

__all__ = ["rejection_resample"]

FUNCTION = "Dataset.rejection_resample"
_TOGETHER = 32  # rows whose classes are counted before acceptance, if proportions are estimated, as in TF
_SMOOTHING = 10  # initial count of each class

Distribution = NDArray[np.float64]
Pair = tuple[np.int64, Any]  # a class and a row


@final
class _Proportions:
    """The probability of keeping a row of each class.

    A fraction of the rows is used unchanged, as large as the class that is rarest relative to its target allows. Of the
    others each class is kept with a probability that fills the gap to its target. Source:
    tf.data.Dataset.rejection_resample.

    Args:
        target: the target share of each class.
        initial: the present share of each class; None if unknown.

    Attributes:
        unchanged: the fraction of results that are unchanged rows.
        accept: the probability of keeping any other row of each class.
    """

    def __init__(self, target: Distribution, initial: Distribution | None) -> None:
        self._target = target
        self._seen = None if initial is not None else np.full(target.size, _SMOOTHING, np.float64)
        self._set(target if initial is None else initial)

    def _set(self, initial: Distribution) -> None:
        ratio = self._target / np.maximum(initial, np.finfo(np.float32).tiny)
        low, high = float(ratio.min()), float(ratio.max())
        self.unchanged = low if high > low else 1.0
        self.accept = (ratio - low) / (high - low) if high > low else np.ones_like(ratio)

    def see(self, classes: NDArray[np.int64]) -> None:
        """Count the classes of some rows, if the initial shares are unknown."""
        if self._seen is not None:
            self._seen += np.bincount(classes, minlength=self._seen.size)
            self._set(self._seen / self._seen.sum())


def _class_of(class_func: Callable[..., Any], classes: int, row: Any, position: int) -> np.int64:
    number = plain_array(call(class_func, row), FUNCTION, "class_func")
    if number.size != 1 or number.dtype.kind not in "iu" or not 0 <= number.item() < classes:
        expected, got = f"an integer in [0, {classes})", f"{number} for row {position}"
        raise ValueError(explain(FUNCTION, "class_func", expected=expected, got=got))
    return np.int64(number.item())


def _kept(pairs: Iterator[Pair], proportions: _Proportions, words: Iterator[int]) -> Iterator[Pair]:
    while together := list(itertools.islice(pairs, _TOGETHER)):
        proportions.see(np.array([number for number, _ in together]))
        for number, row in together:
            if next(words) < proportions.accept[number] * 2**64:
                yield number, row


def _resampled(
    class_func: Callable[..., Any], target: Distribution, initial: Distribution | None, seed: int, epoch: int, below: Node
) -> Iterator[Pair]:  # fmt: skip

    def classified() -> Iterator[Pair]:
        for position, row in enumerate(below.elements(epoch)):
            yield _class_of(class_func, target.size, row, position), row

    proportions = _Proportions(target, initial)
    kept, unchanged = _kept(classified(), proportions, random_words((seed, epoch, 0))), classified()
    ahead = next(kept, None)  # counts classes, if needed
    for word in random_words((seed, epoch, 1)):
        if word < proportions.unchanged * 2**64:
            pair = next(unchanged, None)
        else:
            pair, ahead = ahead, next(kept, None)
        if pair is None:
            return
        yield pair


def rejection_resample(
    parent: Node, class_func: Callable[..., Any], target_dist: Any, initial_dist: Any = None, seed: int | None = None
) -> Node:
    """Drop and repeat rows so that classes have given proportions; elements are (class, row).

    Each class's count is random. The rows of an epoch are read twice: a fraction of the results are all rows in sequence,
    the others are the rows accepted by class. It ends with the first of the two. It reads in order, like `filter`; the
    rows depend on the seed and the epoch only.

    Args:
        class_func: returns the class of a row, an integer from 0 on, int64 in the result; a tuple is passed as several arguments.
        target_dist: the target share of each class; they add up to 1.
        initial_dist: the present share of each class; None estimates it while reading.
        seed: any integer, the same on every rank; None is 0 in every run (TensorFlow draws one per run).

    Raises:
        TypeError: for a function that is not callable.
        ValueError: for a batched dataset and invalid shares; while reading, for an invalid class.

    Example:
        >>> rows = ms.data.from_arrays(np.repeat([0, 1], [600, 400]))
        >>> even = rows.shuffle(seed=1).rejection_resample(
        ...     lambda x: x, [0.5, 0.5], [0.6, 0.4]
        ... ).map(lambda number, row: row)
        >>> bool(abs(np.mean(list(even)) - 0.5) < 0.05)
        True
    """
    check_callable(FUNCTION, "class_func", class_func)
    refuse_batches(FUNCTION, parent)
    target = _distribution("target_dist", target_dist)
    initial = None if initial_dist is None else _distribution("initial_dist", initial_dist)
    if initial is not None and initial.size != target.size:
        expected, got = f"{target.size} shares, as target_dist has", initial.size
        raise ValueError(explain(FUNCTION, "initial_dist", expected=expected, got=got))
    seed = integer(FUNCTION, "seed", DEFAULT_SEED if seed is None else seed)
    given = "" if initial is None else f"initial_dist={initial.tolist()}, "
    return Streamed(
        f"rejection_resample({name_of(class_func)}, target_dist={target.tolist()}, {given}seed={seed})",
        [parent],
        functools.partial(_resampled, class_func, target, initial, seed),
        row_spec=lambda below: (ArraySpec((), np.int64), below.row_spec),
    )


def _distribution(argument: str, given: Any) -> Distribution:
    try:
        shares = plain_array(given, FUNCTION, argument, np.float64)
    except (ValueError, TypeError):
        shares = np.empty(0)
    if shares.ndim != 1 or not shares.size or not (shares >= 0).all() or abs(shares.sum() - 1) > 1e-3:
        expected = "numbers of at least 0 that add up to 1"
        raise ValueError(explain(FUNCTION, argument, expected=expected, got=repr(given)))
    return shares
