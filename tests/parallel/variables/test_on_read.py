"""ON_READ variables: each replica's own copy, and what the copies are together."""

import numpy as np
import pytest

from mpistrat.base.distributed_values import PerReplica
from mpistrat.context import variable_sync_on_read_context
from mpistrat.errors import ClosedError, CollectiveMismatchError
from mpistrat.types import VariableAggregation, VariableSynchronization
from mpistrat.variables import Variable
from tests.harness.variable_harness import VariableHarness, replica_id

NONE, SUM = VariableAggregation.NONE, VariableAggregation.SUM
MEAN, FIRST = VariableAggregation.MEAN, VariableAggregation.ONLY_FIRST_REPLICA
ON_READ = VariableSynchronization.ON_READ


@pytest.fixture(params=["two", "uneven"])
def harness(request):
    from mpi4py import MPI

    count = {"two": 2, "uneven": 1 + MPI.COMM_WORLD.rank % 2}[request.param]
    with VariableHarness([f"cpu:{k}" for k in range(count)]) as made:
        yield made


def local(result):
    return result.values if isinstance(result, PerReplica) else (result,)


@pytest.mark.ranks(1, 2)
def test_documented_numbers_of_two_replicas():
    from mpi4py import MPI

    with VariableHarness(["cpu:0"] if MPI.COMM_WORLD.size == 2 else ["cpu:0", "cpu:1"]) as harness:
        with harness.scope():
            v = Variable(1.0, synchronization=ON_READ, aggregation=SUM)
        assert not v.trainable
        seen = harness.run(lambda: float(v.assign_add(10.0)))
        assert set(local(seen)) == {11.0}
        with harness.scope():
            assert float(v) == 22.0
            v.assign(22.0)
            assert {float(copy) for copy in v.values} == {11.0}
            assert v.numpy() == 22.0
            with pytest.raises(ValueError, match="the copy is ambiguous"):
                v.assign_add(1.0)
            with pytest.raises(ValueError, match="the copy is ambiguous"):
                v.assign_sub(1.0)


@pytest.mark.ranks(1, 2, 3, 4)
def test_what_the_copies_are_together(harness):
    n = harness.topology.num_replicas
    with harness.scope():
        made = {how: Variable([1.0, 2.0], synchronization=ON_READ, aggregation=how) for how in (SUM, MEAN, FIRST, NONE)}

    def step():
        for v in made.values():
            v.assign_add(np.full(2, 5.0 + replica_id()))
            v.assign_sub([0.5, 0.5])
        return [v.numpy() for v in made.values()]

    seen = harness.run(step)
    for how, results in zip(made, seen, strict=True):
        for index, result in enumerate(local(results)):
            assert result.tolist() == [5.5 + harness.topology.replica_offset + index + x for x in (0, 1)], how
    ids = np.arange(n)
    expected = {SUM: (5.5 + ids).sum(), MEAN: (5.5 + ids).mean(), FIRST: 5.5}
    with harness.scope():
        for how, value in expected.items():
            step_2 = n if how is SUM else 1
            np.testing.assert_allclose(made[how].numpy(), [value, value + step_2], rtol=1e-15)
            np.testing.assert_allclose(np.asarray(made[how]), [value, value + step_2], rtol=1e-15)
        with pytest.raises(ValueError, match="NONE"):
            made[NONE].numpy()


@pytest.mark.ranks(1, 2, 3, 4)
def test_integers_lose_nothing(harness):
    with harness.scope():
        v = Variable(np.int64(3), synchronization=ON_READ, aggregation=SUM)
        assert int(v) == 3 * harness.topology.num_replicas
        for value in (0, 7, -7, 22, 1 << 40):
            v.assign(value)
            assert int(v) == value
            copies = [int(copy) for copy in v.values]
            assert max(copies) - min(copies) <= 1


@pytest.mark.ranks(1, 2, 3)
def test_writes_for_all_change_every_copy(harness):
    for how in (MEAN, FIRST, NONE):
        with harness.scope():
            v = Variable(np.zeros(3), synchronization=ON_READ, aggregation=how)
            v.assign(np.array([1.0, 2.0, 3.0]))
            v.assign_add(np.ones(3)).assign_sub([0.5, 0.5, 0.5])
        assert [copy.tolist() for copy in v.values] == [[1.5, 2.5, 3.5]] * harness.topology.num_local_replicas
        harness.update(v, lambda w: w.assign_add(w + 1))
        assert [copy.tolist() for copy in v.values] == [[4.0, 6.0, 8.0]] * harness.topology.num_local_replicas


@pytest.mark.ranks(1, 2, 3)
def test_aggregate_in_replica_context(harness):
    n = harness.topology.num_replicas
    with harness.scope():
        v = Variable(1.0, synchronization=ON_READ, aggregation=SUM)

    def step():
        v.assign(float(replica_id()))
        with variable_sync_on_read_context():
            with variable_sync_on_read_context():
                inner = float(v.read_value())
            outer = float(v.read_value())
        return inner, outer, float(v.read_value())

    inner, outer, after = harness.run(step)
    assert set(local(inner)) == set(local(outer)) == {n * (n - 1) / 2}
    offset = harness.topology.replica_offset
    assert local(after) == tuple(float(offset + index) for index in range(harness.topology.num_local_replicas))


@pytest.mark.ranks(1, 2)
def test_what_it_does_not_do(harness):
    with harness.scope():
        v = Variable(np.zeros(3), synchronization=ON_READ, aggregation=SUM, name="r")
        with pytest.raises(NotImplementedError, match="ON_WRITE"):
            v.scatter_add(([0], [1.0]))
        with pytest.raises(ValueError, match="trainable"):
            Variable(0.0, trainable=True, synchronization=ON_READ)
        with pytest.raises(ValueError, match="gradient|trainable"):
            v.gradient(0)
        if harness.topology.size > 1:
            with pytest.raises(CollectiveMismatchError, match="'r'"):
                v.assign(np.full(3, float(harness.topology.rank)))
    view = v.values[0]
    harness.placement.close()
    for use in (lambda: v.array, lambda: v.numpy(), lambda: v.assign(np.ones(3)), lambda: v.values):
        with pytest.raises(ClosedError, match="'r'"):
            use()
    assert view.tolist() == [0, 0, 0]
