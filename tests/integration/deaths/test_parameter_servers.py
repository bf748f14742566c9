"""Jobs with parameter servers, of which a worker, a server or the chief dies: each batch is applied once nevertheless."""

import time

import pytest

from tests.campaign.kills import sample

pytestmark = pytest.mark.timeout(120)

EACH_BATCH_ONCE = """
import os, signal, sys, time
import numpy as np
import mpistrat as ms
import mpistrat.train.checkpoints
mpistrat.train.checkpoints._SHARE = 1.0  # as often as it says

KILLS = {kills}  # of each start or generation: a rank, and after how many steps
BATCHES, EPOCHS = 61, 3

def train(job):
    strategy = ms.ParameterServerStrategy(num_ps=1)
    with strategy.scope():
        w = ms.Variable(np.zeros(BATCHES), name="w")
        b = ms.Variable(np.zeros(3), name="b")
        optimizer = ms.optimizers.SGD(1.0)
    data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(BATCHES)).shuffle(seed=1).batch(1))
    processes = strategy.all_gather_object(os.getpid())

    def step(x):
        optimizer.apply_gradients([(np.eye(BATCHES)[int(x[0])], w), (np.ones(3), b)])

    class Kill(ms.train.Callback):
        def on_step_end(self, loop):
            time.sleep(0.004)
            if job.generation < len(KILLS) and strategy.rank == 0 and loop.step == KILLS[job.generation][1]:
                os.kill(processes[KILLS[job.generation][0]], signal.SIGKILL)

    checkpoints = ms.train.Checkpoints(strategy, "checkpoints", snapshot_seconds=0.02)
    ms.train.Trainer(strategy, step, callbacks=[Kill()], checkpoints=checkpoints).fit(data, EPOCHS)
    if strategy.rank == 0:
        right = (w.numpy() == -EPOCHS).all() and (b.numpy() == -EPOCHS * BATCHES).all()
        print("end", job.generation, strategy.size, "right" if right else (w.numpy(), b.numpy()), flush=True)
    strategy.close()

ms.survive(train)
"""
FUNCTIONS = """
import os, signal, time
import numpy as np
import mpistrat as ms
from mpistrat.coordinator import ClusterCoordinator

def train(job):
    strategy = ms.ParameterServerStrategy(num_ps=1)
    with strategy.scope():
        w = ms.Variable(np.zeros(3), name="w")
        optimizer = ms.optimizers.SGD(1.0)
    processes = strategy.all_gather_object(os.getpid())

    def step(i):
        time.sleep(0.005)
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w)]))
        return i

    with ClusterCoordinator(strategy) as coordinator:
        if coordinator.is_chief:
            values = [coordinator.schedule(step, args=(i,)) for i in range(50)]
            if job.generation == 0:
                time.sleep(0.1)
                os.kill(processes[{victim}], signal.SIGKILL)
            coordinator.join()
            print("end", job.generation, strategy.size, w.numpy()[0], sum(coordinator.fetch(values)), flush=True)
    strategy.close()

ms.survive(train)
"""
# Workers are ranks 0 to 2, the server is rank 3; rank 0 is the chief. Of three ranks the last one is the server.
KILLS = {"worker": [(1, 20)], "server": [(3, 20)], "each": [(3, 10), (0, 25)]}


@pytest.mark.parametrize("kills", KILLS.values(), ids=KILLS)
def test_ranks_are_started_again(mpistrat_run, kills):
    done = mpistrat_run(EACH_BATCH_ONCE.replace("{kills}", str(kills)), 4, "--restarts", "5")
    assert f"end {len(kills)} 4 right" in done.stdout
    assert done.stderr.count("in memory (") == len(kills), done.stderr


@pytest.mark.parametrize("kills", KILLS.values(), ids=KILLS)
def test_ranks_that_are_left_go_on(mpi, mpistrat_run, kills):
    _skip_without_ulfm(mpi)
    done = mpistrat_run(EACH_BATCH_ONCE.replace("{kills}", str(kills)), 4, "--survive")
    assert f"end {len(kills)} {4 - len(kills)} right" in done.stdout
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("victim", [0, 3])
def test_a_coordinator_s_functions_are_scheduled_again(mpi, mpistrat_run, victim):
    """None of them was saved, so all are. Workers that die: `test_coordinator.py`."""
    _skip_without_ulfm(mpi)
    done = mpistrat_run(FUNCTIONS.replace("{victim}", str(victim)), 4, "--survive")
    assert "end 1 3 -50.0 1225" in done.stdout


def test_one_sided_calls_do_not_outlive_a_worker(mpi, mpistrat_run):
    """MPI does not define what its windows do then, so the function is called again, as without a coordinator."""
    _skip_without_ulfm(mpi)
    program = FUNCTIONS.replace("{victim}", "1").replace("num_ps=1", 'num_ps=1, transport="one_sided"')
    assert "end 1 3 -50.0 1225" in mpistrat_run(program, 4, "--survive").stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("survive", [False, True])
def test_a_sample_of_the_campaign(mpi, survive):
    if survive:
        _skip_without_ulfm(mpi)
    seed = int(time.time()) // 86400
    outcome = sample(mpi.python, kills=5, seed=seed, ranks=4, survive=survive, servers=1)
    assert len(outcome.kills) >= 3
    assert not outcome.wrong


def _skip_without_ulfm(mpi):
    if "Open MPI" not in mpi.vendor:
        pytest.skip("only Open MPI goes on when a rank dies")
