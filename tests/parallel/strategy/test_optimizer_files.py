"""What files have of optimizers: settings that the program changes, and state that was given before the first step."""

import logging

import numpy as np
import pytest

import mpistrat as ms

SHAPE = (12, 6)
GRADIENT = np.random.default_rng(1).normal(size=SHAPE)


def mirrored():
    return ms.MultiWorkerMirroredStrategy()


def without_shared_memory(monkeypatch):
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    return ms.MultiWorkerMirroredStrategy()


def sharded_slots():
    return ms.MultiWorkerMirroredStrategy(sharded_slots=True)


def central():
    return ms.CentralStorageStrategy(["cpu:0", "cpu:1"])


def two_devices():
    return ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])


def mesh():
    return ms.MeshStrategy({"data": 1, "model": -1})


def servers():
    return ms.ParameterServerStrategy(num_ps=1)


def sharded_servers():
    return ms.ParameterServerStrategy(num_ps=1, variable_partitioner=ms.partitioners.FixedShardsPartitioner(3))


def waiting_servers():
    return ms.ParameterServerStrategy(num_ps=1, max_staleness=0)


IN_MEMORY = (mirrored, sharded_slots, central, two_devices, mesh)
KINDS = (*IN_MEMORY, servers, sharded_servers, waiting_servers)


def adagrad():
    return ms.optimizers.Adagrad(0.5)  # its slot does not begin with 0


class Program:
    """Two variables and an optimizer that updates them, or only the first."""

    def __init__(self, strategy, make=adagrad):
        self.strategy = strategy
        layout = {"layout": (None, "model")} if isinstance(strategy, ms.MeshStrategy) else {}
        with strategy.scope():
            self.w = ms.Variable(np.ones(SHAPE), name="w", **layout)
            self.b = ms.Variable(np.ones(5, np.float32), name="b")
            self.optimizer = make()

    def step(self, count=1, variables="wb"):
        strategy, part = self.strategy, getattr(self.w, "part", None)
        gradient = GRADIENT if part is None else GRADIENT[part.slices]
        pairs = [(gradient, self.w), (np.full(5, 0.5, np.float32), self.b)][: len(variables)]
        serves = isinstance(strategy, ms.ParameterServerStrategy)
        # Workers that do not wait for each other would push in any order: only the first one does.
        alone = serves and strategy.max_staleness != 0
        if not serves or not (strategy.is_server or (alone and strategy.worker_index)):
            for _ in range(count):
                strategy.run(lambda: self.optimizer.apply_gradients(pairs))
        if serves and not strategy.is_server:
            strategy.flush()
        strategy.barrier()

    def arrays(self):
        found = {}
        for variable in (self.w, self.b):
            if not getattr(self.strategy, "is_server", False):
                part, value = getattr(variable, "part", None), variable.numpy()
                found[variable.name] = np.array(value if part is None else part.whole(value))
            for name, slot in self.optimizer.slots(variable).items():
                found[f"{variable.name} {name}"] = slot
        return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["set_state", "set_slots"])
def test_state_of_before_the_first_step_is_in_files(kind, how, mpi_tmp_path):
    with kind() as strategy:
        program = Program(strategy)
        program.step(2)
        state, weights = program.optimizer.get_state(), program.arrays()
        iterations = program.optimizer._core.all_iterations()
        program.step()
        expected = program.arrays()
    with kind() as strategy:
        program = Program(strategy)
        for variable in (program.w, program.b):
            if not getattr(strategy, "is_server", False):
                part, value = getattr(variable, "part", None), weights[variable.name]
                variable.assign(value if part is None else part.cut(value))
        if how == "set_state":
            program.optimizer.set_state({**state, "iterations": iterations})
        else:
            program.optimizer.iterations = iterations
            for variable in (program.w, program.b):
                program.optimizer.set_slots(variable, {"accumulator": weights[f"{variable.name} accumulator"]})
        strategy.save(mpi_tmp_path / "x.h5")
    with kind() as strategy:
        program = Program(strategy)
        strategy.restore(mpi_tmp_path / "x.h5")
        assert_equal(program.arrays(), weights)
        assert program.optimizer._core.all_iterations() == iterations
        program.step()
        assert_equal(program.arrays(), expected)


@pytest.mark.ranks(1, 2)
def test_state_of_another_dtype_is_saved_as_slots_are(mpi_tmp_path):
    state = {"iterations": 1, "slots": {"w": {"momentum": [0.5, 1.5], "velocity": np.ones(2, np.float16)}}}
    for dtype in (np.float16, np.float32, np.float64):
        with mirrored() as strategy:
            with strategy.scope():
                ms.Variable(np.ones(2, dtype), name="w")
                optimizer = ms.optimizers.Adam(0.1)
            optimizer.set_state(state)
            strategy.save(mpi_tmp_path / "x.h5")
        with mirrored() as strategy:
            with strategy.scope():
                w, optimizer = ms.Variable(np.ones(2, dtype), name="w"), ms.optimizers.Adam(0.1)
            strategy.restore(mpi_tmp_path / "x.h5")
            slots = optimizer.slots(w)
            assert slots["momentum"].tolist() == [0.5, 1.5] and slots["velocity"].tolist() == [1.0, 1.0]
            assert slots["momentum"].dtype == (np.float64 if dtype is np.float64 else np.float32)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_restores_its_file_of_before_the_first_step(kind, mpi_tmp_path):
    from mpi4py import MPI

    if kind not in IN_MEMORY and MPI.COMM_WORLD.size == 1:
        pytest.skip("servers and workers are two ranks")
    with kind() as strategy:
        program = Program(strategy)
        strategy.save(mpi_tmp_path / "x.h5")
        program.step(2)
        expected = program.arrays()
        strategy.restore(mpi_tmp_path / "x.h5")
        assert program.optimizer._core.all_iterations() == 0
        np.testing.assert_array_equal(program.arrays().get("w", 1), np.ones(SHAPE))
        for name, array in program.arrays().items():
            assert "accumulator" not in name or (array == 0.1).all()
        program.step(2)
        assert_equal(program.arrays(), expected)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("ema", [False, True])
def test_slots_of_a_variable_that_the_file_has_none_of_start_again(mpi_tmp_path, ema):
    """The second variable was not updated when the file was written. Averages start with the restored weights."""

    def make():
        return ms.optimizers.SGD(0.5, momentum=0.5, use_ema=ema, ema_momentum=0.5)

    def program_of(strategy):
        program = Program(strategy, make)
        program.step(2, "w")
        return program

    with mirrored() as strategy:
        program = program_of(strategy)
        strategy.save(mpi_tmp_path / "x.h5")
        program.step(2)
        expected = program.arrays()
    with mirrored() as strategy:
        program = program_of(strategy)
        program.step(3)
        strategy.restore(mpi_tmp_path / "x.h5")
        program.step(2)
        assert_equal(program.arrays(), expected)


def changed(optimizer):
    """What a program may do between steps."""
    optimizer.learning_rate = 0.0123
    optimizer.clipnorm, optimizer.weight_decay = 0.7, 0.25
    if hasattr(optimizer, "beta_1"):
        optimizer.beta_1, optimizer.epsilon = 0.8, 1e-3
    if hasattr(optimizer, "momentum"):
        optimizer.momentum, optimizer.nesterov = 0.4, True


RULES = {
    "sgd": lambda: ms.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: ms.optimizers.Adam(0.1),
    "lamb": lambda: ms.optimizers.Lamb(0.1),
    "schedule": lambda: ms.optimizers.SGD(ms.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), momentum=0.9),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_settings_continue(kind, rule, mpi_tmp_path):
    """A run that is interrupted after its settings were changed has the bits of one that is not."""
    from mpi4py import MPI

    if kind not in IN_MEMORY and MPI.COMM_WORLD.size == 1:
        pytest.skip("servers and workers are two ranks")
    with kind() as strategy:
        program = Program(strategy, RULES[rule])
        program.step(2)
        changed(program.optimizer)
        strategy.save(mpi_tmp_path / "x.h5")
        settings = program.optimizer.get_settings()
        program.step(2)
        expected = program.arrays()
    with kind() as strategy:
        program = Program(strategy, RULES[rule])
        strategy.restore(mpi_tmp_path / "x.h5")
        assert program.optimizer.get_settings() == settings
        assert program.optimizer.learning_rate == 0.0123
        program.step(2)
        assert_equal(program.arrays(), expected)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("first", ["one", "all"])
@pytest.mark.parametrize("early", [False, True])
def test_other_ranks_take_settings_and_early_state(first, early, mpi_tmp_path):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    alone = world.Split(0 if world.rank == 0 else 1, world.rank)
    comms = [alone, world] if first == "one" else [world, alone]

    def program_of(strategy):
        program = Program(strategy, RULES["adam"])
        return program, (1.0 / strategy.num_replicas_in_sync)

    for step, comm in enumerate(comms):
        if comm is alone and world.rank != 0:
            world.Barrier()
            continue
        with ms.MultiWorkerMirroredStrategy(comm=comm) as strategy:
            program, _ = program_of(strategy)
            if step == 0:
                if early:
                    slots = {"momentum": np.full(SHAPE, 0.25), "velocity": np.full(SHAPE, 0.5)}
                    program.optimizer.set_state({"iterations": 5, "slots": {"w": slots}})
                else:
                    program.step(5)
                program.optimizer.learning_rate = 0.0123
                strategy.save(mpi_tmp_path / "x.h5")
            else:
                strategy.restore(mpi_tmp_path / "x.h5")
                assert program.optimizer.learning_rate == 0.0123
                assert program.optimizer.iterations == 5
                if early:
                    assert (program.optimizer.slots(program.w)["momentum"] == 0.25).all()
                    assert program.optimizer.slots(program.b) == {}
        if comm is alone:
            world.Barrier()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_and_snapshots_have_both(asynchronous, mpi_tmp_path, monkeypatch):
    import secrets

    from mpi4py import MPI

    from mpistrat.comm import job_files

    job = MPI.COMM_WORLD.bcast(secrets.token_hex(8))
    monkeypatch.setenv("MPISTRAT_JOB", job)
    try:
        with mirrored() as strategy:
            program = Program(strategy, RULES["adam"])
            checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, asynchronous=asynchronous)
            program.optimizer.iterations = 3
            program.optimizer.learning_rate = 0.5
            checkpoints.save(1)
            program.optimizer.learning_rate = 0.25
            strategy.take_snapshot(2, {})
            program.optimizer.iterations, program.optimizer.learning_rate = 0, 0.1
            strategy.restore_snapshot(strategy.newest_snapshot())
            assert (program.optimizer.iterations, program.optimizer.learning_rate) == (3, 0.25)
            checkpoints.wait()
            assert checkpoints.restore_latest() == {"step": 1}
            assert (program.optimizer.iterations, program.optimizer.learning_rate) == (3, 0.5)
    finally:
        MPI.COMM_WORLD.Barrier()
        job_files.remove(job)


@pytest.mark.ranks(1, 2)
def test_a_schedule_stays_and_a_warning_reports_it(mpi_tmp_path, caplog):
    with mirrored() as strategy:
        program = Program(strategy, RULES["sgd"])
        program.optimizer.learning_rate = 0.0625
        strategy.save(mpi_tmp_path / "number.h5")
        program.optimizer.learning_rate = lambda: 0.75
        strategy.save(mpi_tmp_path / "callable.h5")
    with mirrored() as strategy, caplog.at_level(logging.WARNING):
        program = Program(strategy, RULES["schedule"])
        strategy.restore(mpi_tmp_path / "number.h5")
        assert program.optimizer.learning_rate == 0.1
        assert (
            strategy.rank
            or "keeps a schedule as its learning_rate: the saved state has the number 0.0625" in caplog.text
        )
    with mirrored() as strategy, caplog.at_level(logging.WARNING):
        program = Program(strategy, RULES["sgd"])
        strategy.restore(mpi_tmp_path / "callable.h5")
        assert program.optimizer.learning_rate == 0.1
        assert strategy.rank or "keeps 0.1 as its learning_rate: the saved state has a schedule" in caplog.text


@pytest.mark.ranks(1, 2)
def test_a_loss_scale_is_not_the_inner_optimizers(mpi_tmp_path):
    with mirrored() as strategy:
        program = Program(strategy, RULES["sgd"])
        with strategy.scope():
            program.optimizer = ms.optimizers.LossScaleOptimizer(
                ms.optimizers.SGD(0.1, momentum=0.9), initial_scale=8.0
            )
        strategy.run(lambda: program.optimizer.apply_gradients([(np.ones(SHAPE), program.w)]))
        program.optimizer.learning_rate = 0.5
        strategy.save(mpi_tmp_path / "x.h5")
    with mirrored() as strategy:
        with strategy.scope():
            w, b = ms.Variable(np.ones(SHAPE), name="w"), ms.Variable(np.ones(5, np.float32), name="b")
            unused, optimizer = ms.optimizers.SGD(0.1, momentum=0.9), ms.optimizers.SGD(0.1, momentum=0.9)
        strategy.restore(mpi_tmp_path / "x.h5")
        assert optimizer.loss_scale_factor is None
        assert (optimizer.learning_rate, unused.learning_rate) == (0.5, 0.1)
        assert b.numpy().tolist() == [1] * 5 and w.numpy()[0, 0] != 1


@pytest.mark.ranks(1, 2)
def test_optimizers_are_known_by_where_they_were_made(mpi_tmp_path):
    """Also where their first steps came in another order, and where one of the file is not made any more."""

    def program_of(strategy, count=2):
        with strategy.scope():
            w = ms.Variable(np.zeros(3), name="w")
            return w, [ms.optimizers.SGD(rate, momentum=0.5) for rate in (0.1, 0.2)[:count]]

    def step(strategy, optimizer, w):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3) / strategy.num_replicas_in_sync, w)]))

    for early in (False, True):
        with mirrored() as strategy:
            w, (first, second) = program_of(strategy)
            if not early:
                step(strategy, second, w)
                step(strategy, second, w)
                step(strategy, first, w)
            strategy.save(mpi_tmp_path / "x.h5")
            expected = [first.iterations, second.iterations, first.slots(w), second.slots(w)]
        with mirrored() as strategy:
            w, (first, second) = program_of(strategy)
            first.learning_rate, second.learning_rate = 3.0, 4.0
            for optimizer in (first, second, second):
                step(strategy, optimizer, w)
            strategy.restore(mpi_tmp_path / "x.h5")
            assert (first.learning_rate, second.learning_rate) == (0.1, 0.2)
            assert [first.iterations, second.iterations] == expected[:2]
            for optimizer, slots in ((first, expected[2]), (second, expected[3])):
                for name, array in slots.items():
                    np.testing.assert_array_equal(optimizer.slots(w)[name], array)
                assert slots or not optimizer.slots(w)["momentum"].any()
    with mirrored() as strategy:  # the file's second optimizer is of no use here
        w, (first,) = program_of(strategy, 1)
        strategy.restore(mpi_tmp_path / "x.h5")
        step(strategy, first, w)
        assert w.numpy().tolist() == pytest.approx([-0.1] * 3)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", [mirrored, mesh, servers])
@pytest.mark.parametrize("there", ["SGD", "Adam"])
def test_state_of_another_optimizer_is_refused_before_anything_changes(there, kind, stepped, mpi_tmp_path):
    """Another name, or the same with other slots, whether the program has taken a step or not."""
    rules = {"SGD": lambda: ms.optimizers.SGD(0.1, momentum=0.9), "Adam": lambda: ms.optimizers.Adam(0.1)}
    with kind() as strategy:
        program = Program(strategy, rules[there])
        program.step(2)
        strategy.save(mpi_tmp_path / "x.h5")
    with kind() as strategy:
        program = Program(strategy, lambda: ms.optimizers.Adam(0.1, amsgrad=True))
        if stepped:
            program.step(3)
        before, taken = program.arrays(), program.optimizer.iterations
        text = "slots momentum, velocity in it, here" if there == "Adam" else "is 'sgd' in it, here 'adam'"
        with pytest.raises(ValueError, match=text):
            strategy.restore(mpi_tmp_path / "x.h5")
        assert_equal(program.arrays(), before)
        assert program.optimizer.iterations == taken
        strategy.restore(mpi_tmp_path / "x.h5", strict=False)  # the weights alone
        program.step()
