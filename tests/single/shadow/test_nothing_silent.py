"""A comparison of less than the user believes is an error, or reported: of no step, of fewer steps, of other tensors."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.shadow.samples import row_digests

STEPS = 4


def train(steps=3, rate=0.1, seed=0, names=("hidden",), takes=True, rows=8):
    rng = np.random.default_rng(seed)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(np.ones(5, np.float32), name="w")
            optimizer = ms.optimizers.SGD(rate)

        def step(x):
            for name in names:
                ms.shadow.tensor(name, x @ w.array)
            if takes:
                optimizer.apply_gradients([(x.T @ (x @ w.array) / rows, w)])

        for _ in range(steps):
            strategy.run(step, args=(rng.normal(size=(rows, 5)).astype(np.float32),))


@pytest.fixture
def folder(tmp_path):
    with ms.shadow.record(tmp_path, steps=STEPS):
        train()
    with ms.shadow.round_off(tmp_path, steps=STEPS):
        train()
    return tmp_path


CONTEXTS = [ms.shadow.record, ms.shadow.round_off, ms.shadow.compare]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("program", [lambda: None, lambda: train(steps=0), lambda: train(takes=False)])
def test_no_step_is_an_error(program, context, folder):
    text = f"ms.shadow.{context.__name__}: the program took no step.*Check that"
    with pytest.raises(ValueError, match=text), context(folder):
        program()


def test_a_step_that_no_optimizer_ends_is_named(folder):
    with pytest.raises(ValueError, match="A step started, and no optimizer ended it"), ms.shadow.compare(folder):
        train(takes=False)


@pytest.mark.parametrize("steps", [2, 4])
def test_another_number_of_steps_is_a_difference(steps, folder):
    with pytest.raises(ms.errors.DifferenceError) as found, ms.shadow.compare(folder):
        train(steps=steps)
    assert (found.value.step, found.value.operation) == (min(steps, 3) + 1, "number of steps")


def test_as_many_steps_as_asked_for_are_enough(folder):
    with ms.shadow.compare(folder, steps=2) as report:
        train()
    assert (report.steps, report.whole) == (2, False)
    assert str(report).startswith("2 steps on 1 rank equal")
    with ms.shadow.compare(folder) as report:
        train()
    assert str(report).startswith("all 3 steps on 1 rank equal") and "24 rows of batches" in str(report)


def test_a_difference_that_the_program_catches_is_raised_at_the_end(folder):
    with (
        pytest.raises(ms.errors.DifferenceError, match="parameter w after the update"),
        ms.shadow.compare(folder),
        contextlib.suppress(ms.errors.DifferenceError),
    ):
        train(rate=0.2)


def test_a_program_that_exits_is_compared_as_any_other(folder):
    with pytest.raises(ms.errors.DifferenceError, match="number of steps"), ms.shadow.compare(folder):
        train(steps=2)
        raise SystemExit(0)
    with pytest.raises(SystemExit), ms.shadow.round_off(folder):
        train()
        raise SystemExit(0)
    assert len(list(folder.glob("rounding-*.json"))) == 2


@pytest.mark.parametrize(
    ("names", "operation", "reason"),
    [((), "hidden", "as rank 0 lacked it"), (("hidden", "more"), "more", "as only the ranks have it")],
)
def test_tensors_of_one_side_are_reported(names, operation, reason, folder):
    with ms.shadow.compare(folder) as report:
        train(names=names)
    assert report.left_out == {operation: reason}


@pytest.mark.parametrize(("options", "what"), [({"seed": 1}, "the first batch"), ({"steps": 2}, "took 2 of 3 steps")])
def test_a_program_that_is_another_each_time_is_an_error(options, what, folder):
    text = f"two runs of the program on one process differ: .*{what}"
    with pytest.raises(ValueError, match=text), ms.shadow.round_off(folder):
        train(**options)


def test_rows_of_text_are_those_of_other_objects_with_the_same_text():
    rows = np.array([["a", "b"], ["c", "d"]], object)
    same = np.array([["".join(["a"]), "b"], ["c", "".join(["d", ""])]], object)
    assert np.array_equal(row_digests(rows, 2), row_digests(same, 2))
    assert row_digests(rows, 2)[0] != row_digests(rows, 2)[1]
