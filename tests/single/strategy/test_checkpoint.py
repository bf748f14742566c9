"""save and restore: one file, whole or not there, that another strategy reads."""

import h5py
import numpy as np
import pytest
from strategy_stand import without_mpi

import mpistrat as ms
from mpistrat import VariableAggregation, VariableSynchronization

ON_READ = VariableSynchronization.ON_READ


def model(strategy, shape=(5, 3), dtype=np.float64):
    with strategy.scope():
        return {
            "w": ms.Variable(np.arange(np.prod(shape), dtype=dtype).reshape(shape), name="dense/w"),
            "steps": ms.Variable(0, name=".", synchronization=ON_READ, aggregation=VariableAggregation.SUM),
            "half": ms.Variable(np.ones(3, np.float16), name="50%", trainable=False),
        }


def train(strategy, variables, optimizer, steps):
    def step():
        w = variables["w"]
        w.grad[...] = np.sin(np.arange(w.size)).reshape(w.shape) / strategy.num_replicas_in_sync
        optimizer.apply_gradients([(w.grad, w)])
        variables["steps"].assign_add(1)

    for _ in range(steps):
        strategy.run(step)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 3)])
def test_training_goes_on_as_if_nothing_had_happened(tmp_path, before, after):
    path = tmp_path / "model.h5"
    with without_mpi(before) as strategy:
        variables, optimizer = model(strategy), ms.optimizers.Adam(0.1)
        train(strategy, variables, optimizer, 3)
        strategy.save(path)
        train(strategy, variables, optimizer, 2)
        expected = variables["w"].numpy()
    with without_mpi(after) as strategy:
        variables, optimizer = model(strategy), ms.optimizers.Adam(0.1)
        strategy.restore(str(path))
        assert int(variables["steps"].numpy()) == 3 * before
        train(strategy, variables, optimizer, 2)
        assert optimizer.iterations == 5
        assert np.allclose(variables["w"].numpy(), expected, rtol=1e-12)
        strategy.restore(path)  # into an optimizer that is there already
        assert optimizer.iterations == 3
        train(strategy, variables, optimizer, 2)
        assert np.allclose(variables["w"].numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex128", "int8", "uint64", "bool"])
def test_dtypes(tmp_path, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    values = np.array([0, 1, 0, 1], dtype)
    with without_mpi() as strategy, strategy.scope():
        v = ms.Variable(values, name="v")
        strategy.save(tmp_path / "x.h5")
        v.assign(np.zeros_like(values))
        strategy.restore(tmp_path / "x.h5")
        assert v.numpy().tobytes() == values.tobytes()


def test_the_file(tmp_path):
    with without_mpi(2) as strategy:
        variables, optimizer = model(strategy), ms.optimizers.Adam(0.1, name="opt")
        train(strategy, variables, optimizer, 1)
        strategy.save(tmp_path / "x.h5")
        strategy.save(tmp_path / "x.h5")  # replaces it
        value = variables["w"].numpy()
    assert [p.name for p in tmp_path.iterdir()] == ["x.h5"]
    with h5py.File(tmp_path / "x.h5") as file:
        assert np.array_equal(file["variables/dense%2Fw"], value)
        assert file["variables/%2E"][()] == 2
        assert dict(file["optimizers/0"].attrs) == {"name": "opt", "iterations": 1}
        assert set(file["optimizers/0/slots/dense%2Fw"]) == {"momentum", "velocity"}


def test_what_does_not_fit(tmp_path):
    path = tmp_path / "x.h5"
    with without_mpi() as strategy:
        variables = model(strategy)
        train(strategy, variables, ms.optimizers.SGD(0.1), 1)
        strategy.save(path)
    with without_mpi() as strategy:
        variables = model(strategy, shape=(3, 5))
        with strategy.scope():
            ms.Variable(1.0, name="new")
        with pytest.raises(
            ValueError, match=r"'dense/w' is float64 \(5, 3\) in it, here float64 \(3, 5\); .*'new' is not"
        ):
            strategy.restore(path)
        assert variables["w"].numpy()[0, 1] == 1.0  # nothing was written
    with without_mpi() as strategy:
        model(strategy, dtype=np.float32)
        with pytest.raises(ValueError, match="here float32"):
            strategy.restore(path)
    with without_mpi() as strategy:
        variables = model(strategy)
        strategy.restore(path)
        optimizer = ms.optimizers.Adam(0.1)
        for _ in range(2):  # also if the program tries it again
            with pytest.raises(ValueError, match="'sgd' as optimizer 0"):
                train(strategy, variables, optimizer, 1)
        train(strategy, variables, ms.optimizers.SGD(0.1), 1)
    with without_mpi() as strategy:
        variables = model(strategy)
        train(strategy, variables, ms.optimizers.Adam(0.1), 1)
        with pytest.raises(ValueError, match="optimizer 0 is 'sgd' in it, here 'adam'"):
            strategy.restore(path)


def test_files_that_are_none(tmp_path):
    with without_mpi() as strategy:
        model(strategy)
        with pytest.raises(OSError, match=r"absent.h5: no such file"):
            strategy.restore(tmp_path / "absent.h5")
        (tmp_path / "text.h5").write_text("no HDF5")
        with pytest.raises(OSError, match=r"text.h5"):
            strategy.restore(tmp_path / "text.h5")
        with h5py.File(tmp_path / "other.h5", "w") as file:
            file["x"] = 1
        with pytest.raises(OSError, match="expected a mpistrat checkpoint"):
            strategy.restore(tmp_path / "other.h5")
        with pytest.raises(OSError, match="Strategy.save"):
            strategy.save(tmp_path / "no_such_folder" / "x.h5")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.h5"
    with without_mpi() as strategy:
        model(strategy)
        strategy.save(path)
        old = path.read_bytes()

        def full(*args, **kwargs):
            raise OSError("no space left")

        monkeypatch.setattr(h5py.Group, "create_dataset", full)
        with pytest.raises(OSError, match="no space left"):
            strategy.save(path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["x.h5"]
