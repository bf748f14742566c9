"""What scripts do when they run: how ranks are started, what the program gets, when the job is requeued."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpistrat.batch_jobs import Array, BatchJob, Preemption, SiteProfile, render
from mpistrat.errors import LayoutError
from tests.launch.launcher import ROOT

WORDS = ("train.py", "--name", "it's $HOME", "")
JOB = BatchJob(program=WORDS, nodes=2, ranks_per_node=3, cpus_per_rank=4)
SITE = SiteProfile(venv=".venv")
ARRAY = Array("0-9%2", "seed", "output", "my results")


def at(**settings):
    return dataclasses.replace(SITE, **settings)


def job(**settings):
    return dataclasses.replace(JOB, **settings)


def directives(script, sentinel="#SBATCH"):
    return [line.removeprefix(sentinel + " ") for line in script.splitlines() if line.startswith(sentinel + " ")]


def test_slurm_gets_the_job_and_srun_the_program(machine):
    script = render(job(time="1-02:03:04", partition="gpu", account="me", qos="high", mail="a@b.c", memory="64G"), SITE)
    assert directives(script) == [
        "--job-name=mpistrat", "--output=%x-%j.out", "--partition=gpu", "--account=me", "--qos=high", "--time=26:03:04",
        "--mail-user=a@b.c", "--mail-type=END,FAIL", "--nodes=2", "--ntasks-per-node=3", "--cpus-per-task=4",
        "--mem=64G",
    ]  # fmt: skip
    machine.stub("srun", 'printf "%s\\0" env 4 "$MPISTRAT_STRATEGY" "${MPISTRAT_NUM_PS-}" "$OMP_NUM_THREADS" '
                         '"$SRUN_CPUS_PER_TASK" >> "$CALLS"')  # fmt: skip
    ran = machine.run(script)
    assert (ran.status, ran.stderr) == (0, "")
    assert ran.of("srun") == [["srun", "--kill-on-bad-exit=1", "python", *WORDS]]
    assert ran.of("env") == [["env", "multi_worker_mirrored", "", "3", "3"]]  # the 3 is SLURM's
    assert "6 ranks" in ran.stdout
    assert "job 17" in ran.stdout


def test_directives_end_where_commands_begin():
    for scheduler, sentinel in (("slurm", "#SBATCH"), ("pbs", "#PBS"), ("lsf", "#BSUB"), ("flux", "# flux:")):
        lines = render(job(gpus_per_node=3), at(scheduler=scheduler)).splitlines()
        first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
        found = [number for number, line in enumerate(lines) if re.match(r"\W*(SBATCH|PBS|BSUB|flux:)", line)]
        assert found and max(found) < first
        active = {line[: len(sentinel)] for line in lines if re.match(r"#(SBATCH|PBS|BSUB)|\W*flux:", line)}
        assert active == {sentinel}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mpi": "pmi2"}, ["srun", "--kill-on-bad-exit=1", "--mpi=pmi2"]),
        ({"mpi": "cray_shasta"}, ["srun", "--kill-on-bad-exit=1", "--mpi=cray_shasta"]),
        ({"launcher": "mpich"}, ["mpiexec", "-n", "6", "-ppn", "3"]),
        (
            {"launcher": "openmpi", "variables": {"A": "b c"}},
            ["mpirun", "-n", "6", "--map-by", "ppr:3:node", "--bind-to", "none", "-x", "MPISTRAT_STRATEGY", "-x",
             "OMP_NUM_THREADS", "-x", "PYTHONUNBUFFERED", "-x", "A"],
        ),
        ({"scheduler": "pbs"}, ["mpiexec", "-n", "6", "-ppn", "3"]),
        (
            {"scheduler": "pbs", "launcher": "pals", "mpi": "pmix"},
            ["mpiexec", "-n", "6", "--ppn", "3", "--depth", "4", "--cpu-bind", "depth", "--pmi=pmix"],
        ),
        (
            {"scheduler": "lsf"},
            ["jsrun", "--nrs", "6", "--rs_per_host", "3", "--tasks_per_rs", "1", "--cpu_per_rs", "4", "--bind",
             "packed:4"],
        ),
        ({"scheduler": "flux"}, ["flux", "run", "--nodes=2", "--ntasks=6", "--cores-per-task=4"]),
    ],
)  # fmt: skip
def test_every_launcher_gets_the_ranks_and_the_program(machine, settings, words):
    ran = machine.run(render(JOB, at(**settings)))
    assert (ran.status, ran.stderr) == (0, "")
    assert ran.calls[-1] == [*words, "python", *WORDS]


@pytest.mark.parametrize(
    ("scheduler", "wanted"),
    [
        ("slurm", ["--gpus-per-node=6"]),
        ("pbs", ["-l select=2:ncpus=12:mpiprocs=3:ngpus=6"]),
        ("flux", ["--gpus-per-slot=2", "--nslots=6"]),
    ],
)
def test_gpus(scheduler, wanted):
    sentinel = {"slurm": "#SBATCH", "pbs": "#PBS", "flux": "# flux:"}[scheduler]
    assert set(wanted) <= set(directives(render(job(gpus_per_node=6), at(scheduler=scheduler)), sentinel))


def test_memory_and_mail_of_pbs():
    script = render(job(memory="64G", mail="a@b.c", partition="q", account="me", time="00:01:30"), at(scheduler="pbs"))
    assert directives(script, "#PBS") == [
        "-N mpistrat", "-j oe", "-q q", "-A me", "-l walltime=00:01:30", "-M a@b.c", "-m ae",
        "-l select=2:ncpus=12:mpiprocs=3:mem=64gb",
    ]  # fmt: skip


def test_limits_are_rounded_up_to_minutes():
    assert "-W 2" in directives(render(job(time="00:01:30"), at(scheduler="lsf")), "#BSUB")
    assert "--time-limit=2m" in directives(render(job(time="00:01:30"), at(scheduler="flux")), "# flux:")


def test_gpus_as_sites_ask_for_them():
    def asks(**settings):
        return [each for each in directives(render(job(gpus_per_node=6), at(**settings))) if "g" in each.split("=")[0]]

    assert asks() == ["--gpus-per-node=6"]
    assert asks(gpu_request="gres") == ["--gres=gpu:6"]
    assert asks(gpu_request="per_task", gpu_bind="closest") == ["--gpus-per-task=2", "--gpu-bind=closest"]
    assert asks(directives=("--gres-flags=allow-task-sharing",)) == [
        "--gpus-per-node=6",
        "--gres-flags=allow-task-sharing",
    ]
    jsrun = render(job(gpus_per_node=6), at(scheduler="lsf")).splitlines()[-1]
    assert " --gpu_per_rs 2 " in jsrun
    with pytest.raises(ValueError, match="a multiple of 3"):
        render(job(gpus_per_node=4), at(gpu_request="per_task"))


def test_parameter_servers_by_rank(machine):
    machine.stub("srun", 'printf "%s\\0" env 2 "$MPISTRAT_STRATEGY" "$MPISTRAT_NUM_PS" >> "$CALLS"')
    ran = machine.run(render(job(strategy="parameter_server", num_ps=2), SITE))
    assert ran.of("env") == [["env", "parameter_server", "2"]]
    assert "4 workers, then 2 parameter servers" in render(job(strategy="parameter_server", num_ps=2), SITE)


def test_parameter_servers_as_the_second_component_of_a_heterogeneous_job(machine):
    script = render(job(strategy="parameter_server", num_ps=4, ps_nodes=2, gpus_per_node=3), SITE)
    workers, servers = "\n".join(directives(script)).split("\nhetjob\n")
    assert workers.splitlines()[-4:] == ["--nodes=2", "--ntasks-per-node=3", "--cpus-per-task=4", "--gpus-per-node=3"]
    assert servers.splitlines() == ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=4"]
    ran = machine.run(script)
    assert ran.of("srun") == [["srun", "--kill-on-bad-exit=1", "--het-group=0,1", "python", *WORDS]]
    assert "10 ranks" in ran.stdout


@pytest.mark.parametrize(
    ("scheduler", "directive"), [("slurm", "--array=0-9%2"), ("pbs", "-J 0-9%2"), ("lsf", '-J "mpistrat[1-9]"')]
)
def test_the_tasks_of_an_array_get_their_index_and_their_own_folder(machine, scheduler, directive):
    array = dataclasses.replace(ARRAY, indices="1-9" if scheduler == "lsf" else "0-9%2")
    script = render(job(array=array), at(scheduler=scheduler))
    assert directive in directives(script, {"slurm": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB"}[scheduler])
    ran = machine.run(script)
    assert (ran.status, ran.stderr) == (0, "")
    assert ran.calls[-1][-9:] == ["python", *WORDS, "--seed", "4", "--output", "my results/4"]
    assert (machine.folder / "my results/4").is_dir()


def test_a_container(machine):
    site = at(venv="", container_command=("apptainer", "exec", "--bind", "/my data"))
    assert render(job(), site).count("apptainer") == 0
    ran = machine.run(render(job(container="im age.sif", gpus_per_node=3), site))
    command = ["apptainer", "exec", "--bind", "/my data", "--nv", "im age.sif", "python", *WORDS]
    assert ran.of("srun") == [["srun", "--kill-on-bad-exit=1", *command]]
    with pytest.raises(ValueError, match="the Python of the image"):
        render(job(container="image.sif"), SITE)


def test_a_module_a_command_and_the_site_s_python(machine):
    for settings, site, words in (
        ({"module": True, "program": ("a.b", "-x")}, SITE, ["python", "-m", "a.b", "-x"]),
        ({"program": ("./solve", "-x")}, SITE, ["./solve", "-x"]),
        ({"program": ("a.py",)}, at(python="/my python"), ["/my python", "a.py"]),
    ):
        assert machine.run(render(job(**settings), site)).of("srun") == [["srun", "--kill-on-bad-exit=1", *words]]


def test_the_site_s_environment(machine):
    site = SiteProfile(
        modules=("gcc/12", "mpi"), conda="my env", variables={"A": "b c", "E": ""}, reasons={"modules": "why"}
    )
    machine.stub("conda", 'if [ "$1" = shell.bash ]; then echo "hooked=yes"; fi')
    machine.stub("srun", 'printf "%s\\0" env 2 "$A" "$E" >> "$CALLS"')
    script = render(JOB, site)
    ran = machine.run(script)
    assert ran.of("module", "conda", "env") == [
        ["module", "load", "gcc/12", "mpi"],
        ["conda", "shell.bash", "hook"],
        ["conda", "activate", "my env"],
        ["env", "b c", ""],
    ]
    assert "# At generic: why\nmodule load" in script


def test_srun_is_told_the_cores_only_where_the_site_wants_it():
    assert "SRUN_CPUS_PER_TASK" in render(JOB, SITE)
    assert "SRUN_CPUS_PER_TASK" not in render(JOB, at(srun_cpus_per_task=False))
    assert "SRUN_CPUS_PER_TASK" not in render(JOB, at(launcher="mpich"))


def test_a_module_that_is_missing_ends_the_job(machine):
    machine.stub("module", "exit 1")
    ran = machine.run(render(JOB, at(modules=("nope",))))
    assert ran.status == 1
    assert not ran.of("srun")


def test_the_program_s_status_is_the_job_s(machine):
    machine.stub("srun", "exit 3")
    assert machine.run(render(JOB, SITE)).status == 3
    assert machine.run(render(job(preemption=Preemption()), SITE)).status == 3


@pytest.mark.parametrize("launcher", ["srun", "openmpi", "mpich"])
@pytest.mark.parametrize(
    ("status", "restarts", "state", "requeued"),
    [
        (42, None, "RUNNING", True),
        (42, "2", "RUNNING", True),
        (42, "3", "RUNNING", False),  # often enough
        (42, None, "CANCELLED", False),
        (0, None, "RUNNING", False),
        (1, None, "RUNNING", False),
    ],
)
def test_a_job_that_stopped_early_goes_back_into_the_queue(machine, launcher, status, restarts, state, requeued):
    for name in ("srun", "mpirun", "mpiexec"):
        machine.stub(name, f"exit {status}")
    machine.stub("scontrol", f'if [ "$1" = show ]; then echo "JobId=17 JobState={state} Reason=None"; fi')
    script = render(job(preemption=Preemption(notice=90, max_restarts=3)), at(launcher=launcher))
    ran = machine.run(script, **({} if restarts is None else {"SLURM_RESTART_COUNT": restarts}))
    assert ran.status == status
    assert ([["scontrol", "requeue", "17"]] if requeued else []) == [call for call in ran.calls if "requeue" in call]
    signalled = "--signal=USR1@90" if launcher == "srun" else "--signal=B:USR1@90"
    assert {signalled, "--requeue", "--open-mode=append"} <= set(directives(script))


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize(("launcher", "requeued"), [("openmpi", True), ("mpich", False), ("srun", False)])
def test_mpirun_of_a_preempted_job_tells_nothing(machine, launcher, requeued, status):
    """Open MPI's ends with 0 when its daemons were told to stop; SLURM knows better."""
    for name in ("srun", "mpirun", "mpiexec"):
        machine.stub(name, f"exit {status}")
    script = render(job(preemption=Preemption(max_restarts=3)), at(launcher=launcher))
    for time_of, state, again in (
        ("2026-11-21T17:01:41", "RUNNING", requeued),
        ("2026-11-21T17:01:41", "CANCELLED", False),
        ("None", "RUNNING", False),
    ):
        machine.stub("scontrol", f'if [ "$1" = show ]; then echo "JobState={state} PreemptTime={time_of}"; fi')
        ran = machine.run(script)
        assert ran.status == status
        assert (["scontrol", "requeue", "17"] in ran.calls) == again
    assert ["scontrol", "requeue", "17"] not in machine.run(script, SLURM_RESTART_COUNT="3").calls


def test_a_signal_before_there_are_ranks_comes_to_them(machine):
    """SLURM may signal a minute early, which can be at the script's first lines."""
    machine.stub("mpiexec", "trap 'exit 42' USR1; for i in {1..200}; do sleep 0.1; done")
    machine.stub("scontrol", 'if [ "$1" = show ]; then echo "JobState=RUNNING PreemptTime=None"; fi')
    script = render(job(preemption=Preemption(max_restarts=3)), at(launcher="mpich"))
    assert script.count("set -u\n") == 1
    ran = machine.run(script.replace("set -u\n", "set -u\nkill -USR1 $$\n"))
    assert ran.status == 42
    assert ["scontrol", "requeue", "17"] in ran.calls


def test_a_preemptible_step_ends_a_minute_after_its_first_rank(machine):
    ran = machine.run(render(job(preemption=Preemption()), SITE))
    assert ran.of("srun")[0][:3] == ["srun", "--kill-on-bad-exit=0", "--wait=60"]


def test_a_task_of_an_array_goes_back_alone(machine):
    machine.stub("srun", "exit 42")  # the last task's SLURM_JOB_ID is the id of the whole array
    ran = machine.run(render(job(preemption=Preemption(), array=ARRAY), SITE))
    assert ran.of("scontrol")[-1] == ["scontrol", "requeue", "16_4"]


LAUNCHER = """
trap 'printf "%s\\0" got 1 USR1 >> "$CALLS"; caught=yes' USR1
touch started
for _ in $(seq 200); do
  sleep 0.05 & wait $!
  if [ -n "${caught-}" ]; then sleep 0.2; exit 42; fi
done
"""


def test_a_job_that_goes_on_when_a_rank_dies(machine):
    script = render(job(restarts=7, survive=True, preemption=Preemption()), at(python="python"))
    assert "--no-kill" in directives(script) and "--requeue" in directives(script)
    machine.stub("python", "exit 42")
    machine.stub("scontrol", "")
    ran = machine.run(script)
    ((_, option, code, *words),) = ran.of("python")
    assert words == ["run", "--restarts", "7", "--survive", "python", *WORDS]
    (machine.folder / "json.py").write_text(
        "raise SystemExit(77)"
    )  # in the working directory, from which nothing comes
    command = [sys.executable, option, code, "--version"]
    reply = subprocess.run(command, cwd=machine.folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert reply.stdout.startswith(b"mpistrat "), reply
    assert ran.of("scontrol")[-1][1] == "requeue"
    assert "--no-kill" not in render(JOB, SITE)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize(("launcher", "command"), [("openmpi", "mpirun"), ("mpich", "mpiexec")])
def test_a_signal_to_the_script_reaches_the_launcher(machine, launcher, command, number):
    machine.stub(command, LAUNCHER)
    process = machine.start(render(job(preemption=Preemption()), at(launcher=launcher)))
    wait_for(machine.folder / "started", process)
    process.send_signal(number)
    process.communicate(timeout=30)
    calls = machine.calls()
    assert process.returncode == 42
    assert ["got", "USR1"] in calls
    assert calls[-1] == ["scontrol", "requeue", "17"]


def test_a_signal_to_the_script_does_not_end_srun(machine):
    machine.stub("srun", "touch started; sleep 1; exit 42")
    process = machine.start(render(job(preemption=Preemption()), SITE))
    wait_for(machine.folder / "started", process)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert process.returncode == 42
    assert machine.calls()[-1] == ["scontrol", "requeue", "17"]


def wait_for(path, process):
    for _ in range(400):
        if path.exists() or process.poll() is not None:
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no {path}")


@pytest.mark.parametrize(
    ("settings", "site", "says"),
    [
        ({"preemption": Preemption()}, {"scheduler": "pbs"}, "preemption.*PBS.*Supported by: SLURM"),
        ({"array": ARRAY}, {"scheduler": "flux"}, "array.*Flux.*Supported by: SLURM, PBS, LSF"),
        ({"array": ARRAY}, {"scheduler": "lsf"}, "indices from 1"),
        ({"memory": "1G"}, {"scheduler": "lsf"}, "memory"),
        ({"mail": "a@b.c"}, {"scheduler": "flux"}, "mail"),
        ({"qos": "a"}, {"scheduler": "pbs"}, "qos"),
        ({"strategy": "parameter_server", "num_ps": 1, "ps_nodes": 1}, {"scheduler": "pbs"}, "ps_nodes"),
        ({"strategy": "parameter_server", "num_ps": 1, "ps_nodes": 1}, {"launcher": "mpich"}, "started by srun"),
        (
            {"strategy": "parameter_server", "num_ps": 1, "ps_nodes": 1, "preemption": Preemption()},
            {},
            "a job of one component",
        ),
        (
            {"strategy": "parameter_server", "num_ps": 1, "ps_nodes": 1, "array": ARRAY},
            {},
            "SLURM has no arrays of others",
        ),
        ({"restarts": 3}, {"scheduler": "pbs"}, "restarts.*a SLURM job.*got PBS"),
        ({"restarts": 3}, {"launcher": "openmpi"}, "restarts.*got launcher openmpi"),
        ({"survive": True}, {"mpi": "pmix"}, "survive.*got mpi pmix"),
        ({"restarts": 3, "container": "a.sif"}, {}, "got the image 'a.sif'"),
        ({}, {"launcher": "jsrun"}, "one of srun, openmpi, mpich under SLURM"),
        ({}, {"launcher": "mpich", "mpi": "pmix"}, "mpi: expected one of auto with launcher mpich"),
        ({"program": ("a.py", "{{id}}")}, {"scheduler": "flux"}, "which replaces it"),
    ],
)
def test_what_a_batch_system_cannot_do_is_refused(settings, site, says):
    with pytest.raises(ValueError, match=says):
        render(job(**settings), at(**site))


@pytest.mark.parametrize(
    ("strategy", "nodes", "ranks", "num_ps", "ps_nodes", "fitting"),
    [
        ("one_device", 1, 1, 0, 0, None),
        ("one_device", 1, 2, 0, 0, "mirrored, multi_worker_mirrored, central_storage, parameter_server"),
        ("one_device", 2, 1, 0, 0, "multi_worker_mirrored, parameter_server"),
        ("mirrored", 1, 4, 0, 0, None),
        ("mirrored", 2, 1, 0, 0, "multi_worker_mirrored, parameter_server"),
        ("central_storage", 1, 4, 0, 0, None),
        ("central_storage", 2, 4, 0, 0, "multi_worker_mirrored, parameter_server"),
        ("multi_worker_mirrored", 1, 1, 0, 0, None),
        ("multi_worker_mirrored", 9, 9, 0, 0, None),
        ("multi_worker_mirrored", 2, 2, 1, 0, "servers only with parameter_server"),
        ("parameter_server", 2, 2, 3, 0, None),
        ("parameter_server", 2, 2, 4, 0, "at least one worker.*multi_worker_mirrored"),
        ("parameter_server", 1, 1, 1, 0, "one_device, mirrored, multi_worker_mirrored, central_storage"),
        ("parameter_server", 2, 2, 0, 0, "at least one server"),
        ("parameter_server", 1, 1, 4, 2, None),
        ("parameter_server", 1, 1, 3, 2, "a multiple of 2"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused_and_those_that_do_are_named(
    strategy, nodes, ranks, num_ps, ps_nodes, fitting
):
    def make():
        return BatchJob(
            program=("a",), nodes=nodes, ranks_per_node=ranks, strategy=strategy, num_ps=num_ps, ps_nodes=ps_nodes
        )

    if fitting is None:
        assert make().ranks == nodes * ranks + (num_ps if ps_nodes else 0)
        return
    with pytest.raises(LayoutError, match=fitting):
        make()


def test_scripts_are_bash(tmp_path):
    path = tmp_path / "script"
    for scheduler in ("slurm", "pbs", "lsf", "flux"):
        path.write_text(render(JOB, at(scheduler=scheduler)))
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_environment_is_copied_to_the_nodes_before_the_ranks_start(machine):
    machine.stub("srun", "")
    machine.stub("sbcast", "")
    ran = machine.run(render(job(stage=str(machine.folder)), SITE), SLURM_JOB_NUM_NODES="2", SLURM_RESTART_COUNT="1")
    assert (ran.status, ran.stderr) == (0, "")
    calls = [call for call in ran.of("srun", "sbcast") if call[-1] != "wait" and "trap" not in call[-1]]
    staged = calls[0][-1]
    assert re.fullmatch(rf"{machine.folder}/mpistrat-17-1-\d+", staged), "another user must not know it before"
    one_each = [
        "srun",
        "--overlap",
        "--mpi=none",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
    ]
    assert calls[0] == [*one_each, "mkdir", "-m", "700", staged]
    assert calls[1][0] == "sbcast" and calls[1][2] == f"{staged}/packed"
    assert calls[2] == [*one_each, "tar", "-C", staged, "--no-same-owner", "-xf", f"{staged}/packed"]
    assert calls[-1] == ["srun", "--kill-on-bad-exit=1", f"{staged}/bin/python", *WORDS]
    assert not list(machine.folder.glob("mpistrat-??????")), "what was packed is removed"


def test_a_second_sigterm_does_not_end_the_removal_of_the_copy(machine):
    machine.stub("srun", "")
    machine.stub("sbcast", "")
    ran = machine.run(render(job(stage=str(machine.folder)), SITE), SLURM_JOB_NUM_NODES="2")
    (waiter,) = [call[-1] for call in ran.of("srun") if "trap" in call[-1]]
    (staged,) = [Path(call[-1]) for call in ran.of("srun") if "mkdir" in call]
    (staged / "bin").mkdir(parents=True)
    machine.stub("rm", 'sleep 1; exec /bin/rm "$@"')
    process = subprocess.Popen(["bash", "-c", waiter], start_new_session=True, env=machine.environment())
    time.sleep(0.5)
    for _ in range(3):  # scancel's, srun's, and another scancel's: SLURM sends each to all processes of the step
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.2)
    process.wait(20)
    assert not staged.exists()


@pytest.mark.parametrize(
    ("asked", "site", "expected"),
    [
        ({}, {"scheduler": "pbs"}, "a setting that PBS supports.*Supported by: SLURM"),
        ({}, {"venv": "", "conda": "base"}, "a virtual environment.*got base"),
        ({"container": "a.sif"}, {"venv": ""}, "a virtual environment.*got a.sif"),
        ({}, {"python": "/usr/bin/python3"}, "the Python of that environment, got /usr/bin/python3"),
        ({"program": ("./a.out",)}, {}, "a program that Python runs, got ./a.out"),
        ({"restarts": 2}, {}, "a job whose nodes all stay"),
        ({"strategy": "parameter_server", "num_ps": 1, "ps_nodes": 1}, {}, "a job of one component"),
    ],
)
def test_what_cannot_be_copied_is_refused(asked, site, expected):
    with pytest.raises(ValueError, match=f"Job: stage: expected {expected}"):
        render(job(stage="/tmp", **asked), at(**site))
    for folder in ("shm", "/tmp/$USER", "/a b", "~/x"):
        with pytest.raises(ValueError, match="Job: stage: expected an absolute path"):
            job(stage=folder)
