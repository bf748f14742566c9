"""`mpistrat doctor` on a login node: nothing on a healthy machine, and every fault that was put there."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path

import pytest

from tests.harness.doctor_runs import DoctorRun, documented, run_doctor, why_no_mounts
from tests.launch.launcher import MpiEnv

pytestmark = pytest.mark.skipif(bool(why_no_mounts()), reason=why_no_mounts() or "there are mounts")


@pytest.fixture
def other(mpi: MpiEnv, pytestconfig: pytest.Config) -> MpiEnv:
    """An environment with another MPI."""
    from tests.launch.launcher_plugin import ENVS

    others = [env for env in pytestconfig.stash[ENVS].all.values() if env.vendor != mpi.vendor]
    if not others:
        pytest.skip("this run has one MPI: give another --mpi-env")
    return others[0]


def fake_srun(folder: Path, *plugins: str) -> Path:
    """A folder with an srun that lists these plugins, in the words of SLURM 22.05."""
    folder.mkdir()
    versions = "specific pmix plugin versions available: pmix_v4\n" if "pmix" in plugins else ""
    lines = "".join(f"\t{plugin}\n" for plugin in plugins)
    (folder / "list").write_text(f"MPI plugin types are...\n{lines}{versions}")
    (folder / "srun").write_text(f'#!/bin/sh\n[ "$*" = --mpi=list ] && cat {folder}/list\n')
    (folder / "srun").chmod(0o755)
    return folder


def test_a_healthy_machine_has_nothing(mpi):
    start = time.monotonic()
    found = run_doctor(mpi)
    assert found.bad() == [] and found.err == ""
    assert found.document["status"] == "OK" and found.document["ranks"] == []
    assert {
        "MPI library",
        "MPI start",
        "one-sided calls",
        "shared memory",
        "mpiexec",
        "HDF5",
        "/dev/shm",
    } <= found.names()
    assert found.names() <= documented("On a login node")
    assert mpi.vendor in found.finding("MPI library")["what"] and "libmpi" in found.finding("MPI library")["what"]
    assert ("--survive" in found.finding("death of a rank")["what"]) == ("Open MPI" in mpi.vendor)
    assert time.monotonic() - start < 60  # about 2 s where nothing else runs


def test_ranks_of_this_machine_that_mpi_puts_on_two_nodes(mpi):
    if "MPICH" not in mpi.vendor:
        pytest.skip("MPICH has a setting for it")
    found = run_doctor(mpi, env={"MPIR_CVAR_NOLOCAL": "1"})
    assert [(one["name"], one["status"]) for one in found.bad()] == [("two ranks", "warning")]
    assert "ranks 0, 1 of" in found.finding("two ranks")["what"] and "2 nodes" in found.finding("two ranks")["what"]
    assert "unset MPIR_CVAR_NOLOCAL" in found.finding("two ranks")["remedy"]


@pytest.fixture(scope="module")
def seen() -> dict[str, DoctorRun]:
    """Visits of this file, by MPI."""
    return {}


class TestSickMachine:
    """Faults that do not hide each other are looked for in one run."""

    @pytest.fixture
    def found(self, mpi: MpiEnv, seen: dict[str, DoctorRun], tmp_path: Path) -> DoctorRun:
        if mpi.name not in seen:
            wrong = ("none", "pmi2") if "Open MPI" in mpi.vendor else ("none", "pmix")
            made = (
                "umask 022; touch /dev/shm/mpich_shm_1_0; umask 077; head -c 3M /dev/zero > /dev/shm/sm_segment.h.0.1"
            )
            seen[mpi.name] = run_doctor(
                mpi, "--need", "nccl,parallel-hdf5,cuda-aware-mpi", env={"OMP_NUM_THREADS": "5000"},
                first=[fake_srun(tmp_path / "bin", *wrong)], before=f"{made}; touch -d '2 hours ago' /dev/shm/*", status=1,
            )  # fmt: skip
        return seen[mpi.name]

    def test_no_protocol_of_srun_fits(self, mpi, found):
        finding = found.finding("srun")
        assert finding["status"] == "problem" and "rank 0 of 1" in finding["what"]
        assert ("pmix" if "Open MPI" in mpi.vendor else "pmi2") in finding["remedy"]

    def test_blas_has_more_threads_than_cores(self, found):
        finding = found.finding("BLAS threads")
        assert finding["status"] == "warning" and "OMP_NUM_THREADS=5000" in finding["what"]
        assert "unset OMP_NUM_THREADS" in finding["remedy"]

    def test_h5py_is_serial_and_was_wanted_parallel(self, found):
        finding = found.finding("HDF5")
        if ", parallel" in finding["what"]:
            pytest.skip("this h5py is parallel")
        assert finding["status"] == "problem" and "HDF5_MPI=ON" in finding["remedy"]

    def test_nccl_was_wanted_and_is_missing(self, found):
        if found.finding("GPU")["status"] == "OK":
            pytest.skip("this machine has GPUs")
        finding = found.finding("NCCL")
        assert finding["status"] == "problem" and "CuPy" in finding["what"]

    def test_mpi_does_not_take_memory_of_gpus(self, found):
        finding = found.finding("CUDA-aware MPI")
        if "says that it takes" in finding["what"]:
            pytest.skip("this MPI takes memory of GPUs")
        assert finding["status"] == "problem"

    def test_others_may_read_a_segment(self, found):
        finding = found.finding("segments")
        assert finding["status"] == "warning" and "mpich_shm_1_0 (mode 0644)" in finding["what"]
        assert finding["remedy"].endswith("chmod 600 /dev/shm/mpich_shm_1_0") and "umask 077" in finding["remedy"]

    def test_crashed_jobs_left_files(self, found):
        finding = found.finding("leftovers")
        assert finding["status"] == "warning" and "2 files of yours that no process uses, 3.0 MiB" in finding["what"]
        assert finding["remedy"] == "mpistrat doctor --clean removes them"

    def test_what_was_not_broken_is_well(self, found):
        assert found.names() <= documented("On a login node")
        assert {finding["name"] for finding in found.bad()} <= {
            "srun", "BLAS threads", "HDF5", "GPU", "NCCL", "CUDA-aware MPI", "segments", "leftovers",
        }  # fmt: skip
        assert found.finding("MPI start")["status"] == "OK"


def test_the_launcher_on_path_is_that_of_another_mpi(mpi, other, tmp_path):
    found = run_doctor(mpi, first=[Path(other.python).parent], env={"MPIEXEC": ""}, status=1)
    finding = found.finding("mpiexec")
    assert finding["status"] == "problem" and "another MPI" in finding["what"] and other.vendor in finding["what"]
    assert "rank 0 of 1" in finding["what"]
    assert str(Path(mpi.python).with_name("mpiexec")) in finding["remedy"]
    assert f"export MPI4PY_MPIABI={'mpich' if 'MPICH' in other.vendor else 'openmpi'}: then mpi4py" in finding["remedy"]
    assert [one["name"] for one in found.bad()] == ["mpiexec"]


def test_the_users_own_launcher_is_that_of_another_mpi(mpi, other):
    found = run_doctor(mpi, env={"MPIEXEC": str(Path(other.python).with_name("mpiexec"))}, status=1)
    assert found.finding("mpiexec")["status"] == "problem"


def test_shared_memory_is_full(mpi):
    found = run_doctor(mpi, shm="size=2m", before="head -c 2M /dev/zero > /dev/shm/full", status=1)
    finding = found.finding("/dev/shm")
    assert finding["status"] == "problem" and "0.0 MiB free of 2.0 MiB" in finding["what"]
    assert "--shm-size=8g" in finding["remedy"] and "ls -l /dev/shm" in finding["remedy"]


def test_shared_memory_is_small_as_in_many_containers(mpi):
    found = run_doctor(mpi, shm="size=64m")
    finding = found.finding("/dev/shm")
    assert finding["status"] == "warning" and "of 64.0 MiB" in finding["what"] and "--shm-size=8g" in finding["remedy"]


def test_srun_is_told_a_protocol_that_fits(mpi, tmp_path):
    fits = "pmix" if "Open MPI" in mpi.vendor else "pmi2"
    found = run_doctor(mpi, first=[fake_srun(tmp_path / "bin", "none", "pmi2", "pmix")])
    over_ucx = ["srun"] if mpi.vendor == "MPICH" else []
    assert [one["name"] for one in found.bad()] == over_ucx and f"srun --mpi={fits}" in found.finding("srun")["what"]
    found = run_doctor(mpi, first=[tmp_path / "bin"], env={"MPIR_CVAR_CH4_NETMOD": "ofi"})
    assert found.bad() == [] and f"srun --mpi={fits}" in found.finding("srun")["what"]


def test_slurm_is_told_a_protocol_that_does_not_fit(mpi, tmp_path):
    folder = fake_srun(tmp_path / "bin", "none", "pmi2", "pmix")
    wrong, right = ("pmi2", "pmix") if "Open MPI" in mpi.vendor else ("pmix", "pmi2")
    finding = run_doctor(mpi, first=[folder], env={"SLURM_MPI_TYPE": wrong}).finding("srun")
    assert finding["status"] == "warning" and f"SLURM_MPI_TYPE={right}" in finding["remedy"]


@pytest.mark.parametrize("kind", ["crashes", "hangs", "is missing"])
def test_mpi(mpi, tmp_path, kind):
    """An MPI library that really does so: one of our own, loaded before or instead of the real one."""
    if kind == "is missing":
        found = run_doctor(mpi, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "MPI4PY_MPIABI": "mpi_none"}, status=1)
        finding = found.finding("MPI library")
        assert finding["status"] == "problem" and finding["remedy"]
        return
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    import subprocess

    body = {"crashes": "abort();", "hangs": "for (;;) pause();"}[kind]
    (tmp_path / "init.c").write_text(
        "#include <stdlib.h>\n#include <unistd.h>\n"
        f"int MPI_Init_thread(int *c, char ***v, int r, int *p) {{ {body} return 0; }}\n"
    )
    library = str(tmp_path / "init.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, str(tmp_path / "init.c")], check=True)
    found = run_doctor(mpi, "--time-limit", "8", env={"LD_PRELOAD": library}, status=1)
    finding = found.finding("MPI start")
    assert finding["status"] == "problem" and "MPI_Init_thread" in finding["what"]
    assert ("signal 6" if kind == "crashes" else "did not return") in finding["what"]
    assert found.finding("HDF5")["status"] == "OK"  # the run went on


@dataclasses.dataclass
class Wrong:
    words: tuple[str, ...]
    says: str


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong(("--need", "parallel"), "parallel-hdf5"),
        Wrong(("--need", ""), "parallel-hdf5"),
        Wrong(("--time-limit", "0"), "a number > 0"),
        Wrong(("--time-limit", "nan"), "a number > 0"),
        Wrong(("--unknown",), "unrecognized"),
        Wrong(("h1",), "unrecognized"),
    ],
    ids=lambda wrong: " ".join(wrong.words),
)
def test_wrong_use(wrong, capsys):
    from mpistrat.cli.main import main

    try:
        status = main(["doctor", *wrong.words])
    except SystemExit as end:
        status = end.code
    assert status == 2 and wrong.says in capsys.readouterr().err
