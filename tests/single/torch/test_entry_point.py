"""The entry point that PyTorch calls at `import torch`: when it acts, its cost, and PyTorchs that it does not know."""

import importlib.metadata
import re
import subprocess
import sys
import types
import warnings

import pytest

import _mpistrat_torch
import mpistrat as ms
from mpistrat.cluster.launcher_variables import RANK_VARIABLES
from mpistrat.doctor.process import check_torch
from tests.launch.launcher import ROOT


@pytest.fixture
def stub(monkeypatch):
    """The entry point as a process has it that no launcher started."""
    for name in (*_mpistrat_torch.LAUNCHERS, _mpistrat_torch.TORCHRUN, _mpistrat_torch.SWITCH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_mpistrat_torch, "_chosen", "")
    monkeypatch.setattr(_mpistrat_torch, "_set", {})
    return _mpistrat_torch


class _Torch:
    """The parts of torch.distributed that the entry point uses, without PyTorch."""

    def __init__(self, monkeypatch, *, mpi=False):
        self.calls, backends = [], ["gloo"]

        def register_backend(name, create, *, extended_api, devices):
            assert extended_api
            backends.append(name)

        def theirs(url, **kwargs):
            self.calls.append(url)
            return iter(())

        self.c10d = types.SimpleNamespace(
            __name__="torch.distributed.distributed_c10d",
            _MPI_AVAILABLE=mpi,
            ProcessGroupMPI="torch's",
            _new_process_group_helper="torch's",
        )
        self.rendezvous = types.SimpleNamespace(
            __name__="torch.distributed.rendezvous", _rendezvous_handlers={"env": theirs}
        )
        self.backends = backends
        self.distributed = types.SimpleNamespace(
            is_available=lambda: True,
            Backend=types.SimpleNamespace(backend_list=backends, register_backend=register_backend),
        )
        modules = {"": self.distributed, ".distributed_c10d": self.c10d, ".rendezvous": self.rendezvous}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, f"torch.distributed{name}", module)

    @property
    def env(self):
        return self.rendezvous._rendezvous_handlers["env"]


def test_the_signs_of_launchers_are_those_of_the_package():
    assert tuple(RANK_VARIABLES) == _mpistrat_torch.LAUNCHERS


def test_pyproject_names_it():
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."torch.backends"]\nmpistrat = "_mpistrat_torch:load"' in text
    assert 'py-modules = ["_mpistrat_torch"]' in text
    assert re.search(r'^torch = \["torch>=2\.5"\]', text, re.MULTILINE)


def test_the_installed_package_has_it():
    found = importlib.metadata.entry_points(group="torch.backends")
    if "mpistrat" not in found.names:
        pytest.fail("this environment was installed before the entry point was there: make, or pip install -e . again")
    assert found["mpistrat"].value == "_mpistrat_torch:load"


def test_it_imports_nothing_that_takes_time():
    code = (
        "import sys, importlib, multiprocessing, os, warnings, urllib.parse, typing, collections.abc\n"
        "before = set(sys.modules)\n"
        "import _mpistrat_torch\n"
        "_mpistrat_torch.load()\n"
        "print(sorted(set(sys.modules) - before), _mpistrat_torch.chosen())"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True, timeout=60)
    assert done.stdout == "['_mpistrat_torch'] off (no launcher of MPI started this process)\n", done.stderr


def test_it_acts_only_under_a_launcher(stub, monkeypatch):
    torch = _Torch(monkeypatch)
    stub.load()
    assert (torch.backends, stub.chosen()) == (["gloo"], "off (no launcher of MPI started this process)")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("MPISTRAT_TORCH", "0")
    stub.load()
    assert (torch.backends, stub.chosen()) == (["gloo"], "off (MPISTRAT_TORCH=0)")
    assert torch.c10d._new_process_group_helper == "torch's"


@pytest.mark.parametrize("name", _mpistrat_torch.LAUNCHERS)
def test_it_registers_under_each_launcher(stub, monkeypatch, name):
    torch = _Torch(monkeypatch)
    before = torch.env
    monkeypatch.setenv(name, "1")
    stub.load()
    stub.load()
    assert torch.backends == ["gloo", "mpistrat"]
    assert (
        torch.c10d._MPI_AVAILABLE
        and callable(torch.c10d._new_process_group_helper)
        and callable(torch.c10d.ProcessGroupMPI.create)
    )
    assert torch.env is not before
    assert stub.chosen() == "on (mpistrat, mpi, env://)"


def test_a_torch_that_was_built_with_mpi_keeps_its_own(stub, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    torch = _Torch(monkeypatch, mpi=True)
    stub.load()
    assert (torch.c10d.ProcessGroupMPI, torch.c10d._new_process_group_helper) == ("torch's", "torch's")
    assert stub.chosen() == "on (mpistrat, env://)"
    monkeypatch.setenv("MPISTRAT_TORCH", "mpi")
    torch = _Torch(monkeypatch, mpi=True)
    stub.load()
    assert torch.c10d.ProcessGroupMPI != "torch's"
    assert stub.chosen() == "on (mpistrat, mpi, env://)"


@pytest.mark.parametrize("missing", ["_MPI_AVAILABLE", "_new_process_group_helper", "_rendezvous_handlers"])
def test_a_missing_private_name_is_a_warning_and_the_rest_works(stub, monkeypatch, missing):
    monkeypatch.setenv("PMI_SIZE", "2")
    torch = _Torch(monkeypatch)
    delattr(torch.rendezvous if missing == "_rendezvous_handlers" else torch.c10d, missing)
    with pytest.warns(UserWarning, match=rf"this PyTorch has no torch\.distributed\.\w+\.{missing}: "):
        stub.load()
    assert "mpistrat" in torch.backends
    left = "mpistrat, mpi" if missing == "_rendezvous_handlers" else "mpistrat, env://"
    assert stub.chosen() == f"on ({left})"
    if missing != "_rendezvous_handlers":
        assert torch.c10d.ProcessGroupMPI == "torch's"


def test_it_never_raises(stub, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    stub.load()
    assert stub.chosen().startswith("off (ModuleNotFoundError: ")
    torch = _Torch(monkeypatch)
    del torch.c10d._new_process_group_helper
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stub.load()
    assert stub.chosen().startswith("off (UserWarning: ")
    monkeypatch.setitem(sys.modules, "torch.distributed", types.SimpleNamespace(is_available=lambda: False))
    stub.load()
    assert stub.chosen() == "off (this PyTorch was built without torch.distributed)"


def test_under_torchrun_only_the_errors_are_there(stub, monkeypatch):
    """Its ranks may also have an mpiexec or srun around their torchrun."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    torch = _Torch(monkeypatch)
    before = torch.env
    stub.load()
    assert torch.backends == ["gloo", "mpistrat"]
    assert torch.env is before
    assert not torch.c10d._MPI_AVAILABLE and callable(torch.c10d._new_process_group_helper)


GIVEN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}


def rendezvous(stub, monkeypatch, url="env://"):
    """Return the numbers with which the rendezvous over MPI begins; None where torch's own does."""
    torch, met = _Torch(monkeypatch), []
    monkeypatch.setattr(stub, "_imported", lambda name: lambda *args, **kwargs: met.append((name, *args)))
    stub.load()
    torch.env(url)
    assert len(met) + len(torch.calls) == 1
    return met[0] if met else None


@pytest.mark.parametrize(
    ("variables", "query", "numbers"),
    [
        (GIVEN, "", None),
        ({"MASTER_ADDR": "h1", "MASTER_PORT": "1"}, "?rank=0&world_size=2", None),
        ({}, "", {}),
        ({"MASTER_ADDR": "h1", "MASTER_PORT": "1"}, "", {}),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "", {"RANK": "1", "WORLD_SIZE": "2"}),
        ({"RANK": "1", "MASTER_ADDR": "h1"}, "?rank=0&world_size=4", {"RANK": "0", "WORLD_SIZE": "4"}),
        ({**GIVEN, "MASTER_PORT": ""}, "", {"RANK": "1", "WORLD_SIZE": "2"}),
    ],
)
def test_the_users_variables_stay_if_all_four_are_given(stub, monkeypatch, variables, query, numbers):
    monkeypatch.setenv("PMI_SIZE", "2")
    for name in GIVEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    expected = None if numbers is None else ("rendezvous", numbers)
    assert rendezvous(stub, monkeypatch, "env://" + query) == expected


def test_its_own_variables_are_not_the_users(stub, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    for name in GIVEN:
        monkeypatch.setenv(name, "to be set")
    stub.set_variables(GIVEN)
    assert rendezvous(stub, monkeypatch) == ("rendezvous", {})
    numbers = {"RANK": "0", "WORLD_SIZE": "2"}
    assert rendezvous(stub, monkeypatch, "env://?rank=0&world_size=2") == ("rendezvous", numbers)
    monkeypatch.setenv("MASTER_PORT", "29501")  # by the program, since
    assert rendezvous(stub, monkeypatch) is None
    monkeypatch.delenv("MASTER_PORT")
    assert rendezvous(stub, monkeypatch) == ("rendezvous", {})
    monkeypatch.setenv("RANK", "0")
    assert rendezvous(stub, monkeypatch) == ("rendezvous", {"RANK": "0"})


def test_a_child_of_a_rank_is_no_rank(stub, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    assert rendezvous(stub, monkeypatch) is None


@pytest.mark.parametrize(
    ("version", "known", "env", "status", "what"),
    [
        (None, True, {}, None, ""),
        ("2.4.1", True, {}, "warning", "2.4.1 loads no backends"),
        ("2.13.0+cpu", False, {}, "warning", "the installed mpistrat has no entry point"),
        ("2.13.0+cpu", True, {"MPISTRAT_TORCH": "0"}, "OK", "MPISTRAT_TORCH=0 keeps torch.distributed from starting"),
        ("2.13.0", True, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "OK", "TORCH_DEVICE_BACKEND_AUTOLOAD keeps"),
        ("2.5.0", True, {}, "OK", "2.5.0; under a launcher torch.distributed starts over MPI"),
    ],
)
def test_the_doctor_shows_it(monkeypatch, version, known, env, status, what):
    def version_of(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    names = types.SimpleNamespace(names={"mpistrat"} if known else {"other"})
    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: names)
    for name in ("MPISTRAT_TORCH", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = list(check_torch())
    assert [one.status for one in found] == ([] if status is None else [status])
    assert all(what in one.what for one in found)


def test_show_config_shows_it(monkeypatch, stub, capsys):
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    assert "torch.distributed" not in ms.show_config()
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert re.search(r"^torch\.distributed +not registered: call mpistrat\.torch\.use\(\)$", ms.show_config(), re.M)
    stub.load()
    assert re.search(r"^torch\.distributed +off \(no launcher of MPI started this process\)$", ms.show_config(), re.M)
    assert re.search(r"^MPISTRAT_TORCH +1 \(default\)$", ms.show_config(), re.M)
