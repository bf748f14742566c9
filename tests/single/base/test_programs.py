"""How the package starts its own programs: nothing is imported from the working directory."""

import json
import os
import subprocess
import sys

import pytest

from mpistrat.base.programs import isolated, program
from mpistrat.cluster import launchers
from mpistrat.doctor import probe
from mpistrat.launcher import rank_output
from tests.launch.launcher import ROOT

PLANTED = ("json", "ctypes", "runpy", "re", "importlib", "random", "mpi4py", "numpy", "cloudpickle", "h5py", "mpistrat")
OWN = {
    "command": program("mpistrat", "--version"),
    "launched": program("mpistrat.launcher.launched", "/none"),
    "standby": program("mpistrat.launcher.standby", "train.py"),
    "library": program(launchers._ASK),
    "probe": program(probe._START, json.dumps(sys.path), "mpistrat.doctor.libraries"),
    "isolated": isolated(rank_output.__file__, "RANK", "1", "", "true"),
}


def run(words, folder, **env):
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLURM_", "PMI"))}
    return subprocess.run(words, cwd=folder, env=plain | env, capture_output=True, text=True, timeout=120)


def plant(folder, names=PLANTED):
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(folder)!r} + '/ran_{name}', 'w')\nraise SystemExit(77)\n")


@pytest.mark.parametrize("what", OWN)
def test_nothing_is_imported_from_the_working_directory(what, tmp_path):
    plant(tmp_path)
    reply = run(OWN[what], tmp_path, PYTHONPATH=str(ROOT))
    assert reply.returncode != 77 and not list(tmp_path.glob("ran_*")), reply.stderr


def test_the_path_is_that_of_a_module_without_the_working_directory(tmp_path):
    (tmp_path / "show.py").write_text(show := "import json, sys; print(json.dumps([sys.path, sys.argv]))")
    for settings in ({}, {"PYTHONPATH": str(tmp_path)}, {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}):
        usual, _ = json.loads(run([sys.executable, "-c", show], tmp_path, **settings).stdout)
        path, words = json.loads(run(program(str(tmp_path / "show.py"), "a b", ":"), tmp_path, **settings).stdout)
        assert path == [folder for folder in usual if folder] and words[1:] == ["a b", ":"]


def test_the_package_is_that_of_the_caller(tmp_path):
    """Even if PYTHONPATH leads to another one, or the program's folder alone leads to it."""
    plant(tmp_path, ["mpistrat"])
    reply = run(program("mpistrat", "--version"), "/", PYTHONPATH=str(tmp_path))
    assert reply.stdout.startswith("mpistrat ") and not (tmp_path / "ran_mpistrat").exists(), reply.stderr
    (beside := tmp_path / "beside").mkdir()
    (beside / "mpistrat").symlink_to(ROOT / "mpistrat")
    (beside / "train.py").write_text(
        "from mpistrat.base.programs import program; print(*program('mpistrat', '--version'))"
    )
    words = run([sys.executable, str(beside / "train.py")], "/").stdout.split()
    assert words[1].startswith(str(beside)) and run(words, "/").stdout.startswith("mpistrat ")
