"""save and restore: one file, whole or not there, that another strategy reads."""

import fcntl
import json
import os
import subprocess
import sys
from collections import Counter

import h5py
import numpy as np
import pytest

import mpistrat as ms
from tests.harness.checkpoints import model, train
from tests.harness.strategies import without_mpi


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


def test_a_file_is_read_though_its_writer_has_yet_to_unlock_it(tmp_path):
    """As one that follows a run's files does when the newest has just got its name."""
    with without_mpi(1) as strategy, strategy.scope():
        w = ms.Variable(np.arange(3.0), name="w")
        strategy.save(tmp_path / "x.h5")
        w.assign(np.zeros(3))
        with (tmp_path / "x.h5").open("r+b") as writer:
            fcntl.flock(writer, fcntl.LOCK_EX)
            strategy.restore(tmp_path / "x.h5")
        assert w.numpy().tolist() == [0, 1, 2]


def test_what_was_restored_and_not_trained_is_saved_as_it_was(tmp_path):
    """Also the table of digests, though slots that wait for their variables come in the file's order."""

    def make(strategy):
        with strategy.scope():
            return [ms.Variable(np.ones(3), name=name) for name in "zyx"], ms.optimizers.Adam(0.1)

    def datasets(path):
        found = {}
        with h5py.File(path) as file:
            file.visititems(
                lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
            )
        return {name: array.tobytes() for name, array in found.items()}

    with without_mpi(1) as strategy:
        variables, optimizer = make(strategy)
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), v) for v in variables]))
        strategy.save(tmp_path / "first.h5")
    with without_mpi(1) as strategy:
        make(strategy)
        strategy.restore(tmp_path / "first.h5")
        strategy.save(tmp_path / "second.h5")
    assert datasets(tmp_path / "second.h5") == datasets(tmp_path / "first.h5")


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
        about = dict(file["optimizers/0"].attrs)
        (settings,) = json.loads(about.pop("settings"))
        assert about == {"name": "opt", "iterations": 1}
        assert settings["learning_rate"] == 0.1 and settings["beta_2"] == 0.999 and settings["clipnorm"] is None
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
        with pytest.raises(OSError, match="not a mpistrat checkpoint of version 2"):
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


def cut(shards):
    return ms.partitioners.FixedShardsPartitioner(shards) if shards else None


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3), (5, 2)])
def test_shards_are_saved_and_restored_as_one(tmp_path, before, after):
    """As training that was not interrupted, and whichever shards the variable had."""
    path = tmp_path / "model.h5"

    def made(strategy, shards):
        strategy.extended.placement.partitioner = cut(shards)
        return model(strategy), ms.optimizers.Adagrad(0.1)

    with without_mpi() as strategy:
        variables, optimizer = made(strategy, before)
        assert isinstance(variables["w"], ms.ShardedVariable) == bool(before)
        train(strategy, variables, optimizer, 3)
        strategy.save(path)
        slots = optimizer.slots(variables["w"])
        train(strategy, variables, optimizer, 2)
        expected = variables["w"].numpy()
    with h5py.File(path) as file:
        assert set(file["variables"]) == {"dense%2Fw", "%2E", "50%25"}
        assert file["variables/dense%2Fw"].shape == (5, 3)
        np.testing.assert_array_equal(file["optimizers/0/slots/dense%2Fw/accumulator"], slots["accumulator"])
    with without_mpi() as strategy:
        variables, optimizer = made(strategy, after)
        strategy.restore(path)
        strategy.save(tmp_path / "again.h5")  # slots that wait for their optimizer are not saved
        train(strategy, variables, optimizer, 2)
        np.testing.assert_array_equal(variables["w"], expected)
        strategy.restore(path)
        for name, array in optimizer.slots(variables["w"]).items():
            np.testing.assert_array_equal(array, slots[name])
        train(strategy, variables, optimizer, 2)
        np.testing.assert_array_equal(variables["w"], expected)


def test_slots_of_a_shard_that_was_never_trained_begin_anew(tmp_path):
    with without_mpi() as strategy, strategy.scope():
        strategy.extended.placement.partitioner = cut(2)
        v, optimizer = ms.Variable(np.ones((4, 1)), name="v"), ms.optimizers.Adagrad(0.1, 0.25)
        strategy.run(lambda: optimizer.apply_gradients([(np.ones((2, 1)), v.variables[0])]))
        strategy.save(tmp_path / "x.h5")
    with without_mpi() as strategy, strategy.scope():
        v, optimizer = ms.Variable(np.ones((4, 1)), name="v"), ms.optimizers.Adagrad(0.1, 0.25)
        strategy.restore(tmp_path / "x.h5")
        strategy.run(lambda: optimizer.apply_gradients([(np.zeros((4, 1)), v)]))
        assert optimizer.slots(v)["accumulator"].ravel().tolist() == [1.25, 1.25, 0.25, 0.25]


def test_shards_of_another_shape_or_dtype(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(10).reshape(5, 2).astype(ml_dtypes.bfloat16)
    with without_mpi() as strategy, strategy.scope():
        strategy.extended.placement.partitioner = cut(3)
        v = ms.Variable(array, name="v")
        empty = ms.Variable(np.zeros((0, 2)), name="empty")
        strategy.save(tmp_path / "x.h5")
        v.assign(np.zeros_like(array))
        strategy.restore(tmp_path / "x.h5")
        assert v.numpy().tobytes() == array.tobytes() and empty.shape == (0, 2)
    half, single = array[:4], array.astype(np.float32)
    for other, text in [(half, r"'v' is bfloat16 \(5, 2\) in it, here bfloat16 \(4, 2\)$"), (single, "here float32")]:
        with without_mpi() as strategy, strategy.scope():
            strategy.extended.placement.partitioner = cut(2)
            ms.Variable(other, name="v")
            with pytest.raises(ValueError, match=text) as error:
                strategy.restore(tmp_path / "x.h5")
            assert str(error.value).count("'v'") == 1


def test_a_failed_save_of_shards(tmp_path, monkeypatch):
    with without_mpi() as strategy:
        strategy.extended.placement.partitioner = cut(3)
        variables = model(strategy)
        strategy.save(tmp_path / "x.h5")
        old = (tmp_path / "x.h5").read_bytes()

        def full(*args):
            raise OSError("no space left")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="no space left"):
            strategy.save(tmp_path / "x.h5")
        assert (tmp_path / "x.h5").read_bytes() == old
        strategy.restore(tmp_path / "x.h5")
        assert variables["w"].numpy()[4, 2] == 14


def stairs(momentum=0.9):
    return ms.optimizers.SGD(ms.optimizers.schedules.PiecewiseConstantDecay([3], [1.0, 0.5]), momentum=momentum)


def test_optimizers_of_the_scope_have_their_state_at_once(tmp_path):
    path = tmp_path / "x.h5"
    with without_mpi() as strategy, strategy.scope():
        v, optimizer = ms.Variable(np.zeros(2), name="v"), stairs()
        for _ in range(5):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), v)]))
        strategy.save(path)
    # m = 0.9 m - rate: the rate is 1 up to the step after boundary 3, then 0.5
    momentum = 0.0
    for rate in (1.0, 1.0, 1.0, 1.0, 0.5):
        momentum = 0.9 * momentum - rate
    with without_mpi() as strategy, strategy.scope():
        v, optimizer = ms.Variable(np.zeros(2), name="v"), stairs()
        strategy.restore(path)
        assert (optimizer.iterations, optimizer.learning_rate) == (5, 0.5)
        np.testing.assert_allclose(optimizer.slots(v)["momentum"], [momentum] * 2)
        strategy.save(tmp_path / "again.h5")
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), v)]))
        assert optimizer.iterations == 6
        strategy.restore(tmp_path / "again.h5")
        assert optimizer.iterations == 5
        np.testing.assert_allclose(optimizer.slots(v)["momentum"], [momentum] * 2)


def two_optimizers(strategy, steps, order):
    """Two alike, of which the second may take the first step: each must get its own state back."""
    with strategy.scope():
        v, w = (ms.Variable(np.zeros(2), name=name) for name in "vw")
        pair = {"v": (stairs(), v), "w": (stairs(), w)}
    for name in order:
        optimizer, variable = pair[name]
        for _ in range(steps[name]):
            strategy.run(lambda o=optimizer, x=variable: o.apply_gradients([(np.ones(2), x)]))
    return pair


def test_optimizers_are_told_apart_by_their_order_in_the_scope(tmp_path):
    with without_mpi() as strategy:
        two_optimizers(strategy, {"v": 1, "w": 4}, "wv")
        strategy.save(tmp_path / "x.h5")
    with without_mpi() as strategy:
        pair = two_optimizers(strategy, {}, "")
        strategy.restore(tmp_path / "x.h5")
        assert [pair[name][0].iterations for name in "vw"] == [1, 4]
        assert [[variable.name for variable in pair[name][0].variables] for name in "vw"] == [["v"], ["w"]]


def test_optimizers_of_other_places_are_restored_at_their_first_step(tmp_path):
    with without_mpi() as strategy:
        two_optimizers(strategy, {"v": 1, "w": 4}, "wv")
        strategy.save(tmp_path / "x.h5")
    with without_mpi() as strategy:
        with strategy.scope():
            v, w = (ms.Variable(np.zeros(2), name=name) for name in "vw")
        outside = stairs()
        strategy.restore(tmp_path / "x.h5")
        with strategy.scope():
            first, later = stairs(), stairs()  # made after `restore`: which of the two they are is known
        assert [o.iterations for o in (outside, first, later)] == [0, 0, 0]
        strategy.run(lambda: first.apply_gradients([(np.ones(2), v)]))
        strategy.run(lambda: outside.apply_gradients([(np.ones(2), w)]))  # takes what is left, by order of first steps
        assert [o.iterations for o in (outside, first)] == [5, 2]
    with without_mpi() as strategy:
        with strategy.scope():
            ms.Variable(np.zeros(2), name="v")
            ms.Variable(np.zeros(2), name="w")
            other = ms.optimizers.Adam()
        with pytest.raises(ValueError, match="optimizer . is 'sgd' in it, here 'adam'"):  # also before its first step
            strategy.restore(tmp_path / "x.h5")
        assert other.iterations == 0


def test_what_the_program_adds(tmp_path):
    path = tmp_path / "x.h5"
    data = ms.data.from_arrays(np.arange(12)).shuffle(seed=1).batch(2)
    with without_mpi() as strategy, strategy.scope():
        ms.Variable(1.0, name="v")
        strategy.save(path)
        assert strategy.restore(path) == {}
        batches = iter(strategy.distribute_dataset(data))
        next(batches)
        given = {
            "epoch": np.int64(3),
            "step": np.array(4),
            "best": float("inf"),
            "more": [None, True, {"ä": (1, 2.5)}],
            "at": batches.state(),
        }
        strategy.save(path, extra=given)
        found = strategy.restore(path)
        assert found == {**given, "more": [None, True, {"ä": [1, 2.5]}]} and type(found["epoch"]) is int
        again = iter(strategy.distribute_dataset(data))
        again.restore(found["at"])
        assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]
        for wrong, text in [
            ({"w": np.ones(2)}, r"extra\['w'\]: expected numbers, .* got a ndarray.*tolist"),
            ({"a": [{1: 2}]}, r"extra\['a'\]\[0\]: expected text for keys, got 1"),
            ([1], "extra: expected a dict of what JSON holds, got a list"),
        ]:
            with pytest.raises(TypeError, match=text):
                strategy.save(path, extra=wrong)
        assert strategy.restore(path)["epoch"] == 3


def test_variables_made_outside_the_scope_are_named(tmp_path, caplog):
    outside = ms.Variable(np.int64(0), name="epoch_outside")
    with without_mpi() as strategy:
        model(strategy)
        for _ in range(2):
            strategy.save(tmp_path / "x.h5")
    told = [record.message for record in caplog.records if outside.name in record.message]
    assert len(told) == 1 and "neither saved nor restored" in told[0] and "extra={" in told[0]


def test_links_and_what_others_write_are_left_alone(tmp_path):
    """Names that an earlier version would have written to."""
    precious = tmp_path / "precious"
    precious.write_text("kept")
    for name in (f".x.h5.{os.getpid()}.part", ".x.h5.0.part"):
        (tmp_path / name).symlink_to(precious)
    with without_mpi() as strategy:
        model(strategy)
        strategy.save(tmp_path / "x.h5")
        strategy.restore(tmp_path / "x.h5")
    assert precious.read_text() == "kept" and not (tmp_path / "x.h5").is_symlink()


class Scheduler:
    """An object with a state as those of PyTorch: numbers as keys, a Counter, a tuple."""

    def __init__(self):
        self.milestones, self.table, self.last = Counter({30: 1, 60: 2}), {1: {2: "a"}, 2.5: [3]}, (0.5, 1)

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def test_states_of_objects(tmp_path):
    scheduler = Scheduler()
    with without_mpi() as strategy, strategy.scope():
        ms.Variable(1.0, name="v")
        strategy.save(tmp_path / "x.h5", extra={"scheduler": scheduler, "more": [scheduler], "epoch": 1})
        found = strategy.restore(tmp_path / "x.h5")
        state = {"milestones": Counter({30: 1, 60: 2}), "table": {1: {2: "a"}, 2.5: [3]}, "last": (0.5, 1)}
        assert found == {"scheduler": state, "more": [state], "epoch": 1}
        assert [*found["scheduler"]["milestones"].elements()] == [30, 60, 60]
        scheduler.table = {
            "words": np.arange(6, dtype=np.uint32).reshape(2, 3),
            "key": b"ab",
            "tuple": ((1, None), [2]),
        }
        strategy.save(tmp_path / "x.h5", extra={"scheduler": scheduler})
        table = strategy.restore(tmp_path / "x.h5")["scheduler"]["table"]
        assert table["words"].dtype == np.uint32 and table["words"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert table["key"] == b"ab" and table["tuple"] == ((1, None), [2])
        for value, got in ((np.zeros(1 << 18), "got 2097152. Make it a variable"), (np.array(["a"]), "got a ndarray")):
            scheduler.table = value
            with pytest.raises(TypeError, match=rf"extra\['scheduler'\]\.state_dict\(\)\['table'\]: .* {got}"):
                strategy.save(tmp_path / "x.h5", extra={"scheduler": scheduler})
        with pytest.raises(TypeError, match="got a ndarray|got a bytes"):
            strategy.save(tmp_path / "x.h5", extra={"key": b"ab"})
        with pytest.raises(TypeError, match="got a type"):
            strategy.save(tmp_path / "x.h5", extra={"scheduler": Scheduler})


def test_objects_of_checkpoints(tmp_path, caplog):
    with without_mpi() as strategy, strategy.scope():
        ms.Variable(1.0, name="v")
        scheduler = Scheduler()
        checkpoints = ms.train.Checkpoints(strategy, tmp_path, objects={"scheduler": scheduler})
        scheduler.last, scheduler.table = 7, {}
        checkpoints.save(5, {"epoch": 2})
        scheduler.last = 8
        assert checkpoints.restore_latest() == {"epoch": 2, "step": 5}
        assert (scheduler.last, scheduler.table, scheduler.milestones[60]) == (7, {}, 2)
        other, unknown = Scheduler(), Scheduler()
        again = ms.train.Checkpoints(strategy, tmp_path, objects={"scheduler": other, "scaler": unknown})
        again.restore_latest()
        assert other.last == 7 and unknown.last == (0.5, 1)
        assert "step 5 has no state of object 'scaler'" in caplog.text
        for argument in ("objects", "objects_by_rank"):
            text = rf"{argument}\['step'\]: expected an object with state_dict and load_state_dict, got a int"
            with pytest.raises(TypeError, match=text):
                ms.train.Checkpoints(strategy, tmp_path, **{argument: {"step": 3}})
        with pytest.raises(ValueError, match="objects_by_rank: expected other names than those of objects, got 'one'"):
            ms.train.Checkpoints(strategy, tmp_path, objects={"one": other}, objects_by_rank={"one": other})


_FULL = """
import os, resource, sys
import numpy as np
import mpistrat as ms

def save(count, name):
    strategy = ms.OneDeviceStrategy()
    with strategy.scope():
        variables = [ms.Variable(np.full(5, i, np.float32), name=f"w{i}") for i in range(count)]
    strategy.save(name, extra={"text": "x" * 3000})
    return strategy, variables

folder, refused = sys.argv[1], 0
largest = os.path.getsize(folder + "/whole.h5") if save(200, folder + "/whole.h5") else 0
for limit in [1, 100, *range(700, largest + 4000, largest // 14)]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))  # as a disk that is full, for one process
    try:
        strategy, variables = save(200, folder + "/model.h5")
        assert limit >= largest
    except OSError as error:
        assert limit < largest and "File too large" in str(error) and folder in str(error), error
        assert os.listdir(folder) == ["whole.h5"]
        refused += 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
strategy.restore(folder + "/model.h5")
assert variables[-1].numpy().tolist() == [199] * 5
print("refused", refused)
"""


def test_a_full_disk_is_an_error(tmp_path):
    """HDF5 ended the process by a segmentation fault, as it closed the file."""
    words = [sys.executable, "-c", _FULL, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "refused 16\n"
