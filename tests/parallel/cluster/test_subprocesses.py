"""Programs that a rank starts as processes of its own: none takes the rank's place at the launcher."""

import pytest

PROGRAM = """
import os, shlex, subprocess, sys
import mpistrat as ms

OPTIONS = ["--allow-run-as-root", "--oversubscribe"] if "OMPI_COMM_WORLD_SIZE" in os.environ else []
MPIEXEC = [os.path.join(os.path.dirname(sys.executable), "mpiexec"), *OPTIONS, "-n", "2", sys.executable]
CHILD = [{child!r}]
LAUNCHER = ("PMI_", "PMI2_", "MPI_", "HYDI_", "HYDRA_", "MPICH_", "MPIEXEC_", "OMPI_", "OPAL_", "PMIX_", "PRTE_")

def said(words, **more):
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, **more)
    lines = (done.stdout or done.stderr).split("\\n")
    return done.returncode, sorted(filter(None, lines))[-2:]

with ms.MultiWorkerMirroredStrategy() as strategy:
    if strategy.rank == strategy.size - 1:
        alone = {{name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}}
        print(said([sys.executable, *CHILD]))
        print(said(shlex.join([sys.executable, *CHILD]), shell=True, close_fds=False))
        print(said([sys.executable, *CHILD], env=alone))
        print(said([*MPIEXEC, *CHILD]))
        print(said([*MPIEXEC, *CHILD], env=alone))
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.dup2(write, 2)
            os.execv(sys.executable, [sys.executable, *CHILD])
        os.close(write)
        print("MPI cannot start" in os.fdopen(read).read(), os.waitpid(pid, 0)[1] != 0)
    strategy.barrier()
"""
CHILD = """
import sys
import mpistrat as ms
with ms.MultiWorkerMirroredStrategy() as strategy:
    sys.stdout.write(f"rank {strategy.rank} of {strategy.size}\\n")
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_they_run_alone_or_under_a_launcher_of_their_own(mpi_run, tmp_path, ranks):
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(child=str(child)))
    result = mpi_run([str(path)], ranks, timeout=120)
    assert result.returncode == 0, result
    refused, by_shell, alone, launched, cleaned, forked = result.out[ranks - 1].splitlines()
    for line in (refused, by_shell):
        assert line.startswith("(1, "), result
        assert "MPI cannot start in process" in line and f"which rank {ranks - 1} (process " in line, result
        assert "To run alone, the process needs an environment without the launcher's variables" in line, result
    assert alone == "(0, ['rank 0 of 1'])", result
    for line in (launched, cleaned):
        assert line.startswith("(0, "), result
        assert "rank 0 of 2" in line and "rank 1 of 2" in line, result
    assert forked == "True True", result
