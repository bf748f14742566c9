"""`mpistrat run` in a job of a real SLURM: all its tasks, on both hosts, are the ranks of one world."""

from __future__ import annotations

PROGRAM = """
import os
import mpistrat as ms
from tests.harness.whole_lines import print
strategy = ms.strategy_from_environment(default="one_device")
print(strategy.rank, strategy.size, os.uname().nodename, strategy.servers, os.environ["OMP_NUM_THREADS"])
strategy.close()
"""
SCRIPT = """#!/bin/bash
#SBATCH --output=job.out --nodes=2 --ntasks-per-node=2 --cpus-per-task=1
unset OMP_NUM_THREADS
{python} -m mpistrat run --ps 1 --dry-run train.py >dry
{python} -m mpistrat run --ps 1 train.py
"""


def test_the_tasks_of_the_job_are_the_ranks(slurm, slurm_mpi, tmp_path) -> None:
    from tests.launch.slurm import mpi_type

    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "job.sh").write_text(SCRIPT.format(python=slurm_mpi.python))
    said = slurm.submit(tmp_path / "job.sh").completed().splitlines()
    ranks = sorted(line for line in said if line[:1].isdigit())
    assert ranks == [f"{rank} 4 h{1 + rank // 2} (3,) 1" for rank in range(4)], said
    dry = (tmp_path / "dry").read_text()
    assert f"srun --ntasks=4 --mpi={mpi_type(slurm_mpi)} --kill-on-bad-exit=1 --cpus-per-task=1 " in dry


LAUNCH = """
import os
import socket
import mpistrat as ms


def where():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        return strategy.rank, socket.gethostname()


if __name__ == "__main__":
    print(ms.launch(where, ranks=4, timeout=60))
    print([name for name in os.listdir() if "launch-" in name])
"""
LAUNCH_JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output=job.out
{python} launch.py
"""


def test_launch_has_ranks_on_all_nodes(slurm, slurm_mpi, tmp_path):
    (tmp_path / "launch.py").write_text(LAUNCH)
    (tmp_path / "job.sh").write_text(LAUNCH_JOB.format(python=slurm_mpi.python))
    output = slurm.submit(tmp_path / "job.sh").completed().splitlines()
    assert output == ["[(0, 'h1'), (1, 'h1'), (2, 'h2'), (3, 'h2')]", "[]"]


WORDS_JOB = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=2 --output=job.out
srun -n 1 echo taken : touch planted-by-srun
{python} -m mpistrat run words.py x : touch planted : "" = --map-by "%t %d" -n 9
"""


def test_a_program_gets_its_words_as_they_are(slurm, slurm_mpi, tmp_path):
    """srun would start what follows ":" as another program, as the first line of the job shows."""
    (tmp_path / "words.py").write_text("import sys\nsys.stdout.write(f'{sys.argv[1:]}\\n')")
    (tmp_path / "job.sh").write_text(WORDS_JOB.format(python=slurm_mpi.python))
    output = slurm.submit(tmp_path / "job.sh").completed().splitlines()
    words = ["x", ":", "touch", "planted", ":", "", "=", "--map-by", "%t %d", "-n", "9"]
    assert output.count(str(words)) == 2 and not (tmp_path / "planted").exists(), output
    assert "taken : touch planted-by-srun" not in output, output
