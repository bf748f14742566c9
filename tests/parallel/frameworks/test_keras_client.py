"""Keras's fit on all ranks of a job that serves, started by a client."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")
pytest.importorskip("zmq")

import mpistrat as ms  # noqa: E402
from tests.launch.launcher import Job  # noqa: E402


def fit(x, y, weights, distributed):
    import keras

    keras.config.set_floatx("float64")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.set_weights(weights)
    if distributed:
        model = ms.keras.distribute(model)
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
    history = model.fit(x, y, batch_size=12, epochs=3, shuffle=False, verbose=2 if distributed else 0)
    return history.history["loss"], model.get_weights()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [pytest.param(3, id="np3")])
def test_fit_equals_one_process(mpi, ranks, tmp_path, capsys, float64):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(50, 4))
    weights = [rng.normal(size=shape) for shape in ((4, 8), (8,), (8, 1), (1,))]
    arguments = x, x.sum(1, keepdims=True), weights
    loss, expected = fit(*arguments, False)
    folder = tmp_path / "job"
    folder.mkdir()
    job = Job([mpi.python, "-m", "mpistrat", "serve", str(tmp_path / "serve.json")], ranks, mpi, folder)
    try:
        with ms.connect(tmp_path / "serve.json", timeout=120) as cluster:
            for losses, found in cluster.run(fit, (*arguments, True), strategy=ms.MultiWorkerMirroredStrategy):
                np.testing.assert_allclose(losses, loss, rtol=1e-6)
                for one, other in zip(found, expected, strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-6)
            assert "Epoch 3/3" in capsys.readouterr().out  # rank 0's progress
            cluster.shutdown()
    finally:
        job.end()
