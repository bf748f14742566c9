"""Where a call happens: the truth table of contexts, scopes, and the strategy outside of them."""

import copy
import pickle
import threading

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import context
from mpistrat.errors import ClosedError, ContextError, MpistratError
from tests.harness.strategies import without_mpi


def where():
    """What the four questions answer here; of the replica context its id."""
    replica = ms.get_replica_context()
    return (
        ms.has_strategy(),
        ms.in_cross_replica_context(),
        None if replica is None else replica.replica_id_in_sync_group,
        context.in_update_context(),
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_truth_table(replicas):
    with without_mpi(replicas) as strategy:
        assert where() == (False, False, 0, False)
        with strategy.scope():
            v = ms.Variable(1.0)
            assert where() == (True, True, None, False)
            assert ms.get_strategy() is strategy
            found = strategy.extended.update(v, lambda var: (*where(), context.get_update_replica_id()))
            assert found == (True, False, None, True, 0)

        def step():
            inside = ms.get_replica_context().merge_call(lambda s: [where(), s is strategy])
            return [where(), inside, where()]

        for replica, (before, merged, after) in enumerate(strategy.local_results(strategy.run(step))):
            assert before == after == (True, False, replica, False)
            assert merged == [(True, True, None, False), True]
        assert where() == (False, False, 0, False)


def test_a_scope_may_be_entered_again():
    with without_mpi() as strategy, strategy.scope() as one, strategy.scope() as two:
        assert one is two is strategy
        assert where() == (True, True, None, False)


def test_scopes_of_two_strategies_do_not_nest():
    with without_mpi() as one, without_mpi() as two, one.scope():
        with pytest.raises(RuntimeError, match="expected no scope of another strategy"), two.scope():
            pass
        for act in (lambda: two.run(int), lambda: two.reduce("SUM", 1.0), lambda: two.gather(np.ones(1), 0)):
            with pytest.raises(RuntimeError, match="another strategy"):
                act()
        assert ms.get_strategy() is one
    assert not ms.has_strategy()


def test_scopes_are_left_in_reverse_order():
    with without_mpi() as strategy:
        outer, inner = strategy.scope(), strategy.scope()
        outer.__enter__()
        inner.__enter__()
        with pytest.raises(RuntimeError, match="reverse order"):
            outer.__exit__(None, None, None)
        assert ms.get_strategy() is strategy
        inner.__exit__(None, None, None)
        outer.__exit__(None, None, None)
    assert not ms.has_strategy()


def test_a_scope_belongs_to_its_thread():
    with without_mpi() as strategy, strategy.scope():
        found = []
        thread = threading.Thread(target=lambda: found.append(ms.has_strategy()))
        thread.start()
        thread.join()
        assert found == [False]


def test_cross_replica_calls_are_refused_in_a_step():
    with without_mpi() as strategy:
        for act in (
            lambda: strategy.run(int),
            lambda: strategy.scope().__enter__(),
            lambda: strategy.reduce("SUM", 1.0, axis=None),
            lambda: strategy.gather(np.ones(1), axis=0),
            lambda: strategy.extended.reduce_to("SUM", 1.0, "cpu:0"),
            lambda: strategy.distribute_values_from_function(lambda c: 1),
        ):
            with pytest.raises(RuntimeError, match="replica context"):
                strategy.run(act)


def test_a_replica_context_serves_its_step_only():
    with without_mpi() as strategy:
        kept = strategy.run(ms.get_replica_context)
        with pytest.raises(ContextError, match="outside of it"):
            kept.all_reduce("SUM", 1.0)
        with pytest.raises(ContextError, match="outside of it"):
            kept.merge_call(lambda s: None)


def test_variable_sync_on_read_context_nests():
    assert not context.in_sync_on_read_context()
    with ms.variable_sync_on_read_context():
        with ms.variable_sync_on_read_context():
            assert context.in_sync_on_read_context()
        assert context.in_sync_on_read_context()
    assert not context.in_sync_on_read_context()


class TestSetStrategy:
    def test_holds_everywhere_until_reset(self):
        with without_mpi() as strategy:
            ms.tf.experimental_set_strategy(strategy)
            try:
                assert where() == (True, True, None, False)
                assert ms.get_strategy() is strategy
                found = []
                thread = threading.Thread(target=lambda: found.append(ms.get_strategy()))
                thread.start()
                thread.join()
                assert found == [strategy]
                with strategy.scope():
                    assert where() == (True, True, None, False)
                assert strategy.run(where) == (True, False, 0, False)
                with without_mpi() as other, pytest.raises(RuntimeError), other.scope():
                    pass
            finally:
                ms.set_strategy(None)
            assert where() == (False, False, 0, False)

    def test_not_in_a_scope(self):
        with without_mpi() as strategy, strategy.scope(), pytest.raises(RuntimeError, match="outside every scope"):
            ms.set_strategy(strategy)

    def test_not_of_something_else(self):
        with pytest.raises(TypeError, match="a Strategy or None"):
            ms.set_strategy("mirrored")


class TestDefaultStrategy:
    def test_what_it_is(self):
        default = ms.get_strategy()
        assert default is ms.get_strategy()
        assert (default.num_replicas_in_sync, default.rank, default.size, default.comm) == (1, 0, 1, None)
        assert ms.get_replica_context().strategy is default

    def test_reductions_return_what_they_get(self):
        default, value = ms.get_strategy(), object()
        assert default.reduce("SUM", value, axis=None) is value
        assert default.extended.reduce_to("MEAN", value, "cpu:0") is value
        assert default.extended.batch_reduce_to("SUM", [(value, None)]) == [value]
        assert default.gather(value, axis=0) is value
        assert ms.get_replica_context().all_reduce("SUM", value) is value
        assert default.local_results(value) == (value,)

    def test_reductions_over_an_axis_are_local(self):
        assert ms.get_strategy().reduce("MEAN", np.array([1, 2, 6]), axis=0) == 3.0

    def test_run(self):
        assert ms.get_strategy().run(lambda a, b: (a + b, where()), args=(1,), kwargs={"b": 2}) == (
            3,
            (False, False, 0, False),
        )
        assert ms.get_replica_context().merge_call(lambda s, x: (s, x, where()), args=(7,)) == (
            ms.get_strategy(),
            7,
            (False, True, None, False),
        )

    def test_variables_and_optimizers(self):
        v = ms.Variable([1.0, 2.0])
        v.assign_add([1.0, 1.0])
        v.grad[...] = 2.0
        ms.optimizers.SGD(0.5).apply_gradients([(v.grad, v)])
        assert v.numpy().tolist() == [1.0, 2.0]

    def test_it_has_no_devices(self):
        for name in ("worker_devices", "parameter_devices"):
            with pytest.raises(RuntimeError, match="the default one"):
                getattr(ms.get_strategy().extended, name)

    def test_its_scope_does_not_nest(self):
        with ms.get_strategy().scope():
            assert where() == (False, False, 0, False)
        default = ms.get_strategy()
        with without_mpi() as strategy:
            with strategy.scope(), pytest.raises(RuntimeError, match="another strategy"), default.scope():
                pass
            with default.scope(), strategy.scope():
                assert where() == (True, True, None, False)


class TestObject:
    def test_copies(self):
        with without_mpi(2) as strategy:
            with pytest.raises(RuntimeError, match="deepcopy"):
                copy.copy(strategy)
            with pytest.raises(TypeError, match="no pickling"):
                pickle.dumps(strategy)
            other = copy.deepcopy(strategy)
            assert other is not strategy
            assert other.extended.process_group is strategy.extended.process_group
            with other.scope():
                assert ms.get_strategy() is other
                v = ms.Variable(1.0, aggregation=ms.VariableAggregation.SUM)
            other.run(lambda: v.assign_add(1.0))
            assert float(v) == 3.0
            assert other.extended.variable_created_in_scope(v)
            assert not strategy.extended.variable_created_in_scope(v)
            other.close()
            with pytest.raises(ClosedError):
                other.reduce("MEAN", 1.0)
            assert strategy.reduce("MEAN", 1.0) == 1.0

    def test_a_copy_ends_with_the_original(self):
        strategy = without_mpi(2)
        other = copy.deepcopy(strategy)
        value = ms.PerReplica([1.0, 2.0])
        assert other.reduce("SUM", value) == 3.0
        strategy.close()
        with pytest.raises(ClosedError):
            other.reduce("SUM", value)
        other.close()

    def test_the_base_class_is_no_strategy(self):
        with pytest.raises(TypeError, match="expected a strategy"):
            ms.Strategy()

    def test_closed(self):
        with without_mpi(2) as strategy:
            assert "2 replicas" in repr(strategy)
            with strategy.scope():
                v = ms.Variable(1.0)
        assert "closed" in repr(strategy)
        strategy.close()
        for act in (
            lambda: strategy.run(int),
            lambda: strategy.scope(),
            lambda: strategy.reduce("SUM", 1.0),
            lambda: strategy.gather([1.0], 0),
            lambda: strategy.save("x"),
            lambda: strategy.extended.update(v, lambda var: None),
            lambda: v.numpy(),
        ):
            with pytest.raises(ClosedError):
                act()

    def test_an_exception_leaves_it_open(self):
        strategy = without_mpi()
        with pytest.raises(ZeroDivisionError), strategy:
            1 / 0  # noqa: B018
        assert not strategy.extended.closed

    def test_what_it_tells(self):
        with without_mpi(2) as strategy:
            assert (strategy.rank, strategy.size, strategy.local_rank, strategy.num_replicas_in_sync) == (0, 1, 0, 2)
            assert strategy.extended.worker_devices == ("cpu:0", "cpu:1")
            assert strategy.extended.parameter_devices == ("cpu:0", "cpu:1")
            assert strategy.extended.should_checkpoint
            assert strategy.cluster_resolver is None


def test_errors_of_contexts_are_the_package_s_and_built_in():
    assert issubclass(ContextError, MpistratError)
    assert issubclass(ContextError, RuntimeError)
