"""Steps on the replicas of one process: arguments, results, rendezvous, failures."""

import contextvars
import gc
import threading
import time
import weakref

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ContextError
from tests.harness.strategies import without_mpi


def replica_id():
    return ms.get_replica_context().replica_id_in_sync_group


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n}replicas")
def strategy(request):
    with without_mpi(request.param) as made:
        yield made


@pytest.fixture
def two():
    with without_mpi(2) as made:
        yield made


class TestArgumentsAndResults:
    def test_ids_are_dense(self, strategy):
        n = strategy.num_replicas_in_sync
        found = strategy.run(replica_id)
        assert strategy.local_results(found) == tuple(range(n))
        assert isinstance(found, int) is (n == 1)

    def test_the_context_tells(self, strategy):
        def step():
            ctx = ms.get_replica_context()
            return ctx.devices, ctx.num_replicas_in_sync, ctx.num_input_pipelines, ctx.strategy is strategy

        for replica, found in enumerate(strategy.local_results(strategy.run(step))):
            assert found == ((f"cpu:{replica}",), strategy.num_replicas_in_sync, 1, True)

    def test_per_replica_arguments_are_divided_anywhere(self, strategy):
        n = strategy.num_replicas_in_sync
        parts = ms.PerReplica(range(10, 10 + n))
        marker = object()

        def step(nested, plain, *, named):
            return nested["a"][0], named, plain is marker

        found = strategy.run(step, args=[{"a": [parts]}, marker], kwargs={"named": ms.Mirrored([5] * n)})
        assert strategy.local_results(found) == tuple((10 + r, 5, True) for r in range(n))

    def test_variables_are_passed_whole(self, strategy):
        with strategy.scope():
            v = ms.Variable(3.0)
        assert all(strategy.local_results(strategy.run(lambda var: np.bool_(var is v), args=(v,))))

    def test_the_same_object_is_not_wrapped(self, strategy):
        marker = object()
        assert strategy.run(lambda: marker) is marker
        assert strategy.run(lambda: None) is None

    def test_numbers_are_wrapped_even_where_equal(self, two):
        assert two.run(lambda: 1).values == (1, 1)  # Python keeps one object for each small integer
        assert two.reduce("SUM", two.run(lambda: 1)) == 2

    def test_nests_are_regrouped(self, two):
        found = two.run(lambda: {"id": replica_id(), "more": (replica_id(), None)})
        assert found["id"].values == (0, 1)
        assert found["more"][0].values == (0, 1)
        assert found["more"][1] is None
        assert two.local_results(found) == ({"id": 0, "more": (0, None)}, {"id": 1, "more": (1, None)})

    def test_results_of_different_forms_are_refused(self, two):
        with pytest.raises(ValueError, match="expected tuple"):
            two.run(lambda: (1,) if replica_id() == 0 else (1, 2))

    def test_local_results_of_a_plain_value(self, strategy):
        assert strategy.local_results("x") == ("x",)

    def test_local_results_of_a_variable(self, strategy):
        with strategy.scope():
            v = ms.Variable(3.0)
        assert [float(value) for value in strategy.local_results(v)] == [3.0] * strategy.num_replicas_in_sync

    @pytest.mark.parametrize("args", [5, "ab", {"a": 1}, None])
    def test_args_are_a_tuple_or_list(self, strategy, args):
        with pytest.raises(ValueError, match="a tuple or list"):
            strategy.run(lambda x: x, args=args)

    def test_a_variable_of_another_strategy(self, strategy):
        with without_mpi() as other:
            with other.scope():
                v = ms.Variable(1.0)
            with pytest.raises(ValueError, match="scope of the .*Strategy that runs, got one of another"):
                strategy.run(lambda var: None, args=(v,))
            with pytest.raises(ValueError, match="one of another"):
                strategy.run(lambda: v.assign(2.0))

    def test_values_of_another_number_of_replicas(self, two):
        with pytest.raises(ValueError, match="2 local replicas, got 3"):
            two.run(lambda x: x, args=(ms.PerReplica([1, 2, 3]),))

    def test_a_variable_made_outside_of_the_scope(self, strategy):
        v = ms.Variable(1.0, name="w", aggregation=ms.VariableAggregation.SUM)
        optimizer = ms.optimizers.SGD(0.1)
        for wrong in (lambda: optimizer.apply_gradients([(1.0, v)]), lambda: v.assign_add(1.0)):
            with pytest.raises(
                ValueError, match=r"outside of every scope\. .*with strategy\.scope\(\): w\w* = ms\.Variable"
            ):
                strategy.run(wrong)

    def test_a_step_that_nobody_runs(self, strategy):
        with strategy.scope():
            v = ms.Variable(1.0, name="w")
        with pytest.raises(ValueError, match=r"outside of strategy\.run\. .*strategy\.run\(step, args=\(batch,\)\)"):
            ms.optimizers.SGD(0.1).apply_gradients([(1.0, v)])

    def test_an_array_in_place_of_args(self, strategy):
        with pytest.raises(ValueError, match=r"got a ndarray\. Write args=\(x,\)"):
            strategy.run(lambda x: x, args=np.ones(3))

    def test_a_step_that_takes_other_arguments(self, strategy):
        def step(inputs):
            return inputs + "never reached with a number"

        with pytest.raises(
            TypeError, match=r"args: expected the arguments that step\(inputs\) takes, got 2 .*args=\(batch,\)"
        ):
            strategy.run(step, args=(1, 2))
        with pytest.raises(TypeError, match="fn: expected a function"):
            strategy.run(None)
        with pytest.raises(TypeError, match="unsupported operand"):  # the step's own
            strategy.run(step, args=(1,))

    def test_options_are_accepted(self, strategy):
        assert strategy.local_results(strategy.run(lambda: 1, options=ms.RunOptions()))[0] == 1

    def test_values_from_function(self, strategy):
        found = strategy.distribute_values_from_function(
            lambda c: (c.replica_id_in_sync_group, [c.num_replicas_in_sync])
        )
        n = strategy.num_replicas_in_sync
        assert found[0].values == tuple(range(n))
        assert found[1][0].values == (n,) * n

    def test_context_variables_reach_the_step(self, strategy):
        variable = contextvars.ContextVar("variable", default=0)
        variable.set(7)
        assert strategy.local_results(strategy.run(variable.get)) == (7,) * strategy.num_replicas_in_sync


class TestTogether:
    def test_merge_call_is_called_once(self, strategy):
        calls = []

        def merge(current, ids, plain, *, named):
            calls.append(threading.current_thread())
            assert current is strategy
            return strategy.local_results(ids), plain, strategy.local_results(named)

        def step():
            return ms.get_replica_context().merge_call(
                merge, args=(replica_id(), "x"), kwargs={"named": [float(replica_id())]}
            )

        n = strategy.num_replicas_in_sync
        found = strategy.local_results(strategy.run(step))
        assert found[0] == (tuple(range(n)), "x", tuple([float(r)] for r in range(n)))
        assert calls == [threading.current_thread()]

    def test_merge_results_are_divided(self, strategy):
        def merge(current, ids):
            own = ms.PerReplica([value * 10 for value in current.local_results(ids)])
            return {"own": own, "same": "s"}

        found = strategy.run(lambda: ms.get_replica_context().merge_call(merge, args=(replica_id(),)))
        for replica, part in enumerate(strategy.local_results(found)):
            assert part == {"own": 10 * replica, "same": "s"}

    def test_many_rendezvous(self, strategy):
        def step():
            ctx, total = ms.get_replica_context(), 0
            for turn in range(50):
                total += int(ctx.all_reduce("SUM", turn + replica_id()))
            return total

        n = strategy.num_replicas_in_sync
        expected = sum(n * turn + n * (n - 1) // 2 for turn in range(50))
        assert strategy.local_results(strategy.run(step)) == (expected,) * n

    def test_all_reduce(self, strategy):
        n = strategy.num_replicas_in_sync

        def step():
            ctx, r = ms.get_replica_context(), replica_id()
            nested = {"a": np.array([r, 1.0]), "b": (np.float32(r),)}
            return ctx.all_reduce("SUM", nested), ctx.all_reduce(ms.ReduceOp.MEAN, r)

        for summed, mean in strategy.local_results(strategy.run(step)):
            assert summed["a"].tolist() == [n * (n - 1) / 2, n]
            assert summed["b"][0] == n * (n - 1) / 2
            assert type(summed["b"][0]) is np.float32
            assert mean == (n - 1) / 2  # integers too

    def test_results_of_replicas_are_their_own(self, two):
        def step():
            total = ms.get_replica_context().all_reduce("SUM", np.ones(3))
            ms.get_replica_context().merge_call(lambda s: None)
            if replica_id() == 0:
                total[...] = 0
            ms.get_replica_context().merge_call(lambda s: None)
            return total

        assert [total.tolist() for total in two.run(step).values] == [[0, 0, 0], [2, 2, 2]]

    def test_all_gather(self, strategy):
        n = strategy.num_replicas_in_sync

        def step():
            r = replica_id()
            return ms.get_replica_context().all_gather({"rows": np.full((r + 1, 2), r), "x": np.array([r])}, axis=0)

        expected = np.concatenate([np.full((r + 1, 2), r) for r in range(n)])
        for found in strategy.local_results(strategy.run(step)):
            assert np.array_equal(found["rows"], expected)
            assert found["x"].tolist() == list(range(n))

    def test_broadcast(self, strategy):
        last = strategy.num_replicas_in_sync - 1
        found = strategy.run(lambda: ms.get_replica_context().broadcast((replica_id(), np.ones(2)), root=last))
        for part in strategy.local_results(found):
            assert part[0] == last
        with pytest.raises(ValueError, match="root"):
            strategy.run(lambda: ms.get_replica_context().broadcast(1.0, root=last + 1))

    def test_plain_numbers_count_for_each_replica(self, strategy):
        found = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", 1))
        assert strategy.local_results(found) == (strategy.num_replicas_in_sync,) * strategy.num_replicas_in_sync

    def test_variables_made_in_a_step(self, strategy):
        def step():
            return id(ms.Variable(float(replica_id()), name="made"))

        assert len(set(strategy.local_results(strategy.run(step)))) == 1
        assert [v.name for v in strategy.extended.variables] == ["made"]
        assert float(strategy.extended.variables[0]) == 0.0

    def test_random_numbers(self, strategy):
        def step():
            ctx = ms.get_replica_context()
            return ctx.rng(1, 2).random(), ctx.rng(1, 2, sample=5).random()

        found = strategy.local_results(strategy.run(step))
        n = strategy.num_replicas_in_sync
        assert [own for own, _ in found] == [ms.rng(seed=1, step=2, replica=r).random() for r in range(n)]
        assert len({own for own, _ in found}) == n
        assert {sample for _, sample in found} == {ms.rng(seed=1, step=2, sample=5).random()}


class TestFailures:
    @pytest.mark.parametrize("failing", [0, 1])
    def test_an_exception_stops_the_others_and_is_raised(self, two, failing):
        reached = []

        def step():
            if replica_id() == failing:
                raise KeyError("mine")
            ms.get_replica_context().all_reduce("SUM", 1.0)
            reached.append(replica_id())

        with pytest.raises(KeyError, match="mine"):
            two.run(step)
        assert reached == []
        assert two.run(replica_id).values == (0, 1)

    def test_the_first_exception_wins(self, two):
        def step():
            if replica_id() == 0:
                time.sleep(0.2)
                raise ValueError("late")
            raise KeyError("early")

        with pytest.raises(KeyError, match="early"):
            two.run(step)

    def test_system_exit_of_another_replica(self, two):
        with pytest.raises(SystemExit) as caught:
            two.run(lambda: exit(3) if replica_id() else None)
        assert caught.value.code == 3

    @pytest.mark.parametrize("missing", [0, 1])
    def test_unequal_numbers_of_merge_calls(self, two, missing):
        def step():
            if replica_id() != missing:
                ms.get_replica_context().merge_call(lambda s: None)

        with pytest.raises(RuntimeError, match=f"replica {missing} has returned"):
            two.run(step)

    def test_different_calls_together(self, two):
        def step():
            ctx = ms.get_replica_context()
            return ctx.all_reduce("SUM", 1.0) if replica_id() else ctx.all_reduce("MEAN", 1.0)

        with pytest.raises(ContextError, match="all_reduce SUM on replica 1"):
            two.run(step)

    def test_an_exception_in_a_merge_function(self, two):
        def merge(current):
            raise OSError("in the middle")

        def step():
            try:
                ms.get_replica_context().merge_call(merge)
            finally:
                ends.append(replica_id())

        ends = []
        with pytest.raises(OSError, match="in the middle"):
            two.run(step)
        assert sorted(ends) == [0, 1]
        assert ms.in_cross_replica_context() is False
        assert not ms.has_strategy()

    def test_merge_arguments_of_different_forms(self, two):
        def step():
            ms.get_replica_context().merge_call(lambda s, x: None, args=([1] if replica_id() else [1, 2],))

        with pytest.raises(ValueError, match="expected list"):
            two.run(step)

    def test_an_exception_of_one_replica(self):
        with without_mpi() as one:
            with pytest.raises(KeyError):
                one.run({}.__getitem__, args=("x",))
            assert not ms.has_strategy()

    def test_text_where_numbers_belong(self, strategy):
        batch = np.zeros(2), np.array(["cat", "dog"])
        text = (
            r"args: expected numbers.*got text or objects \(<U3\) in args\[1\]: ufunc 'subtract'.*return_inverse=True"
        )
        with pytest.raises(TypeError, match=text):
            strategy.run(lambda x, y: x - y, args=batch)
        with pytest.raises(TypeError, match=r"^ufunc 'subtract'"):
            strategy.run(lambda x: x - batch[1], args=(batch[0],))

    def test_a_batch_of_no_distributed_dataset(self, strategy):
        for batch in ms.data.from_arrays(np.ones((4, 2))).batch(4):
            text = r"expected a batch of a distributed dataset.*'NoneType'.*Loop over strategy.distribute_dataset\(dataset\)"
            with pytest.raises(TypeError, match=text):
                strategy.run(lambda x: x / ms.context.global_batch_size(), args=(batch,))

    def test_ctrl_c_while_others_compute(self, two):
        """The calling thread raises at once; the replica that still computes disturbs no later run."""
        release = threading.Event()

        def step():
            if replica_id() == 0:
                threading.Timer(0.2, lambda: interrupt(main)).start()
                return
            release.wait(10)
            ms.get_replica_context().merge_call(lambda s: None)
            reached.append(replica_id())

        def interrupt(thread):
            import signal

            signal.pthread_kill(thread.ident, signal.SIGINT)

        reached = []
        main = threading.main_thread()
        with pytest.raises(KeyboardInterrupt):
            two.run(step)
        release.set()
        assert two.run(replica_id).values == (0, 1)
        assert reached == []


class TestThreads:
    def test_they_are_kept_and_end_with_close(self):
        before = set(threading.enumerate())
        with without_mpi(3) as strategy:
            assert set(threading.enumerate()) <= before  # none before the first run
            threads = [strategy.run(threading.current_thread).values for _ in range(3)]
            assert threads[0] == threads[1] == threads[2]
            assert threads[0][0] is threading.current_thread()
            assert all(thread.daemon for thread in threads[0][1:])
        for thread in threads[0][1:]:
            thread.join(5)
            assert not thread.is_alive()

    def test_they_end_with_their_owner(self):
        strategy = without_mpi(2)
        other = strategy.run(threading.current_thread).values[1]
        del strategy
        gc.collect()
        other.join(5)
        assert not other.is_alive()

    def test_runs_from_several_threads_take_turns(self, two):
        found = []

        def work():
            for _ in range(20):
                found.append(two.run(lambda: ms.get_replica_context().all_reduce("SUM", replica_id())).values)

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(30)
        assert found == [(1, 1)] * 60

    def test_no_object_of_a_step_is_kept(self, two):
        class Thing:
            pass

        thing = Thing()
        alive = weakref.ref(thing)
        two.run(lambda x: None, args=(thing,))
        del thing
        for _ in range(100):
            gc.collect()
            if alive() is None:
                break
            time.sleep(0.01)
        assert alive() is None
