"""`mpistrat run --torchrun`: what each option of torchrun becomes, and those that cannot be kept."""

import json
import os
import subprocess
import sys

import pytest

from mpistrat.cli import torchrun
from mpistrat.cli.main import main
from mpistrat.cli.torchrun import read_torchrun
from mpistrat.cluster.launchers import Allocation
from mpistrat.launcher import rank_variables
from mpistrat.launcher.rank_variables import variables_of
from tests.harness.simulated_machine import Machine
from tests.launch.launcher import ROOT


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(torchrun, "usable_cores", lambda: 8)
    monkeypatch.setattr(torchrun, "gpus_of_machine", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torchrun, "allocation_of_job", lambda: Allocation())
    return machine


PYTHON = sys.executable


def started(capsys, *words):
    assert main(["run", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["command"]


def test_the_command(capsys):
    command = started(capsys, "--torchrun", "--standalone", "--nproc_per_node=4", "train.py", "--lr", "1", "--nnodes")
    assert command[:3] == ["/opt/mpich/mpiexec", "-n", "4"]
    assert command[3:7] == [PYTHON, "-S", "-I", rank_variables.__file__]
    assert command[-5:] == [PYTHON, "train.py", "--lr", "1", "--nnodes"]


def test_plain_run_sets_the_variables_only_on_request(capsys):
    assert started(capsys, "-n", "2", "train.py") == ["/opt/mpich/mpiexec", "-n", "2", PYTHON, "train.py"]
    assert rank_variables.__file__ in started(capsys, "-n", "2", "--numbers", "train.py")


@pytest.mark.parametrize(
    ("words", "ranks", "program"),
    [
        ("train.py a", 1, (PYTHON, "train.py", "a")),
        ("--nproc-per-node 3 -m package.train -x", 3, (PYTHON, "-m", "package.train", "-x")),
        ("--nproc-per-node auto --run-path train.py", 8, (PYTHON, "train.py")),
        ("--nproc-per-node cpu --nnodes 1:1 --node-rank 0 train.py", 8, (PYTHON, "train.py")),
    ],
)
def test_programs_and_ranks(words, ranks, program):
    found = read_torchrun(words.split())
    assert (found.ranks, found.program) == (ranks, program)
    assert (found.restarts, found.tag, found.log_dir, found.unused) == (0, False, None, ())


def test_a_program_that_is_not_pythons():
    assert read_torchrun(["--no-python", "sh", "-c", "true"]).program[1:] == ("-c", "true")
    assert os.path.isabs(read_torchrun(["--no-python", "sh"]).program[0])


def test_gpus(monkeypatch):
    monkeypatch.setattr(torchrun, "gpus_of_machine", lambda: ["0000:01:00.0", "0000:02:00.0"])
    assert [read_torchrun(["--nproc-per-node", kind, "train.py"]).ranks for kind in ("auto", "gpu", "cpu")] == [2, 2, 8]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert read_torchrun(["--nproc-per-node", "gpu", "train.py"]).ranks == 1


def test_nodes_of_a_job(monkeypatch):
    monkeypatch.setattr(torchrun, "allocation_of_job", lambda: Allocation(("n1", "n2")))
    assert read_torchrun(["--nnodes", "2", "--nproc-per-node", "4", "train.py"]).ranks == 8
    with pytest.raises(ValueError, match="--nnodes: expected at most 2, the nodes that this job has, got 3"):
        read_torchrun(["--nnodes", "3", "train.py"])
    for own in "01":  # a script that calls it on each node
        with pytest.raises(ValueError, match=rf"--node-rank: expected .*, got {own}\. .*all nodes|again"):
            read_torchrun(["--nnodes", "2", "--node-rank", own, "train.py"])


def test_restarts_and_output():
    found = read_torchrun(["--max-restarts", "3", "-t", "3", "--log-dir", "logs", "train.py"])
    assert (found.restarts, found.tag, found.log_dir) == (3, True, "logs")
    found = read_torchrun(["-r", "3", "--log_dir", "logs", "train.py"])
    assert (found.tag, found.log_dir, found.unused) == (False, "logs", ())
    found = read_torchrun(["--log-dir", "logs", "-r", "0", "train.py"])
    assert (found.log_dir, found.unused) == (None, ("--log-dir",))


def test_options_without_effect_are_reported(capsys):
    words = (
        "--rdzv-backend c10d --rdzv_endpoint h1:29500 --rdzv-id 7 --rdzv-conf a=1 --master-addr h1 --master_port 29500"
    )
    words += " --local-addr h1 --monitor-interval 1 --start-method fork --role trainer --standalone train.py"
    found = read_torchrun(words.split())
    assert set(found.unused) == set(torchrun._UNUSED)
    assert main(["run", "--json", "--torchrun", "--rdzv-backend=c10d", "train.py"]) == 0
    assert capsys.readouterr().err == "mpistrat run: not used, as MPI connects the ranks: --rdzv-backend\n"


@pytest.mark.parametrize("option", torchrun._REFUSED)
def test_options_that_cannot_be_kept_are_named(capsys, option):
    value = [] if torchrun._REFUSED[option] == "store_true" else ["1"]
    assert main(["run", "--torchrun", option, *value, "train.py"]) == 2
    assert (
        f"mpistrat run --torchrun: {option}: expected an option that ranks of MPI can keep" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--nnodes 1:4 train.py",
            "--nnodes: expected a number >= 1: ranks of MPI are as many from start to end, got 1:4",
        ),
        ("--nnodes 2 train.py", "--nnodes: expected at most 1, the nodes that this job has, got 2"),
        ("--node-rank 1 train.py", "--node-rank: expected 0, or none"),
        ("--nproc-per-node gpu train.py", "--nproc-per-node: expected a GPU that this process may use"),
        ("--nproc-per-node xpu train.py", "--nproc-per-node: expected a number >= 1, auto, cpu or gpu, got xpu"),
        ("--nproc-per-node 0 train.py", "--nproc-per-node: expected a number >= 1, auto, cpu or gpu, got 0"),
        ("--max-restarts many train.py", "--max-restarts: expected a number >= 0, got many"),
        ("-r 0:1 train.py", "--redirects: expected 0 or 3: neither or both streams, of all ranks, got 0:1"),
        ("-r 3 train.py", "--redirects: expected --log-dir with it, got none"),
        ("missing.py", "training_script: expected a file that is there, got missing.py"),
        ("--no-python missing", "training_script: expected a program on PATH, got missing"),
        ("-m --no-python train", "--no-python: expected no -m, got both"),
    ],
)
def test_wrong_use(capsys, words, said):
    assert main(["run", "--torchrun", *words.split()]) == 2
    assert f"mpistrat run --torchrun: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "2"], "-n: expected none with --torchrun"),
        (["--restarts", "2"], "--restarts: expected none with --torchrun"),
    ],
)
def test_what_both_say(capsys, words, said):
    assert main(["run", *words, "--torchrun", "--max-restarts", "1", "train.py"]) == 2
    assert said in capsys.readouterr().err


def test_an_option_that_torchrun_has_not(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--torchrun", "--epochs", "3", "train.py"])


def test_every_option_of_torchrun_is_known():
    """An option of a newer PyTorch is found by this test."""
    reply = subprocess.run(
        [PYTHON, "-c", "from torch.distributed.run import get_args_parser as p; print(*p()._option_string_actions)"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    if reply.returncode:
        pytest.skip("PyTorch is not installed: make test-frameworks")
    missing = set(reply.stdout.split()) - set(torchrun._parser()._option_string_actions)
    assert not missing


def test_the_shim_is_the_same(tmp_path):
    text = (ROOT / "mpistrat" / "torch" / "run.py").read_text()
    assert 'program("mpistrat", "run", "--torchrun", *sys.argv[1:])' in text


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, "3 4 1 2"),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "3 4 1 2",
        ),
        (
            {"SLURM_PROCID": "8", "SLURM_STEP_NUM_TASKS": "11", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
             "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, "8 11 0 3",
        ),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
          "SLURM_STEP_TASKS_PER_NODE": "1"}, "0 1 0 1"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "0 1  "),
    ],
)  # fmt: skip
def test_the_variables_of_launchers(env, expected):
    from mpistrat.cluster.launcher_variables import RANK_VARIABLES

    found = variables_of(env, tuple(RANK_VARIABLES.values()), tuple(RANK_VARIABLES))
    assert list(found) == ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    assert " ".join(found.values()) == expected


def test_a_launcher_that_shows_no_numbers_is_an_error():
    words = [PYTHON, "-S", "-I", rank_variables.__file__, "PMI_RANK", "PMI_SIZE", "true"]
    env = {"PATH": os.environ["PATH"], "PMI_RANK": "0"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert "the launcher does not show WORLD_SIZE and LOCAL_RANK and LOCAL_WORLD_SIZE" in done.stderr
