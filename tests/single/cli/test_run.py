"""`mpistrat run`: the program that it starts, and wrong use, on simulated machines."""

import json
import os
import subprocess
import sys

import pytest

from mpistrat.cli.main import main
from mpistrat.cluster.launchers import Allocation
from mpistrat.launcher import plan as run
from tests.harness.simulated_machine import OPENMPI, Machine
from tests.launch.launcher import ROOT


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


COMMAND = "import sys; sys.path.remove(''); from mpistrat.cli.main import main; sys.exit(main())"  # as the script does


@pytest.mark.parametrize("words", ["run --dry-run -n 1 true", "job --mpi pmi2 a.py", "doctor"])
def test_nothing_is_imported_from_the_working_directory(words, tmp_path):
    """In a folder that others write to, a file with the name of a module would run as whoever starts a command there."""
    (tmp_path / "a.py").touch()
    for name in ("json", "ctypes", "runpy", "re", "mpi4py", "numpy", "h5py", "mpistrat", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path)!r} + '/ran_{name}', 'w')\nraise SystemExit(77)\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLURM_", "PMI"))}
    subprocess.run(
        [sys.executable, "-c", COMMAND, *words.split()], cwd=tmp_path, env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert sorted(path.name for path in tmp_path.glob("ran_*")) == []


def shown(capsys, *words, status=0):
    try:
        found = main(["run", *words])
    except SystemExit as end:
        found = end.code
    out, err = capsys.readouterr()
    assert found == status, out + err
    return out if status == 0 else err


def command(capsys, *words):
    return json.loads(shown(capsys, "--json", "-n", "2", *words))["command"][3:]


def test_programs_and_their_arguments(machine, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "notes").touch()
    (tmp_path / "package").mkdir()
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    python = sys.executable
    assert command(capsys, "train.py", "--json", "-n", "9", "--", "-m") == [
        python, "train.py", "--json", "-n", "9", "--", "-m",
    ]  # fmt: skip
    assert command(capsys, "--", "train.py", "a b") == [python, "train.py", "a b"]
    assert command(capsys, "package") == [python, "package"]
    assert command(capsys, "notes") == [python, "notes"]
    assert command(capsys, "./tool", "x") == ["./tool", "x"]
    assert command(capsys, "sh", "-c", "true; false")[1:] == ["-c", "true; false"]
    assert command(capsys, "-m", "pkg.train", "--ps", "3") == [python, "-m", "pkg.train", "--ps", "3"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "program: expected a program, or -m and a module, got none"),
        (["-m"], "program: expected a program, or -m and a module, got none"),
        (["missing.py"], "program: expected a file that is there, got missing.py"),
        (["missing"], "program: expected a file, or a program on PATH, got missing"),
        (["-n", "0", "a.py"], "expected a whole number from 1 to 65535, got '0'"),
        (["-n", "two", "a.py"], "expected a whole number from 1 to 65535, got 'two'"),
        (["-n", "100000", "a.py"], "expected a whole number from 1 to 65535, got '100000'"),
        (["--strategy", "best", "a.py"], "invalid choice: 'best'"),
        (["--strategy", "mesh", "a.py"], "Call ms.MeshStrategy(axes={...}) in the program"),
        (["--epochs", "3"], "--epochs"),
        (["--standby", "sh"], "--standby: expected --restarts with it, got none"),
        (["--restarts", "2", "--standby", "sh"], "--standby: expected a program of Python, got /"),
    ],
)
def test_wrong_use(machine, capsys, monkeypatch, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    assert said in shown(capsys, "--dry-run", *words, status=2)


def test_wrong_use_in_a_slurm_job(machine, capsys, monkeypatch, tmp_path):
    """Outside of its nodes nothing tells how ranks that survive have ended: their launcher says 0 whatever happens."""
    machine.slurm(["pmix"])
    machine.has(library=OPENMPI)
    monkeypatch.setattr("mpistrat.cli.run.allocation_of_job", Allocation)
    said = shown(capsys, "--dry-run", "--survive", "sh", status=2)
    assert "--survive: expected a node of the SLURM job" in said and "batch script" in said
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert "--with-ft ulfm" in shown(capsys, "--dry-run", "--survive", "sh")
    (tmp_path / "a.py").touch()
    said = shown(capsys, "--dry-run", "--restarts", "2", "--standby", str(tmp_path / "a.py"), status=2)
    assert "--standby: expected ranks on this machine, got a SLURM job" in said


def test_a_machine_without_a_launcher_is_a_problem(machine, capsys, monkeypatch):
    monkeypatch.setattr(run, "find_launchers", lambda library: [])
    assert "error: mpistrat run: launcher: expected an mpiexec that" in shown(capsys, "-n", "2", "sh", status=1)


def test_a_dry_run_says_what_it_would_do(machine, capsys):
    text = shown(capsys, "-n", "4", "--ps", "1", "--dry-run", "-m", "train", "a b")
    assert text == (
        "# MPICH 5.0.2 from /opt/lib/libmpi.so.12; 4 ranks on 8 cores\n"
        "OMP_NUM_THREADS=2 MPISTRAT_STRATEGY=parameter_server MPISTRAT_NUM_PS=1"
        f" /opt/mpich/mpiexec -n 4 {sys.executable} -m train 'a b'\n"
    )


def test_mpi_is_not_started():
    code = (
        "import sys; from mpistrat.cli.main import main; main(['run', '-n', '2', '--dry-run', 'sh']);"
        " print('mpi4py' in sys.modules)"
    )
    reply = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert reply.stdout.splitlines()[-1] == "False", reply.stderr
