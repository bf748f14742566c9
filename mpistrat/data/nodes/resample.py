"""Rows left out, and some taken twice, so that classes come in given proportions."""

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
_TOGETHER = 32  # rows whose classes are counted before they are looked at, where proportions are estimated, as TF does
_SMOOTHING = 10  # rows of each class that are taken as seen before the first

Distribution = NDArray[np.float64]
Pair = tuple[np.int64, Any]  # a class and a row


@final
class _Proportions:
    """How likely a row of each class is kept.

    A part of the rows may stay as they are: as many as the class that is rarest compared with its target allows. Of the
    others each class is kept so often that its share is what the target lacks.
    Source: tf.data.Dataset.rejection_resample.

    Args:
        target: the share of each class that is wanted.
        initial: the share that there is; None where it is not known.

    Attributes:
        unchanged: which part of what comes is rows as they are.
        accept: the probability with which a row of each class is kept else.
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
        """Take note of the classes of some rows, where the share of each is not known."""
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
    """The rows that are left of all."""
    while together := list(itertools.islice(pairs, _TOGETHER)):
        proportions.see(np.array([number for number, _ in together]))
        for number, row in together:
            if next(words) < proportions.accept[number] * 2**64:
                yield number, row


def _resampled(
    class_func: Callable[..., Any], target: Distribution, initial: Distribution | None, seed: int, epoch: int, below: Node
) -> Iterator[Pair]:  # fmt: skip
    """Pairs of a class and a row, in other proportions."""

    def classified() -> Iterator[Pair]:
        for position, row in enumerate(below.elements(epoch)):
            yield _class_of(class_func, target.size, row, position), row

    proportions = _Proportions(target, initial)
    kept, unchanged = _kept(classified(), proportions, random_words((seed, epoch, 0))), classified()
    ahead = next(kept, None)  # which counts classes, if that has to be done
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
    """Leave out rows, and take some twice, so that classes come in given proportions; elements are (class, row).

    How often a class comes is random. The rows of an epoch are read twice: a part of what comes is rows as they are, the
    others are those that are left of all when some are thrown away. It ends with the first of the two. It reads in order,
    like `filter`; which rows come depends on the seed and the epoch only.

    Args:
        class_func: returns the class of a row, an integer from 0 on, as int64 in what comes; a tuple is passed as several
            arguments.
        target_dist: the share of each class that is wanted; the shares add up to 1.
        initial_dist: the share that each class has; None estimates it while reading.
        seed: any integer, the same on every rank. None is 0, in every run. (TensorFlow draws another one for each run.)

    Raises:
        TypeError: for what cannot be called.
        ValueError: for a dataset that is batched already, shares that are none, and while reading for a class that is none.

    Example:
        >>> rows = ms.data.from_arrays(np.repeat([0, 1], [600, 400])).shuffle(seed=1)
        >>> even = rows.rejection_resample(lambda x: x, [0.5, 0.5], [0.6, 0.4]).map(lambda number, row: row)
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
