"""Elastic states, the sampler, and functions that start again."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat.horovod.torch as hvd  # noqa: E402
from mpistrat.horovod.errors import HostsUpdatedInterrupt  # noqa: E402
from tests.harness.horovod_ranks import initialized  # noqa: E402


@pytest.fixture(autouse=True)
def started():
    with initialized():
        yield


def filled(value):
    model = torch.nn.Linear(2, 1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def weights(model):
    return sorted({float(value) for parameter in model.parameters() for value in parameter.flatten()})


@pytest.mark.ranks(1, 2)
def test_a_state_is_synchronized_committed_and_restored():
    model = filled(1.0 + hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 + hvd.rank())
    state = hvd.elastic.TorchState(model, optimizer, epoch=10 + hvd.rank(), history=[hvd.rank()])
    state.sync()
    assert (weights(model), optimizer.param_groups[0]["lr"], state.epoch, state.history) == ([1], 0.5, 10, [0])
    model.load_state_dict(filled(7.0).state_dict())
    state.epoch = 11
    state.history.append(3)
    state.restore()
    assert (weights(model), state.epoch, state.history) == ([1], 10, [0])
    model.load_state_dict(filled(7.0).state_dict())
    state.epoch = 11
    state.commit()
    model.load_state_dict(filled(8.0).state_dict())
    state.restore()
    assert (weights(model), state.epoch, state.commits) == ([7], 11, 1)
    state.model = filled(3.0)
    state.restore()
    assert weights(state.model) == [3]


@pytest.mark.ranks(1, 2, 3)
def test_the_sampler_divides_what_is_left():
    sampler = hvd.elastic.ElasticSampler(range(20), seed=4)
    mine = hvd.allgather_object(list(sampler))
    assert set().union(*mine) == set(range(20)) and len({len(part) for part in mine}) == 1
    first = [row for part in mine for row in part[:2]]
    sampler.record_batch(0, 2)
    sampler.load_state_dict(sampler.state_dict())
    left = hvd.allgather_object(list(sampler))
    assert set().union(*left) == set(range(20)) - set(first)
    sampler.set_epoch(1)
    assert sampler.processed_num == 0 and hvd.allgather_object(list(sampler)) != mine


@pytest.mark.ranks(2)
def test_an_error_of_all_ranks_returns_to_the_commit():
    seen, resets = [], []

    @hvd.elastic.run
    def train(state):
        while state.step < 4:
            state.step += 1
            seen.append(state.step)
            if state.step == 3 and seen.count(3) == 1:
                raise hvd.HorovodInternalError("broken once")
            hvd.allreduce(torch.ones(1), name=f"step{state.step}")
            if state.step % 2 == 0:
                state.commit()
        return state.step

    state = hvd.elastic.ObjectState(step=0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    assert train(state) == 4
    assert seen == [1, 2, 3, 3, 4] and resets == [2]


@pytest.mark.ranks(2)
def test_an_error_that_comes_again_is_raised():
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(1)
        hvd.allreduce(torch.ones(1 + hvd.rank()), name="grad")

    with pytest.raises(
        hvd.HorovodInternalError, match=r"allreduce\.grad: the ranks call allreduce with different shapes"
    ):
        train(hvd.elastic.ObjectState(step=0))
    assert len(calls) == 3


@pytest.mark.ranks(2)
def test_an_interrupt_keeps_what_was_not_committed():
    @hvd.elastic.run
    def train(state):
        if state.step == 0:
            state.step = 5
            raise HostsUpdatedInterrupt(skip_sync=False)
        return state.step

    assert train(hvd.elastic.ObjectState(step=0)) == 5


@pytest.mark.ranks(2)
def test_the_newest_commit_of_the_job_counts(monkeypatch):
    """Rank 0 committed once before it died, rank 1 twice."""
    from mpi4py import MPI

    from mpistrat.comm import job_files

    job = MPI.COMM_WORLD.bcast(job_files.new_key(), 0)
    monkeypatch.setenv("MPISTRAT_JOB", job)
    try:
        earlier = hvd.elastic.TorchState(filled(0.0), step=0)
        for step in range(1, 2 + hvd.rank()):
            earlier.model.load_state_dict(filled(10.0 * step).state_dict())
            earlier.step = step
            earlier.commit()
        hvd.barrier()
        state = hvd.elastic.TorchState(filled(5.0), step=0)
        assert hvd.elastic.run(lambda state: (state.step, state.commits, weights(state.model)))(state) == (2, 2, [20])
        MPI.COMM_WORLD.Barrier()
    finally:
        job_files.remove(job)
