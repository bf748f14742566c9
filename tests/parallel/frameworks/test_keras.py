"""Keras under strategies: the numbers of one process of plain Keras, whatever the ranks and the backend."""

import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

import numpy as np  # noqa: E402
from keras_training import (  # noqa: E402
    BATCH,
    EXACT,
    KINDS,
    build,
    compiled,
    difference,
    fit,
    history_difference,
    put,
    rows,
    weights,
)


@pytest.fixture(autouse=True)
def float64():
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_fit_evaluate_and_predict_equal_one_process(kind):
    x, y = rows()
    held_out = rows(7)
    reference = compiled(build(kind))
    expected = fit(reference, x, y, validation_data=held_out)
    model = build(kind)
    with put(model) as strategy:
        if strategy.rank and kind != "subclassed":  # rank 0's count
            model.set_weights([weight + 1 for weight in weights(model)])
        compiled(model)
        history = fit(model, x, y, validation_data=held_out)
        assert difference(weights(model), weights(reference)) < EXACT
        assert history_difference(history, expected) < EXACT
        numbers = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        assert difference([numbers], [reference.evaluate(x, y, batch_size=BATCH, verbose=0)]) < EXACT
        outputs = model.predict(x, batch_size=BATCH, verbose=0)
        assert difference([outputs], [reference.predict(x, verbose=0)]) < EXACT
        assert len(set(strategy.all_gather_object(repr((history, numbers, np.sum(outputs)))))) == 1
