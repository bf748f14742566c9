"""`cache_variable_reads`: one read from the server for all reads inside, whatever is written meanwhile."""

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.parameter_server_strategies import made, settle
from tests.harness.transports import TRANSPORTS


def pulls(strategy):
    """How often this worker has pulled."""
    return sum(count for t in strategy._parameter_servers.transports for count, _ in t.stats.pulls.values())


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reads_inside_give_what_the_first_one_got(transport):
    with made(transport=transport) as strategy:
        v = ms.Variable(np.zeros(3), name="v", aggregation=ms.VariableAggregation.SUM)
        settle(strategy)
        if strategy.worker_index == 0:
            with ms.cache_variable_reads():
                assert v.numpy().tolist() == [0, 0, 0]
                v.assign([5.0, 6.0, 7.0])
                strategy.run(lambda: v.assign_add([1.0, 1.0, 1.0]))
                assert v.numpy().tolist() == [0, 0, 0]
                assert strategy.run(lambda: v.numpy().tolist()) == [0, 0, 0]
                assert v.sparse_read([1]).tolist() == [0]
            assert v.numpy().tolist() == [6, 7, 8]
            with ms.cache_variable_reads():
                assert v.numpy().tolist() == [6, 7, 8]
                v.assign([0.0, 0.0, 0.0])
            assert strategy.run(lambda: v.numpy().tolist()) == [0, 0, 0]
        strategy.barrier()


@pytest.mark.ranks(2, 3, 4)
def test_steps_inside_pull_once_and_push_the_version_they_read():
    with made() as strategy:
        v = ms.Variable(np.zeros(3), name="v")
        optimizer = ms.optimizers.SGD(1.0)
        settle(strategy)
        seen = []

        def step():
            seen.append((v.numpy().tolist(), v.version_of_step if v.array is not None else None))
            optimizer.apply_gradients([(np.ones(3), v)])

        if strategy.worker_index == 0:
            before = pulls(strategy)
            with ms.cache_variable_reads():
                for _ in range(4):
                    strategy.run(step)
            assert pulls(strategy) == before + 1
            assert len({str(each) for each in seen}) == 1
            assert seen[0][0] == [0, 0, 0]
            assert v.numpy().tolist() == [-4, -4, -4]
            for _ in range(4):
                strategy.run(step)
            assert [numbers[0] for numbers, _ in seen[4:]] == [-4, -5, -6, -7]
            assert [version - seen[0][1] for _, version in seen[4:]] == [4, 5, 6, 7]
        strategy.barrier()


@pytest.mark.ranks(3)
def test_workers_in_sync_keep_what_they_have_read_together():
    with made(workers_in_sync=2) as strategy:
        v = ms.Variable(np.zeros(1), name="v", aggregation=ms.VariableAggregation.SUM)
        settle(strategy)
        if not strategy.is_server:
            with ms.cache_variable_reads():
                if strategy.worker_index == 1:
                    v.numpy()  # alone: nothing that the other one must have, too
                first = strategy.run(lambda: v.numpy().tolist())
                strategy.run(lambda: v.assign_add([1.0]))
                assert strategy.run(lambda: v.numpy().tolist()) == first == [0]
            assert strategy.run(lambda: v.numpy().tolist()) == [2]
        strategy.barrier()


@pytest.mark.ranks(2, 3)
def test_other_variables_are_read_as_ever_and_caches_do_not_nest():
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        v = ms.Variable([0.0])
        with ms.cache_variable_reads():
            assert v.numpy().tolist() == [0]
            v.assign([1.0])
            assert v.numpy().tolist() == [1]
            with pytest.raises(ValueError, match="one inside another"), ms.cache_variable_reads():
                pass
        with ms.cache_variable_reads():  # the error has not left it open
            pass
