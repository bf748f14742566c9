"""The digits' network learns as well where its gradients and weights travel between nodes in fewer bytes."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.examples import digits_data
from mpistrat.examples.digits_model import Digits

EPOCHS = 5


def accuracy(wire: str | None) -> float:
    """Train, each rank a node, and return which part of the test rows is right. Collective."""
    pixels, labels = digits_data.load()
    order = np.random.default_rng(2024).permutation(len(labels))
    images, labels = (pixels[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    test, train = slice(0, digits_data.TEST_ROWS), slice(digits_data.TEST_ROWS, None)
    options = ms.CommunicationOptions(wire=wire)
    with ms.MultiWorkerMirroredStrategy(communication_options=options) as strategy:
        rows = ms.data.from_arrays((images[train], labels[train])).shuffle(seed=1).batch(64)
        data = strategy.distribute_dataset(rows)
        with strategy.scope():
            model, optimizer = Digits(1, np.float32), ms.optimizers.Adam(1e-3)

        def step(batch: tuple[np.ndarray, np.ndarray]) -> None:
            model.scores_and_gradients(*batch)
            optimizer.apply_gradients([(v.grad, v) for v in model.variables])

        for _ in range(EPOCHS):
            for batch in data:
                strategy.run(step, args=(batch,))
        assert model.variables[0].arena.form.exact == (wire is None)
        return float((model.forward(images[test])[-1].argmax(1) == labels[test]).mean())


@pytest.mark.ranks(2)
def test_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over three seeds of the initial weights float32 alone ends at 97.2 to 98.1 %: two rows of a hundred are noise."""
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    expected = accuracy(None)
    assert expected >= 0.95
    for wire in ("bfloat16", "int8"):
        assert abs(accuracy(wire) - expected) <= 0.02, wire
