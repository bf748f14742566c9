"""Which launcher starts the MPI that mpi4py loads. What launchers say is quoted from their versions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.cluster import launchers
from mpistrat.cluster.launchers import Launcher, MPILibrary, choose_launcher, find_launchers, loaded_library, mismatch
from mpistrat.errors import ClusterError

MPICH = MPILibrary("MPICH", "5.0.2", "MPICH Version:      5.0.2")
INTEL = MPILibrary("Intel MPI", "2021.13.0", "Intel(R) MPI Library 2021.13 for Linux* OS")
OPENMPI = MPILibrary("Open MPI", "5.0.11", "Open MPI v5.0.11")

SAYS = {
    "HYDRA build details:\n    Version:                                 4.0.2\n": ("MPICH", "4.0.2", "mpich"),
    "mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://": ("Open MPI", "5.0.11", "openmpi"),
    "mpirun (OpenRTE) 4.1.4\n": ("Open MPI", "4.1.4", "openmpi"),
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701": ("Intel MPI", "2021.13", "mpich"),
    "mpiexec version 1.2.12, revision 1234 PALS": ("", "", "other"),
}


def program(path: Path, text: str, status: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_a_folder_on_path_that_cannot_be_looked_into_is_passed_over(tmp_path, monkeypatch):
    """The system refuses it for its name here, for want of permission elsewhere."""
    path = program(tmp_path / "mpiexec", next(iter(SAYS)))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PATH", str(tmp_path / ("x" * 300)), prepend=":")
    assert str(path) in [launcher.path for launcher in find_launchers()]


@pytest.mark.parametrize("said", SAYS)
def test_launchers_say_whose_they_are(tmp_path, monkeypatch, said):
    path = program(tmp_path / "mpiexec", said)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = next(launcher for launcher in find_launchers() if launcher.path == str(path))
    assert (found.name, found.version, found.family) == SAYS[said]


@pytest.mark.parametrize(
    ("library", "launcher", "fits"),
    [
        (MPICH, ("MPICH", "4.0.2", "mpich"), True),
        (INTEL, ("MPICH", "4.0.2", "mpich"), True),
        (OPENMPI, ("Open MPI", "5.0.3", "openmpi"), True),
        (OPENMPI, ("Open MPI", "4.1.4", "openmpi"), False),
        (OPENMPI, ("MPICH", "4.0.2", "mpich"), False),
        (MPICH, ("Open MPI", "5.0.3", "openmpi"), False),
        (MPICH, ("", "", "other"), False),
    ],
)
def test_a_launcher_starts_its_own_family(library, launcher, fits):
    found = Launcher(("mpiexec",), *launcher, "PATH")
    assert (mismatch(library, found) == "") == fits
    assert choose_launcher(library, [found]) == (found if fits else None)


def test_the_users_launcher_is_believed_unless_it_is_known_to_be_wrong():
    unknown = Launcher(("mpiexec",), "", "", "other", launchers.USER)
    wrong = Launcher(("mpiexec",), "MPICH", "4.0.2", "mpich", launchers.USER)
    assert choose_launcher(OPENMPI, [wrong, unknown]) is unknown


def test_what_came_with_the_library_precedes_path_and_follows_the_users_word(tmp_path, monkeypatch):
    hydra = "HYDRA build details:\n    Version: 4.0.2"
    with_library = program(tmp_path / "mpi" / "bin" / "mpiexec", hydra)
    on_path = program(tmp_path / "path" / "mpiexec", hydra)
    program(tmp_path / "path" / "mpirun", hydra)  # another name of the same
    chosen = program(tmp_path / "my mpiexec", hydra)
    monkeypatch.setenv("PATH", str(on_path.parent), prepend=":")
    monkeypatch.setenv("MPIEXEC", f"'{chosen}' -ppn 4")
    library = MPILibrary("MPICH", "4.0.2", "", str(tmp_path / "mpi" / "lib" / "x86_64-linux-gnu" / "libmpi.so.12"))
    found = [launcher for launcher in find_launchers(library) if str(tmp_path) in launcher.path]
    assert [(launcher.path, launcher.where) for launcher in found] == [
        (str(chosen), "$MPIEXEC"),
        (str(with_library), "with the MPI library"),
        (str(on_path), "PATH"),
    ]
    assert found[0].command == (str(chosen), "-ppn", "4")


@pytest.mark.parametrize("given", ["/there/is/none", "'unclosed", " ", "''"])
def test_a_word_of_the_users_that_is_no_program_is_passed_over(monkeypatch, given):
    monkeypatch.setenv("MPIEXEC", given)
    assert all(launcher.where != launchers.USER for launcher in find_launchers())


def test_the_library_is_asked_without_starting_mpi():
    library = loaded_library()
    assert library.family in ("mpich", "openmpi")
    assert library.version in library.text
    assert Path(library.path).exists()
    assert choose_launcher(library, find_launchers(library)) is not None
    started = (
        "from mpistrat.cluster.launchers import loaded_library as l; import sys; l(); print('mpi4py' in sys.modules)"
    )
    reply = subprocess.run([sys.executable, "-c", started], capture_output=True, text=True, check=True)
    assert reply.stdout == "False\n"


def test_a_python_without_mpi_says_what_is_missing(tmp_path):
    fake = program(tmp_path / "python", "", 1)
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')  # without site-packages
    with pytest.raises(ClusterError, match=r"No module named 'mpi4py'.*pip install mpich"):
        loaded_library(str(fake))


def test_a_folder_on_path_that_may_not_be_entered_is_skipped(monkeypatch, tmp_path):
    (tmp_path / "closed" / "bin").mkdir(parents=True)
    (tmp_path / "closed" / "bin" / "mpiexec").touch(0o755)
    (tmp_path / "closed").chmod(0)
    monkeypatch.setenv("PATH", f"{tmp_path}/closed/bin")
    monkeypatch.delenv("MPIEXEC", raising=False)
    user = os.geteuid()
    if user == 0:  # who may enter every folder
        os.seteuid(65534)
    try:
        found = find_launchers(MPILibrary("MPICH", "5.0.2", "", str(tmp_path / "closed" / "lib" / "libmpi.so")))
    finally:
        os.seteuid(user)
        (tmp_path / "closed").chmod(0o700)
    assert not [launcher for launcher in found if str(tmp_path) in launcher.path]
