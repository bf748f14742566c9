"""What the doctor makes of an outcome, a number or a file: faults that cannot be put into a machine of ours."""

from __future__ import annotations

import dataclasses
import os
import resource
import socket
import time

import numpy as np
import pytest

from mpistrat.base.cores import Quota
from mpistrat.cluster.launchers import Launcher, MPILibrary
from mpistrat.doctor import launching, libraries, login, process
from mpistrat.doctor.finding import Finding
from mpistrat.doctor.folders import check_shared_folder
from mpistrat.doctor.launching import check_launchers
from mpistrat.doctor.libraries import check_gpus, check_hdf5, check_loops
from mpistrat.doctor.mpi import check_start
from mpistrat.doctor.probe import Outcome
from mpistrat.doctor.process import check_cores, check_limits
from tests.harness.doctor_runs import documented

UNLIMITED = resource.RLIM_INFINITY
MPICH = MPILibrary("MPICH", "5.0.2", "MPICH Version 5.0.2", "/opt/mpich/lib/libmpi.so.12")
OPENMPI = MPILibrary("Open MPI", "5.0.11", "Open MPI v5.0.11", "/opt/openmpi/lib/libmpi.so.40")


def statuses(findings: list[Finding]) -> dict[str, str]:
    """The status of each finding by its name, which the page must have; what is not OK has a remedy."""
    assert {finding.name for finding in findings} <= documented("On a login node")
    assert all(finding.remedy for finding in findings if finding.status != "OK")
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding.status for finding in findings}


def named(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


class TestLimits:
    @pytest.fixture
    def look(self, monkeypatch, tmp_path):
        """Look at limits, by default none, and network cards."""

        def check(*cards: str, **limited: int) -> list[Finding]:
            given = {getattr(resource, f"RLIMIT_{name.upper()}"): value for name, value in limited.items()}
            monkeypatch.setattr(process.resource, "getrlimit", lambda which: (given.get(which, UNLIMITED), 1 << 20))
            monkeypatch.setattr(process, "_CARDS", tmp_path / "cards")
            for card in cards:
                (tmp_path / "cards" / card).mkdir(parents=True)
            return list(check_limits())

        return check

    def test_no_limit_is_well(self, look):
        assert statuses(look("mlx5_0")) == {"open files": "OK", "locked memory": "OK", "stack": "OK"}

    @pytest.mark.parametrize(("files", "status"), [(1024, "OK"), (1023, "warning"), (0, "warning")])
    def test_open_files(self, look, files, status):
        found = look(nofile=files)
        assert statuses(found) == {"open files": status, "locked memory": "OK", "stack": "OK"}
        assert str(files) in named(found, "open files").what

    @pytest.mark.parametrize(("cards", "status"), [((), "OK"), (("mlx5_1", "mlx5_0"), "warning")])
    def test_locked_memory_counts_beside_a_network_card(self, look, cards, status):
        found = look(*cards, memlock=8 << 20)
        assert statuses(found) == {"open files": "OK", "locked memory": status, "stack": "OK"}
        what = named(found, "locked memory").what
        assert what.startswith("8192 KiB") and ("(mlx5_0, mlx5_1)" in what if cards else "no network card" in what)

    @pytest.mark.parametrize(("stack", "status"), [(1 << 20, "OK"), ((1 << 20) - 1024, "warning")])
    def test_stack(self, look, stack, status):
        found = look(stack=stack)
        assert statuses(found) == {"open files": "OK", "locked memory": "OK", "stack": status}
        assert named(found, "stack").what.startswith(f"{stack // 1024} KiB")


@pytest.mark.parametrize(
    ("quota", "status"), [(None, "OK"), (Quota(4.0, 1), "OK"), (Quota(3.5, 1), "warning"), (Quota(0.5, 1), "warning")]
)
def test_a_quota_below_the_cores(monkeypatch, quota, status):
    monkeypatch.setattr(process, "available_cores", lambda: [0, 1, 2, 5])
    monkeypatch.setattr(process, "cpu_quota", lambda: quota)
    for name in process.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    found = list(check_cores())
    assert statuses(found) == {"cores": status, "BLAS threads": "OK"}
    what = named(found, "cores").what
    assert what.startswith("4 for this process (0-2,5)")
    assert status == "OK" or f"the time of {quota.cores:g} only" in what


def asked(*, code: int | None = 0, step: str = "asking CuPy for NCCL", err: str = "", **said: object) -> Outcome:
    """What the program said that asks the libraries."""
    record = {"h5py": ["3.16.0", "2.0.0", False], "libmpi": [], **said}
    return Outcome(({key: value for key, value in record.items() if value is not None},), step, code, err)


class TestLoops:
    def test_they_are_used(self):
        found = list(check_loops(asked(loops=["AVX2", ""])))
        assert statuses(found) == {"compiled loops": "OK"} and found[0].what.endswith("use AVX2")

    def test_they_are_not_built(self):
        found = list(check_loops(asked(loops=["", "not built"])))
        assert statuses(found) == {"compiled loops": "warning"}
        assert found[0].what.startswith("not built: NumPy") and "gcc" in found[0].remedy

    def test_they_are_switched_off(self):
        found = list(check_loops(asked(loops=["", "switched off by MPISTRAT_COMPILED_LOOPS=0"])))
        assert statuses(found) == {"compiled loops": "warning"} and found[0].remedy == "unset MPISTRAT_COMPILED_LOOPS"

    def test_loading_them_crashes(self):
        found = list(check_loops(asked(step="loading the compiled loops", code=-4)))
        assert statuses(found) == {"compiled loops": "problem"}
        assert found[0].what == "loading the compiled loops ended with signal 4"


class TestGpus:
    NONE = "there is no CuPy"
    GPU = (["GPU-1", "NVIDIA H100"],)

    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch):
        """A machine without GPUs, or with as many."""

        def has(*addresses: str) -> None:
            monkeypatch.setattr(libraries, "gpus_of_machine", lambda: list(addresses))

        has()
        return has

    def test_there_is_none(self):
        found = list(check_gpus(asked(gpus=[], no_gpu=self.NONE, no_nccl=self.NONE), ()))
        assert statuses(found) == {"GPU": "OK"}

    def test_they_are_there(self):
        found = list(check_gpus(asked(gpus=[*self.GPU, ["GPU-2", "NVIDIA H100"]], no_gpu="", no_nccl=""), ()))
        assert statuses(found) == {"GPU": "OK", "NCCL": "OK"}
        assert found[0].what == "2 for this process: NVIDIA H100 (GPU-1), NVIDIA H100 (GPU-2)"

    @pytest.mark.parametrize(
        ("addresses", "says"), [(["a"], "this machine has 1 NVIDIA GPU,"), (["a", "b"], "has 2 NVIDIA GPUs,")]
    )
    @pytest.mark.parametrize(("why", "remedy"), [(NONE, NONE), ("", "Ask the batch system for one")])
    def test_they_are_idle(self, machine, addresses, says, why, remedy):
        machine(*addresses)
        found = list(check_gpus(asked(gpus=[], no_gpu=why, no_nccl=self.NONE), ()))
        assert statuses(found) == {"GPU": "warning"}
        assert says in found[0].what and found[0].remedy == remedy

    @pytest.mark.parametrize("need", ["gpu", "nccl"])
    def test_they_are_needed(self, machine, need):
        machine("a")
        found = list(check_gpus(asked(gpus=[], no_gpu=self.NONE, no_nccl=self.NONE), [need]))
        assert statuses(found) == {"GPU": "problem"} | ({"NCCL": "problem"} if need == "nccl" else {})

    @pytest.mark.parametrize(("needs", "status"), [((), "warning"), (("gpu",), "warning"), (("nccl",), "problem")])
    def test_nccl_is_missing_beside_a_gpu(self, needs, status):
        found = list(check_gpus(asked(gpus=[*self.GPU], no_gpu="", no_nccl="no libnccl.so.2"), needs))
        assert statuses(found) == {"GPU": "OK", "NCCL": status}
        assert "no libnccl.so.2" in named(found, "NCCL").what

    def test_asking_crashes(self):
        found = list(check_gpus(asked(step="asking CuPy for GPUs", code=-11, err="no driver\n"), ()))
        assert statuses(found) == {"GPU": "problem"}
        assert found[0].what == "asking CuPy for GPUs ended with signal 11: no driver"

    def test_h5py_crashes_before_anybody_asks(self):
        found = list(check_gpus(asked(step="import h5py", code=-11, h5py=None), ()))
        assert statuses(found) == {"GPU": "warning"} and "not checked" in found[0].what

    @pytest.mark.parametrize(
        ("needs", "expected"), [((), {"GPU": "OK"}), (("nccl",), {"GPU": "OK", "NCCL": "problem"})]
    )
    def test_asking_for_nccl_hangs(self, needs, expected):
        found = list(check_gpus(asked(code=None, gpus=[*self.GPU], no_gpu=""), needs))
        assert statuses(found) == expected
        assert not needs or found[1].what == "asking CuPy for NCCL did not return"


class TestHdf5:
    PARALLEL = ("3.16.0", "2.0.0", True)

    def test_built_with_another_mpi(self):
        found = list(check_hdf5(asked(h5py=self.PARALLEL, libmpi=[MPICH.path, OPENMPI.path]), MPICH, ()))
        assert statuses(found) == {"HDF5": "problem"}
        assert (
            f"({OPENMPI.path}) than mpi4py loads ({MPICH.path})" in found[0].what and "HDF5_MPI=ON" in found[0].remedy
        )

    def test_built_with_the_same_mpi_by_another_name(self, tmp_path):
        (tmp_path / "libmpi.so.12").touch()
        (tmp_path / "libmpi.so").symlink_to("libmpi.so.12")
        library = MPILibrary("MPICH", "5.0.2", "", str(tmp_path / "libmpi.so.12"))
        outcome = asked(h5py=self.PARALLEL, libmpi=[str(tmp_path / "libmpi.so")])
        found = list(check_hdf5(outcome, library, ["parallel-hdf5"]))
        assert statuses(found) == {"HDF5": "OK"} and "parallel" in found[0].what

    def test_importing_crashes(self):
        found = list(check_hdf5(asked(h5py=None, step="import h5py", code=1, err="ImportError: no libhdf5"), MPICH, ()))
        assert statuses(found) == {"HDF5": "problem"}
        assert found[0].what == "import h5py ended with exit status 1: ImportError: no libhdf5"


def started(
    *tried: tuple[str, str], level: int = 3, step: str = "MPI_Finalize", code: int | None = 0, err: str = ""
) -> Outcome:
    """What the program said that starts MPI: what it tried, each with how it failed."""
    start = {"seconds": 0.1, "level": level, "standard": "5.0"}
    return Outcome((start, {"gpu": False}, *({"tried": list(one)} for one in tried)), step, code, err)


WELL = {"MPI start": "OK", "thread level": "OK", "CUDA-aware MPI": "OK", "one-sided calls": "OK", "shared memory": "OK"}


class TestMpi:
    def test_it_is_well(self):
        found = list(check_start(started(("one-sided calls", ""), ("shared memory", "")), MPICH, False))
        assert statuses(found) == WELL

    @pytest.mark.parametrize(("level", "name"), [(0, "SINGLE"), (1, "FUNNELED"), (2, "SERIALIZED")])
    def test_a_lower_thread_level(self, level, name):
        found = list(check_start(started(("one-sided calls", ""), ("shared memory", ""), level=level), MPICH, False))
        assert statuses(found) == WELL | {"thread level": "warning"}
        assert f"MPI_THREAD_{name}:" in named(found, "thread level").what

    @pytest.mark.parametrize(
        ("code", "says"), [(None, "did not return"), (-11, "ended with signal 11"), (3, "ended with exit status 3")]
    )
    def test_its_end(self, code, says):
        outcome = started(("one-sided calls", ""), ("shared memory", ""), code=code, err="free(): invalid pointer\n")
        found = list(check_start(outcome, MPICH, False))
        assert statuses(found) == WELL | {"MPI end": "problem"}
        assert named(found, "MPI end").what == f"MPI_Finalize {says}: free(): invalid pointer"

    @pytest.mark.parametrize(("library", "remedy"), [(MPICH, "Ask the site"), (OPENMPI, "OMPI_MCA_osc=^ucx")])
    def test_one_sided_calls_fail(self, library, remedy):
        failed = "RuntimeError: what was put is not what was read"
        found = list(check_start(started(("one-sided calls", failed), ("shared memory", "")), library, False))
        assert statuses(found) == WELL | {"one-sided calls": "problem"}
        finding = named(found, "one-sided calls")
        assert finding.what == failed and remedy in finding.remedy

    def test_one_sided_calls_crash(self):
        found = list(check_start(started(step="one-sided calls", code=-6), MPICH, False))
        expected = {name: status for name, status in WELL.items() if name != "shared memory"}  # was not reached
        assert statuses(found) == expected | {"one-sided calls": "problem"}
        assert named(found, "one-sided calls").what == "ended with signal 6"

    def test_shared_memory_fails(self):
        failed = "Exception: MPI_ERR_OTHER"
        found = list(check_start(started(("one-sided calls", ""), ("shared memory", failed)), MPICH, False))
        assert statuses(found) == WELL | {"shared memory": "problem"}
        finding = named(found, "shared memory")
        assert finding.what == failed and "MPISTRAT_SHARED_MEMORY=0" in finding.remedy

    def test_shared_memory_hangs(self):
        outcome = started(("one-sided calls", ""), step="shared memory", code=None, err="waiting\n")
        found = list(check_start(outcome, MPICH, False))
        assert statuses(found) == WELL | {"shared memory": "problem"}
        assert named(found, "shared memory").what == "did not return: waiting"


class TestLaunchers:
    """A machine whose MPI came without a launcher."""

    @pytest.fixture
    def look(self, monkeypatch):
        """Look for launchers where srun, if there is one, offers these protocols."""
        monkeypatch.delenv("SLURM_MPI_TYPE", raising=False)
        monkeypatch.setattr(launching, "find_launchers", lambda _: [])

        def check(offered: list[str] | None, library: MPILibrary = MPICH) -> list[Finding]:
            has = {} if offered is None else {"srun": "/usr/bin/srun"}
            monkeypatch.setattr(launching.shutil, "which", has.get)
            monkeypatch.setattr(launching, "offered_pmis", lambda: offered or [])
            return list(check_launchers(library))

        return check

    def test_there_is_none(self, look):
        found = look(None)
        assert statuses(found) == {"mpiexec": "problem"} and "no launcher of MPICH 5.0.2" in found[0].what

    def test_srun_is_enough(self, look):
        found = look(["none", "pmi2"])
        assert statuses(found) == {"mpiexec": "OK", "srun": "OK"}
        assert found[1].what.endswith("start with srun --mpi=pmi2 python train.py")

    def test_srun_without_a_slurm(self, look):
        assert statuses(look([])) == {"mpiexec": "problem", "srun": "problem"}

    def test_srun_offers_nothing_that_fits(self, look):
        found = look(["none", "pmi2"], OPENMPI)
        assert statuses(found) == {"mpiexec": "problem", "srun": "problem"}
        assert "load the site's own MPI" in found[1].remedy

    def test_srun_offers_nothing_for_cray_mpich(self, look):
        found = look(["none", "pmix"], MPILibrary("Cray MPICH", "8.1.28", "CRAY MPICH version 8.1.28"))
        assert statuses(found)["srun"] == "problem"
        assert "needs cray_shasta or pmi2" in found[1].what and "cray_shasta or pmi2 plugin" in found[1].remedy

    def test_srun_and_a_library_whose_protocol_nobody_knows(self, look):
        found = look(["none", "pmi2"], MPILibrary("Microsoft MPI", "10.1.0", ""))
        assert statuses(found)["srun"] == "warning" and "pmi2 plugin" not in found[1].remedy

    def test_intel_mpi_is_told_of_its_variable(self, look, monkeypatch):
        monkeypatch.delenv("I_MPI_PMI_LIBRARY", raising=False)
        intel = MPILibrary("Intel MPI", "2021.13.0", "Intel(R) MPI Library 2021.13 for Linux* OS")
        assert "train.py, after export I_MPI_PMI_LIBRARY=" in look(["none", "pmi2"], intel)[1].what
        monkeypatch.setenv("I_MPI_PMI_LIBRARY", "/usr/lib64/libpmi2.so")
        assert look(["none", "pmi2"], intel)[1].what.endswith("train.py")

    def test_mpich_over_ucx_is_told_of_pmi2_s_short_lines(self, look, monkeypatch):
        monkeypatch.delenv("MPIR_CVAR_CH4_NETMOD", raising=False)
        both = dataclasses.replace(MPICH, device="ch4:ucx ofi")
        found = look(["none", "pmi2"], both)[1]
        assert (found.status, "too long for SLURM's PMI2" in found.what) == ("warning", True)
        assert found.remedy.startswith("export MPIR_CVAR_CH4_NETMOD=ofi, or start with its own mpiexec")
        alone = look(["none", "pmi2"], dataclasses.replace(MPICH, device="ch4:ucx"))[1]
        assert alone.status == "warning" and alone.remedy.startswith("Start with its own mpiexec")
        assert look(["none", "pmi2"], dataclasses.replace(MPICH, device="ch4:ofi"))[1].status == "OK"
        monkeypatch.setenv("MPIR_CVAR_CH4_NETMOD", "ofi")
        assert look(["none", "pmi2"], both)[1].status == "OK"

    def test_the_user_has_set_what_is_not_offered(self, look, monkeypatch):
        monkeypatch.setenv("SLURM_MPI_TYPE", "pmix_v5")
        found = look(["none", "pmi2", "pmix_v4"], OPENMPI)
        assert statuses(found)["srun"] == "problem"
        assert "SLURM_MPI_TYPE=pmix_v5" in found[1].what and found[1].remedy == "export SLURM_MPI_TYPE=pmix_v4"


class TestSharedFolder:
    def test_there_is_none(self, tmp_path):
        found = list(check_shared_folder(tmp_path / "nowhere"))
        assert statuses(found) == {"/dev/shm": "OK"} and "there is no" in found[0].what

    def test_what_is_left_is_removed_when_asked(self, tmp_path):
        """Files of an MPI, of this user, that nobody uses and that are not new; nothing else."""
        names = [*(f"mpich_shm_{number}" for number in range(7)), "sm_segment.h.0.1"]
        others = ["train.log", "a file", "mpich_shm_new", "mpich_shm_mapped", "mpich_shm_open", "mpich_shm_of_another"]
        for name in (*names, *others):
            (tmp_path / name).write_bytes(bytes(4096))
            if name != "mpich_shm_new":
                os.utime(tmp_path / name, (time.time() - 3600,) * 2)
        (tmp_path / "mpich_shm_link").symlink_to(tmp_path / "train.log")
        if os.geteuid() == 0:
            os.chown(tmp_path / "mpich_shm_of_another", 12345, -1)
        else:
            (tmp_path / "mpich_shm_of_another").unlink()
        kept = {path.name for path in tmp_path.iterdir()} - set(names)
        mapped = np.memmap(tmp_path / "mpich_shm_mapped", np.uint8, "r")
        with open(tmp_path / "mpich_shm_open"):
            finding = named(list(check_shared_folder(tmp_path)), "leftovers")
            assert finding.status == "warning" and finding.what.startswith(
                "8 files of yours that no process uses, 0.0 MiB"
            )
            assert finding.what.endswith("mpich_shm_5 and 2 more")
            finding = named(list(check_shared_folder(tmp_path, clean=True)), "leftovers")
            assert finding.status == "OK" and finding.what.startswith("removed 8 files of yours")
            assert {path.name for path in tmp_path.iterdir()} == kept
        finding = named(list(check_shared_folder(tmp_path, clean=True)), "leftovers")
        assert finding.what.endswith(": mpich_shm_open") and mapped[0] == 0


def test_open_files_and_sockets_of_this_process_are_counted():
    before = process.open_files()
    with socket.socket(), socket.socket(), open(os.devnull):
        now = process.open_files()
    assert (now["open"] - before["open"], now["sockets"] - before["sockets"]) == (3, 2)
    assert before["most"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


LAUNCHERS = {
    "fails": ("echo the network is down >&2; exit 3", "ended with exit status 3: the network is down"),
    "hangs": ("exec sleep 60", "did not return in 1 s"),
    "prints something else": ("echo '{}'", "ended with exit status 0"),
}


@pytest.mark.parametrize("how", LAUNCHERS)
@pytest.mark.parametrize("library", [MPICH, OPENMPI], ids=str)
def test_two_ranks_that_do_not_start(tmp_path, monkeypatch, library, how):
    act, says = LAUNCHERS[how]
    monkeypatch.setattr(login, "_MEETING", 0.5)
    (tmp_path / "mpiexec").write_text(f"#!/bin/sh\n{act}\n")
    (tmp_path / "mpiexec").chmod(0o755)
    launcher = Launcher((str(tmp_path / "mpiexec"),), library.name, library.version, library.family, "PATH")
    found = login.check_pair(library, launcher, dict(os.environ), 0.5 if how == "hangs" else 60)
    assert (found.name, found.status) == ("two ranks", "problem") and says in found.what, found
    assert "mpistrat doctor --ranks" in found.remedy
