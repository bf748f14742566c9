"""Optimizers on parameter servers: with one worker all of them do what they do alone, whatever a program does with them."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.optimizers import schedules
from tests.harness.parameter_server_strategies import alone, made, settle

pytestmark = pytest.mark.ranks(2, 3, 4)

MADE = {
    "adagrad": lambda: ms.optimizers.Adagrad(0.1),
    "ftrl": lambda: ms.optimizers.Ftrl(0.1),
    "nadam": lambda: ms.optimizers.Nadam(0.01),
    "rmsprop": lambda: ms.optimizers.RMSprop(0.01, momentum=0.9),
    "adamw": lambda: ms.optimizers.AdamW(0.1, weight_decay=0.1),
    "decayed": lambda: ms.optimizers.SGD(0.5, 0.9, weight_decay=0.01, clipvalue=0.05),
    "amsgrad": lambda: ms.optimizers.Adam(0.05, amsgrad=True),
    "clipped each": lambda: ms.optimizers.SGD(0.5, 0.9, clipnorm=0.05),
    "clipped": lambda: ms.optimizers.SGD(0.5, 0.9, global_clipnorm=0.1),
    "exponential": lambda: ms.optimizers.SGD(schedules.ExponentialDecay(0.5, 2, 0.5)),
    "piecewise": lambda: ms.optimizers.Adam(schedules.PiecewiseConstantDecay([1, 3], [0.5, 0.1, 0.01])),
}


def one_worker():
    """How many servers leave one worker."""
    from mpi4py import MPI

    return {"num_ps": MPI.COMM_WORLD.size - 1}


def three_variables():
    return [
        ms.Variable(np.linspace(-1, 1, 6).reshape(3, 2) + i, name=name) for i, name in enumerate(("w", "bias", "u"))
    ]


def same(strategy, variables, expected, rtol=0.0):
    """Compare the variables, as a worker reads them, with what they should be. Collective."""
    if not strategy.is_server:
        found = [v.numpy() for v in variables]
        for value, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, right, rtol=rtol, atol=0)  # 0: bit for bit
    strategy.comm.Barrier()


def works(strategy):
    return not getattr(strategy, "is_server", False)


@pytest.mark.parametrize("rule", MADE)
def test_one_worker_alone_bit_for_bit(rule):
    """Some steps leave variables out, by None or altogether: then not every server gets a gradient, and all count."""

    def program(strategy):
        variables, optimizer = three_variables(), MADE[rule]()
        if isinstance(optimizer, ms.optimizers.AdamW):
            optimizer.exclude_from_weight_decay([variables[2]], ["bias"])

        def step(number):
            pairs = [(v.array * 0.5 + number, v) for v in variables]
            if number == 2:
                pairs[0] = None, variables[0]
            if number == 3:
                pairs = [(None, variables[0]), (None, variables[1]), pairs[2]]
            if number == 4:
                pairs = pairs[1:2]
            optimizer.apply_gradients(pairs)

        for number in range(1, 7) if works(strategy) else ():
            strategy.run(step, args=(number,))
        return variables

    expected = alone(lambda strategy: [v.numpy() for v in program(strategy)])
    with made(**one_worker()) as strategy:
        same(strategy, program(strategy), expected, 1e-14 if rule.startswith("clipped") else 0)  # a norm is a sum


def test_adamw_excludes_by_variable_and_name():
    with made(**one_worker()) as strategy:
        variables, optimizer = three_variables(), ms.optimizers.AdamW(0.5, weight_decay=0.5)
        optimizer.exclude_from_weight_decay([variables[2]], ["bi.s"])
        before = [np.linspace(-1, 1, 6).reshape(3, 2) + i for i in range(3)]
        if works(strategy):
            strategy.run(lambda: optimizer.apply_gradients([(np.zeros((3, 2)), v) for v in variables]))
        same(strategy, variables, [before[0] - before[0] * 0.25, before[1], before[2]])


SETTINGS = {  # what a program does with an optimizer after its constructor, and what is left of a weight after a step
    "exclude a variable": (lambda optimizer, variables: optimizer.exclude_from_weight_decay([variables[1]]), 1.0),
    "exclude a name": (lambda optimizer, variables: optimizer.exclude_from_weight_decay(None, ["bi.s"]), 1.0),
    "weight_decay": (lambda optimizer, variables: setattr(optimizer, "weight_decay", 0.25), 0.875),
    "learning_rate": (lambda optimizer, variables: setattr(optimizer, "learning_rate", 0.25), 0.875),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_pushes_wait_for_a_server_that_sets_its_optimizer_later(setting):
    change, left = SETTINGS[setting]
    with made(**one_worker()) as strategy:
        variables, optimizer = three_variables(), ms.optimizers.AdamW(0.5, weight_decay=0.5)
        if not works(strategy):
            time.sleep(0.3)
        change(optimizer, variables)
        before = np.linspace(-1, 1, 6).reshape(3, 2) + 1
        if works(strategy):
            for _ in range(2):
                strategy.run(lambda: optimizer.apply_gradients([(np.zeros((3, 2)), variables[1])]))
        same(strategy, variables[1:2], [before * left * left])


def test_several_optimizers_each_with_its_steps():
    """Two of one kind, in turn and in one step, one of them on the variables of the other, too."""

    def program(strategy):
        w, b, u = three_variables()
        first, second = ms.optimizers.Adam(0.1), ms.optimizers.Adam(0.1)
        third = ms.optimizers.SGD(schedules.InverseTimeDecay(1.0, 1, 1.0))

        def step(number):
            first.apply_gradients([(w.array, w), (b.array, b)])
            if number % 2:
                second.apply_gradients([(u.array, u)])
            if number % 3 == 0:
                third.apply_gradients([(np.ones((3, 2)), w)])

        for number in range(7) if works(strategy) else ():
            strategy.run(step, args=(number,))
        return [w, b, u]

    expected = alone(lambda strategy: [v.numpy() for v in program(strategy)])
    with made(**one_worker()) as strategy:
        same(strategy, program(strategy), expected)


@pytest.mark.parametrize("late", ["servers", "workers"])
def test_the_rate_may_change_between_passes(late):
    """Every rank sets it; whoever is late, a gradient is applied with the rate that its worker had."""
    data = ms.data.from_arrays(np.arange(6)).batch(1)
    rates = [1.0, 0.25, schedules.ExponentialDecay(0.5, 3, 0.5)]

    def program(strategy):
        v, optimizer = ms.Variable(np.zeros(2)), ms.optimizers.SGD(rates[0])
        distributed = strategy.distribute_dataset(data)
        for rate in rates:
            if isinstance(strategy, ms.ParameterServerStrategy) and strategy.is_server == (late == "servers"):
                time.sleep(0.3)
            optimizer.learning_rate = rate
            for _ in distributed:
                strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), v)]))
        return [v]

    expected = alone(lambda strategy: [v.numpy() for v in program(strategy)])
    with made(**one_worker()) as strategy:
        same(strategy, program(strategy), expected)


@pytest.mark.parametrize("bound", [None, 0], ids=["asynchronous", "synchronous"])
def test_a_worker_may_be_a_pass_ahead_with_another_rate(bound):
    """Its gradients are kept until the slowest worker has left the pass and the servers' programs have set the rate."""
    with made(max_staleness=bound) as strategy:
        v, optimizer = ms.Variable(np.zeros(2)), ms.optimizers.SGD(1.0)
        data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(6 * strategy.num_workers)).batch(1))
        for rate in (1.0, 0.25, 0.5):
            if strategy.is_server:
                time.sleep(0.2)
            optimizer.learning_rate = rate
            for _ in data:
                strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), v)]))
                if strategy.worker_index == 0:
                    time.sleep(0.03)
        settle(strategy, v)
        if works(strategy):
            assert v.numpy().tolist() == [-1.75 * 6 * strategy.num_workers] * 2
        strategy.comm.Barrier()


def test_workers_count_steps_together():
    """Steps of all workers are numbered by the server: so a schedule goes on with the training, not with one worker."""
    with made() as strategy:
        v = ms.Variable(np.zeros(1))
        # The sum of 1, 1/2, 1/4, ...: who came first does not matter for it.
        optimizer = ms.optimizers.SGD(schedules.ExponentialDecay(1.0, 1, 0.5, staircase=True))
        if works(strategy):
            for _ in range(4):
                strategy.run(lambda: optimizer.apply_gradients([(-np.ones(1), v)]))
                v.numpy()
        settle(strategy, v)
        if works(strategy):
            steps = 4 * strategy.num_workers
            found = v.numpy()[0]
            # Two workers' steps may begin at the same number of complete ones; then both have it.
            assert 2 - 0.5 ** (steps - 1) <= found < 2 * strategy.num_workers
            if strategy.num_workers == 1:
                assert found == 2 - 0.5**3
        strategy.comm.Barrier()
        assert optimizer._core.all_iterations() == 4 * strategy.num_workers


def test_ranks_that_have_made_other_strategies_before_know_the_same_optimizers():
    from mpi4py import MPI

    others = MPI.COMM_WORLD.size - 1  # the last rank makes none
    part = MPI.COMM_WORLD.Split(int(MPI.COMM_WORLD.rank == others))
    if MPI.COMM_WORLD.rank < others > 1:
        with ms.ParameterServerStrategy(num_ps=1, comm=part):
            pass
    part.Free()
    with ms.ParameterServerStrategy(num_ps=1, max_staleness=0) as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(2), name="w")
            optimizer = ms.optimizers.SGD(0.5)
        if strategy.is_server:
            strategy.serve()
        else:
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), w)]))
            strategy.flush()
            np.testing.assert_array_equal(w.numpy(), [-0.5 * others] * 2)
            strategy.leave()


@pytest.mark.parametrize("sparse", [False, True])
def test_a_clipped_gradient_has_that_norm(sparse):
    with made(**one_worker(), devices=["cpu:0", "cpu:1"]) as strategy:
        v, w = ms.Variable(np.zeros((2, 2))), ms.Variable(np.zeros((2, 1)))
        optimizer = ms.optimizers.SGD(1.0, global_clipnorm=1.0)
        if works(strategy):
            rows = ms.IndexedSlices(np.array([[3.0, 0.0]]), np.array([1]))
            dense = np.array([[0.0, 0.0], [3.0, 0.0]])
            strategy.run(lambda: optimizer.apply_gradients([(rows if sparse else dense, v), (np.full((2, 1), 0.0), w)]))
            assert v.numpy().tolist() == [[0, 0], [-1, 0]]  # two replicas' 3 make 6, which is scaled to 1
            strategy.run(lambda: optimizer.apply_gradients([(np.full((2, 2), 0.125), v), (np.zeros((2, 1)), w)]))
            assert v.numpy().tolist() == [[-0.25, -0.25], [-1.25, -0.25]]  # of norm 0.5: left alone
        strategy.comm.Barrier()


def test_a_server_keeps_the_optimizers_that_its_program_has_let_go_of():
    with made() as strategy:
        v = ms.Variable(np.zeros(2))

        def program():
            optimizer = ms.optimizers.SGD(1.0)
            if works(strategy):
                strategy.comm.Barrier()  # until it is gone on the server
                strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), v)]))

        program()
        if not works(strategy):
            gc.collect()
            strategy.comm.Barrier()
        settle(strategy, v)
        if works(strategy):
            assert v.numpy().tolist() == [-strategy.num_workers] * 2
        strategy.comm.Barrier()


def saved_two(path, strategy) -> None:
    """Two optimizers of one kind, the second of which steps first, and a third that never does."""
    with strategy.scope():
        ms.optimizers.Adam(0.5)
        v, w = ms.Variable(np.zeros(2), name="v"), ms.Variable(np.zeros(2), name="w")
        first, second = ms.optimizers.Adam(0.1), ms.optimizers.Adam(0.1)
    if strategy.worker_index == 0:
        strategy.run(lambda: second.apply_gradients([(np.full(2, 3.0), w)]))
        for _ in range(3):
            strategy.run(lambda: first.apply_gradients([(np.ones(2), v)]))
    settle(strategy, v, w)
    strategy.save(path)


@pytest.mark.parametrize("late", [False, True])
def test_each_optimizer_is_restored_with_its_own_numbers(mpi_tmp_path, late):
    """On a server that meets one of them only, and on others, whichever steps first."""
    from mpi4py import MPI

    path, servers = mpi_tmp_path / "state.h5", min(2, MPI.COMM_WORLD.size - 1)
    with made(num_ps=servers) as strategy:
        saved_two(path, strategy)
    with made(num_ps=servers) as strategy:
        if late:
            strategy.comm.Barrier()
        ms.optimizers.Adam(0.5)
        v, w = ms.Variable(np.zeros(2), name="v"), ms.Variable(np.zeros(2), name="w")
        first, second = ms.optimizers.Adam(0.1), ms.optimizers.Adam(0.1)
        if late and strategy.worker_index == 0:  # they have met before the file is read
            strategy.run(lambda: second.apply_gradients([(np.ones(2), w)]))
            strategy.run(lambda: first.apply_gradients([(np.ones(2), v)]))
        settle(strategy, v, w)
        strategy.restore(path)
        assert [first.iterations, second.iterations] == [3, 1]  # at once, on workers and servers
        np.testing.assert_allclose(first.slots(v)["momentum"], 1 - 0.9**3, rtol=1e-12)
        if strategy.worker_index == 0:
            strategy.run(lambda: second.apply_gradients([(np.full(2, 3.0), w)]))
            strategy.run(lambda: first.apply_gradients([(np.ones(2), v)]))
        settle(strategy, v, w)
        assert [first._core.all_iterations(), second._core.all_iterations()] == [4, 2]
        moments = [first.slots(v)["momentum"][0], second.slots(w)["momentum"][0]]
        np.testing.assert_allclose(moments, [1 - 0.9**4, 3 * (1 - 0.9**2)], rtol=1e-12)
        strategy.comm.Barrier()


def test_restoring_waits_for_what_was_pushed(mpi_tmp_path):
    def slowly(value):
        time.sleep(0.1)
        return value

    with made() as strategy:
        v = ms.Variable(np.zeros(4), name="v", constraint=slowly)
        optimizer = ms.optimizers.SGD(1.0)
        if strategy.worker_index == 0:
            strategy.run(lambda: optimizer.apply_gradients([(np.zeros(4), v)]))
        strategy.save(mpi_tmp_path / "state.h5")
        if strategy.worker_index == 0:
            for _ in range(4):
                strategy.run(lambda: optimizer.apply_gradients([(np.ones(4), v)]))
        strategy.restore(mpi_tmp_path / "state.h5")
        settle(strategy, v)
        if not strategy.is_server:
            assert v.numpy().tolist() == [0] * 4
        strategy.comm.Barrier()


@pytest.mark.parametrize("way", ["from servers", "to servers", "2 servers to 1"])
def test_training_goes_on_under_another_strategy(mpi_tmp_path, way):
    """Adam on several variables, stopped and restored: as if it had not been."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    path = mpi_tmp_path / "state.h5"

    def program(strategy, steps, restored=False):
        variables, optimizer = three_variables(), ms.optimizers.Adam(0.1)
        counter = ms.Variable(np.int64(0), trainable=False, aggregation=ms.VariableAggregation.ONLY_FIRST_REPLICA)
        if restored:
            strategy.restore(path)

        def step(number):
            replicas = strategy.num_replicas_in_sync
            optimizer.apply_gradients([(np.full((3, 2), number / replicas), v) for v in variables])
            counter.assign_add(1)

        if not isinstance(strategy, ms.ParameterServerStrategy) or strategy.worker_index == 0:
            for number in steps:
                strategy.run(step, args=(number,))
        if isinstance(strategy, ms.ParameterServerStrategy):
            settle(strategy, *variables, counter)
        if not restored:
            strategy.save(path)
        numbers = None if getattr(strategy, "is_server", False) else [v.numpy() for v in [*variables, counter]]
        comm.Barrier()
        return numbers

    servers = {
        "from servers": lambda: ms.ParameterServerStrategy(num_ps=min(2, comm.size - 1)),
        "2 servers": lambda: ms.ParameterServerStrategy(num_ps=min(2, comm.size - 1)),
        "1 server": lambda: ms.ParameterServerStrategy(num_ps=1),
        "together": lambda: ms.MultiWorkerMirroredStrategy(),
    }
    first, second = {
        "from servers": ("2 servers", "together"),
        "to servers": ("together", "2 servers"),
        "2 servers to 1": ("2 servers", "1 server"),
    }[way]

    def run(name, *args, **settings):
        strategy = servers[name]()
        with strategy.scope():
            found = program(strategy, *args, **settings)
        strategy.close()
        return found

    run(first, [1.0, -2.0, 3.0])
    found = run(second, [4.0, -5.0, 6.0], restored=True)

    def whole(strategy):
        variables, optimizer = three_variables(), ms.optimizers.Adam(0.1)
        for number in (1.0, -2.0, 3.0, 4.0, -5.0, 6.0):
            strategy.run(lambda g=number: optimizer.apply_gradients([(np.full((3, 2), g), v) for v in variables]))
        return [v.numpy() for v in variables]

    if found is not None:
        *values, counter = found
        for value, expected in zip(values, alone(whole), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-12)  # halves and thirds of gradients are rounded
        assert counter == 6
    comm.Barrier()


def test_a_rule_of_whole_variables_is_refused():
    with made(**one_worker()) as strategy, strategy.scope():
        w = ms.Variable(np.ones(4))
        if not strategy.is_server:
            with pytest.raises(ValueError, match=r"for Lamb, got variables on servers\. Use Adam"):
                strategy.run(lambda: ms.optimizers.Lamb(0.1).apply_gradients([(np.ones(4), w)]))


@pytest.mark.parametrize("max_staleness", [None, 0])
def test_a_server_counts_the_steps_before_it_gets_a_variable_of_an_optimizer(max_staleness):
    """The rate is 1.0 in the first step of all and 0.0 later."""
    if not one_worker()["num_ps"] > 1:
        pytest.skip("of two servers one is behind")
    rate = schedules.PiecewiseConstantDecay([1], [1.0, 0.0])
    with made(num_ps=2, max_staleness=max_staleness) as strategy:
        first, late = ms.Variable(np.zeros(1), name="first"), None
        optimizer = ms.optimizers.SGD(rate)
        for steps in (3, 1):
            pairs = [(np.ones(1), v) for v in (first, late) if v is not None]
            if strategy.is_server:
                strategy.serve()
            else:
                for _ in range(steps):
                    strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
                strategy.leave()
            strategy.barrier()
            if late is None:
                late = ms.Variable(np.zeros(1), name="late")  # on the other server
        assert first.server != late.server
        assert optimizer._core.all_iterations() == 4 * (strategy.num_workers if max_staleness is None else 1)
        if not strategy.is_server:
            assert late.numpy().tolist() == [0.0]
        strategy.barrier()


@pytest.mark.parametrize("settings", [{}, {"max_staleness": 0}])
@pytest.mark.parametrize("devices", [1, 2])
def test_losses_are_scaled_as_without_servers(settings, devices):
    """One worker: the same factors, steps and weights. The infinity is one replica's."""

    def program(strategy):
        w, b, u = three_variables()
        optimizer = ms.optimizers.LossScaleOptimizer(
            ms.optimizers.Adam(0.1, global_clipnorm=0.5), initial_scale=8.0, dynamic_growth_steps=2
        )
        scales = []

        def step(number):
            replica = ms.get_replica_context().replica_id_in_sync_group
            value = optimizer.scale_loss(0.3 if number not in (1, 4) or replica != devices - 1 else np.inf)
            optimizer.apply_gradients([(np.full((3, 2), value), v) for v in (w, b, u)])

        for number in range(7) if works(strategy) else ():
            strategy.run(step, args=(number,))
            scales.append(float(optimizer.dynamic_scale))
        return [w, b, u], scales, optimizer.iterations, optimizer.step_counter

    def expected_of(strategy):
        variables, *counts = program(strategy)
        return [v.numpy() for v in variables], *counts

    expected, *counts = alone(expected_of, devices)
    assert counts == [[8, 4, 4, 8, 4, 4, 8], 5, 0]
    devices_here = [f"cpu:{i}" for i in range(devices)]
    with made(**one_worker(), **settings, devices=devices_here) as strategy:
        variables, *found = program(strategy)
        if not strategy.is_server:
            assert found == counts
        same(strategy, variables, expected, 1e-14)


@pytest.mark.parametrize("max_staleness", [None, 0, 2])
def test_each_worker_has_a_factor_of_its_own(max_staleness, tmp_path_factory):
    """The first worker's third step overflows: the others' are applied, and their factors grow on."""
    from mpi4py import MPI

    path = MPI.COMM_WORLD.bcast(str(tmp_path_factory.mktemp("files") / "state.h5"))

    def opened():
        w = ms.Variable(np.zeros(2), name="w")
        return w, ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(1.0), initial_scale=16.0, dynamic_growth_steps=3)

    with made(num_ps=1, max_staleness=max_staleness) as strategy:
        w, optimizer = opened()
        if strategy.is_server:
            strategy.serve()
        else:
            first = strategy.worker_index == 0

            def step(number):
                gradient = optimizer.scale_loss(np.inf if first and number == 2 else 1.0)
                optimizer.apply_gradients([(np.full(2, gradient), w)])

            for number in range(4):
                strategy.run(step, args=(number,))
            assert float(optimizer.dynamic_scale) == (8.0 if first else 32.0)
            assert optimizer.iterations == (3 if first else 4)
            strategy.leave()
        strategy.barrier()
        same(strategy, [w], [np.full(2, -(4.0 * strategy.num_workers - 1))])
        assert [float(scale) for scale in optimizer.dynamic_scale.read_all()] == [8.0] + [32.0] * (
            strategy.num_workers - 1
        )
        together = max_staleness == 0 and strategy.num_workers > 1  # then the others' step is one
        steps = 4 if together else 4 * strategy.num_workers - 1
        assert optimizer.inner_optimizer._core.all_iterations() == steps
        strategy.save(path)
    with made(num_ps=1) as strategy:
        w, optimizer = opened()
        strategy.restore(path)
        assert float(optimizer.dynamic_scale) == 8.0


def test_a_fixed_factor_divides_gradients_before_they_are_pushed():
    with made(**one_worker()) as strategy:
        w = ms.Variable(np.zeros(2), dtype="float32", name="w")
        table = ms.Variable(np.zeros((3, 2)), name="table")
        optimizer = ms.optimizers.SGD(1.0, loss_scale_factor=4.0)
        if works(strategy):
            rows = ms.IndexedSlices(np.full((2, 2), optimizer.scale_loss(0.5)), np.array([2, 2]), (3, 2))
            pairs = [(np.full(2, 6, np.int64), w), (rows, table)]
            strategy.run(lambda: optimizer.apply_gradients(pairs))
        same(strategy, [w, table], [np.full(2, -1.5), [[0, 0], [0, 0], [-1, -1]]])
