"""jobscripts/ holds what the package writes, and every file in it is what it says it is."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.batch_jobs import render
from mpistrat.batch_jobs.examples import EXAMPLES, main
from mpistrat.cluster_resolver import TFConfigClusterResolver
from tests.launch.launcher import ROOT

FOLDER = ROOT / "jobscripts"
WRITTEN_BY_HAND = {"README.md", "kubernetes-mpijob.yaml", "tf-config.sh"}
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sh"))
REWRITE = "look at the difference; `python -m mpistrat.batch_jobs.examples jobscripts` writes them anew"


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_script_is_what_the_package_writes(name):
    assert (FOLDER / name).read_text() == render(*EXAMPLES[name]), REWRITE
    assert os.access(FOLDER / name, os.X_OK)


def test_there_are_no_others(tmp_path):
    main(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == set(EXAMPLES)
    assert {path.name for path in FOLDER.iterdir()} == set(EXAMPLES) | WRITTEN_BY_HAND


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_bash(name):
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_finds_nothing(name):
    path = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if path is None:
        pytest.skip("no shellcheck")
    words = [path, "-e", "SC1091", str(FOLDER / name)]  # SC1091: there is no environment for it to look into
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_readme_tells_of_every_file():
    told = re.findall(r"^\| \[([\w.-]+)\]\(([\w.-]+)\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert all(name == link for name, link in told)
    assert {name for name, _ in told} == set(EXAMPLES) | WRITTEN_BY_HAND - {"README.md"}


@pytest.fixture
def job():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((FOLDER / "kubernetes-mpijob.yaml").read_text())


# From the operator's CustomResourceDefinition of v2beta1: the fields of an MPIJob, and which values some have.
SPEC = {"launcherCreationPolicy", "mpiImplementation", "mpiReplicaSpecs", "runLauncherAsWorker", "runPolicy",
        "slotsPerWorker", "sshAuthMountPath"}  # fmt: skip
RUN_POLICY = {"activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "managedBy", "schedulingPolicy", "suspend",
              "ttlSecondsAfterFinished"}  # fmt: skip


def test_the_mpijob_has_the_fields_of_the_operator(job):
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    spec = job["spec"]
    assert set(spec) <= SPEC
    assert set(spec["runPolicy"]) <= RUN_POLICY
    assert spec["runPolicy"]["cleanPodPolicy"] in ("Running", "All", "None")
    assert spec["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for replica in spec["mpiReplicaSpecs"].values():
        assert set(replica) <= {"replicas", "restartPolicy", "template"}
        assert isinstance(replica["replicas"], int)
        for container in replica["template"]["spec"]["containers"]:
            assert {"name", "image"} <= set(container)
            assert all(isinstance(word, str) for word in container.get("command", []) + container.get("args", []))


def test_the_mpijob_starts_as_many_ranks_as_it_has_slots(job):
    spec = job["spec"]
    workers, launcher = spec["mpiReplicaSpecs"]["Worker"], spec["mpiReplicaSpecs"]["Launcher"]
    words = launcher["template"]["spec"]["containers"][0]["command"]
    assert words[0] == "mpirun"
    assert int(words[words.index("-n") + 1]) == spec["slotsPerWorker"] * workers["replicas"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == spec["slotsPerWorker"]


@pytest.mark.parametrize(
    ("started_by", "servers", "expected"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, "", ("worker", 1, {"worker": 3})),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, "1", ("ps", 0, {"worker": 2, "ps": 1})),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}, "2", ("worker", 0, {"worker": 1, "ps": 2})),
        # mpiexec inside a job, whose first task has SLURM's variables
        ({"PMI_RANK": "2", "PMI_SIZE": "3", "SLURM_PROCID": "0"}, "", ("worker", 2, {"worker": 3})),
    ],
)
def test_tf_config_of_every_rank(monkeypatch, started_by, servers, expected):
    environment = {"PATH": os.environ["PATH"], **started_by} | ({"MPISTRAT_NUM_PS": servers} if servers else {})
    done = subprocess.run(
        [str(FOLDER / "tf-config.sh"), "printenv", "TF_CONFIG"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("TF_CONFIG", done.stdout)
    resolver = TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, {job: spec.num_tasks(job) for job in spec.jobs}) == expected
