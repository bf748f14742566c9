"""Ranks without a program of their own: led by the chief's, in Server.join()."""

import pytest

CHIEF = """
import sys
import numpy as np
import mpistrat as ms
from mpi4py import MPI
if MPI.COMM_WORLD.rank:
    ms.Server().join()
    print("joined")
    sys.exit()
strategy = ms.ParameterServerStrategy(num_ps=1, variable_partitioner=ms.partitioners.MaxSizePartitioner(64))
with strategy.scope():
    v = ms.Variable(np.zeros(4, np.float32), name="v")
    big = ms.Variable(lambda: np.arange(20.0).reshape(10, 2) + np.random.default_rng().random(), name="big")
    first = ms.optimizers.Adam(0.1)
    optimizer = ms.optimizers.SGD(0.5, name="mine")
c = ms.coordinator.ClusterCoordinator(strategy)

def step(gradient):
    strategy.run(lambda: optimizer.apply_gradients([(np.full(4, gradient, np.float32), v)]))

"""


def test_the_chief_sees_what_was_exchanged_and_whether_to_stop(mpi_run):
    program = """
with strategy.scope(), strategy.extended.colocate_vars_with(v):
    near = ms.Variable(np.arange(40.0), name="near")  # the partitioner would cut it
assert near.server == v.server and near.numpy().sum() == 780
c.schedule(step, (1.0,))
c.join()
stats = strategy.stats()
print([(e.variable, e.worker, e.pushes) for e in stats.exchanges if e.pushes])
print("servers" in ms.show_config(strategy))
print(strategy.should_stop())
strategy.close()
"""
    result = mpi_run(CHIEF + program, 4, timeout=60)
    assert result.returncode == 0, result.stderr
    lines = result.out[0].splitlines()
    assert lines[0] in ("[('v', 1, 1)]", "[('v', 2, 1)]")
    assert lines[-2:] == ["True", "False"]


def test_a_chief_among_programs_that_serve_is_asked_alone(mpi_run):
    program = """
import os, signal
import numpy as np
import mpistrat as ms
ms.catch_stop_signals()
strategy = ms.ParameterServerStrategy(num_ps=1)
with strategy.scope():
    v = ms.Variable(np.zeros(4))
with ms.coordinator.ClusterCoordinator(strategy) as c:
    if strategy.rank == 0:
        print(strategy.should_stop())
        print(c.schedule(lambda: 7).get())
        os.kill(os.getpid(), signal.SIGUSR1)
        print(strategy.should_stop())
strategy.close()
"""
    result = mpi_run(program, 3, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.out[0].splitlines() == ["False", "7", "True"]


def test_the_chiefs_program_is_as_if_alone(mpi_run, tmp_path):
    program = f"""
for _ in range(10):
    c.schedule(step, (1.0,))
c.join()
print(v.numpy().tolist())
print(len(big.variables) > 1, c.schedule(lambda: big).get().tolist() == big.numpy().tolist())
optimizer.learning_rate = 1.0
c.schedule(step, (1.0,)).get()
print(v.numpy().tolist())
path = {str(tmp_path / "file.h5")!r}
strategy.save(path)
v.assign(np.full(4, 9.0))
strategy.restore(path)
print(c.schedule(lambda: v).get().tolist())
v.assign(np.full(4, 9.0))
strategy.restore(path, map={{v.name: v.name}}, strict=False)
print(c.schedule(lambda: v).get().tolist())
with strategy.scope():
    late = ms.Variable([1, 2, 3])
print(c.schedule(lambda: late * 2).get().tolist())
c.close()
c = ms.coordinator.ClusterCoordinator(strategy)
print(c.schedule(lambda: late[0]).get())
"""
    for end in ("strategy.close()", ""):
        result = mpi_run(CHIEF + program + end, 4, timeout=60)
        assert result.returncode == 0, result.stderr
        lines = result.out[0].splitlines()
        assert lines[:1] == ["[-5.0, -5.0, -5.0, -5.0]"]
        assert lines[1] == "True True"
        assert lines[2:5] == ["[-6.0, -6.0, -6.0, -6.0]"] * 3
        assert lines[5:7] == ["[2, 4, 6]", "1"]
        assert [result.out[rank].strip() for rank in (1, 2, 3)] == ["joined"] * 3


def test_optimizers_are_restored_where_nobody_has_used_them(mpi_run, tmp_path):
    path = str(tmp_path / "file.h5")
    before = f"""
for _ in range(3):
    c.schedule(step, (1.0,))
c.join()
strategy.save({path!r})
strategy.close()
"""
    after = f"""
strategy.restore({path!r})
print(optimizer.iterations)
strategy.save({path!r})  # all ranks know them
c.schedule(step, (1.0,)).get()
print(v.numpy().tolist())
strategy.restore({path!r})
print(optimizer.iterations, v.numpy().tolist())
strategy.close()
"""
    for program, lines in ((before, []), (after, ["3", "[-2.0, -2.0, -2.0, -2.0]", "3 [-1.5, -1.5, -1.5, -1.5]"])):
        result = mpi_run(CHIEF + program, 4, timeout=60)
        assert result.returncode == 0, result.stderr
        assert result.out[0].splitlines() == lines


def test_a_function_may_not_do_what_all_ranks_do_together(mpi_run):
    program = """
for wrong in (lambda: ms.Variable(1.0), lambda: strategy.save("nowhere.h5"), strategy.close):
    c.schedule(wrong)
    try:
        c.join()
    except ms.errors.ContextError as error:
        print("told:", error)
c.schedule(step, (1.0,)).get()
print(v.numpy().tolist())
"""
    result = mpi_run(CHIEF + program, 3, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.out[0].count("not in a scheduled function") == 3
    assert "[-0.5, -0.5, -0.5, -0.5]" in result.out[0]


def test_a_distributed_dataset_that_a_function_makes_is_the_workers_own(mpi_run):
    program = """
def from_function():
    def make(context):
        assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
        return ms.data.from_arrays(np.arange(6)).batch(context.get_per_replica_batch_size(2))
    return strategy.distribute_datasets_from_function(make)

def from_dataset():
    return strategy.distribute_dataset(ms.data.from_arrays(np.arange(6)).batch(2))

for make in (from_function, from_dataset):
    iterator = iter(c.create_per_worker_dataset(make))
    for worker in range(c.num_workers):
        rows = [c.schedule(lambda it: next(it).tolist(), (iterator,), worker=worker) for _ in range(3)]
        print(c.fetch(rows))
"""
    result = mpi_run(CHIEF + program, 4, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.out[0].splitlines() == ["[[0, 1], [2, 3], [4, 5]]"] * 4


def test_servers_join_while_workers_run_their_own_loops(mpi_run):
    program = """
import numpy as np
import mpistrat as ms
from mpi4py import MPI
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
cluster = {"worker": [f"h:{i}" for i in range(size - 1)], "ps": ["h:100"]}
job, index = ("ps", 0) if rank == size - 1 else ("worker", rank)
if job == "ps":
    ms.Server(cluster, job_name=job, task_index=index, protocol="grpc").join()
    print("joined")
else:
    resolver = ms.cluster_resolver.SimpleClusterResolver(ms.ClusterSpec(cluster), task_type=job, task_id=index)
    strategy = ms.ParameterServerStrategy(resolver)
    with strategy.scope():
        v = ms.Variable(np.zeros(3))
        optimizer = ms.optimizers.SGD(0.5)
    for _ in range(20):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))
    v.numpy()
    strategy.close()
    print("trained")
"""
    result = mpi_run(program, 3, timeout=60)
    assert result.returncode == 0, result.stderr
    assert [result.out[rank].strip() for rank in range(3)] == ["trained", "trained", "joined"]


def test_rank_0_must_lead(mpi_run):
    result = mpi_run("import mpistrat as ms; ms.Server().join()", 3, timeout=40)
    assert result.returncode != 0
    assert "Server.join: expected a program on rank 0 that the others follow" in result.stderr
    result = mpi_run("import mpistrat as ms; ms.Server({'ps': ['h:1']})", 1, timeout=40)
    assert "expected the task of this rank" in result.stderr


@pytest.mark.parametrize("setting", ["max_staleness=0", "max_staleness=2", "workers_in_sync=2"])
def test_workers_that_wait_for_each_other_are_refused(mpi_run, setting):
    program = f"""
import mpistrat as ms
strategy = ms.ParameterServerStrategy({setting})
try:
    ms.coordinator.ClusterCoordinator(strategy)
except ValueError as error:
    print(error)
strategy.close()
"""
    result = mpi_run(program, 3, timeout=40)
    assert result.returncode == 0, result.stderr
    assert all(f"a strategy with {setting.split('=')[0]}=" in out for out in result.out)
