"""Adafactor: matrices on several ranks' slices, with the row and column means that Keras keeps; files, meshes, 32 bits."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mpistrat as ms

SHAPES = ((70001,), (), (129, 513), (4, 70, 33), (300, 2, 3), (1, 9), (9, 1))


def keras(w, g, s, t, rate):
    """One step as Keras takes it, with its means of rows and columns in `s`; the gradient's and the weights' dtype is kept."""
    relative = max(1e-3, math.sqrt((w**2).mean())) * min(rate, 1 / math.sqrt(t))
    squares, b = g**2 + 1e-30, 1 - t**-0.8
    if w.ndim > 1:
        s["r"] = b * s.get("r", 0) + (1 - b) * squares.mean(-1)
        s["c"] = b * s.get("c", 0) + (1 - b) * squares.mean(-2)
        v = (s["r"] / s["r"].mean(-1, keepdims=True))[..., None] * s["c"][..., None, :]
    else:
        s["v"] = v = b * s.get("v", 0) + (1 - b) * squares
    u = g / np.sqrt(v)
    return w - relative * u / max(1.0, math.sqrt((u**2).mean()))


def gradients_of(step):
    """Whose rows and columns have sizes of their own."""
    found = []
    for index, shape in enumerate(SHAPES):
        rng = np.random.default_rng((step, index))
        found.append(rng.normal(size=shape) * rng.uniform(0, 3, (*shape[:-1], 1) if shape else ()))
    return found


def start():
    return [np.random.default_rng(index).normal(size=shape) for index, shape in enumerate(SHAPES)]


def expected_after(steps, rate=0.3):
    weights, slots = start(), [{} for _ in SHAPES]
    for step in range(1, steps + 1):
        rows = zip(weights, gradients_of(step), slots, strict=True)
        weights = [keras(w, g, s, step, rate) for w, g, s in rows]
    return weights


def made(strategy, dtype=np.float64):
    with strategy.scope():
        variables = [ms.Variable(value.astype(dtype), name=f"v{index}") for index, value in enumerate(start())]
        return variables, ms.optimizers.Adafactor(0.3)


def train(strategy, variables, optimizer, steps):
    for step in steps:
        parts = [(g / strategy.num_replicas_in_sync).astype(variables[0].dtype) for g in gradients_of(step)]
        strategy.run(lambda parts=parts: optimizer.apply_gradients(list(zip(parts, variables, strict=True))))


def assert_close(variables, expected, rtol=1e-12):
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=rtol, atol=rtol)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.hosts(2, ranks_per_host=2)
def test_many_steps_on_any_layout_are_those_of_whole_matrices():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        variables, optimizer = made(strategy)
        train(strategy, variables, optimizer, range(1, 13))
        assert_close(variables, expected_after(12))


@pytest.mark.ranks(1, 2, 3)
def test_a_file_of_some_ranks_goes_on_on_another_number(mpi_tmp_path):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with ms.MirroredStrategy() as strategy:
        variables, optimizer = made(strategy)
        train(strategy, variables, optimizer, range(1, 5))
        strategy.save(mpi_tmp_path / "all.h5")
    with ms.MirroredStrategy(comm=MPI.COMM_SELF) as strategy:
        variables, optimizer = made(strategy)
        strategy.restore(mpi_tmp_path / "all.h5")
        train(strategy, variables, optimizer, range(5, 9))
        assert_close(variables, expected_after(8))
        if world.rank == 0:
            strategy.save(mpi_tmp_path / "one.h5")
    world.Barrier()
    with ms.MirroredStrategy() as strategy:
        variables, optimizer = made(strategy)
        strategy.restore(mpi_tmp_path / "one.h5")
        train(strategy, variables, optimizer, range(9, 11))
        assert_close(variables, expected_after(10))


@pytest.mark.ranks(1, 3)
def test_in_32_bits_it_stays_close_and_rows_without_gradients_stay_as_they_are():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        variables, optimizer = made(strategy, np.float32)
        with strategy.scope():
            table = ms.Variable(np.ones((50, 40), np.float32))
        train(strategy, variables, optimizer, range(1, 7))
        assert_close(variables, expected_after(6), rtol=2e-5)
        gradient = np.zeros((50, 40), np.float32)
        gradient[:20, :30] = 1 / strategy.num_replicas_in_sync
        strategy.run(lambda: optimizer.apply_gradients([(gradient, table)]))
        changed = table.numpy() != 1
        assert changed[:20, :30].all()
        assert not changed[20:].any() and not changed[:, 30:].any()


@pytest.mark.ranks(4)
def test_under_a_mesh_whole_matrices_are_right_and_divided_ones_refused():
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        with strategy.scope():
            whole = ms.Variable(start()[2], name="whole")
            vector = ms.Variable(np.linspace(1, 2, 512), name="vector", layout=("model",))
            divided = ms.Variable(np.ones((4, 8)), name="divided", layout=(None, "model"))
            optimizer = ms.optimizers.Adafactor(0.3)
        gradient, part = gradients_of(1)[2], np.linspace(-1, 1, 512)
        pairs = [(gradient / 2, whole), (part[vector.part.slices] / 2, vector)]
        strategy.run(lambda: optimizer.apply_gradients(pairs))
        np.testing.assert_allclose(whole.numpy(), keras(start()[2], gradient, {}, 1, 0.3), rtol=1e-12, atol=1e-12)
        expected = keras(np.linspace(1, 2, 512), part, {}, 1, 0.3)
        np.testing.assert_allclose(vector.gathered(), expected, rtol=1e-12, atol=1e-12)
        with pytest.raises(ValueError, match=r"matrices that each rank has whole, for Adafactor, got parts of divided"):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones((4, 4)), divided)]))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("name", "value"), [("beta_2_decay", 0.1), ("epsilon_1", 0.0), ("epsilon_2", -1.0), ("clip_threshold", 0.0)]
)
def test_numbers_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        ms.optimizers.Adafactor(**{name: value})


@pytest.mark.ranks(2)
def test_ranks_with_other_numbers_are_told():
    from mpistrat.errors import CollectiveMismatchError

    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        v = ms.Variable(np.ones((3, 4)))
        optimizer = ms.optimizers.Adafactor(0.3, clip_threshold=1.0 + strategy.rank)
        with pytest.raises(CollectiveMismatchError, match="clip_threshold"):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones((3, 4)), v)]))
