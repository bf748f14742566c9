"""MIN of bools is True if all are, MAX if any is, as NumPy's `all` and `any` of the replicas' arrays."""

import numpy as np
import pytest

import mpistrat as ms

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def flags(replica, shape):
    return np.random.default_rng(replica).random(shape) > 0.3


@pytest.mark.parametrize("devices", [1, 2])
def test_all_and_any(devices):
    with ms.MultiWorkerMirroredStrategy(devices=[f"cpu:{index}" for index in range(devices)]) as strategy:
        number = strategy.num_replicas_in_sync

        def mine(shape):
            return strategy.distribute_values_from_function(lambda c: flags(c.replica_id_in_sync_group, shape))

        for op, over in (("MIN", np.all), ("MAX", np.any)):
            for shape in ((), (5,), (3, 400_000)):
                every = np.array([flags(replica, shape) for replica in range(number)])
                found = strategy.reduce(op, mine(shape))
                assert found.dtype == bool and np.array_equal(found, over(every, axis=0)), (op, shape)
                found = strategy.all_reduce_async(op, mine(shape)).wait()
                assert found.dtype == bool and np.array_equal(found, over(every, axis=0)), (op, shape)
                if shape:
                    found = strategy.reduce(op, mine(shape), axis=-1)
                    assert found.dtype == bool and np.array_equal(found, over(over(every, axis=-1), axis=0)), (
                        op,
                        shape,
                    )

            def step(x):
                return ms.get_replica_context().all_reduce(op, {"x": x, "y": x.astype(int)})  # noqa: B023

            (found, *_) = strategy.local_results(strategy.run(step, args=(mine((7,)),)))
            every = np.array([flags(replica, (7,)) for replica in range(number)])
            assert np.array_equal(found["x"], over(every, axis=0)) and np.array_equal(found["y"], over(every, axis=0))
            with pytest.raises(ValueError, match="expected an element on some replica"):
                strategy.reduce(op, mine((0,)), axis=0)
            # replicas without an element do not count
            some = strategy.distribute_values_from_function(
                lambda c: np.full(int(c.replica_id_in_sync_group == 0), op == "MIN")  # noqa: B023
            )
            assert strategy.reduce(op, some, axis=0) == (op == "MIN")
        for op in ("SUM", "MEAN", "PROD"):
            for axis in (None, 0):
                with pytest.raises(
                    TypeError, match="got dtype bool. To count, cast.*MIN is True if all are, MAX if any"
                ):
                    strategy.reduce(op, mine((3,)), axis=axis)
        if strategy.size > 1 and devices == 1:
            with pytest.raises(ms.errors.CollectiveMismatchError, match="bool"):
                strategy.reduce("MIN", np.ones(3, [bool, np.int8][strategy.rank % 2]))
