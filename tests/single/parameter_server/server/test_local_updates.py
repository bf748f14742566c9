"""Updates of whole variables and of rows in one process: what the optimizer's step does, and no more."""

import copy
import gc
import mmap
import os
import pickle
import threading

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arena.reduction import BLOCK
from mpistrat.optimizers.core import find
from mpistrat.parameter_server.server.local_updates import LocalUpdates
from mpistrat.variables.placement import ORDINAL_STEP
from tests.harness.server_harness import Weights
from tests.models import optimizer_reference as reference

CASES = {
    name: case for name, case in reference.cases().items() if not case[0](ms.optimizers)._passes
}  # not for servers
RULES = {
    **{name: make for name, (make, _, _) in CASES.items()},
    "schedule": lambda o: o.SGD(o.schedules.PiecewiseConstantDecay([2], [0.1, 0.01])),
    "some decay": lambda o: decaying(o.AdamW(0.03, weight_decay=0.1)),
}


def decaying(adamw):
    adamw.exclude_from_weight_decay(var_names=["bias"])
    return adamw


def dtype_of(name):
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


def random(seed, shape, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_dense_updates_are_the_step_bit_for_bit(rule, dtype):
    dtype = dtype_of(dtype)
    shapes = {"kernel": (2, 70001), "large bias": (140001,), "bias": (7,), "scale": ()}
    starts = {name: random(len(name), shape, dtype) for name, shape in shapes.items()}
    serial, local = RULES[rule](ms.optimizers), RULES[rule](ms.optimizers)
    variables = [ms.Variable(start, name=name) for name, start in starts.items()]
    updates, others = LocalUpdates(local), [Weights(start, name) for name, start in starts.items()]
    arrays = [start.copy() for start in starts.values()]
    for step in range(1, 5):
        gradients = [random((step, index), array.shape, dtype) for index, array in enumerate(arrays)]
        serial.apply_gradients(list(zip(gradients, variables, strict=True)))
        for other, array, gradient in zip(others, arrays, gradients, strict=True):
            gradient = gradient.copy()
            gradient.flags.writeable = False
            updates.dense(other, array, [gradient], updates.iterations + 1)
        updates.count_step()
        assert updates.iterations == serial.iterations == step
    for variable, other, array in zip(variables, others, arrays, strict=True):
        assert variable.numpy().tobytes() == array.tobytes()
        theirs, ours = serial.slots(variable), updates.slots(other)
        assert list(theirs) == list(ours)
        for name in theirs:
            assert theirs[name].tobytes() == ours[name].tobytes()
            assert theirs[name].dtype == ours[name].dtype


@pytest.mark.parametrize("rule", RULES)
def test_several_threads_make_the_same_bits(rule, monkeypatch):
    """Large variables are shared out among threads; what was before may lie elsewhere, and stays as it is."""
    monkeypatch.setattr("mpistrat.parameter_server.server.local_updates._SHARED", 2)
    start, array = random(0, (5, 70001), np.float32), random(0, (5, 70001), np.float32)
    alone, shared = LocalUpdates(RULES[rule](ms.optimizers)), LocalUpdates(RULES[rule](ms.optimizers))
    first, second = Weights(start, "kernel"), Weights(start, "kernel")
    for step in range(1, 4):
        gradients = [random((step, part), start.shape, np.float32) for part in range(2)]
        monkeypatch.setattr("mpistrat.parameter_server.server.local_updates._threads", lambda: 1)
        alone.dense(first, array, gradients, step)
        monkeypatch.setattr("mpistrat.parameter_server.server.local_updates._threads", lambda: 3)
        after, before = np.full_like(start, np.nan), start.copy()
        shared.dense(second, after, gradients, step, old=start)
        assert start.tobytes() == before.tobytes()
        assert after.tobytes() == array.tobytes()
        start = after
    for name, slot in alone.slots(first).items():
        assert slot.tobytes() == shared.slots(second)[name].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_several_gradients_are_summed_in_their_order_like_those_of_replicas(dtype):
    start = random(1, 70001, dtype)
    gradients = [random((9, replica), 70001, dtype) * 100**replica for replica in range(3)]
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with strategy.scope():
        v, optimizer = ms.Variable(start), ms.optimizers.Adam(0.1)
        strategy.run(
            lambda: optimizer.apply_gradients([(gradients[ms.get_replica_context().replica_id_in_sync_group], v)])
        )
        expected, momentum = v.numpy(), optimizer.slots(v)["momentum"]
    strategy.close()

    def updated(gradients):
        updates, weights, array = LocalUpdates(ms.optimizers.Adam(0.1)), Weights(start), start.copy()
        updates.dense(weights, array, gradients, 1)
        return array, updates.slots(weights)["momentum"]

    array, ours = updated(gradients)
    assert array.tobytes() == expected.tobytes()
    assert ours.tobytes() == momentum.tobytes()
    assert updated(gradients[::-1])[1].tobytes() != momentum.tobytes()  # else the order would not be tested


# rows


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [(), (3,), (5, 4), (40000,)], ids=str)
def test_rows_are_updated_as_they_would_be_alone_and_others_stay(rule, dtype, width):
    """The rows of each step, taken out, are a variable of their own, with slots of their own."""
    start = random(1, (12, *width), dtype)
    updates, weights, array = LocalUpdates(RULES[rule](ms.optimizers)), Weights(start), start.copy()
    alone = [(LocalUpdates(RULES[rule](ms.optimizers)), Weights(row), row.copy()) for row in start[:, None]]
    for step, rows in enumerate([[1, 4, 5, 11], [4], [], [0, 1, 4]], 1):
        rows = np.array(rows, np.int64)
        values = random((step, 7), (len(rows), *width), dtype)
        updates.rows(weights, array, rows, values, step)
        for row, value in zip(rows, values, strict=True):
            other, variable, expected = alone[row]
            other.dense(variable, expected, [value[None]], step)
    for row, (_, _, expected) in enumerate(alone):
        assert array[row].tobytes() == expected.tobytes(), row
    for name, slot in updates.slots(weights).items():
        for row, (other, variable, _) in enumerate(alone):
            expected = other.slots(variable)
            # rows 2, 3, 6 to 10 were never updated
            assert np.array_equal(
                slot[row], expected[name][0] if expected else np.full(width, start_of(updates, name), slot.dtype)
            ), row


def start_of(updates, name):
    return updates._core.slot_start.get(name, 0.0)


def test_rows_wider_than_a_block():
    start = random(1, (3, 150001), np.float32)
    updates, array = LocalUpdates(ms.optimizers.Adam(0.1)), start.copy()
    values = random(2, (2, 150001), np.float32)
    weights = Weights(start)
    updates.rows(weights, array, np.array([0, 2]), values, 1)
    dense = start.copy()
    gradient = np.zeros_like(start)
    gradient[[0, 2]] = values
    LocalUpdates(ms.optimizers.Adam(0.1)).dense(Weights(start), dense, [gradient], 1)
    assert array.tobytes() == dense.tobytes()  # the first step of dense Adam moves no weight whose gradient is zero
    assert np.array_equal(array[1], start[1])


def test_something_else_is_done_between_the_blocks_of_a_large_variable():
    """By the thread that updates it; others, if there are any, take some of the blocks. The numbers are the same."""
    start, threads = random(1, (20 * BLOCK + 1,), np.float32), []
    updates = LocalUpdates(ms.optimizers.SGD(0.5), lambda: threads.append(threading.current_thread()))
    for step in range(1, 51):
        array = start.copy()
        updates.dense(Weights(start), array, [start], step)
        assert array.tobytes() == (start - start * np.float32(0.5)).tobytes()
        if threads:  # on a busy machine the others may have taken all blocks
            break
    assert 1 <= len(threads) <= 21
    assert set(threads) == {threading.current_thread()}
    small = start[:BLOCK].copy()
    threads.clear()
    updates.dense(Weights(small, "small"), small, [small.copy()], 1)
    assert not threads


def test_many_rows_in_several_blocks():
    start = random(1, (5000, 64), np.float32)
    rows = np.sort(np.random.default_rng(3).choice(5000, 3000, replace=False))
    values, array = random(2, (3000, 64), np.float32), start.copy()
    LocalUpdates(ms.optimizers.SGD(0.5)).rows(Weights(start), array, rows, values, 1)
    expected = start.copy()
    expected[rows] -= values * np.float32(0.5)
    assert array.tobytes() == expected.tobytes()


def test_rows_of_16_bit_weights_take_sums_in_float32():
    start = np.ones((4, 2), np.float16)
    array = start.copy()
    values = np.array([[2049.0, 1.0]], np.float32)  # 2049 is no float16
    LocalUpdates(ms.optimizers.SGD(1.0)).rows(Weights(start), array, np.array([2]), values, 1)
    assert array.tolist() == [[1, 1], [1, 1], [-2048, 0], [1, 1]]


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
@pytest.mark.parametrize("rule", ["adam", "adagrad"])
def test_a_large_table_of_which_few_rows_are_updated_takes_little_memory(rule):
    table = np.frombuffer(mmap.mmap(-1, 1 << 28), np.float32).reshape(-1, 16)  # 256 MB, each slot as well
    updates, weights = LocalUpdates(RULES[rule](ms.optimizers)), Weights(table)
    before = resident_bytes()
    rows = np.arange(0, len(table), len(table) // 100)
    updates.rows(weights, table, rows, np.ones((len(rows), 16), np.float32), 1)
    assert resident_bytes() - before < 64 << 20
    assert np.flatnonzero(table[:, 0]).tolist() == rows.tolist()


def test_rows_first_and_all_of_a_variable_later():
    start, rows = random(1, (6, 2), np.float32), np.array([1, 4])
    updates, weights, array = LocalUpdates(ms.optimizers.Adagrad(0.5)), Weights(start), start.copy()
    updates.rows(weights, array, rows, random(2, (2, 2), np.float32), 1)
    updates.dense(weights, array, [random(3, (6, 2), np.float32)], 2)
    again, expected = LocalUpdates(ms.optimizers.Adagrad(0.5)), start.copy()
    gradient = np.zeros_like(start)  # with Adagrad rows without a gradient stay anyway
    gradient[rows] = random(2, (2, 2), np.float32)
    again.dense(weights, expected, [gradient], 1)
    again.dense(weights, expected, [random(3, (6, 2), np.float32)], 2)
    assert array.tobytes() == expected.tobytes()
    assert updates.slots(weights)["accumulator"].tobytes() == again.slots(weights)["accumulator"].tobytes()


def test_slots_that_are_set_after_some_rows_were_updated_stay():
    start, updates = np.zeros((3, 2)), LocalUpdates(ms.optimizers.Adagrad(1.0, epsilon=0.0))
    weights, array = Weights(start), start.copy()
    updates.rows(weights, array, np.array([0]), np.ones((1, 2)), 1)
    updates.set_slots(weights, {"accumulator": np.full((3, 2), 15.0)})
    updates.rows(weights, array, np.array([2]), np.ones((1, 2)), 2)
    assert updates.slots(weights)["accumulator"].tolist() == [[15, 15], [15, 15], [16, 16]]
    assert array[2].tolist() == [-0.25, -0.25]  # Keras: w -= g / sqrt(15 + g²)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_nothing_to_update(shape):
    start = np.zeros(shape, np.float32)
    updates, weights = LocalUpdates(ms.optimizers.Adam()), Weights(start)
    updates.dense(weights, start, [start], 1)
    updates.rows(weights, start, np.arange(shape[0]), start, 1)
    assert updates.slots(weights)["momentum"].shape == shape


# slots


def test_slots_are_kept_by_variable_and_can_be_set():
    updates, first, second = LocalUpdates(ms.optimizers.Momentum(0.1)), Weights(np.ones((2, 2))), Weights(np.ones(3))
    assert updates.slots(first) == {}
    updates.dense(first, first.start.copy(), [np.ones((2, 2))], 1)
    assert updates.slots(second) == {}
    assert updates.slots(first)["momentum"].tolist() == [[-0.1, -0.1], [-0.1, -0.1]]
    updates.set_slots(second, {"momentum": [1.0, 2.0, 3.0]})
    array = second.start.copy()
    updates.dense(second, array, [np.zeros(3)], 1)
    np.testing.assert_allclose(array, [1.9, 2.8, 3.7])  # Keras: m = 0.9 m, w += m


def test_slots_are_copies_and_no_update_goes_on_meanwhile():
    updates, weights = LocalUpdates(ms.optimizers.Momentum(0.5, 0.5)), Weights(np.zeros(2))
    assert not updates.has_slots(weights)
    array = np.zeros(2)
    updates.dense(weights, array, [np.ones(2)], 1)
    assert updates.has_slots(weights)
    first = updates.slots(weights)["momentum"]
    assert first.flags.writeable
    kept = first.tolist()
    updates.dense(weights, array, [np.ones(2)], 2)
    assert first.tolist() == kept != updates.slots(weights)["momentum"].tolist()


def test_slots_that_do_not_fit():
    updates, weights = LocalUpdates(ms.optimizers.Momentum(0.1)), Weights(np.ones(3))
    with pytest.raises(ValueError, match=r"LocalUpdates.set_slots: w: expected slots momentum, got velocity"):
        updates.set_slots(weights, {"velocity": np.ones(3)})
    with pytest.raises(ValueError, match=r"expected momentum of shape \(3,\), got shape \(4,\)"):
        updates.set_slots(weights, {"momentum": np.ones(4)})
    assert updates.slots(weights) == {}


def test_slots_that_were_restored_wait_for_their_variable():
    optimizer = ms.optimizers.Momentum(0.1)
    updates, weights = LocalUpdates(optimizer), Weights(np.ones(2), "kernel")
    optimizer.set_state({"iterations": 5, "slots": {"kernel": {"momentum": np.array([1.0, 2.0])}}})
    assert updates.iterations == 5
    assert updates.slots(weights)["momentum"].tolist() == [1, 2]
    optimizer.set_state({"iterations": 7, "slots": {"kernel": {"momentum": np.array([3.0, 4.0])}}})
    array = weights.start.copy()
    updates.dense(weights, array, [np.zeros(2)], 8)
    np.testing.assert_allclose(array, [1 + 2.7, 1 + 3.6])


# which optimizer it is


def test_optimizers_are_counted_and_found():
    first = ms.optimizers.SGD(0.1)
    second = ms.optimizers.Adam(0.1)
    assert second._core.ordinal == first._core.ordinal + ORDINAL_STEP
    assert find(first._core.ordinal) is first
    assert find(second._core.ordinal) is second
    assert find(second._core.ordinal + ORDINAL_STEP) is None
    assert "ordinal" not in repr(first)  # two of a kind are described alike
    number = second._core.ordinal
    del second
    gc.collect()
    assert find(number) is None


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_are_counted_like_others(duplicate):
    first = ms.optimizers.SGD(0.1, momentum=0.5)
    again = duplicate(first)
    assert again._core.ordinal == first._core.ordinal + ORDINAL_STEP
    assert find(again._core.ordinal) is again
    assert find(first._core.ordinal) is first
    assert repr(again) == repr(first)


def test_threads_get_different_ordinals():
    made = []
    threads = [
        threading.Thread(target=lambda: made.extend([ms.optimizers.SGD() for _ in range(200)])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({optimizer._core.ordinal for optimizer in made}) == 800
    assert all(find(optimizer._core.ordinal) is optimizer for optimizer in made)
