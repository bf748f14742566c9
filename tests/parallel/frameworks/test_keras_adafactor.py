"""`ms.optimizers.Adafactor` beside Keras's own, whose rate and exponents are of 32 bits."""

import pytest

keras = pytest.importorskip("keras", reason="Keras or its backend is not installed: make test-frameworks")

import numpy as np  # noqa: E402

import mpistrat as ms  # noqa: E402

SHAPES = [(50,), (3, 5), (), (29, 31), (4, 7, 3)]
SETTINGS = {
    "defaults": {},
    "all": {
        "learning_rate": 0.9,
        "beta_2_decay": -0.6,
        "epsilon_1": 1e-4,
        "epsilon_2": 0.5,
        "clip_threshold": 0.7,
        "relative_step": False,
        "weight_decay": 0.1,
    },
    "clipped": {"learning_rate": 0.3, "global_clipnorm": 1.0},
}


def values_of(step, shapes=SHAPES):
    return [2 * np.random.default_rng((step, index)).normal(size=shape) for index, shape in enumerate(shapes)]


@pytest.mark.ranks(1, 2)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("settings", SETTINGS)
def test_weights_are_those_of_keras(settings):
    theirs = keras.optimizers.Adafactor(**SETTINGS[settings])
    expected = [keras.Variable(value, dtype="float64") for value in values_of(99)]
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ours, found = ms.optimizers.Adafactor(**SETTINGS[settings]), [ms.Variable(v) for v in values_of(99)]
        for step in range(12):
            gradients = values_of(step)
            tensors = [keras.ops.convert_to_tensor(gradient, dtype="float64") for gradient in gradients]
            theirs.apply(tensors, expected)
            shares = [gradient / strategy.num_replicas_in_sync for gradient in gradients]
            strategy.run(lambda s=shares: ours.apply_gradients(list(zip(s, found, strict=True))))
        for variable, value in zip(found, expected, strict=True):
            weights = keras.ops.convert_to_numpy(value)
            np.testing.assert_allclose(variable.numpy(), weights, rtol=1e-5, atol=1e-5)
        assert np.abs(found[3].numpy() - values_of(99)[3]).max() > 1e-3
