"""Metrics of regression and classification, with Keras's names, arguments and numbers (https://keras.io/api/metrics/)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from ..base.arguments import integer
from ..base.errors import explain
from ..base.limits import POSITIVE, UP_TO_ONE, Limits, flag, number
from ..base.underflow import may_underflow
from .metric import UPDATE, MeanOf, Metric, host, ratio, same_rank

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "CategoricalHinge",
    "ConcordanceCorrelation",
    "CosineSimilarity",
    "F1Score",
    "FBetaScore",
    "FalseNegatives",
    "FalsePositives",
    "Hinge",
    "IoU",
    "KLDivergence",
    "LogCoshError",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanIoU",
    "MeanMetricWrapper",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "PearsonCorrelation",
    "Poisson",
    "Precision",
    "R2Score",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "SquaredHinge",
    "TopKCategoricalAccuracy",
    "TrueNegatives",
    "TruePositives",
    "get_metric",
]

_SMALLEST = 1e-7  # Keras's epsilon
_ANY = Limits("a number", lambda value: not math.isnan(value))


def _single(array: np.ndarray) -> np.ndarray:
    """Return floats as float32, in which Keras compares: 0.2 in float64 is less than 0.2 in float32."""
    return array if array.dtype.kind in "biu" else array.astype(np.float32, copy=False)


def _one_of(function: str, argument: str, value: Any, legal: Sequence[str | None]) -> Any:
    if value not in legal:
        raise ValueError(explain(function, argument, expected=" or ".join(map(str, legal)), got=repr(value)))
    return value


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


@final
class MeanAbsolutePercentageError(MeanOf):
    """The mean of absolute differences relative to the labels, in percent."""

    def __init__(self, name: str = "mean_absolute_percentage_error") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels, _ = same_rank(y_true, y_pred)
        return 100 * np.abs(_difference(y_true, y_pred)) / np.maximum(np.abs(labels.astype(np.float64)), _SMALLEST)


@final
class MeanSquaredLogarithmicError(MeanOf):
    """The mean of squared differences of log(1 + x); negative numbers count as 0."""

    def __init__(self, name: str = "mean_squared_logarithmic_error") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels, scores = (np.log1p(np.maximum(array, _SMALLEST)) for array in _doubles(y_true, y_pred))
        return np.square(scores - labels)


@final
class LogCoshError(MeanOf):
    """The mean of log(cosh(prediction - label))."""

    def __init__(self, name: str = "logcosh") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        size = np.abs(_difference(y_true, y_pred))
        return size + np.log1p(np.exp(-2 * size)) - math.log(2)


@final
class Poisson(MeanOf):
    """The mean of prediction - label * log(prediction): the negative log-likelihood of counts, up to a constant."""

    def __init__(self, name: str = "poisson") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels, scores = _doubles(y_true, y_pred)
        return scores - labels * np.log(scores + _SMALLEST)


@final
class R2Score(Metric):
    """The coefficient of determination: 1 - squared errors / squared deviations of the labels from their mean.

    Keras finds the number of outputs in the first batch. Here it is an argument, because all ranks make the sums together.

    Args:
        num_outputs: the size of the last dimension of labels and predictions.
        class_aggregation: "uniform_average" or "variance_weighted_average" over the outputs; None for an array.
        num_regressors: the number of independent variables, for the adjusted score; 0 for the plain one.
        name: under which `results` returns it.

    Raises:
        ValueError: an argument out of range, or rows of another number of outputs.

    Example:
        >>> score = ms.train.R2Score()
        >>> score.update_state([[1.0], [4.0], [3.0]], [[2.0], [4.0], [4.0]])
        >>> round(score.result(), 4)
        0.5714
    """

    def __init__(
        self,
        num_outputs: int = 1,
        class_aggregation: str | None = "uniform_average",
        num_regressors: int = 0,
        name: str = "r2_score",
    ) -> None:
        self._outputs = integer("R2Score", "num_outputs", num_outputs, 1)
        self._mean = _one_of(
            "R2Score", "class_aggregation", class_aggregation, ("uniform_average", "variance_weighted_average", None)
        )
        self._regressors = integer("R2Score", "num_regressors", num_regressors, 0)
        super().__init__(name, 4 * self._outputs + 1)

    @may_underflow
    def added(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> np.ndarray:
        labels, scores = _doubles(*same_rank(*host(y_true=y_true, y_pred=y_pred)))
        labels, scores = (array[:, None] if array.ndim == 1 else array for array in (labels, scores))
        _expect_columns("R2Score", labels, self._outputs)
        _expect_columns("R2Score", scores, self._outputs)
        weights = _row_weights(sample_weight, labels.shape)
        sums = (labels * weights, labels * labels * weights, np.square(labels - scores) * weights, weights)
        return np.concatenate([*(array.sum(0) for array in sums), [labels.size]])

    @may_underflow
    def result_of(self, sums: np.ndarray) -> Any:
        first, squares, errors, weights = np.split(sums[:-1], 4)
        with np.errstate(divide="ignore", invalid="ignore"):  # labels that are all equal, and no row
            deviations = squares - first * first / weights
            deviations[deviations <= 1e-13 * squares] = 0  # of equal labels rounding is left
            scores = 1 - errors / deviations
            scores[np.isinf(scores)] = 0
            if self._mean == "uniform_average":
                scores = scores.mean()
            elif self._mean is not None:
                scores = (deviations * scores).sum() / deviations.sum()
        left = sums[-1] - self._regressors - 1
        if self._regressors and left > 0:
            scores = 1 - (1 - scores) * (sums[-1] - 1) / left
        return scores if self._mean is None else float(scores)


def _doubles(y_true: np.ndarray, y_pred: np.ndarray) -> Sequence[np.ndarray]:
    return [array.astype(np.float64) for array in same_rank(y_true, y_pred)]


def _expect_columns(function: str, array: np.ndarray, columns: int) -> None:
    if array.ndim != 2 or array.shape[1] != columns:
        expected, got = f"arrays of shape (rows, {columns})", f"shape {array.shape}"
        raise ValueError(explain(f"{function}.update_state", "y_true, y_pred", expected=expected, got=got))


def _row_weights(sample_weight: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weight of each element of rows: of a number, one for each row, or one for each element."""
    if sample_weight is None:
        return np.ones(shape)
    (weights,) = host(sample_weight=sample_weight)
    weights = weights[:, None] if weights.ndim == 1 else weights
    return np.broadcast_to(weights.astype(np.float64), shape)


# Directions and distributions of rows


@final
class CosineSimilarity(MeanOf):
    """The mean cosine of the angle between the rows of labels and predictions; 0 of a row of zeros.

    Example:
        >>> similarity = ms.train.CosineSimilarity()
        >>> similarity.update_state([[0.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [1.0, 1.0]])
        >>> round(similarity.result(), 4)
        0.5
    """

    def __init__(self, name: str = "cosine_similarity") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels, scores = (
            array / np.maximum(np.linalg.norm(array, axis=-1, keepdims=True), _SMALLEST)
            for array in _doubles(y_true, y_pred)
        )
        return np.asarray((labels * scores).sum(-1))


@final
class PearsonCorrelation(MeanOf):
    """The mean over rows of the correlation between labels and predictions of the row; NaN where all of one are equal."""

    def __init__(self, name: str = "pearson_correlation") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels, scores = (array - array.mean(-1, keepdims=True) for array in _doubles(y_true, y_pred))
        with np.errstate(invalid="ignore"):
            return np.asarray((labels * scores).mean(-1) / (labels.std(-1) * scores.std(-1)))


@final
class ConcordanceCorrelation(MeanOf):
    """The mean over rows of Lin's concordance correlation coefficient (1989), https://doi.org/10.2307/2532051."""

    def __init__(self, name: str = "concordance_correlation") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels, scores = _doubles(y_true, y_pred)
        means = labels.mean(-1), scores.mean(-1)
        covariance = (labels * scores).mean(-1) - means[0] * means[1]
        return np.asarray(
            2 * covariance / (labels.var(-1) + scores.var(-1) + np.square(means[0] - means[1]) + _SMALLEST)
        )


@final
class KLDivergence(MeanOf):
    """The mean Kullback-Leibler divergence of predicted from true probabilities, over the last dimension."""

    def __init__(self, name: str = "kl_divergence") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels, scores = (np.clip(array, _SMALLEST, 1) for array in _doubles(y_true, y_pred))
        return np.asarray((labels * np.log(labels / scores)).sum(-1))


# Hinge losses


@final
class Hinge(MeanOf):
    """The mean of max(1 - label * prediction, 0), of labels -1 and 1; a label 0 counts as -1."""

    def __init__(self, name: str = "hinge") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return _hinge(y_true, y_pred)


@final
class SquaredHinge(MeanOf):
    """The mean of max(1 - label * prediction, 0)**2, of labels -1 and 1; a label 0 counts as -1."""

    def __init__(self, name: str = "squared_hinge") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return np.square(_hinge(y_true, y_pred))


@final
class CategoricalHinge(MeanOf):
    """The mean of max(1 + largest score of another class - score of the class, 0); labels one-hot."""

    def __init__(self, name: str = "categorical_hinge") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels, scores = _doubles(y_true, y_pred)
        return np.asarray(np.maximum(((1 - labels) * scores).max(-1) - (labels * scores).sum(-1) + 1, 0))


def _hinge(y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    labels, scores = _doubles(y_true, y_pred)
    return np.maximum(1 - np.where(labels == 0, -1, labels) * scores, 0)


# Accuracy


@final
class Accuracy(MeanOf):
    """The fraction of predictions that equal their label.

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
    """The fraction of predictions above a threshold for label 1, and not above it for 0."""

    def __init__(self, name: str = "binary_accuracy", threshold: float = 0.5) -> None:
        super().__init__(name)
        self.threshold = number("BinaryAccuracy", "threshold", threshold, _ANY)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        y_true, y_pred = same_rank(y_true, y_pred)
        return y_true == (_single(y_pred) > np.float32(self.threshold))


@final
class CategoricalAccuracy(MeanOf):
    """The fraction of rows whose largest prediction is of their class; labels one-hot."""

    def __init__(self, name: str = "categorical_accuracy") -> None:
        super().__init__(name)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return _largest(y_true) == _largest(y_pred)


@final
class SparseCategoricalAccuracy(MeanOf):
    """The fraction of rows whose largest prediction is of their class; labels as class numbers.

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
    """The fraction of rows whose class is among the k largest predictions; labels one-hot. Equal predictions share a rank."""

    def __init__(self, k: int = 5, name: str = "top_k_categorical_accuracy") -> None:
        super().__init__(name)
        self.k = integer(type(self).__name__, "k", k, 0)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return _in_top_k(_largest(y_true), y_pred, self.k)


@final
class SparseTopKCategoricalAccuracy(MeanOf):
    """The fraction of rows whose class is among the k largest predictions; labels as class numbers. Equal ones share a rank."""

    def __init__(self, k: int = 5, name: str = "sparse_top_k_categorical_accuracy") -> None:
        super().__init__(name)
        self.k = integer(type(self).__name__, "k", k, 0)

    @may_underflow
    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return _in_top_k(_classes(y_true, y_pred), y_pred, self.k)


def _largest(scores: np.ndarray) -> np.ndarray:
    """Return the index of the largest score of each row; NaN is less than all."""
    return (scores if scores.dtype.kind in "biu" else np.where(np.isnan(scores), -np.inf, scores)).argmax(-1)


def _labels(y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    """Return the label of each row, which may be out of range."""
    labels = y_true[..., 0] if y_true.ndim == y_pred.ndim and y_true.shape[-1] == 1 else y_true
    return labels.astype(np.float32) if labels.dtype.kind == "V" else labels  # bfloat16


def _classes(y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    """Return the class number of each row.

    Raises:
        ValueError: a label is not an integer.
    """
    return _integers("y_true", _labels(y_true, y_pred))


def _integers(argument: str, labels: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        classes = labels.astype(np.int64, copy=False)
    _refuse(argument, labels, classes != labels, "numbers of classes, which are integers")
    return classes


def _refuse(argument: str, labels: np.ndarray, wrong: np.ndarray, expected: str) -> None:
    if wrong.any():
        raise ValueError(explain(UPDATE, argument, expected=expected, got=str(labels[wrong][0])))


def _inside(classes: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    return (classes >= 0) & (classes < y_pred.shape[-1])


def _of_class(classes: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    return np.take_along_axis(y_pred, classes[..., None], -1)


def _in_top_k(classes: np.ndarray, y_pred: np.ndarray, k: int) -> np.ndarray:
    """Return whether classes are among the k largest: False out of range, and in rows with NaN or an infinity."""
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
        _refuse("y_true", classes, ~_inside(classes, y_pred), f"numbers of {y_pred.shape[-1]} classes, counted from 0")
        return -_of_class(classes, _logarithms(y_pred, self.from_logits))[..., 0]


def _logarithms(y_pred: np.ndarray, from_logits: bool) -> np.ndarray:
    """Return the logarithms of predicted probabilities."""
    scores = y_pred.astype(np.float64)
    if from_logits:
        scores = scores - scores.max(-1, keepdims=True)
        return np.asarray(scores - np.log(np.exp(scores).sum(-1, keepdims=True)))
    return np.log(np.clip(scores / scores.sum(-1, keepdims=True), _SMALLEST, 1 - _SMALLEST))


# Positives and negatives


class _Thresholds(Metric):
    """True and false positives above each threshold, and the weight of all positive and negative rows."""

    def __init__(self, name: str, thresholds: Sequence[float], evenly: bool) -> None:
        super().__init__(name, 2 * len(thresholds) + 2)
        numbers = np.asarray(thresholds, np.float32)  # as Keras compares
        self._order = np.argsort(numbers, kind="stable")
        self._ascending = numbers[self._order]
        self._evenly = evenly

    def _exceeded(self, scores: np.ndarray) -> np.ndarray:
        """Return the number of thresholds below each score; 0 for NaN.

        Like Keras, compute it for even thresholds instead of comparing: a score that equals one differs.
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
        """Return the sums of a batch's rows: all labels except 0 are positive."""
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
    """Counts of decisions at each threshold."""

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
    """The fraction of positive predictions that are right: a number, or an array for several thresholds.

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
    """The fraction of positive labels that are found: a number, or an array for several thresholds."""

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


class _Count(_Decisions):
    """The weight of the rows of one kind at each threshold."""

    _kind: int  # in `parts`
    _default_name: str

    def __init__(self, thresholds: float | Sequence[float] | None = None, name: str | None = None) -> None:
        super().__init__(thresholds, None, None, self._default_name if name is None else name)

    def result_of(self, sums: np.ndarray) -> Any:
        return self.number_or_array(self.parts(sums)[self._kind])


@final
class TruePositives(_Count):
    """The number of rows of label 1 above the threshold: a number, or an array for several thresholds.

    Example:
        >>> found = ms.train.TruePositives()
        >>> found.update_state([0, 1, 1, 1], [1, 0, 1, 1])
        >>> found.result()
        2.0
    """

    _kind, _default_name = 0, "true_positives"


@final
class FalsePositives(_Count):
    """The number of rows of label 0 above the threshold: a number, or an array for several thresholds."""

    _kind, _default_name = 1, "false_positives"


@final
class FalseNegatives(_Count):
    """The number of rows of label 1 at or below the threshold: a number, or an array for several thresholds."""

    _kind, _default_name = 2, "false_negatives"


@final
class TrueNegatives(_Count):
    """The number of rows of label 0 at or below the threshold: a number, or an array for several thresholds."""

    _kind, _default_name = 3, "true_negatives"


@final
class AUC(_Thresholds):
    """The area under the curve of true over false positives (ROC), or of precision over recall (PR).

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
        self._curve = _one_of("AUC", "curve", curve, ("ROC", "PR"))
        methods = ("interpolation", "minoring", "majoring")
        self._summation = _one_of("AUC", "summation_method", summation_method, methods)
        num_thresholds = integer("AUC", "num_thresholds", num_thresholds, 2)
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
        """Return the area if true positives are linear in all positives between two thresholds."""
        found = true + false
        slope = ratio(true[:-1] - true[1:], np.maximum(found[:-1] - found[1:], 0))
        intercept = true[1:] - slope * found[1:]
        both = (found[:-1] > 0) & (found[1:] > 0)
        growth = np.where(both, ratio(found[:-1], np.where(both, found[1:], 1)), 1)
        areas = slope * (true[:-1] - true[1:] + intercept * np.log(growth))
        return float(ratio(areas, true[1:] + missed[1:]).sum())


# Counts of each class


class FBetaScore(Metric):
    """The weighted harmonic mean of precision and recall, of each class or over all.

    Keras finds the number of classes in the first batch. Here it is an argument, because all ranks make the sums together.

    Args:
        num_classes: the size of the last dimension of labels and predictions.
        average: None for an array with a score for each class; "micro" counts all classes together; "macro" is the mean over
            classes; "weighted" the mean by the number of labels of each class.
        beta: the weight of recall relative to precision.
        threshold: predictions above it count as 1. With None the largest prediction of each row does.
        name: under which `results` returns it.

    Raises:
        ValueError: an argument out of range, or rows of another number of classes.
    """

    def __init__(
        self,
        num_classes: int,
        average: str | None = None,
        beta: float = 1.0,
        threshold: float | None = None,
        name: str = "fbeta_score",
    ) -> None:
        function = type(self).__name__
        self._classes = integer(function, "num_classes", num_classes, 1)
        self._average = _one_of(function, "average", average, (None, "micro", "macro", "weighted"))
        self._beta = number(function, "beta", beta, POSITIVE)
        self._threshold = None if threshold is None else number(function, "threshold", threshold, UP_TO_ONE)
        super().__init__(name, 3 * self._classes)

    @may_underflow
    def added(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> np.ndarray:
        labels, scores = host(y_true=y_true, y_pred=y_pred)
        _expect_columns(type(self).__name__, labels, self._classes)
        _expect_columns(type(self).__name__, scores, self._classes)
        scores, labels = scores.astype(np.float32, copy=False), labels.astype(np.float64)
        if self._threshold is None:
            chosen = (scores >= scores.max(-1, keepdims=True, initial=-np.inf)) & (np.abs(scores) > 1e-9)
        else:
            chosen = scores > np.float32(self._threshold)
        weights = _row_weights(sample_weight, labels.shape)
        sums = (chosen * labels, chosen * (1 - labels), ~chosen * labels)
        return np.concatenate([(array * weights).sum(0) for array in sums])

    @may_underflow
    def result_of(self, sums: np.ndarray) -> Any:
        true, false, missed = np.split(sums, 3)
        support = true + missed
        if self._average == "micro":
            true, false, missed = true.sum(), false.sum(), missed.sum()
        weight = self._beta**2
        scores = ratio((1 + weight) * true, (1 + weight) * true + weight * missed + false)
        if self._average is None:
            return scores
        return float(ratio((scores * support).sum(), support.sum()) if self._average == "weighted" else scores.mean())


@final
class F1Score(FBetaScore):
    """The harmonic mean of precision and recall, of each class or over all: `FBetaScore` with beta 1.

    Example:
        >>> score = ms.train.F1Score(num_classes=2, average="macro")
        >>> predictions = [[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]
        >>> score.update_state([[1, 0], [0, 1], [0, 1]], predictions)
        >>> round(score.result(), 4)
        0.6667
    """

    def __init__(
        self, num_classes: int, average: str | None = None, threshold: float | None = None, name: str = "f1_score"
    ) -> None:
        super().__init__(num_classes, average, 1.0, threshold, name)


class IoU(Metric):
    """The mean over classes of intersection over union: rows of the class found, by rows labelled or found as the class.

    Classes without a row, labelled or found, are left out. Rows whose label or prediction is not a class are left out, too.

    Args:
        num_classes: the number of classes.
        target_class_ids: the classes whose mean is the result.
        ignore_class: a label whose rows are left out, such as 255 for "void".
        sparse_y_true, sparse_y_pred: whether labels and predictions are numbers of classes; else a score for each class in the
            last dimension, the largest of which counts.
        name: under which `results` returns it.

    Raises:
        ValueError: a class is out of range.
    """

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        name: str = "io_u",
    ) -> None:
        function = type(self).__name__
        self._classes = integer(function, "num_classes", num_classes, 1)
        self._targets = [integer(function, "target_class_ids", each, 0) for each in target_class_ids]
        if not self._targets or max(self._targets) >= self._classes:
            expected = f"classes from 0 to {self._classes - 1}"
            raise ValueError(explain(function, "target_class_ids", expected=expected, got=list(target_class_ids)))
        self._ignored = None if ignore_class is None else integer(function, "ignore_class", ignore_class)
        self._sparse = flag(function, "sparse_y_true", sparse_y_true), flag(function, "sparse_y_pred", sparse_y_pred)
        super().__init__(name, self._classes**2)

    @may_underflow
    def added(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> np.ndarray:
        arrays = zip(("y_true", "y_pred"), host(y_true=y_true, y_pred=y_pred), self._sparse, strict=True)
        labels, found = (
            (_integers(argument, array) if sparse else array.argmax(-1)).reshape(-1)
            for argument, array, sparse in arrays
        )
        if labels.size != found.size:
            expected, got = "labels and predictions of as many rows", f"{labels.size} and {found.size}"
            raise ValueError(explain(UPDATE, "y_true, y_pred", expected=expected, got=got))
        weights: Any = 1.0
        if sample_weight is not None:
            (weights,) = host(sample_weight=sample_weight)
            weights = weights.reshape(-1) if weights.ndim else weights
        known = (labels >= 0) & (labels < self._classes) & (found >= 0) & (found < self._classes)
        if self._ignored is not None:
            known &= labels != self._ignored
        cells = labels[known] * self._classes + found[known]
        counted = np.broadcast_to(weights, labels.shape)[known].astype(np.float64)
        return np.bincount(cells, counted, self._classes**2)

    @may_underflow
    def result_of(self, sums: np.ndarray) -> float:
        matrix = sums.reshape(self._classes, self._classes)
        both = np.diag(matrix)
        either = matrix.sum(0) + matrix.sum(1) - both
        seen = either[self._targets] > 0
        return float(ratio(ratio(both, either)[self._targets].sum(), seen.sum()))


@final
class MeanIoU(IoU):
    """The mean over all classes of intersection over union.

    Example:
        >>> score = ms.train.MeanIoU(num_classes=2)
        >>> score.update_state([0, 0, 1, 1], [0, 1, 0, 1])
        >>> round(score.result(), 4)
        0.3333
    """

    def __init__(
        self,
        num_classes: int,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        name: str = "mean_io_u",
    ) -> None:
        classes = range(integer("MeanIoU", "num_classes", num_classes, 1))
        super().__init__(num_classes, classes, ignore_class, sparse_y_true, sparse_y_pred, name)


# By function and by name


@final
class MeanMetricWrapper(MeanOf):
    """The weighted mean over rows of a function of labels and predictions.

    Args:
        fn: called with y_true and y_pred, arrays of NumPy, and the settings; returns a value for each row, or for each element.
        name: under which `results` returns it; default the function's.
        settings: further arguments of the function.

    Example:
        >>> def misses(y_true, y_pred, limit):
        ...     return abs(y_true - y_pred) > limit
        >>> metric = ms.train.MeanMetricWrapper(misses, limit=0.5)
        >>> metric.update_state([0, 1], [0.1, 0.2])
        >>> metric.name, metric.result()
        ('misses', 0.5)
    """

    def __init__(self, fn: Callable[..., Any], name: str | None = None, **settings: Any) -> None:
        super().__init__(getattr(fn, "__name__", type(fn).__name__) if name is None else name)
        self._fn, self._settings = fn, settings

    def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        (found,) = host(values=self._fn(y_true, y_pred, **self._settings))
        return found


_SHORT = {
    "bce": "BinaryCrossentropy",
    "mse": "MeanSquaredError",
    "mae": "MeanAbsoluteError",
    "mape": "MeanAbsolutePercentageError",
    "msle": "MeanSquaredLogarithmicError",
}


def get_metric(identifier: str | Callable[..., Any], **settings: Any) -> Metric:
    """Return a new metric by Keras's name of it, or of a function of labels and predictions. Collective, in a scope.

    Args:
        identifier: "MeanSquaredError", "mean_squared_error", "mse" or "MSE", and so on for each metric; or a function for
            `MeanMetricWrapper`.
        settings: arguments of the metric, or of the function.

    Raises:
        ValueError: there is no such metric.

    Example:
        >>> metric = ms.train.get_metric("binary_accuracy", threshold=0.3)
        >>> metric.name, ms.train.get_metric("mse").name
        ('binary_accuracy', 'mean_squared_error')
    """
    if not isinstance(identifier, str):
        return MeanMetricWrapper(identifier, **settings)
    kinds = {name: globals()[name] for name in __all__ if name not in ("MeanMetricWrapper", "get_metric")}
    named = {_snake(name): kind for name, kind in kinds.items()} | {name: kinds[full] for name, full in _SHORT.items()}
    found = (
        kinds.get(identifier) or named.get(identifier) or named.get(identifier.lower() if identifier.isupper() else "")
    )
    if found is None:
        raise ValueError(
            explain("get_metric", "identifier", expected=f"one of {', '.join(named)}", got=repr(identifier))
        )
    metric: Metric = found(**settings)
    return metric


def _snake(name: str) -> str:
    """Return a class's name as Keras writes it in lower case."""
    spaced = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", spaced).lower()
