"""Metrics: the numbers of Keras's documentation, of arithmetic, and of a definition by pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat as ms

t = ms.train


def result(metric, *batches, weight=None):
    for batch in batches:
        metric.update_state(*batch, **({} if weight is None else {"sample_weight": weight}))
    return metric.result()


LOGITS = [[2.0, 1.0, 0.0], [0.0, 3.0, 0.0]]
# What Keras's pages of the metrics show, with and without weights.
DOCUMENTED = [
    (lambda: t.Sum(), ([1, 3, 5, 7],), None, 16.0),
    (lambda: t.Sum(), ([1, 3, 5, 7],), [1, 1, 0, 0], 4.0),
    (lambda: t.Mean(), ([1, 3, 5, 7],), None, 4.0),
    (lambda: t.Mean(), ([1, 3, 5, 7],), [1, 1, 0, 0], 2.0),
    (lambda: t.MeanSquaredError(), ([[0, 1], [0, 0]], [[1, 1], [0, 0]]), None, 0.25),
    (lambda: t.MeanSquaredError(), ([[0, 1], [0, 0]], [[1, 1], [0, 0]]), [1, 0], 0.5),
    (lambda: t.MeanAbsoluteError(), ([[0, 1], [0, 0]], [[1, 1], [0, 0]]), [1, 0], 0.5),
    (lambda: t.RootMeanSquaredError(), ([[0, 1], [0, 0]], [[1, 1], [0, 0]]), None, 0.5),
    (lambda: t.RootMeanSquaredError(), ([[0, 1], [0, 0]], [[1, 1], [0, 0]]), [1, 0], 0.70710677),
    (lambda: t.Accuracy(), ([[1], [2], [3], [4]], [[0], [2], [3], [4]]), None, 0.75),
    (lambda: t.Accuracy(), ([[1], [2], [3], [4]], [[0], [2], [3], [4]]), [1, 1, 0, 0], 0.5),
    (lambda: t.BinaryAccuracy(), ([[1], [1], [0], [0]], [[0.98], [1], [0], [0.6]]), None, 0.75),
    (lambda: t.BinaryAccuracy(), ([[1], [1], [0], [0]], [[0.98], [1], [0], [0.6]]), [1, 0, 0, 1], 0.5),
    (lambda: t.CategoricalAccuracy(), ([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]]), None, 0.5),
    (lambda: t.CategoricalAccuracy(), ([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]]), [0.7, 0.3], 0.3),
    (lambda: t.SparseCategoricalAccuracy(), ([[2], [1]], [[0.1, 0.6, 0.3], [0.05, 0.95, 0]]), None, 0.5),
    (lambda: t.SparseCategoricalAccuracy(), ([[2], [1]], [[0.1, 0.6, 0.3], [0.05, 0.95, 0]]), [0.7, 0.3], 0.3),
    (lambda: t.TopKCategoricalAccuracy(k=1), ([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]]), None, 0.5),
    (lambda: t.SparseTopKCategoricalAccuracy(k=1), ([2, 1], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]]), [0.7, 0.3], 0.3),
    (lambda: t.BinaryCrossentropy(), ([[0, 1], [0, 0]], [[0.6, 0.4], [0.4, 0.6]]), None, 0.81492424),
    (lambda: t.BinaryCrossentropy(), ([[0, 1], [0, 0]], [[0.6, 0.4], [0.4, 0.6]]), [1, 0], 0.9162905),
    (lambda: t.CategoricalCrossentropy(), ([[0, 1, 0], [0, 0, 1]], [[0.05, 0.95, 0], [0.1, 0.8, 0.1]]), None, 1.1769392),
    (
        lambda: t.CategoricalCrossentropy(),
        ([[0, 1, 0], [0, 0, 1]], [[0.05, 0.95, 0], [0.1, 0.8, 0.1]]), [0.3, 0.7], 1.6271976,
    ),
    (lambda: t.SparseCategoricalCrossentropy(), ([1, 2], [[0.05, 0.95, 0], [0.1, 0.8, 0.1]]), None, 1.1769392),
    (lambda: t.Precision(), ([0, 1, 1, 1], [1, 0, 1, 1]), None, 2 / 3),
    (lambda: t.Precision(), ([0, 1, 1, 1], [1, 0, 1, 1]), [0, 0, 1, 0], 1.0),
    (lambda: t.Precision(top_k=2), ([0, 0, 1, 1], [1, 1, 1, 1]), None, 0.0),
    (lambda: t.Precision(top_k=4), ([0, 0, 1, 1], [1, 1, 1, 1]), None, 0.5),
    (lambda: t.Recall(), ([0, 1, 1, 1], [1, 0, 1, 1]), None, 2 / 3),
    (lambda: t.Recall(), ([0, 1, 1, 1], [1, 0, 1, 1]), [0, 0, 1, 0], 1.0),
    (lambda: t.AUC(num_thresholds=3), ([0, 0, 1, 1], [0, 0.5, 0.3, 0.9]), None, 0.75),
    (lambda: t.AUC(num_thresholds=3), ([0, 0, 1, 1], [0, 0.5, 0.3, 0.9]), [1, 0, 0, 1], 1.0),
    (lambda: t.MeanAbsolutePercentageError(), ([[0, 1], [0, 0]], [[1, 1], [0, 0]]), None, 250000000.0),
    (lambda: t.MeanSquaredLogarithmicError(), ([[0, 1], [0, 0]], [[1, 1], [0, 0]]), None, 0.12011322),
    (lambda: t.CosineSimilarity(), ([[0.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [1.0, 1.0]]), [0.3, 0.7], 0.7),
    (lambda: t.LogCoshError(), ([[0, 1], [0, 0]], [[1, 1], [0, 0]]), None, 0.10844523),
    (lambda: t.R2Score(), ([[1], [4], [3]], [[2], [4], [4]]), None, 0.57142854),
    (lambda: t.KLDivergence(), ([[0, 1], [0, 0]], [[0.6, 0.4], [0.4, 0.6]]), None, 0.45814306),
    (lambda: t.Poisson(), ([[0, 1], [0, 0]], [[1, 1], [0, 0]]), None, 0.49999997),
    (lambda: t.Hinge(), ([[0, 1], [0, 0]], [[0.6, 0.4], [0.4, 0.6]]), None, 1.3),
    (lambda: t.Hinge(), ([[0, 1], [0, 0]], [[0.6, 0.4], [0.4, 0.6]]), [1, 0], 1.1),
    (lambda: t.SquaredHinge(), ([[0, 1], [0, 0]], [[0.6, 0.4], [0.4, 0.6]]), None, 1.86),
    (lambda: t.CategoricalHinge(), ([[0, 1], [0, 0]], [[0.6, 0.4], [0.4, 0.6]]), None, 1.4),
    (lambda: t.PearsonCorrelation(), ([[0, 1, 0.5], [1, 1, 0.2]], [[0.1, 0.9, 0.5], [1, 0.9, 0.2]]), None, 0.99669963),
    (lambda: t.FalsePositives(), ([0, 1, 0, 0], [0, 0, 1, 1]), [0, 0, 1, 0], 1.0),
    (lambda: t.FalseNegatives(), ([0, 1, 1, 1], [0, 1, 0, 0]), [0, 0, 1, 0], 1.0),
    (lambda: t.TrueNegatives(), ([0, 1, 0, 0], [1, 1, 0, 0]), [0, 0, 1, 0], 1.0),
    (lambda: t.TruePositives(), ([0, 1, 1, 1], [1, 0, 1, 1]), [0, 0, 1, 0], 1.0),
    (lambda: t.MeanIoU(2), ([0, 0, 1, 1], [0, 1, 0, 1]), None, 1 / 3),
    (lambda: t.MeanIoU(2), ([0, 0, 1, 1], [0, 1, 0, 1]), [0.3, 0.3, 0.3, 0.1], 0.23809525),
    (lambda: t.IoU(2, [0]), ([0, 0, 1, 1], [0, 1, 0, 1]), [0.3, 0.3, 0.3, 0.1], 1 / 3),
    # By arithmetic: softmax(2, 1, 0)[1] and softmax(0, 3, 0)[1].
    (
        lambda: t.SparseCategoricalCrossentropy(from_logits=True), ([1, 1], LOGITS), None,
        -(math.log(math.e / (math.e**2 + math.e + 1)) + math.log(math.e**3 / (math.e**3 + 2))) / 2,
    ),
    (
        lambda: t.BinaryCrossentropy(from_logits=True), ([[1.0], [0.0]], [[2.0], [-1.0]]), None,
        (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(-1))) / 2,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", DOCUMENTED, ids=[str(i) for i in range(len(DOCUMENTED))])
def test_documented_numbers(case):
    make, batch, weight, expected = case
    assert result(make(), [np.asarray(array) for array in batch], weight=weight) == pytest.approx(expected, rel=1e-6)


def test_several_thresholds_give_arrays():
    labels, scores = [0, 1, 1, 0, 1], [0.2, 0.3, 0.8, 0.6, 0.9]
    assert result(t.Precision([0.1, 0.5, 0.85]), (labels, scores)).tolist() == [3 / 5, 2 / 3, 1]
    assert result(t.Recall([0.85, 0.1, 0.5]), (labels, scores)).tolist() == [1 / 3, 1, 2 / 3]
    one_class = t.Recall(class_id=1)
    assert result(one_class, ([[0, 1], [1, 1], [1, 0]], [[0, 0.9], [0.9, 0.2], [0.1, 0.7]])) == 0.5


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8)), min_size=2, max_size=40))
@settings(deadline=None)
def test_the_area_is_the_part_of_pairs_in_order(rows):
    """Where no score falls on a threshold: a pair of equal scores counts half (Mann and Whitney)."""
    labels, scores = np.array([a for a, _ in rows]), np.array([(b + 0.5) / 9 for _, b in rows])
    if labels.all() or not labels.any():
        return
    above = np.subtract.outer(scores[labels], scores[~labels])
    expected = ((above > 0) + 0.5 * (above == 0)).mean()
    assert result(t.AUC(num_thresholds=10), (labels, scores)) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.integers(0, 10), min_size=1, max_size=5), st.integers(0, 2**31))
@settings(deadline=None, max_examples=25)
def test_batches_give_what_all_rows_give(sizes, seed):
    rng = np.random.default_rng(seed)
    labels, scores = rng.integers(0, 2, sum(sizes)), rng.random(sum(sizes))
    ends = np.cumsum(sizes)[:-1]
    batches = list(zip(np.split(labels, ends), np.split(scores, ends), strict=True))
    for make in (t.AUC, t.Precision, t.MeanSquaredError, t.BinaryCrossentropy):
        assert result(make(), *batches) == pytest.approx(result(make(), (labels, scores)), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("make", [t.Precision, t.AUC, t.MeanSquaredError, t.BinaryCrossentropy])
def test_shapes_of_a_column_are_of_its_rows(make):
    rng = np.random.default_rng(0)
    labels, scores, weights = rng.integers(0, 2, 20), rng.random(20), rng.random(20)
    expected = result(make(), (labels, scores), weight=weights)
    for columns in ((0, 1, 2), (0,), (1,), (2,), (0, 1), (1, 2)):
        a, b, c = (array[:, None] if i in columns else array for i, array in enumerate((labels, scores, weights)))
        assert result(make(), (a, b), weight=c) == pytest.approx(expected, rel=1e-12)


def test_no_row_gives_zero():
    for metric in (t.Mean(), t.Precision(), t.AUC(), t.RootMeanSquaredError(), t.MeanIoU(3), t.F1Score(3, "macro")):
        assert metric.result() == 0


@pytest.mark.filterwarnings("error")
def test_a_coefficient_of_determination_of_no_row_is_not_a_number():
    assert math.isnan(t.R2Score().result())


LABELS = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
SCORES = np.array([[0.2, 0.6, 0.7], [0.2, 0.6, 0.6], [0.6, 0.8, 0.0]])


@pytest.mark.parametrize(
    ("average", "expected"),  # the first is of Keras's page; support 3, 2, 1; counts 4 of 5 found and 6 there
    [
        (None, [0.5, 0.8, 2 / 3]),
        ("macro", (0.5 + 0.8 + 2 / 3) / 3),
        ("weighted", (0.5 * 3 + 0.8 * 2 + 2 / 3) / 6),
        ("micro", 2 * 4 / (6 + 6)),
    ],
)
def test_f1_of_classes(average, expected):
    assert result(t.F1Score(3, average, threshold=0.5), (LABELS, SCORES)) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [int, np.uint8, bool, np.float16])
def test_f1_of_predictions_of_any_dtype(dtype):
    assert result(t.F1Score(2), (np.eye(2, dtype=dtype), np.eye(2, dtype=dtype))).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("label", [0.1, 1.1, 3.3, 1e8])
def test_equal_labels_have_no_deviation(label):
    assert result(t.R2Score(), ([label] * 7, [label + 1] * 7)) == 0.0


def test_classes_of_an_intersection_are_integers():
    with pytest.raises(ValueError, match=r"y_pred: expected numbers of classes, which are integers, got 1\.5"):
        result(t.MeanIoU(3), ([0, 1], [1.5, 1.0]))
    with pytest.raises(ValueError, match="expected labels and predictions of as many rows, got 2 and 3"):
        result(t.MeanIoU(3), ([0, 1], [1, 1, 2]))
    assert result(t.MeanIoU(3), ([0.0, 1.0], [0.0, 1.0])) == 1.0
    with pytest.raises(
        ValueError, match=r"F1Score.update_state: .*expected arrays of shape \(rows, 3\), got shape \(2, 2\)"
    ):
        result(t.F1Score(3), (np.eye(2), np.eye(2)))


def test_labels_of_hinge_losses_are_read_one_by_one():
    """So that a batch has the same result however its rows are divided over replicas."""
    labels, scores = np.array([[0.0], [-1.0], [1.0]]), np.array([[0.5], [0.5], [0.5]])
    assert result(t.Hinge(), (labels, scores)) == result(t.Hinge(), *zip(labels[:, None], scores[:, None], strict=True))
    assert result(t.Hinge(), (labels, scores)) == pytest.approx((1.5 + 1.5 + 0.5) / 3)


def test_reset_and_several_results_at_once():
    loss, rows = t.Mean("loss"), t.Sum("rows")
    loss.update_state([2.0, 4.0])
    rows.update_state(2)
    assert t.results([loss, rows]) == {"loss": 3.0, "rows": 2.0}
    loss.reset_state()
    assert t.results([loss, rows]) == {"loss": 0.0, "rows": 2.0}
    with pytest.raises(ValueError, match="two of name 'loss'"):
        t.results([loss, t.Mean("loss")])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: t.F1Score(0), "F1Score: num_classes: expected at least 1, got 0"),
        (lambda: t.F1Score(2, "mean"), "F1Score: average: expected None or micro or macro or weighted, got 'mean'"),
        (lambda: t.F1Score(2, threshold=2), "F1Score: threshold: expected a number from 0 to 1, got 2"),
        (lambda: t.FBetaScore(2, beta=0), "FBetaScore: beta: expected a finite number > 0, got 0"),
        (lambda: t.R2Score(class_aggregation="sum"), "R2Score: class_aggregation: expected uniform_average or"),
        (lambda: t.R2Score(num_regressors=-1), "R2Score: num_regressors: expected at least 0, got -1"),
        (lambda: t.IoU(2, [2]), "IoU: target_class_ids: expected classes from 0 to 1, got .2."),
        (lambda: t.IoU(2, []), "IoU: target_class_ids: expected classes from 0 to 1, got ..$"),
        (lambda: t.AUC(curve="ROCK"), "AUC: curve: expected ROC or PR, got 'ROCK'"),
        (lambda: t.AUC(summation_method="most"), "summation_method"),
        (lambda: t.AUC(num_thresholds=1), "num_thresholds: expected at least 2, got 1"),
        (lambda: t.AUC(num_thresholds=2.5), "num_thresholds: expected an integer, got 2.5"),
        (lambda: t.Precision(1.5), "Precision: thresholds: expected a number from 0 to 1, got 1.5"),
        (lambda: t.Precision([0.5, math.nan]), "thresholds: expected a number from 0 to 1, got nan"),
        (lambda: t.Recall("0.5"), "Recall: thresholds: expected a number from 0 to 1, got str '0.5'"),
        (lambda: t.Recall(top_k=-1), "Recall: top_k: expected at least 0, got -1"),
        (lambda: t.Recall(class_id=1.5), "Recall: class_id: expected an integer, got 1.5"),
        (lambda: t.BinaryAccuracy(threshold="0.5"), "threshold: expected a number, got str"),
        (lambda: t.BinaryAccuracy(threshold=math.nan), "threshold: expected a number, got nan"),
        (lambda: t.TopKCategoricalAccuracy(k=1.5), "k: expected an integer, got 1.5"),
        (lambda: t.SparseTopKCategoricalAccuracy(k=-1), "k: expected at least 0, got -1"),
        (lambda: t.BinaryCrossentropy(label_smoothing=2), "label_smoothing: expected a number from 0 to 1, got 2"),
        (lambda: t.CategoricalCrossentropy(label_smoothing="0.1"), "label_smoothing: expected .*, got str"),
        (lambda: t.SparseCategoricalCrossentropy(from_logits="False"), "from_logits: expected True or False, got str"),
    ],
)
def test_wrong_settings_are_named(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@pytest.mark.parametrize(
    ("labels", "predictions", "expected"),
    [(["a", "b"], ["a", "c"], 0.5), ([1 + 1j], [1 + 2j], 0.0), ([True, False], [True, True], 0.5)],
)
def test_what_is_no_float_is_compared_as_it_is(labels, predictions, expected):
    accuracy = ms.train.Accuracy()
    accuracy.update_state(labels, predictions)
    assert accuracy.result() == expected


# NaN > threshold is False, as in Keras: of 4 rows only the last positive one, with 0.9, is positive.
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: t.Precision(), 1.0),
        (lambda: t.Recall(), 0.5),
        (lambda: t.Precision([0.2, 0.7]), [0.5, 1.0]),
        (lambda: t.Recall([0, 0.5, 1]), [0.5, 0.5, 0]),
        (lambda: t.AUC(), 0.25),
    ],
)
def test_a_score_of_nan_is_above_no_threshold(make, expected):
    assert np.asarray(result(make(), ([0, 1, 1, 0], [0.3, np.nan, 0.9, np.nan]))).tolist() == expected


@pytest.mark.parametrize(
    ("row", "largest", "in_top"),
    [([np.nan, 0.5, 0.6], 2, []), ([0.6, 0.5, np.nan], 0, []), ([np.nan] * 3, 0, []), ([0.1, 0.3, 0.2], 1, [1, 2])],
)
def test_nan_is_less_than_all_and_in_no_top_k(row, largest, in_top):
    """As Keras computes with TensorFlow."""
    for label in range(3):
        one_hot = [np.eye(3)[label].tolist()]
        assert result(t.CategoricalAccuracy(), (one_hot, [row])) == (label == largest)
        assert result(t.SparseCategoricalAccuracy(), ([label], [row])) == (label == largest)
        assert result(t.TopKCategoricalAccuracy(2), (one_hot, [row])) == (label in in_top)
        assert result(t.SparseTopKCategoricalAccuracy(2), ([label], [row])) == (label in in_top)


@pytest.mark.parametrize("label", [-1, 3, 2**32 + 1, 1.7, math.nan])
def test_a_label_that_is_no_class_is_never_another_one(label):
    scores = [[0.1, 0.7, 0.2], [0.6, 0.2, 0.2]]
    assert result(t.SparseCategoricalAccuracy(), ([label, 0], scores)) == 0.5
    whole = label == label // 1
    if whole:
        assert result(t.SparseTopKCategoricalAccuracy(3), ([label, 0], scores)) == 0.5
    else:
        with pytest.raises(ValueError, match=f"y_true: expected numbers of classes, which are integers, got {label}"):
            result(t.SparseTopKCategoricalAccuracy(3), ([label, 0], scores))
    words = f"numbers of {'3 classes, counted from 0' if whole else 'classes, which are integers'}, got {label}"
    with pytest.raises(ValueError, match=f"Metric.update_state: y_true: expected {words}"):
        result(t.SparseCategoricalCrossentropy(), ([label, 0], scores))


def test_one_threshold_gives_a_number_as_in_keras():
    for threshold in (0.3, np.float32(0.3), np.array(0.3), [0.3], np.array([0.3])):
        found = result(t.Precision(threshold), ([0, 1, 1], [0.1, 0.9, 0.2]))
        assert type(found) is float and found == 1.0
    with pytest.raises(ValueError, match="Precision: class_id: expected one of 2 classes, counted from 0, got 2"):
        result(t.Precision(class_id=2), ([[0, 1]], [[0.1, 0.9]]))
