"""`mpistrat job`: what is asked for comes out as a script, is written, is submitted; what is wrong is said."""

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys

import pytest

from mpistrat.batch_jobs import site_names
from mpistrat.cli.job import COMMAND
from mpistrat.cli.main import main
from mpistrat.cluster.launchers import MPILibrary
from mpistrat.errors import ClusterError
from tests.launch.launcher import ROOT

COMMAND_MODULE = sys.modules[COMMAND.run.__module__]

NOTED = 'printf "%s\\n" "$0" "$@" > "$NOTES/called"; cat > "$NOTES/script"\n'


@pytest.fixture
def job(capsys, monkeypatch):
    monkeypatch.setattr(COMMAND_MODULE, "offered_pmis", list)  # wherever the tests run

    def run(*words, status=0):
        try:
            found = main(["job", *words])
        except SystemExit as end:
            found = end.code
        said = capsys.readouterr()
        assert found == status, said.err
        return said.err if status else said.out

    return run


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A command of a batch system that notes its arguments and the script, and answers."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path))

    def make(name, answer):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{NOTED}{answer}\n")
        path.chmod(0o755)

    return make


def directives(script):
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}


def test_the_command_of_the_help_text(job):
    words = (
        "--scheduler slurm --nodes 4 --ranks-per-node 4 --gpus-per-node 4 --time 02:00:00 --strategy multi_worker_mirrored "
        "--site generic train.py --epochs 10"
    )
    script = job(*words.split())
    assert {
        "--nodes=4",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--time=02:00:00",
        "--job-name=train",
    } <= directives(script)
    assert "export MPISTRAT_STRATEGY=multi_worker_mirrored\n" in script
    assert "program=(python train.py --epochs 10)\n" in script
    assert script.endswith('srun --kill-on-bad-exit=1 "${program[@]}"\n')


def test_the_program_s_options_are_not_ours(job):
    assert "program=(python train.py --nodes 7 --json -m x)" in job(
        "--nodes", "2", "train.py", "--nodes", "7", "--json", "-m", "x"
    )
    script = job("-m", "mpistrat.examples.digits", "--strategy", "mirrored")
    assert "program=(python -m mpistrat.examples.digits --strategy mirrored)" in script
    assert "--job-name=digits" in directives(script)
    assert "program=(./solve --help)" in job("--", "./solve", "--help")


def test_every_example_of_the_help_text_works(job, stub):
    stub("sbatch", "echo 1")
    for example in COMMAND.examples:
        words = [word for word in shlex.split(example.split(" > ")[0])[2:] if word not in ("-o", "job.sh", "check.sh")]
        if "~" not in example:  # a shell's
            assert job(*words)


def test_help(job):
    text = job("--help")
    assert text.startswith("usage: mpistrat job [options] (PROGRAM [ARGUMENT …] | --check)\n")
    assert "exit status: 0 fine, 1 a problem was found, 2 wrong use" in text
    assert all(example in text for example in COMMAND.examples)
    assert all(name in text for name in site_names())


@pytest.mark.parametrize(
    ("words", "last"),
    [
        ((), "srun --kill-on-bad-exit=1"),
        (("--mpi", "pmi2"), "srun --kill-on-bad-exit=1 --mpi=pmi2"),
        (("--scheduler", "pbs"), "mpiexec -n 4 -ppn 2"),
        (("--scheduler", "flux", "--nodes", "3"), "flux run --nodes=3 --ntasks=6 --cores-per-task=1"),
        (("--launcher", "openmpi", "--ranks-per-node", "8"),
         "mpirun -n 16 --map-by ppr:8:node --bind-to none -x MPISTRAT_STRATEGY -x OMP_NUM_THREADS -x PYTHONUNBUFFERED"),
    ],
)  # fmt: skip
def test_a_check_starts_its_steps_by_the_launchers_words(job, words, last):
    lines = job("--check", "--output-folder", "my results", *words).splitlines()
    assert lines[-1] == f'"${{program[@]}}" {last}'
    program = next(line for line in lines if line.startswith("program=("))
    assert program.endswith(" doctor --folder 'my results' --time-limit 540 --job)")
    if "--scheduler" not in words:
        assert {"#SBATCH --time=00:10:00", "#SBATCH --nodes=2", "#SBATCH --job-name=check"} <= set(lines)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train.py",), "--check: expected no program beside it, got 'train.py'"),
        (("--time", "2m"), "--time: expected more than 120 seconds for --check, got 00:02:00"),
        (("--restarts", "3"), "Job: check: expected a job without restarts, which only programs have, got 3"),
        (("--preemptible",), "--preemptible: expected a program with it, got --check"),
        (("--array", "0-3"), "--array: expected a program with it, got --check"),
        (("--container", "a.sif"), "Job: check: expected a job without container, which only programs have, got a.sif"),
    ],
)
def test_a_check_is_no_program(job, words, says):
    assert says in job("--check", *words, status=2)


def test_ranks_follow_gpus_and_strategies_follow_servers(job):
    assert {"--ntasks-per-node=4", "--gpus-per-node=4"} <= directives(job("--gpus-per-node", "4", "a.py"))
    assert "--ntasks-per-node=1" in directives(job("a.py"))
    script = job("--nodes", "2", "--ps", "1", "a.py")
    assert "export MPISTRAT_STRATEGY=parameter_server\nexport MPISTRAT_NUM_PS=1 " in script


def test_an_array(job):
    script = job("--array", "0-9%2", "--index-argument", "seed", "--output-argument", "output", "a.py")
    assert "--array=0-9%2" in directives(script)
    assert 'folder=a/"$SLURM_ARRAY_TASK_ID"' in script
    assert "its own folder" in job("--array", "0-9", "--index-argument", "seed", "a.py", status=2)


@pytest.mark.parametrize(
    ("limit", "written"),
    [
        ("90m", "01:30:00"), ("1h", "01:00:00"), ("1h30m", "01:30:00"), ("2d", "48:00:00"), ("1d2h3m4s", "26:03:04"),
        ("90s", "00:01:30"), ("1-02:00:00", "26:00:00"), ("999d", "23976:00:00"), ("12000h", "12000:00:00"),
        ("999d23h59m59s", "23999:59:59"), ("1000000m", "16666:40:00"),
    ],
)  # fmt: skip
def test_a_time_limit_with_units(job, limit, written):
    assert f"--time={written}" in directives(job("--time", limit, "a.py"))


def test_files_that_are_not_here_are_warned_of(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(COMMAND_MODULE, "offered_pmis", list)
    (tmp_path / "train.py").touch()
    (tmp_path / "a.sif").touch()

    def warned(*words):
        assert main(["job", *words]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]

    for words in (["train.py"], ["-m", "nosuch"], ["nosuch"], ["--container", "a.sif", "train.py"], ["--check"]):
        assert warned(*words) == []
    (line,) = warned("nosuch.py")
    assert line.startswith("mpistrat job: warning: no file nosuch.py here.")
    assert "no file ./solve here" in warned("./solve")[0]
    assert warned("--container", "none.sif", "train.py") == [
        "mpistrat job: warning: --container: no file none.sif here"
    ]
    assert warned("--container", "docker://ubuntu:24.04", "train.py") == []


def test_a_file_is_its_owner_s_alone(job, tmp_path):
    path = tmp_path / "a job.sh"
    path.write_text("before, and longer than what comes now" * 100)
    path.chmod(0o666)
    assert job("-o", str(path), "a.py").startswith("wrote ")
    assert path.read_text() == job("a.py")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert "--output: " in (said := job("-o", str(tmp_path / "no" / "job.sh"), "a.py", status=1)) and "mkdir -p" in said


@pytest.mark.parametrize(
    ("scheduler", "command", "answer", "job_id"),
    [
        ("slurm", "sbatch", "echo 123", "123"),
        ("slurm", "sbatch", "echo '123;cluster'", "123"),
        ("pbs", "qsub", "echo 12.host.domain", "12.host.domain"),
        ("pbs", "qsub", "echo '12[].host'", "12[].host"),
        ("lsf", "bsub", "echo 'Job <77> is submitted to queue <normal>.'", "77"),
        ("flux", "flux", "echo ƒM7Zq9AKHno", "ƒM7Zq9AKHno"),
    ],
)
def test_submitting(job, stub, tmp_path, scheduler, command, answer, job_id):
    stub(command, answer)
    words = ["--scheduler", scheduler, "a.py", "it's $HOME"]
    assert job("--submit", *words) == f"{job_id}\n"
    assert (tmp_path / "script").read_text() == job(*words)
    called = (tmp_path / "called").read_text().splitlines()[1:]
    assert called == {"slurm": ["--parsable"], "flux": ["batch"]}.get(scheduler, [])
    told = json.loads(job("--submit", "--json", *words))
    assert told["job_id"] == job_id
    assert told["scheduler"] == scheduler
    assert told["script"] == job(*words)


def test_a_refused_job_and_a_missing_command(job, stub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    stub("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    said = job("--submit", "a.py", status=1)
    assert (
        said == "error: submit: expected sbatch --parsable to accept the script, got sbatch: error: invalid partition\n"
    )
    stub("sbatch", "echo hello")
    assert "got hello" in job("--submit", "a.py", status=1)
    monkeypatch.setenv("PATH", "/nowhere")
    said = job("--submit", "a.py", status=1)
    assert "expected the command sbatch --parsable" in said
    assert "Submit where SLURM is installed" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "0", "a.py"], "Job: nodes: expected a whole number from 1"),
        (["--nodes", "two", "a.py"], "--nodes: expected a whole number >= 0, got 'two'"),
        (["--time", "1000d", "a.py"], "--time: expected less than 1000 days, got '1000d'"),
        (["--time", "24000h", "a.py"], "--time: expected less than 1000 days, got '24000h'"),
        (["--time", "2x", "a.py"], "or a number with d, h, m or s, as in 90m, got '2x'"),
        (
            ["--time", "25:00", "a.py"],
            "[DAYS-]HOURS:MINUTES:SECONDS, or a number with d, h, m or s, as in 90m, got '25:00'",
        ),
        (["--partition=-x", "a.py"], "Job: partition: expected letters"),
        (["--name", "a\nb", "a.py"], "got 'a\\nb'"),
        (
            ["--strategy", "mirrored", "--nodes", "2", "a.py"],
            "These strategies fit: multi_worker_mirrored, parameter_server",
        ),
        (["--site", "nowhere", "a.py"], "expected one of alps, aurora,"),
        (["--site", "frontire", "a.py"], "got 'frontire'. Did you mean frontier?"),
        (["--env", "X", "a.py"], "--env: expected NAME=VALUE, got 'X'"),
        (["--env", "BASH_ENV=x", "a.py"], "variables that neither the shell"),
        (["--directive=--wrap=x", "a.py"], "directives: expected one of --begin"),
        (["a.py", ":"], "mpiexec and srun end the program there"),
        ([], "expected a program, got none"),
        (["--venv", "x", "--conda", "y", "a.py"], "no conda environment next to venv"),
        (["--notice", "60", "a.py"], "--notice: expected --preemptible beside it, got none"),
        (["--max-restarts", "2", "a.py"], "--max-restarts: expected --preemptible beside it, got none"),
        (["--output-folder", "x", "a.py"], "--output-folder: expected --array beside it, got none"),
        (["--index-argument", "x", "a.py"], "--index-argument: expected --array beside it, got none"),
        (
            ["--preemptible", "--time", "00:01:00", "a.py"],
            "preemption: expected a notice of less than the time limit, 60 seconds, got 120",
        ),
        (["--scheduler", "pbs", "--gpu-bind", "closest", "a.py"], "gpu_bind: expected SLURM, whose option it is"),
        (
            ["--gpus-per-node", "2", "--ranks-per-node", "4", "a.py"],
            "a GPU for each rank that trains, got 2 for 4 ranks",
        ),
    ],
)
def test_wrong_use(job, words, says):
    said = job(*words, status=2)
    assert says in said
    assert "Traceback" not in said


def test_the_environment_is_the_one_this_runs_in_unless_it_is_said(job, monkeypatch):
    if sys.prefix != sys.base_prefix:
        assert f"source {sys.prefix}/bin/activate\n" in job("a.py")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    assert f"program=({sys.executable} a.py)" in job("a.py")
    monkeypatch.setenv("CONDA_PREFIX", sys.prefix)
    assert f"conda activate {sys.prefix}\n" in job("a.py")
    assert "source /v/bin/activate\n" in job("--venv", "/v", "a.py")
    assert "conda activate c\n" in job("--conda", "c", "a.py")
    assert "program=(/py a.py)" in job("--python", "/py", "a.py")
    script = job("--container", "image.sif", "a.py")
    assert "program=(apptainer exec image.sif python a.py)" in script
    assert "activate" not in script


def test_what_belongs_to_one_scheduler_does_not_get_into_another_s_script(job):
    assert "closest" not in job("--site", "frontier", "--scheduler", "pbs", "a.py")


def test_threads_that_the_user_chose_are_left_alone(job):
    for words in ([], ["--scheduler", "pbs"], ["--scheduler", "flux"], ["--scheduler", "lsf"]):
        script = job(*words, "--env", "OMP_NUM_THREADS=1", "--cpus-per-rank", "4", "a.py")
        assert [line for line in script.splitlines() if "export OMP_NUM_THREADS" in line] == [
            "export OMP_NUM_THREADS=1"
        ]
        assert script.count("-x OMP_NUM_THREADS") <= 1
    script = job("--env", "OMP_NUM_THREADS=1", "--cpus-per-rank", "4", "a.py")
    assert 'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-4}"' in script
    assert job("--launcher", "openmpi", "--env", "OMP_NUM_THREADS=1", "a.py").count("-x OMP_NUM_THREADS") == 1


def test_directives_that_name_several_nodes(job):
    assert "#SBATCH '--exclude=n[1-3]'\n" in job("--directive=--exclude=n[1-3]", "a.py")
    assert "#BSUB -w 'done(12)'\n" in job("--scheduler", "lsf", "--directive=-w done(12)", "a.py")


@pytest.mark.parametrize(
    ("words", "status", "says"), [(["job", "--help"], 0, "usage"), (["job", "--nope"], 2, "error:")]
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_help_and_wrong_use_start_no_mpi(words, status, says, rank):
    """Not even where srun started tasks that do not find each other; one of them speaks."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank}
    program = (
        "import sys; sys.modules['mpi4py'] = None; from mpistrat.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done
    assert (says in done.stdout + done.stderr) == (rank == "0") and "Traceback" not in done.stderr


def test_tasks_that_do_not_find_each_other_are_a_problem_without_a_traceback():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    command = [sys.executable, "-m", "mpistrat", "shards", "info", "x.h5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: COMM_WORLD: "), done
    assert "Traceback" not in done.stderr


def test_srun_is_told_how_the_mpi_of_the_job_starts(job, stub, monkeypatch, tmp_path):
    library = MPILibrary("MPICH", "5.0.2", "")
    asked = []
    monkeypatch.setattr(COMMAND_MODULE, "offered_pmis", lambda: ["none", "pmi2", "pmix_v4"])
    monkeypatch.setattr(COMMAND_MODULE, "loaded_library", lambda python: asked.append(python) or library)
    script = job("a.py")
    assert 'srun --kill-on-bad-exit=1 --mpi=pmi2 "${program[@]}"' in script
    assert "# At generic: srun offers none, pmi2, pmix_v4, and MPICH 5.0.2 is started by pmi2.\n" in script
    assert asked == [shutil.which(sys.executable)] or asked == [f"{sys.prefix}/bin/python"]

    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").write_text("#!/bin/sh\n")
    (venv / "python").chmod(0o755)
    library = MPILibrary("Open MPI", "5.0.11", "")
    assert "--mpi=pmix_v4 " in job("--venv", str(tmp_path / "venv"), "a.py")
    assert asked[-1] == str(venv / "python")

    assert not srun_is_told(job("--mpi", "auto", "a.py"))
    for words in (
        ["--container", "i.sif"], ["--venv", "/not/there"], ["--conda", "name"], ["--launcher", "openmpi"],
        ["--load", "openmpi/5"],
    ):  # fmt: skip
        before = len(asked)
        assert not srun_is_told(job(*words, "a.py"))
        assert len(asked) == before
    assert '"mpi": "auto"' in job("--show-site")  # a profile of the site, not of this environment
    monkeypatch.setenv("LOADEDMODULES", "gcc/12:openmpi/5")
    assert "--mpi=pmix_v4 " in job("--load", "openmpi/5", "a.py")
    assert "--mpi=none " in job("--mpi", "none", "a.py")
    assert "--mpi=cray_shasta " in job("--mpi", "cray_shasta", "a.py")
    assert "pmix_vN" in job("--mpi", "pmx", "a.py", status=2)

    monkeypatch.delenv("I_MPI_PMI_LIBRARY", raising=False)
    library = MPILibrary("Intel MPI", "2021.13.0", "")
    assert "It may need --env I_MPI_PMI_LIBRARY=/path/to/libpmi2.so, which comes with SLURM.\n" in job("a.py")

    library = MPILibrary("Other", "1", "")
    assert 'srun --kill-on-bad-exit=1 "${program[@]}"' in job("a.py")
    monkeypatch.setattr(COMMAND_MODULE, "offered_pmis", list)
    assert 'srun --kill-on-bad-exit=1 "${program[@]}"' in job("a.py")


def srun_is_told(script: str) -> bool:
    return "--mpi" in script.splitlines()[-1]


@pytest.mark.parametrize(
    ("device", "words", "says"),
    [
        ("ch4:ucx ofi", (), 'export MPIR_CVAR_CH4_NETMOD="${MPIR_CVAR_CH4_NETMOD:-ofi}"'),
        ("ch4:ucx ofi", ("--mpi", "pmi2"), 'export MPIR_CVAR_CH4_NETMOD="${MPIR_CVAR_CH4_NETMOD:-ofi}"'),
        ("ch4:ucx ofi", ("--mpi", "auto"), 'if [ "$mpi" = pmi2 ]; then export MPIR_CVAR_CH4_NETMOD='),
        (None, ("--mpi", "pmi2"), 'export MPIR_CVAR_CH4_NETMOD="${MPIR_CVAR_CH4_NETMOD:-ofi}"'),
        ("ch4:ucx ofi", ("--env", "MPIR_CVAR_CH4_NETMOD=ucx"), "export MPIR_CVAR_CH4_NETMOD=ucx"),
        ("ch4:ucx ofi", ("--mpi", "pmix"), None),
        ("ch4:ucx ofi", ("--launcher", "mpich"), None),
        ("ch4:ucx", (), None),
        ("ch4:ofi", (), None),
    ],
)
def test_mpich_over_ucx_uses_libfabric_under_pmi2(job, monkeypatch, device, words, says):
    """UCX's addresses are longer than SLURM's PMI2 reads. A library that nobody knows may be that MPICH."""

    def library(python):
        if device is None:
            raise ClusterError("no such Python here")
        return MPILibrary("MPICH", "5.0.2", "", device=device)

    monkeypatch.setattr(COMMAND_MODULE, "offered_pmis", lambda: ["none", "pmi2"])
    monkeypatch.setattr(COMMAND_MODULE, "loaded_library", library)
    script = job(*words, "a.py")
    lines = [line for line in script.splitlines() if "MPIR_CVAR_CH4_NETMOD" in line]
    assert [line[: len(says or "")] for line in lines] == ([says] if says else [])
    assert ("too long for SLURM's PMI2" in script) == (says is not None and "=ucx" not in says)


def test_a_profile_of_one_s_own_and_what_comes_before_it(job, tmp_path):
    profile = json.loads(job("--site", "perlmutter", "--show-site"))
    assert profile["gpu_bind"] == "none"
    profile |= {"name": "mine", "venv": "/v", "modules": ["gcc"], "reasons": {"mpi": "because"}, "mpi": "pmi2"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile))
    script = job("--site", str(path), "--gpus-per-node", "4", "a.py")
    assert {"--gpu-bind=none", "--constraint=gpu"} <= directives(script)
    assert "module load gcc\n" in script
    assert "--mpi=pmi2" in script
    script = job(
        "--site", str(path), "--mpi", "pmix", "--load", "x/1", "--env", "A=b", "--directive=--exclusive", "a.py"
    )
    assert "module load gcc x/1\n" in script
    assert "--mpi=pmix" in script
    assert "export A=b\n" in script
    assert {"--constraint=gpu", "--exclusive"} <= directives(script)
    assert "#PBS" in job("--site", str(path), "--scheduler", "pbs", "a.py")  # what was only SLURM's is left out


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"nope": 1}', '{"mpi": 3}', '{"modules": "gcc"}', '{"variables": []}', "[" * 9999]
)
def test_a_profile_that_is_wrong(job, tmp_path, text):
    path = tmp_path / "site.json"
    path.write_text(text)
    assert "error: " in job("--site", str(path), "a.py", status=2)
    assert "'./none.json': expected a JSON file, got no such file" in job("--site", "./none.json", "a.py", status=2)


def test_every_site_makes_a_script(job, tmp_path):
    for name in site_names():
        profile = json.loads(job("--site", name, "--show-site"))
        assert profile["name"] == name
        assert name == "generic" or "not run" in profile["about"]
        path = tmp_path / "script"
        job("--site", name, "--nodes", "2", "--gpus-per-node", "4", "-o", str(path), "a.py")
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_it_needs_no_mpi(tmp_path):
    """Not the library, not mpi4py, and no launcher's word that there are more ranks."""
    (tmp_path / "a.py").touch()
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise SystemExit('mpi4py was imported')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "4"}
    done = subprocess.run(
        [sys.executable, "-m", "mpistrat", "job", "a.py"], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "program=(python a.py)" in done.stdout


def test_without_jinja2_it_says_what_to_install(job, monkeypatch):
    sys.modules["mpistrat.batch_jobs.render"]._environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install jinja2" in job("a.py", status=1)


def test_it_says_what_it_wrote_and_how_to_submit_it(job, tmp_path):
    path = tmp_path / "a job.sh"
    assert job("-o", str(path), "a.py") == f"wrote {path}; submit it with: sbatch '{path}'\n"
    assert job("--scheduler", "lsf", "-o", str(path), "a.py") == f"wrote {path}; submit it with: bsub < '{path}'\n"
    assert "#BSUB" in path.read_text() and json.loads(job("--json", "-o", str(path), "a.py"))["path"] == str(path)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("rnu a.py", "run"), ("shards wrte", "write"), ("run --stratgy one_device a.py", "--strategy"),
        ("job --nodez 2 a.py", "--nodes"),
        ("run --strategy mirored a.py", "mirrored"), ("shards write --rows-per-shrad 1 a b", "--rows-per-shard"),
        ("run --xyz a.py", None),
    ],
)  # fmt: skip
def test_what_a_misspelt_word_may_have_meant(words, meant, capsys):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and (last.endswith(f"Did you mean {meant}?") if meant else "Did you mean" not in last), (
        last
    )


def test_what_a_copy_of_the_environment_would_leave_out_is_said(capsys, monkeypatch, tmp_path):
    """A package installed editable is a link to its folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for name, about in (("here", {"url": "file:///x", "dir_info": {}}), ("away", {"dir_info": {"editable": True}})):
        folder = tmp_path / "lib" / "python3.11" / "site-packages" / f"{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "direct_url.json").write_text(json.dumps(about))
    words = ["job", "--venv", str(tmp_path), "--mpi", "pmix", "train.py"]
    assert main(words) == 0 and capsys.readouterr().err == ""
    assert main([*words[:1], "--stage", "/tmp", *words[1:]]) == 0
    assert capsys.readouterr().err.endswith("ranks read them where they are: away\n")
