"""`mpistrat doctor --ranks` under real launchers: nothing on healthy ranks, and every fault that was put there, told once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness.doctor_runs import DoctorRun, clean_environment, documented, rank_program
from tests.launch.launcher import ROOT, MpiEnv, Result

VERSION = "9.9.9"
CLOCK = "import time\ntime_ = time.time\ntime.time = lambda: time_() + 100\n"
CUPY = """
import types
names = {names!r}
def properties(index):
    return {{"name": b"a GPU of the imagination", "uuid": bytes(15) + bytes([names[index]])}}
runtime = types.SimpleNamespace(getDeviceCount=lambda: len(names), getDeviceProperties=properties)
cuda = types.SimpleNamespace(runtime=runtime)
"""


def doctor_run(result: Result) -> DoctorRun:
    """What rank 0 said; nobody else may say anything on stdout."""
    spoken = [text for text in result.out if text.strip()]
    assert len(spoken) == 1 and spoken[0] == result.out[0], str(result)
    return DoctorRun(result.returncode or 0, result.out[0], result.stderr)


def other_version(folder: Path) -> str:
    """A folder to import from, with this package in another version."""
    own = "base/version.py"
    (folder / "mpistrat/base").mkdir(parents=True)
    for path in [*(ROOT / "mpistrat").iterdir(), *(ROOT / "mpistrat/base").iterdir()]:
        name = str(path.relative_to(ROOT / "mpistrat"))
        if name not in ("base", own) and path.name != "__pycache__":
            (folder / "mpistrat" / name).symlink_to(path)
    (folder / "mpistrat" / own).write_text(f'__version__ = "{VERSION}"\n')
    return str(folder)


def on_path(folder: Path, module: str, text: str) -> str:
    """A PYTHONPATH with a module of this text, before the package."""
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(text)
    return os.pathsep.join([str(folder), str(ROOT)])


def test_healthy_ranks_have_nothing(mpi_run):
    found = doctor_run(mpi_run(rank_program({}), 2, timeout=100))
    assert found.status == 0 and found.bad() == []
    assert found.names() <= documented("On the ranks of a job")
    rows = found.document["ranks"]
    assert [row["rank"] for row in rows] == [0, 1] == [row["local_rank"] for row in rows]
    assert [row["role"] for row in rows] == ["worker 0", "worker 1"]
    assert len({row["host"] for row in rows}) == 1 and rows[0]["cores"] and rows[0]["threads"] == 1
    for name in ("all-reduce", "shared memory", "one-sided calls", "clocks", "temporary folder", "versions", "cores"):
        assert found.finding(name)["status"] == "OK"


class TestSickRanks:
    """Faults that do not hide each other, looked for in one run."""

    @pytest.fixture
    def found(self, mpi: MpiEnv, mpi_run, seen: dict[str, DoctorRun], tmp_path: Path) -> DoctorRun:
        if mpi.name not in seen:
            (tmp_path / "version").mkdir()
            different = os.pathsep.join([str(tmp_path / "clock"), other_version(tmp_path / "version")])
            on_path(tmp_path / "clock", "sitecustomize", CLOCK)
            variables = {"MPISTRAT_STRATEGY": "parameter_server", "MPISTRAT_TRANSPORT": "messages"}
            variables.update(PYTHONPATH=different, TMPDIR="/nowhere")
            environment = {"OMP_NUM_THREADS": "2000", "MPISTRAT_STRATEGY": "mirrored"}
            program = rank_program({1: variables}, "--need", "nccl")
            seen[mpi.name] = doctor_run(mpi_run(program, 2, timeout=100, env=environment))
        return seen[mpi.name]

    def test_the_status_tells(self, found):
        assert found.status != 0 and found.document["status"] == "problem"
        assert found.names() <= documented("On the ranks of a job")

    def test_versions_differ(self, found):
        finding = found.finding("versions")
        assert finding["status"] == "problem" and f"mpistrat: rank 0: 0.1.0; rank 1: {VERSION}" in finding["what"]
        assert "numpy" not in finding["what"]

    def test_roles_are_unequal(self, found):
        finding = found.finding("roles")
        assert finding["status"] == "problem" and "different roles" in finding["what"]
        assert "rank 0: MPISTRAT_STRATEGY=mirrored; rank 1: MPISTRAT_STRATEGY=parameter_server" in finding["what"]

    def test_settings_differ(self, found):
        finding = found.finding("settings")
        assert finding["status"] == "problem" and "MPISTRAT_TRANSPORT" in finding["what"]
        assert "rank 0: unset; rank 1: messages" in finding["what"]

    def test_clocks_differ(self, found):
        finding = found.finding("clocks")
        assert finding["status"] == "warning" and "rank 1 is +100.0 s" in finding["what"]

    def test_there_are_more_threads_than_cores(self, found):
        finding = found.finding("cores")
        assert finding["status"] == "warning" and "4000 threads" in finding["what"]
        assert "nset OMP_NUM_THREADS" in finding["remedy"]

    def test_nccl_is_missing(self, found):
        if any(row["gpus"] for row in found.document["ranks"]):
            pytest.skip("this machine has GPUs")
        finding = found.finding("nccl")
        assert finding["status"] == "problem" and "ranks 0, 1" in finding["what"]

    def test_the_temporary_folder_is_not_there(self, found):
        """Python falls back on /tmp, so the fault is no fault: it must not be told."""
        assert found.finding("temporary folder")["status"] == "OK"


@pytest.fixture(scope="module")
def seen() -> dict[str, DoctorRun]:
    """Visits of this file, by MPI."""
    return {}


def test_processes_that_srun_started_without_mpi_are_told_once(mpi):
    """srun without a fitting --mpi= gives each process its number, and MPI nothing: each is rank 0 of 1."""
    processes = []
    for number in range(3):
        slurm = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": str(number)}
        command = [mpi.python, "-m", "mpistrat", "doctor", "--ranks", "--json"]
        processes.append(
            subprocess.Popen(
                command, env=clean_environment(mpi, slurm), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    replies = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [1, 0, 0]  # one that fails may end the others
    assert [bool(out.strip()) for out, _ in replies] == [True, False, False]
    assert all("doctor" not in err for _, err in replies)
    finding = DoctorRun(1, *replies[0]).finding("launch")
    assert finding["status"] == "problem" and "rank 0 of 1" in finding["what"] and "3 ranks" in finding["what"]
    assert "use srun --mpi=" in finding["remedy"]


def test_one_process_of_srun_is_legal(mpi):
    slurm = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    command = [mpi.python, "-m", "mpistrat", "doctor", "--ranks", "--json"]
    reply = subprocess.run(command, env=clean_environment(mpi, slurm), capture_output=True, text=True, timeout=100)
    assert DoctorRun(reply.returncode, reply.stdout, reply.stderr).bad() == []


def test_a_process_that_nothing_started_is_told_how_to_start(mpi):
    command = [mpi.python, "-m", "mpistrat", "doctor", "--ranks", "--json"]
    reply = subprocess.run(command, env=clean_environment(mpi), capture_output=True, text=True, timeout=100)
    found = DoctorRun(reply.returncode, reply.stdout, reply.stderr)
    assert found.status == 0 and [one["name"] for one in found.bad()] == ["launch"]
    assert "srun mpistrat doctor --ranks" in found.finding("launch")["remedy"]


def test_the_launcher_of_another_mpi(mpi, pytestconfig, tmp_path):
    """Really started: Open MPI's processes under MPICH's mpiexec are each alone; the other way round MPI_Init fails."""
    from tests.launch.launcher_plugin import ENVS

    others = [env for env in pytestconfig.stash[ENVS].all.values() if env.vendor != mpi.vendor]
    if not others:
        pytest.skip("this run has one MPI: give another --mpi-env")
    shell = 'exec "$0" -m mpistrat doctor --ranks --json > $1/$$.out 2> $1/$$.err'
    command = [*others[0].command(3), "sh", "-c", shell, mpi.python, str(tmp_path)]
    reply = subprocess.run(command, env=clean_environment(mpi), capture_output=True, text=True, timeout=120)
    assert reply.returncode != 0
    spoken = [text for path in tmp_path.glob("*.out") if (text := path.read_text()).strip()]
    errors = "".join(path.read_text() for path in tmp_path.glob("*.err"))
    assert len(spoken) == 1, f"{spoken}\n{errors}\n{reply.stderr}"
    found = DoctorRun(reply.returncode, spoken[0], errors)
    problems = [one for one in found.bad() if one["status"] == "problem"]
    assert [one["name"] for one in problems] in (["launch"], ["MPI start"])
    assert "belongs to another MPI" in problems[0]["remedy"]
    if problems[0]["name"] == "launch":
        assert "rank 0 of 1" in problems[0]["what"]


def test_a_rank_that_never_comes_is_waited_for_a_limited_time(mpi_run):
    program = rank_program({}, "--time-limit", "6", prelude="if rank == 1: time.sleep(40)")
    result = mpi_run(program, 2, timeout=39)
    assert result.returncode != 0
    problems = [one for one in json.loads(result.out[0])["findings"] if one["status"] == "problem"]
    assert len(problems) == 1 and "after 6 s" in problems[0]["what"]
    assert "MPI_Init_thread" in problems[0]["what"] or "meeting" in problems[0]["what"]


def test_a_rank_that_crashes_says_so_itself(mpi_run, tmp_path):
    path = on_path(tmp_path / "crash", "mpi4py", "import os\nos.kill(os.getpid(), 11)\n")
    result = mpi_run(rank_program({1: {"PYTHONPATH": path}}, "--time-limit", "20"), 2, timeout=40)
    assert result.returncode != 0
    assert "mpistrat doctor: rank 1" in result.err[1] and "signal 11" in result.err[1], str(result)


def gpus(folder: Path, *names: int) -> dict[str, str]:
    """Variables of a rank that sees these GPUs."""
    return {"PYTHONPATH": on_path(folder, "cupy", CUPY.format(names=list(names)))}


def test_ranks_that_share_a_gpu_by_mistake(mpi_run, tmp_path):
    """Rank 0 sees GPUs 1 and 2, rank 1 sees 2 and 1: both take GPU … 1 by their local rank."""
    variables = {0: gpus(tmp_path / "a", 1, 2), 1: gpus(tmp_path / "b", 2, 1)}
    found = doctor_run(mpi_run(rank_program(variables), 2, timeout=100))
    finding = found.finding("GPUs")
    assert finding["status"] == "problem" and "ranks 0, 1" in finding["what"]
    assert "share GPU-00000000-0000-0000-0000-000000000001, by mistake" in finding["what"]
    assert "1 of 2 GPUs" in finding["what"] and "--gpus-per-task=1" in finding["remedy"]
    assert found.document["ranks"][0]["gpus"][1] == "GPU-00000000-0000-0000-0000-000000000002"


def test_ranks_with_a_gpu_each(mpi_run, tmp_path):
    variables = {0: gpus(tmp_path / "a", 1, 2), 1: gpus(tmp_path / "a", 1, 2)}
    assert doctor_run(mpi_run(rank_program(variables), 2, timeout=100)).finding("GPUs")["status"] == "OK"


@pytest.mark.parametrize(
    ("cluster", "tasks", "says"),
    [
        ({"worker": ["a:1", "b:1"]}, (0, 0), "2 ranks are worker 0: 0, 1"),
        ({"worker": ["a:1", "b:1", "c:1"]}, (0, 1), "3 tasks, and there are 2 ranks"),
        ({"worker": ["a:1"]}, (0, 1), "rank 1"),
    ],
)
def test_tf_config_contradicts_the_ranks(mpi_run, cluster, tasks, says):
    variables = {
        rank: {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": task}})}
        for rank, task in enumerate(tasks)
    }
    finding = doctor_run(mpi_run(rank_program(variables), 2, timeout=100)).finding("roles")
    assert finding["status"] == "problem" and says in finding["what"], finding


def test_a_login_visit_of_several_processes_is_told_once(mpi_run):
    program = rank_program({}).replace('"--ranks", ', "")
    result = mpi_run(program, 2, timeout=100)
    assert [bool(text.strip()) for text in result.out] == [True, False]
    start = DoctorRun(0, result.out[0], "").finding("MPI start")
    assert start["status"] == "OK" and "alone" in start["what"]


@pytest.mark.parametrize("how", ["time limit", "launcher"])
def test_mpi_that_hangs_under_slurm(mpi, tmp_path, how):
    """A library that hangs in MPI_Init, loaded before the real one; the launcher, where it loses patience, sends SIGTERM."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "init.c").write_text(
        "#include <unistd.h>\nint MPI_Init_thread(int *c, char ***v, int r, int *p) { for (;;) pause(); }\n"
    )
    library = str(tmp_path / "init.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, str(tmp_path / "init.c")], check=True)
    limit = "20" if how == "time limit" else "100"
    process = subprocess.Popen(
        [mpi.python, "-m", "mpistrat", "doctor", "--ranks", "--json", "--time-limit", limit], text=True,
        env=clean_environment(mpi, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "LD_PRELOAD": library}),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    if how == "launcher":
        until = time.monotonic() + 60
        while not waiting_in(library, process.pid) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(1)
        process.terminate()
    out, err = process.communicate(timeout=110)
    problems = [one for one in json.loads(out)["findings"] if one["status"] == "problem"]
    assert process.returncode == 1 and len(problems) == 1, out + err
    assert "MPI_Init_thread" in problems[0]["what"] and "rank 0" in problems[0]["what"]
    if how == "launcher":
        assert "the launcher ended the job" in problems[0]["what"]
    else:
        assert "after 20 s" in problems[0]["what"]
        assert ("MPIR_CVAR_CH4_NETMOD=ofi" in problems[0]["remedy"]) == (mpi.vendor == "MPICH")


def waiting_in(library: str, parent: int) -> bool:
    """Whether a child of a process has loaded the library, and MPI's own."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        maps = Path(f"/proc/{child}/maps").read_text()
        if library in maps and "/libmpi" in maps:
            return True
    return False
