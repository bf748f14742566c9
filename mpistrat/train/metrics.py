"""Metrics of regression and classification, with Keras's names, arguments and numbers (https://keras.io/api/metrics/)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from ..base.arguments import integer
from ..base.errors import explain
from ..base.limits import UP_TO_ONE, Limits, flag, number
from ..base.underflow import may_underflow
from .metric import UPDATE, MeanOf, Metric, host, ratio, same_rank

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "TopKCategoricalAccuracy",
]

_SMALLEST = 1e-7  # Keras's epsilon
_ANY = Limits("a number", lambda value: not math.isnan(value))


def _single(array: np.ndarray) -> np.ndarray:
    """Return an array of floats in float32, in which Keras compares: 0.2 in float64 is less than 0.2 in float32."""
    return array if array.dtype.kind in "biu" else array.astype(np.float32, copy=False)


# Regression


@final
class MeanSquaredError(MeanOf):
    """The mean of squared differences.

    Example:
        >>> error = ms.train.MeanSquaredError()
        >>> error.update_state([[0, 1], [0, 0]], [[1, 1], [0, 0]])
        >>> error.result()
        0.25
    """

    def __init__(self, name: str = "mean_squared_error") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return np.square(_difference(y_true, y_pred))


@final
class MeanAbsoluteError(MeanOf):
    """The mean of absolute differences."""

    def __init__(self, name: str = "mean_absolute_error") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return np.abs(_difference(y_true, y_pred))


@final
class RootMeanSquaredError(MeanOf):
    """The square root of the mean of squared differences."""

    def __init__(self, name: str = "root_mean_squared_error") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return np.square(_difference(y_true, y_pred))

    @may_underflow
    def result_of(self, sums: np.ndarray) -> float:
        return float(np.sqrt(super().result_of(sums)))


def _difference(y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    y_true, y_pred = same_rank(y_true, y_pred)
    return np.subtract(y_pred, y_true, dtype=np.float64)


# Accuracy


@final
class Accuracy(MeanOf):
    """How often predictions equal labels.

    Example:
        >>> accuracy = ms.train.Accuracy()
        >>> accuracy.update_state([1, 2, 3, 4], [0, 2, 3, 4])
        >>> accuracy.result()
        0.75
    """

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        y_true, y_pred = same_rank(y_true, y_pred)
        if y_true.dtype.kind in "fV" and y_pred.dtype.kind in "fV":  # compared as predictions are
            y_pred = y_pred if y_pred.dtype.itemsize < 4 else _single(y_pred)
            y_true = y_true.astype(y_pred.dtype)
        return y_true == y_pred


@final
class BinaryAccuracy(MeanOf):
    """How often a prediction is above a threshold where the label is 1, and not where it is 0."""

    def __init__(self, name: str = "binary_accuracy", threshold: float = 0.5) -> None:
        super().__init__(name)
        self.threshold = number("BinaryAccuracy", "threshold", threshold, _ANY)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        y_true, y_pred = same_rank(y_true, y_pred)
        return y_true == (_single(y_pred) > np.float32(self.threshold))


@final
class CategoricalAccuracy(MeanOf):
    """How often the largest prediction is that of the class; labels one-hot."""

    def __init__(self, name: str = "categorical_accuracy") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return _largest(y_true) == _largest(y_pred)


@final
class SparseCategoricalAccuracy(MeanOf):
    """How often the largest prediction is that of the class; labels as numbers of classes.

    Example:
        >>> accuracy = ms.train.SparseCategoricalAccuracy()
        >>> accuracy.update_state([2, 1], [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0]])
        >>> accuracy.result()
        0.5
    """

    def __init__(self, name: str = "sparse_categorical_accuracy") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return _labels(y_true, y_pred) == _largest(y_pred)


@final
class TopKCategoricalAccuracy(MeanOf):
    """How often the class is among the k largest predictions; labels one-hot. Equal predictions count as of one rank."""

    def __init__(self, k: int = 5, name: str = "top_k_categorical_accuracy") -> None:
        super().__init__(name)
        self.k = integer(type(self).__name__, "k", k, 0)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return _in_top_k(_largest(y_true), y_pred, self.k)


@final
class SparseTopKCategoricalAccuracy(MeanOf):
    """How often the class is among the k largest predictions; labels as numbers of classes. Equal ones count as of one rank."""

    def __init__(self, k: int = 5, name: str = "sparse_top_k_categorical_accuracy") -> None:
        super().__init__(name)
        self.k = integer(type(self).__name__, "k", k, 0)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return _in_top_k(_classes(y_true, y_pred), y_pred, self.k)


def _largest(scores: np.ndarray) -> np.ndarray:
    """Return where the largest score of each row is; NaN is less than all."""
    return (scores if scores.dtype.kind in "biu" else np.where(np.isnan(scores), -np.inf, scores)).argmax(-1)


def _labels(y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    """Return the label of each row, which need not be a class that there is."""
    labels = y_true[..., 0] if y_true.ndim == y_pred.ndim and y_true.shape[-1] == 1 else y_true
    return labels.astype(np.float32) if labels.dtype.kind == "V" else labels  # bfloat16


def _classes(y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    """Return the number of the class of each row.

    Raises:
        ValueError: a label is no integer.
    """
    labels = _labels(y_true, y_pred)
    with np.errstate(invalid="ignore"):
        classes = labels.astype(np.int64, copy=False)
    _refuse(labels, classes != labels, "numbers of classes, which are integers")
    return classes


def _refuse(labels: np.ndarray, wrong: np.ndarray, expected: str) -> None:
    if wrong.any():
        raise ValueError(explain(UPDATE, "y_true", expected=expected, got=str(labels[wrong][0])))


def _inside(classes: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    return (classes >= 0) & (classes < y_pred.shape[-1])


def _of_class(classes: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    return np.take_along_axis(y_pred, classes[..., None], -1)


def _in_top_k(classes: np.ndarray, y_pred: np.ndarray, k: int) -> np.ndarray:
    """Return whether classes are among the k largest: none out of range is, nor any of a row that has NaN or an infinity."""
    known = _inside(classes, y_pred)
    own = _of_class(np.where(known, classes, 0), y_pred)
    return known & np.isfinite(y_pred).all(-1) & ((y_pred > own).sum(-1) < k)


# Cross-entropy


@final
class BinaryCrossentropy(MeanOf):
    """The cross-entropy between labels 0 and 1 and predicted probabilities, or logits."""

    def __init__(
        self, name: str = "binary_crossentropy", from_logits: bool = False, label_smoothing: float = 0.0
    ) -> None:
        super().__init__(name)
        self.from_logits = flag(type(self).__name__, "from_logits", from_logits)
        self.label_smoothing = number(type(self).__name__, "label_smoothing", label_smoothing, UP_TO_ONE)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels, scores = (array.astype(np.float64) for array in same_rank(y_true, y_pred))
        labels = labels * (1 - self.label_smoothing) + 0.5 * self.label_smoothing
        if self.from_logits:
            return np.maximum(scores, 0) - scores * labels + np.log1p(np.exp(-np.abs(scores)))
        scores = np.clip(scores, _SMALLEST, 1 - _SMALLEST)
        return -(labels * np.log(scores) + (1 - labels) * np.log1p(-scores))


@final
class CategoricalCrossentropy(MeanOf):
    """The cross-entropy between one-hot labels and predicted probabilities, or logits."""

    def __init__(
        self, name: str = "categorical_crossentropy", from_logits: bool = False, label_smoothing: float = 0.0
    ) -> None:
        super().__init__(name)
        self.from_logits = flag(type(self).__name__, "from_logits", from_logits)
        self.label_smoothing = number(type(self).__name__, "label_smoothing", label_smoothing, UP_TO_ONE)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels = y_true * (1 - self.label_smoothing) + self.label_smoothing / y_true.shape[-1]
        return -(labels * _logarithms(y_pred, self.from_logits)).sum(-1)


@final
class SparseCategoricalCrossentropy(MeanOf):
    """The cross-entropy between numbers of classes and predicted probabilities, or logits."""

    def __init__(self, name: str = "sparse_categorical_crossentropy", from_logits: bool = False) -> None:
        super().__init__(name)
        self.from_logits = flag(type(self).__name__, "from_logits", from_logits)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        classes = _classes(y_true, y_pred)
        _refuse(classes, ~_inside(classes, y_pred), f"numbers of {y_pred.shape[-1]} classes, counted from 0")
        return -_of_class(classes, _logarithms(y_pred, self.from_logits))[..., 0]


def _logarithms(y_pred: np.ndarray, from_logits: bool) -> np.ndarray:
    """The logarithms of predicted probabilities."""
    scores = y_pred.astype(np.float64)
    if from_logits:
        scores = scores - scores.max(-1, keepdims=True)
        return np.asarray(scores - np.log(np.exp(scores).sum(-1, keepdims=True)))
    return np.log(np.clip(scores / scores.sum(-1, keepdims=True), _SMALLEST, 1 - _SMALLEST))


# Positives and negatives


class _Thresholds(Metric):
    """True and false positives above each of some thresholds, and the weight of all rows of either kind."""

    def __init__(self, name: str, thresholds: Sequence[float], evenly: bool) -> None:
        super().__init__(name, 2 * len(thresholds) + 2)
        numbers = np.asarray(thresholds, np.float32)  # as Keras compares
        self._order = np.argsort(numbers, kind="stable")
        self._ascending = numbers[self._order]
        self._evenly = evenly

    def _exceeded(self, scores: np.ndarray) -> np.ndarray:
        """Return how many thresholds each score is above; NaN is above none.

        Keras computes the number of evenly distributed ones instead of comparing, which differs where a score equals one.
        """
        scores = scores.astype(np.float32, copy=False)
        if not self._evenly:
            return np.where(np.isnan(scores), 0, np.searchsorted(self._ascending, scores, "left"))
        count = self._ascending.size
        found = np.ceil(np.clip(scores, 0, 1) * np.float32(count - 1))
        least = int(self._ascending[0] < 0 or self._ascending[-1] > 1)
        return np.where(np.isnan(found), 0, np.maximum(found, least)).astype(np.int64)

    @may_underflow
    def count(self, y_true: np.ndarray, y_pred: np.ndarray, weight: Any) -> np.ndarray:
        """Return what rows add: labels of any form but 0 are positive."""
        if weight is None:
            weights: Any = np.ones(y_pred.shape)
        else:
            (weights,) = host(sample_weight=weight)
            _, weights = same_rank(y_pred, weights)
            weights = weights.reshape(weights.shape + (1,) * (y_pred.ndim - weights.ndim))
            weights = np.broadcast_to(weights, y_pred.shape)
        positive, weights = y_true.reshape(-1).astype(bool), weights.reshape(-1).astype(np.float64)
        order = self._order
        exceeded = self._exceeded(y_pred.reshape(-1))
        parts, whole = [], []
        for mine in (positive, ~positive):
            by_count = np.bincount(exceeded[mine], weights[mine], len(order) + 1)
            above = np.empty(len(order))
            above[order] = by_count[:0:-1].cumsum()[::-1]
            parts.append(above)
            whole.append([by_count.sum()])
        return np.concatenate([*parts, *whole])

    def parts(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return true positives, false positives, false negatives and true negatives at each threshold."""
        true, false = np.split(sums[:-2], 2)
        return true, false, sums[-2] - true, sums[-1] - false


class _Decisions(_Thresholds):
    """What is decided at each threshold."""

    def __init__(
        self, thresholds: float | Sequence[float] | None, top_k: int | None, class_id: int | None, name: str
    ) -> None:
        function = type(self).__name__
        self._top_k = None if top_k is None else integer(function, "top_k", top_k, 0)
        self._class_id = None if class_id is None else integer(function, "class_id", class_id)
        if thresholds is None:
            many = [0.5 if top_k is None else -1e10]
        else:
            given: Any = thresholds if np.ndim(thresholds) else [thresholds]
            many = [number(function, "thresholds", threshold, UP_TO_ONE) for threshold in given]
        self._single = len(many) == 1
        evenly = len(many) > 2 and np.allclose(many, np.linspace(0, 1, len(many)), atol=_SMALLEST)
        super().__init__(name, many, evenly)

    def added(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> np.ndarray:
        labels, scores = same_rank(*host(y_true=y_true, y_pred=y_pred))
        if self._top_k is not None:
            scores = _single(scores)
            kept = np.argsort(-scores, -1, kind="stable")[..., : self._top_k]
            filtered = np.full(scores.shape, -1e10)
            np.put_along_axis(filtered, kept, np.take_along_axis(scores, kept, -1).astype(np.float64), -1)
            scores = filtered
        if self._class_id is not None:
            if not -scores.shape[-1] <= self._class_id < scores.shape[-1]:
                expected = f"one of {scores.shape[-1]} classes, counted from 0"
                raise ValueError(explain(type(self).__name__, "class_id", expected=expected, got=self._class_id))
            labels, scores = labels[..., self._class_id], scores[..., self._class_id]
        return self.count(labels, scores, sample_weight)

    def number_or_array(self, value: np.ndarray) -> Any:
        return float(value[0]) if self._single else value


@final
class Precision(_Decisions):
    """What part of the positive predictions is right: a number, or an array for several thresholds.

    A score of NaN is above no threshold, as in Keras.

    Example:
        >>> precision = ms.train.Precision()
        >>> precision.update_state([0, 1, 1, 1], [1, 0, 1, 1])
        >>> round(precision.result(), 4)
        0.6667
    """

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str = "precision",
    ) -> None:
        super().__init__(thresholds, top_k, class_id, name)

    @may_underflow
    def result_of(self, sums: np.ndarray) -> Any:
        true, false, _, _ = self.parts(sums)
        return self.number_or_array(ratio(true, true + false))


@final
class Recall(_Decisions):
    """What part of the positive labels is found: a number, or an array for several thresholds."""

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str = "recall",
    ) -> None:
        super().__init__(thresholds, top_k, class_id, name)

    @may_underflow
    def result_of(self, sums: np.ndarray) -> Any:
        true, _, missed, _ = self.parts(sums)
        return self.number_or_array(ratio(true, true + missed))


@final
class AUC(_Thresholds):
    """The area under the curve of true over false positives (ROC), or of precision over recall (PR), in steps of thresholds.

    Areas under PR are interpolated as by Davis and Goadrich (2006), https://doi.org/10.1145/1143844.1143874.

    Example:
        >>> area = ms.train.AUC(num_thresholds=3)
        >>> area.update_state([0, 0, 1, 1], [0, 0.5, 0.3, 0.9])
        >>> area.result()
        0.75
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str = "auc",
    ) -> None:
        for argument, value, legal in (
            ("curve", curve, ("ROC", "PR")),
            ("summation_method", summation_method, ("interpolation", "minoring", "majoring")),
        ):
            if value not in legal:
                raise ValueError(explain("AUC", argument, expected=" or ".join(legal), got=repr(value)))
        num_thresholds = integer("AUC", "num_thresholds", num_thresholds, 2)
        self._curve, self._summation = curve, summation_method
        between = np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
        super().__init__(name, [-_SMALLEST, *between, 1 + _SMALLEST], evenly=True)

    def added(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> np.ndarray:
        return self.count(*same_rank(*host(y_true=y_true, y_pred=y_pred)), sample_weight)

    @may_underflow
    def result_of(self, sums: np.ndarray) -> float:
        true, false, missed, spared = self.parts(sums)
        recall = ratio(true, true + missed)
        if self._curve == "ROC":
            x, y = ratio(false, false + spared), recall
        elif self._summation == "interpolation":
            return self._interpolated(true, false, missed)
        else:
            x, y = recall, ratio(true, true + false)
        pick = {"minoring": np.minimum, "majoring": np.maximum}.get(self._summation)
        heights = (y[:-1] + y[1:]) / 2 if pick is None else pick(y[:-1], y[1:])
        return float(((x[:-1] - x[1:]) * heights).sum())

    @staticmethod
    @may_underflow
    def _interpolated(true: np.ndarray, false: np.ndarray, missed: np.ndarray) -> float:
        """The area where true positives are linear in all positives between two thresholds."""
        found = true + false
        slope = ratio(true[:-1] - true[1:], np.maximum(found[:-1] - found[1:], 0))
        intercept = true[1:] - slope * found[1:]
        both = (found[:-1] > 0) & (found[1:] > 0)
        growth = np.where(both, ratio(found[:-1], np.where(both, found[1:], 1)), 1)
        areas = slope * (true[:-1] - true[1:] + intercept * np.log(growth))
        return float(ratio(areas, true[1:] + missed[1:]).sum())
