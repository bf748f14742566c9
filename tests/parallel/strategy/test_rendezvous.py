"""What happens where the ranks do not all come to the making of the strategy, or make different ones: no hang, no silence."""

from __future__ import annotations

import dataclasses

import pytest

LIMIT = {"MPISTRAT_WARN_AFTER": "1", "MPISTRAT_ABORT_AFTER": "3"}
START = """
import os, sys, time
import mpistrat as ms

rank = int(os.environ.get("PMI_RANK", os.environ.get("PMIX_RANK", "0")))  # as the launcher counts
last = rank == int(os.environ.get("PMI_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))) - 1
"""
STRATEGY = "\nstrategy = ms.MultiWorkerMirroredStrategy()"


@dataclasses.dataclass
class Stray:
    """A program whose last rank strays, what stands in the errors, and the exit status."""

    program: str
    says: tuple[str, ...]
    status: int = 1
    ranks: int = 2
    seconds: float = 30.0
    limit: str = "3"


STRAYS = {
    "an error before MPI starts": Stray(
        "if last: open('/nonexistent/config.json')" + STRATEGY,
        ("rank 1 of 2: the job ends on this exception", "FileNotFoundError"),
    ),
    "an error after MPI has started": Stray(
        "from mpi4py import MPI\nif last: raise KeyError('mine')" + STRATEGY,
        ("rank 1 of 2: the job ends on this exception", "KeyError: 'mine'"),
    ),
    "a typo in a keyword": Stray(
        "ms.MultiWorkerMirroredStrategy(**{'devicess' if last else 'devices': ['cpu:0']})",
        ("rank 1 of 2: the job ends on this exception", "unexpected keyword argument 'devicess'"),
    ),
    "another class": Stray(
        "ms.OneDeviceStrategy() if last else ms.MultiWorkerMirroredStrategy()",
        (
            "the ranks make different things: ranks 0, 1: MultiWorkerMirroredStrategy; rank 2: OneDeviceStrategy",
            "comm=",
        ),
        ranks=3,
    ),
    "parameter servers on one rank": Stray(
        "ms.ParameterServerStrategy(num_ps=1) if last else ms.MultiWorkerMirroredStrategy()",
        ("rank 0: MultiWorkerMirroredStrategy; rank 1: ParameterServerStrategy",),
    ),
    "another communicator": Stray(
        "from mpi4py import MPI\nms.MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF if last else None)\nif last: time.sleep(30)",
        ("MultiWorkerMirroredStrategy: rank 0 waits for rank 2", "rank 0 of 3 waited 3 s for rank 2", "another comm="),
        ranks=3,
    ),
    "rank 0 comes never": Stray(
        "from mpi4py import MPI\nif rank == 0: time.sleep(30)" + STRATEGY,
        ("waits for rank 0", "waited 3 s for rank 0"),
    ),
    "an exit after MPI has started": Stray(
        "from mpi4py import MPI\nif last: sys.exit(0)" + STRATEGY,
        ("PeerExitError: MultiWorkerMirroredStrategy: rank 0 of 2 waits for rank 1, which has finished its program",),
        limit="60",
    ),
    "an end after MPI has started": Stray(
        "from mpi4py import MPI\nif not last: ms.MultiWorkerMirroredStrategy()",
        ("rank 0 of 3 waits for rank 2, which has finished its program",),
        limit="60",
        ranks=3,
    ),
    "an exit before MPI starts": Stray(
        "if last: sys.exit(0)" + STRATEGY,
        ("PeerExitError: rank 0 of 2 has been in MPI_Init for ", "rank 1 ended without starting it, and the job ends"),
        limit="60",
    ),
    "an exit that nobody hears of": Stray(
        "if last: os._exit(0)" + STRATEGY,
        ("rank 1 ended without starting it, and the job ends",),
        limit="60",
    ),
    "an exit with an error before MPI starts": Stray(
        "if last: sys.exit(3)" + STRATEGY,
        ("rank 1 of 2: the job ends: it called sys.exit(3) before MPI was started",),
        status=3,
    ),
    "no strategy": Stray(
        "if last: time.sleep(30)" + STRATEGY,
        (
            "rank 0 of 2 has been in MPI_Init for 3 s, where it waits for ranks that have not started MPI, and the job ends",
        ),
    ),
}


@pytest.mark.parametrize("how", STRAYS)
def test_a_rank_that_strays_before_the_strategy_exists(mpi_run, how):
    stray = STRAYS[how]
    result = mpi_run(START + stray.program, stray.ranks, timeout=40, env={**LIMIT, "MPISTRAT_ABORT_AFTER": stray.limit})
    assert result.returncode == stray.status, result
    if "an exit" in how and "process rank 1" in result.launcher:  # Open MPI's may see it first
        return
    for words in stray.says:
        assert words in result.stderr, result
    assert result.seconds < stray.seconds, result


def test_programs_that_do_not_stray_are_left_alone(mpi_run):
    """Ranks that come late, strategies of parts of the ranks, strategies one after the other, and children of a rank."""
    program = """
import subprocess
from mpi4py import MPI

time.sleep(0.3 * rank)
with ms.MultiWorkerMirroredStrategy() as strategy:
    assert strategy.size == 3
part = MPI.COMM_WORLD.Split(int(last))
with ms.MultiWorkerMirroredStrategy(comm=part) as strategy:
    assert strategy.size == (1 if last else 2)
child = subprocess.run([sys.executable, "-c", "import mpistrat; raise ValueError('mine')"], capture_output=True, text=True)
assert child.returncode == 1 and "ValueError: mine" in child.stderr and "the job" not in child.stderr, child
child = subprocess.run([sys.executable, "-c", "import mpistrat, sys; sys.exit(4)"], capture_output=True, text=True)
assert child.returncode == 4 and not child.stderr, child
"""
    result = mpi_run(START + program, 3, timeout=60, env={"MPISTRAT_WARN_AFTER": "20", "MPISTRAT_LOG": "error"})
    assert result.returncode == 0 and not result.stderr.strip(), result


def test_a_program_without_mpi_is_left_alone(mpi_run):
    result = mpi_run("import mpistrat as ms\nprint(ms.__version__)", 2, timeout=40)
    assert result.returncode == 0 and not result.stderr.strip(), result


@pytest.mark.parametrize("level", ["single", "multiple"])
def test_how_mpi_is_started_is_mpi4pys_to_say(mpi_run, level):
    program = f"""
import mpi4py
mpi4py.rc.thread_level = {level!r}
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy()
from mpi4py import MPI

assert MPI.Query_thread() == MPI.THREAD_{level.upper()}
assert MPI.COMM_WORLD.Get_errhandler() == MPI.ERRORS_RETURN
assert mpi4py.rc.initialize is True and mpi4py.rc.finalize is None
import atexit
atexit.register(lambda: print("finalized", MPI.Is_finalized()))
"""
    result = mpi_run(program, 2, timeout=40)
    assert result.returncode == 0 and result.stdout.count("finalized False") == 2, result
