"""A strategy that a program drops without close(): a worker warns, and nothing waits for it."""

import pytest

PROGRAM = """
import gc
import numpy as np
import mpistrat as ms

def trained(times=2):
    strategy = ms.ParameterServerStrategy(num_ps=1)
    with strategy.scope():
        v = ms.Variable(np.zeros(3), name="v")
        optimizer = ms.optimizers.SGD(0.1)
    for _ in strategy.distribute_dataset(ms.data.from_arrays(np.arange(2.0 * times)).batch(2)):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))
    if not strategy.is_server:
        strategy.flush()
    strategy.barrier()
    assert np.allclose(v.numpy(), -0.1 * times), v.numpy()
    return strategy, v, optimizer

made = trained()
"""
WARNING = "dropped a ParameterServerStrategy without close()"
AFTER = {  # how many of the two workers' warnings
    "the program ends": ("", 0),
    "it is closed": ("made[0].close(); del made; gc.collect()", 0),
    "it is dropped": ("del made; gc.collect()", 2),
    "one worker drops it": ("if made[0].rank == 0: del made; gc.collect()", 1),
    "a second one is made": ("made = None; gc.collect(); made = trained(3); made[0].close()", 2),
    "another strategy is made": (
        "made = None; gc.collect()\nwith ms.MultiWorkerMirroredStrategy() as s: assert s.reduce('SUM', 1.0, axis=None) == 3",
        2,
    ),
}


@pytest.mark.parametrize("after", AFTER)
def test_the_job_goes_on_and_a_worker_warns(mpi_run, after):
    act, warnings = AFTER[after]
    result = mpi_run(PROGRAM + act, 3, timeout=90, env={"MPISTRAT_ABORT_AFTER": "30"})
    assert result.returncode == 0, result
    assert result.stderr.count(WARNING) == warnings, result


def test_a_server_that_serves_for_good_and_workers_that_go_on(mpi_run):
    """It waits for workers that wait for it: an error, after a warning that names the cause."""
    act = """
if made[0].is_server:
    made[0].serve(None)
else:
    made = None
    gc.collect()
ms.MultiWorkerMirroredStrategy()
"""
    env = {"MPISTRAT_WARN_AFTER": "2", "MPISTRAT_ABORT_AFTER": "12"}
    result = mpi_run(PROGRAM + act, 3, timeout=90, env=env)
    assert result.returncode == 1, result
    assert result.stderr.count(WARNING) == 2 and "CollectiveTimeoutError" in result.stderr, result
