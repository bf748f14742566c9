"""The files that a host's CI, an index and packagers read: they parse, fit Makefile and pyproject.toml, and name one version."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.minimum import project

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FILES = [
    *sorted((ROOT / ".github").rglob("*.yml")), ROOT / ".readthedocs.yaml", ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff", ROOT / "packaging" / "conda" / "recipe.yaml",
]  # fmt: skip
MAKEFILE = (ROOT / "Makefile").read_text()
INDEXES = ("pypi.org", "pythonhosted", "anaconda.org", "conda.anaconda", "docker.io", "ghcr.io")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job.get("steps", [])]


def requirements(texts: list[str]) -> dict[str, str]:
    """Return the lowest version of each package in lines like "numpy>=2", "numpy >=2"."""
    found = (re.fullmatch(r"([\w-]+) ?>=([\d.]+)", text) for text in texts)
    return {match[1]: match[2] for match in found if match}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_yaml_parses(path: Path) -> None:
    assert isinstance(read(path), dict)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_fits_the_repository(path: Path) -> None:
    document = read(path)
    assert document["permissions"] == {"contents": "read"}  # a job that needs more asks for it
    targets = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())  # type: ignore[index]
    for step in steps(path):
        for name, target in re.findall(r"(?:^|&& )make ((?:[A-Z]+=\S+ )*)(\S+)", step.get("run", "")):
            assert target in targets, target
            for variable in re.findall(r"([A-Z]+)=", name):
                assert re.search(rf"^{variable} \?=|\$\(.*\b{variable}\b", MAKEFILE, re.MULTILINE), variable
        for script in re.findall(r"(?<!\S)(\.ci/\w+)", step.get("run", "")):
            assert (ROOT / script).stat().st_mode & 0o100, script
    uses = [step["uses"] for step in steps(path) if "uses" in step]
    for action in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", action), f"{action}: pin a version"
    for job in document["jobs"].values():
        assert "timeout-minutes" in job or "uses" in job
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()


def test_only_publishing_may_ask_for_a_token() -> None:
    asking = {
        (path.name, name): job["permissions"]
        for path in WORKFLOWS
        for name, job in read(path)["jobs"].items()
        if "permissions" in job
    }
    assert asking == {
        ("publish.yml", "publish"): {"id-token": "write"},
        ("publish.yml", "release"): {"contents": "write"},
    }
    assert read(ROOT / ".github/workflows/publish.yml")[True] == {"push": {"tags": ["v*"]}}  # YAML reads "on" as true


def test_ci_runs_every_python_of_the_classifiers() -> None:
    found = re.findall(r"Python :: (3\.\d+)", "\n".join(project()["classifiers"]))
    assert read(ROOT / ".github/workflows/ci.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"] == found


def test_nothing_names_the_host_of_an_index() -> None:
    paths = [path for folder in (".github", "packaging") for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert len(paths) > 10
    for path in paths:
        assert not [host for host in INDEXES if host in path.read_text(encoding="utf-8")], path


def test_pre_commit_has_a_ruff_that_pyproject_allows() -> None:
    (rev,) = (repo["rev"] for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] if "ruff" in repo["repo"])
    least = requirements(project()["optional-dependencies"]["lint"])["ruff"]
    assert [int(part) for part in rev.removeprefix("v").split(".")] >= [int(part) for part in least.split(".")]


def test_the_version_is_one() -> None:
    def check(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / ".ci" / "version"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    from mpistrat import __version__

    assert check().stdout == f"{__version__}\n", check().stderr
    wrong = check("v999.0")
    assert wrong.returncode == 1 and f"the tag v999.0 is not v{__version__}" in wrong.stderr


def test_recipes_have_the_dependencies_of_pyproject() -> None:
    table = project()
    needed = requirements(table["dependencies"])
    recipe = read(ROOT / "packaging/conda/recipe.yaml")["requirements"]
    assert requirements(recipe["run"]) == needed
    spack = (ROOT / "packaging/spack/package.py").read_text()
    found = dict(re.findall(r'depends_on\("py-([\w-]+)@([\d.]+):", type=\("build", "run"\)\)', spack))
    assert found == needed
    assert f'"python@{table["requires-python"].removeprefix(">=")}:"' in spack
    extras = table["optional-dependencies"]
    for extra, package in {"tables": "pyarrow", "torch": "torch"}.items():
        assert f'"py-{package}@{requirements(extras[extra])[package]}:"' in spack
    assert extras["parquet"] == extras["tables"]
    build = requirements(["setuptools>=77.0.3"])
    assert requirements(recipe["host"]) == build and '"py-setuptools@77.0.3:"' in spack
    assert "setuptools>=77.0.3" in (ROOT / "pyproject.toml").read_text()


def test_images_are_those_of_the_job_scripts() -> None:
    """The MPI operator starts sshd by the words of the pod: port, file and user must be the image's."""
    image = (ROOT / "packaging" / "Dockerfile").read_text()
    job = read(ROOT / "jobscripts" / "kubernetes-mpijob.yaml")["spec"]
    worker = job["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert f"'Port {worker['readinessProbe']['tcpSocket']['port']}'" in image
    assert f">{worker['args'][-1]}" in image and f"'HostKey {job['sshAuthMountPath']}/id_rsa'" in image
    assert f"--uid {worker['securityContext']['runAsUser']} " in image
    name = worker["image"].partition("/")[2]
    about = (ROOT / "packaging" / "README.md").read_text()
    assert f"-t {name} " in about and f"-t {name} " in image
    script = (ROOT / "jobscripts" / "slurm-apptainer.sh").read_text()
    assert "apptainer exec --nv mpistrat.sif" in script and "apptainer build mpistrat.sif" in about
    families = {"OpenMPI": "openmpi-bin"}
    assert families[job["mpiImplementation"]] in image and "--mpi=pmix" in script
    assert "openmpi-bin" in (ROOT / "packaging" / "apptainer.def").read_text()


def test_links_come_from_the_repository_that_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPISTRAT_REPOSITORY", raising=False)
    code = "import runpy; print(runpy.run_path('setup.py')['urls']())"
    shown = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        ).stdout
        for env in ({}, {"MPISTRAT_REPOSITORY": "https://host.example/a/b/"})
    ]
    assert shown[0] == "{}\n" and "'Issues': 'https://host.example/a/b/issues'" in shown[1]
