"""Programs with `import horovod.torch`: install(), `mpistrat run --horovod`, and a new start after a killed rank."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.horovod_programs import elastic, ends

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
import horovod.torch as hvd
import torch
from horovod.torch.mpi_ops import allreduce, rank

hvd.init()
print(f"{rank()} of {hvd.size()}: {allreduce(torch.ones(2), op=hvd.Sum).tolist()} {sys.argv[1:]}", flush=True)
"""


def run(folder, program, *words, code=None, **environment):
    """Run a command of this package in a folder with a program, and return what it printed."""
    (folder / "train.py").write_text(program)
    start = [sys.executable, "-m", "mpistrat", "run", *words] if code is None else [sys.executable, "-c", code]
    done = subprocess.run(
        start, cwd=folder, capture_output=True, text=True, timeout=110, env={**plain(), **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def plain():
    """Return an environment without the variables of a launcher, in which the package is found."""
    names = ("PMI", "OMPI_", "PMIX_", "MPI_", "MPISTRAT_", "HYDI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))}


@pytest.mark.timeout(150)
def test_a_program_of_horovod_runs_unchanged(tmp_path):
    done = run(tmp_path, PROGRAM, "-n", "2", "--horovod", "train.py", "--lr", "1")
    lines = sorted(re.findall(r"\d of.*?'\]", done.stdout))  # two ranks may share a line
    assert lines == [f"{rank} of 2: [2.0, 2.0] ['--lr', '1']" for rank in range(2)]


def test_without_the_option_there_is_no_horovod(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mpistrat", "run", "-n", "1", "--json"]
    for option, there in (([], False), (["--horovod"], True)):
        done = subprocess.run(
            [*command, *option, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, env=plain()
        )
        path = json.loads(done.stdout)["environment"].get("PYTHONPATH", "")
        assert path.startswith(str(ROOT / "mpistrat" / "horovod" / "alias")) == there
        assert (str(ROOT) in path.split(os.pathsep)) == there, "the user's own stays"


@pytest.mark.timeout(150)
def test_install_and_another_horovod(tmp_path):
    about = tmp_path / "horovod-0.28.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    code = """
import mpistrat.horovod
mpistrat.horovod.install()
mpistrat.horovod.install()
import horovod, horovod.torch.elastic, horovod.common.exceptions
from horovod.torch import mpi_ops, DistributedOptimizer
print(horovod.__version__, horovod.torch.__name__, horovod.common.exceptions.HorovodInternalError is mpi_ops.HorovodInternalError)
"""
    done = run(tmp_path, "", code=code, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.stdout == "0.28.1 mpistrat.horovod.torch True\n"
    assert done.stderr.count("Horovod 0.28.1 is installed, and not used: horovod.torch is mpistrat.horovod.torch") == 1


def test_install_after_another_horovod_was_imported(tmp_path):
    package = tmp_path / "horovod"
    (package / "torch").mkdir(parents=True)
    for path in (package, package / "torch"):
        (path / "__init__.py").touch()
    code = """
import horovod.torch, mpistrat.horovod, mpistrat
try:
    mpistrat.horovod.install()
except mpistrat.errors.ContextError as error:
    print(error)
"""
    done = run(tmp_path, "", code=code, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.stdout.startswith("mpistrat.horovod.install: expected no imported horovod, got that of ")
    assert done.stdout.endswith("Call install() before the program imports horovod\n")


@pytest.mark.timeout(200)
def test_a_killed_rank_and_a_new_start_from_the_last_commit(tmp_path):
    """The gradient is 1.5 in each step. Rank 1 is killed in the fourth, which rank 0 may have committed or not."""
    done = run(tmp_path, elastic(victim=1), "-n", "2", "--restarts", "2", "--horovod", "train.py")
    lines = sorted(re.findall(r"elastic \d from.*?\]\]", done.stdout))  # two ranks may share a line
    assert lines in [ends(2, step, -9.0) for step in (3, 4)], done.stdout + done.stderr
