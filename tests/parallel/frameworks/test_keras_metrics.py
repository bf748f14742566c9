"""Metrics of `ms.train` have Keras's numbers, to the last digits of its float32."""

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402

k, t = keras.metrics, ms.train
KINDS = {
    "binary": [
        (lambda: k.BinaryAccuracy(threshold=0.3), lambda: t.BinaryAccuracy(threshold=0.3)),
        (k.BinaryCrossentropy, t.BinaryCrossentropy),
        (lambda: k.BinaryCrossentropy(label_smoothing=0.1), lambda: t.BinaryCrossentropy(label_smoothing=0.1)),
        (k.MeanSquaredError, t.MeanSquaredError),
        (k.MeanAbsoluteError, t.MeanAbsoluteError),
        (k.RootMeanSquaredError, t.RootMeanSquaredError),
        (k.MeanAbsolutePercentageError, t.MeanAbsolutePercentageError),
        (k.MeanSquaredLogarithmicError, t.MeanSquaredLogarithmicError),
        (k.LogCoshError, t.LogCoshError),
        (k.Poisson, t.Poisson),
        (k.Hinge, t.Hinge),
        (k.SquaredHinge, t.SquaredHinge),
        (k.R2Score, t.R2Score),
        (lambda: k.R2Score(num_regressors=2), lambda: t.R2Score(num_regressors=2)),
        (k.TruePositives, t.TruePositives),
        (lambda: k.FalsePositives([0.2, 0.7]), lambda: t.FalsePositives([0.2, 0.7])),
        (lambda: k.TrueNegatives(0.9), lambda: t.TrueNegatives(0.9)),
        (lambda: k.FalseNegatives([0.9, 0.1, 0.5]), lambda: t.FalseNegatives([0.9, 0.1, 0.5])),
        (k.Precision, t.Precision),
        (lambda: k.Precision([0.2, 0.7, 0.4]), lambda: t.Precision([0.2, 0.7, 0.4])),
        (lambda: k.Recall(0.25), lambda: t.Recall(0.25)),
        (k.AUC, t.AUC),
        (lambda: k.MeanMetricWrapper(k.mean_squared_error), lambda: t.get_metric(k.mean_squared_error)),
        (lambda: k.AUC(curve="PR"), lambda: t.AUC(curve="PR")),
        (lambda: k.AUC(num_thresholds=20, summation_method="minoring"), lambda: t.AUC(20, summation_method="minoring")),
        (
            lambda: k.AUC(curve="PR", summation_method="majoring"),
            lambda: t.AUC(curve="PR", summation_method="majoring"),
        ),
    ],
    "classes": [
        (k.CategoricalAccuracy, t.CategoricalAccuracy),
        (k.CategoricalCrossentropy, t.CategoricalCrossentropy),
        (
            lambda: k.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2),
            lambda: t.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2),
        ),
        (k.CategoricalHinge, t.CategoricalHinge),
        (k.KLDivergence, t.KLDivergence),
        (k.CosineSimilarity, t.CosineSimilarity),
        (k.PearsonCorrelation, t.PearsonCorrelation),
        (k.ConcordanceCorrelation, t.ConcordanceCorrelation),
        (lambda: k.R2Score(class_aggregation=None), lambda: t.R2Score(5, None)),
        (
            lambda: k.R2Score(class_aggregation="variance_weighted_average", num_regressors=3),
            lambda: t.R2Score(5, "variance_weighted_average", 3),
        ),
        (lambda: k.F1Score(), lambda: t.F1Score(5)),
        (lambda: k.F1Score(average="weighted", threshold=0.25), lambda: t.F1Score(5, "weighted", 0.25)),
        (lambda: k.FBetaScore(average="macro", beta=2.0), lambda: t.FBetaScore(5, "macro", 2.0)),
        (lambda: k.FBetaScore(average="micro", beta=0.5), lambda: t.FBetaScore(5, "micro", 0.5)),
        (
            lambda: k.MeanIoU(5, sparse_y_true=False, sparse_y_pred=False, dtype="float32"),
            lambda: t.MeanIoU(5, sparse_y_true=False, sparse_y_pred=False),
        ),
        (lambda: k.TopKCategoricalAccuracy(k=2), lambda: t.TopKCategoricalAccuracy(k=2)),
        (lambda: k.Precision(top_k=2), lambda: t.Precision(top_k=2)),
        (lambda: k.Recall(top_k=1, class_id=3), lambda: t.Recall(top_k=1, class_id=3)),
    ],
    "numbers": [
        (k.SparseCategoricalAccuracy, t.SparseCategoricalAccuracy),
        (lambda: k.SparseTopKCategoricalAccuracy(k=3), lambda: t.SparseTopKCategoricalAccuracy(k=3)),
        (
            lambda: k.IoU(5, [0, 3], ignore_class=1, sparse_y_pred=False, dtype="float32"),
            lambda: t.IoU(5, [0, 3], ignore_class=1, sparse_y_pred=False),
        ),
        (
            lambda: k.MeanIoU(3, sparse_y_pred=False, dtype="float32"),  # labels 3 and 4 are left out
            lambda: t.MeanIoU(3, sparse_y_pred=False),
        ),
        (k.SparseCategoricalCrossentropy, t.SparseCategoricalCrossentropy),
        (
            lambda: k.SparseCategoricalCrossentropy(from_logits=True),
            lambda: t.SparseCategoricalCrossentropy(from_logits=True),
        ),
    ],
}
CASES = [pytest.param(kind, *pair, id=f"{kind}{i}") for kind, pairs in KINDS.items() for i, pair in enumerate(pairs)]


def rows(kind, seed):
    rng = np.random.default_rng(seed)
    scores = rng.random((17, 5)).astype(np.float32)
    numbers = rng.integers(0, 5, 17)
    if kind == "binary":
        return rng.integers(0, 2, (17, 1)), scores[:, :1], rng.random(17).astype(np.float32)
    labels = np.eye(5, dtype=np.float32)[numbers] if kind == "classes" else numbers
    return labels, scores / scores.sum(-1, keepdims=True), rng.random(17).astype(np.float32)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("kind", "theirs", "ours"), CASES)
def test_a_metric_has_keras_numbers(kind, theirs, ours, weighted):
    theirs, ours = theirs(), ours()
    for seed in range(3):
        labels, scores, weights = rows(kind, seed)
        given = {"sample_weight": weights} if weighted else {}
        theirs.update_state(labels, scores, **given)
        ours.update_state(labels, scores, **given)
    expected = keras.ops.convert_to_numpy(theirs.result())
    np.testing.assert_allclose(ours.result(), expected, rtol=3e-5, atol=1e-6)


GRID = (np.arange(21) / 20).tolist()  # on which scores and thresholds are equal again and again
TIES = {
    "Precision": [{"thresholds": number} for number in GRID] + [{"thresholds": [0.0, 0.25, 0.5, 0.75, 1.0]}],
    "Recall": [{"thresholds": [0.2]}, {"thresholds": [0.7, 0.2, 0.35]}, {"thresholds": GRID}],
    "AUC": [{"num_thresholds": number, "curve": curve} for number in (2, 3, 11, 21) for curve in ("ROC", "PR")],
    "BinaryAccuracy": [{"threshold": number} for number in GRID],
    "Accuracy": [{}],
    "CategoricalAccuracy": [{}],
    "TopKCategoricalAccuracy": [{"k": 2}],
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "list"])
@pytest.mark.parametrize("name", TIES)
def test_scores_that_equal_thresholds_count_as_in_keras(name, dtype):
    if (name == "BinaryAccuracy" and dtype in ("float16", "float64")) or (name, dtype) == ("Accuracy", "float64"):
        pytest.skip("Keras's backends differ: some compare in the dtype of the predictions")
    for settings in TIES[name]:
        theirs, ours = getattr(k, name)(**settings), getattr(t, name)(**settings)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            scores = rng.choice(GRID, (40, 4 if "Categorical" in name else 1))
            if name == "Accuracy":
                labels = rng.choice(GRID, (40, 1))
            else:
                labels = np.eye(4)[rng.integers(0, 4, 40)] if "Categorical" in name else rng.integers(0, 2, (40, 1))
            given = scores.tolist() if dtype == "list" else scores.astype(dtype)
            theirs.update_state(labels, given)
            ours.update_state(labels, given)
            expected = keras.ops.convert_to_numpy(theirs.result())
            np.testing.assert_allclose(ours.result(), expected, rtol=3e-5, atol=1e-6, err_msg=f"{settings}")


@pytest.mark.ranks(1)
def test_names_of_metrics_are_keras_s():
    from keras.src.metrics import ALL_OBJECTS_DICT

    with ms.OneDeviceStrategy() as strategy, strategy.scope():
        for name, kind in ALL_OBJECTS_DICT.items():
            ours = getattr(t, kind.__name__, None)
            needed = {"FBetaScore": {"num_classes": 2}, "F1Score": {"num_classes": 2}, "MeanIoU": {"num_classes": 2}}
            needed["IoU"] = {"num_classes": 2, "target_class_ids": [0]}
            if ours is not None and kind.__name__ not in ("Mean", "Metric", "Sum", "MeanMetricWrapper"):
                assert type(t.get_metric(name, **needed.get(kind.__name__, {}))) is ours, name
    with pytest.raises(ValueError, match="get_metric: identifier: expected one of auc, .*, got 'acuracy'"):
        t.get_metric("acuracy")
