"""What a program does not use it does not load: P ranks would open each module P times."""

from __future__ import annotations

import json
import os
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import mpistrat as ms
from tests.harness.house_rules import FRAMEWORKS, modules
from tests.launch.launcher import ROOT

LAZY = ("mpistrat", "mpistrat.cluster.resolvers", "mpistrat.data", "mpistrat.train")

IMPORT = "import mpistrat as ms"
TRAIN = """
import numpy as np
import mpistrat as ms
strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = ms.Variable(np.zeros(4, np.float32), name="w")
    optimizer = ms.optimizers.Adam(0.25)

def step():
    w.grad[:] = 1
    optimizer.apply_gradients([(w.grad, w)])

for _ in range(10):
    strategy.run(step)
assert np.allclose(w, -2.5)  # a constant gradient moves weights by the learning rate
strategy.close()
"""
# What of `ms.` is a module.
MODULES = ["cluster_resolver", "context", "coordinator", "data", "errors", "estimator", "lookup", "nn", "optimizers",
           "partitioners", "random", "shadow", "tf", "timeline", "train"]  # fmt: skip
LIBRARIES = ["h5py", "cupy", "cloudpickle", "jinja2", "keras", "jax", "matplotlib", "pytest", "safetensors", "tensorboardX",
             "torch"]  # fmt: skip
OURS = ["batch_jobs", "bench", "cli", "coordinator", "doctor", "estimator", "examples", "jax", "keras", "parameter_server",
        "shadow", "timeline", "torch", "train"]  # fmt: skip
# Of data/ a strategy needs only how checkpoints are checked.
INPUT = ["data.dataset", "data.feed", "data.nodes", "data.files.hdf5", "strategy.input"]
STRATEGY = ["optimizers", "strategy", "variables"]


def python(program: str, **environment: str) -> str:
    command = [sys.executable, "-c", program]
    reply = subprocess.run(command, cwd=ROOT, env=environment or None, capture_output=True, text=True, timeout=60)
    assert reply.returncode == 0, reply.stderr
    return reply.stdout


def loaded_by(program: str) -> set[str]:
    return set(json.loads(python(f"{program}\nimport sys, json; print(json.dumps(sorted(sys.modules)))")))


@pytest.mark.parametrize(
    ("program", "most", "absent"),
    [(IMPORT, 31, [*OURS, *INPUT, *STRATEGY]), (TRAIN, 144, [*OURS, *INPUT])],
    ids=["import", "train"],
)
def test_a_program_loads_what_it_uses(program, most, absent):
    loaded = loaded_by(program)
    assert not loaded & {*LIBRARIES, *(f"mpistrat.{name}" for name in absent)}
    ours = {name for name in loaded if name.partition(".")[0] == "mpistrat"}
    assert len(ours) <= most, f"{len(ours)} of {len(modules())} modules: {sorted(ours)}"


@pytest.mark.parametrize("package", LAZY)
def test_names_are_there_before_they_are_loaded(package):
    names = json.loads(
        python(
            f"import json, {package}\n"
            f"before = dir({package})\n"
            f"names = {package}.__all__\n"
            f"assert set(names) <= set(before), set(names) - set(before)\n"
            f"for name in names: getattr({package}, name)\n"
            f"print(json.dumps(names))"
        )
    )
    assert len(names) == len(set(names)) > 5
    everything: dict[str, object] = {}
    exec(f"from {package} import *", everything)
    assert set(names) <= set(everything)


@pytest.mark.parametrize("package", LAZY)
def test_no_module_hides_what_has_its_name(package):
    """Python puts `mpistrat.launcher.survive`, the module, under its name into the package when it is loaded."""
    parts = [part.name for part in pkgutil.iter_modules(sys.modules[package].__path__)]
    parts = [part for part in parts if part not in (*FRAMEWORKS, "__main__")]
    shown = python(
        f"import importlib, types, {package}\n"
        f"for part in {parts}: importlib.import_module('{package}.' + part)\n"
        f"is_module = lambda name: isinstance(getattr({package}, name), types.ModuleType)\n"
        f"print(*filter(is_module, sorted({package}.__all__)))"
    )
    assert shown.split() == (MODULES if package == "mpistrat" else [])


def test_modules_are_attributes_before_anybody_has_imported_them():
    code = (
        "import mpistrat as ms; print(ms.types.ReduceOp.SUM.name, ms.data.spec.__name__, hasattr(ms, 'no_such_module'))"
    )
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert reply.stdout == "SUM mpistrat.data.spec False\n", reply


def test_an_unknown_name_is_an_error_with_a_suggestion():
    with pytest.raises(AttributeError, match="module 'mpistrat' has no attribute 'Varable'") as raised:
        ms.Varable  # noqa: B018
    assert raised.value.name == "Varable" and raised.value.obj is ms  # by which Python finds "Did you mean"
    with pytest.raises(ImportError, match="cannot import name 'Dataset' from 'mpistrat'"):
        from mpistrat import Dataset  # noqa: F401
    assert not hasattr(ms.train, "Means")


def test_what_was_pickled_elsewhere_is_found():
    program = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.stdin.read()))[1])"
    text = pickle.dumps((ms.train.Mean, ms.ReduceOp.SUM, ms.data.InputOptions)).hex()
    reply = subprocess.run([sys.executable, "-c", program], input=text, cwd=ROOT, capture_output=True, text=True)
    assert reply.stdout.strip() == str(ms.ReduceOp.SUM), reply.stderr


@pytest.mark.parametrize(
    "program",
    [
        "ms.get_replica_context().all_reduce('sum', 1)",  # of the default strategy, which registers itself
        "ms.context.get_strategy()",
        "ms.nn.compute_average_loss([1.0])",
        "ms.monitor, ms.survive, ms.launch",
        "from mpistrat.cluster import Topology",
        "import mpistrat.parameter_server.strategy",
        "import mpistrat.estimator, mpistrat.cli.main, mpistrat.bench",
    ],
)
def test_parts_work_alone(program):
    python(f"import mpistrat as ms\n{program}")


def test_the_environment_names_a_strategy_that_is_not_loaded():
    python(
        "import mpistrat as ms\n"
        "try: ms.strategy_from_environment()\n"
        "except ms.errors.LayoutError as error: assert 'ParameterServerStrategy' in str(error)\n"
        "else: raise SystemExit('one rank is no worker and server')",
        **{**os.environ, "MPISTRAT_STRATEGY": "parameter_server"},
    )


def test_a_package_without_sources_says_so(tmp_path: Path):
    folder = tmp_path / "part"
    folder.mkdir()
    (folder / "__init__.py").write_text("from mpistrat.base.lazy import lazy\n__getattr__, __dir__ = lazy(__name__)\n")
    program = (
        "import compileall, os, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"compileall.compile_dir({str(folder)!r}, legacy=True, quiet=1); os.remove({str(folder / '__init__.py')!r})\n"
        "import part\n"
        "try: part.name\n"
        "except ImportError as error: print(error)"
    )
    assert "only compiled files are installed" in python(program)


def test_an_old_numpy_is_refused():
    program = "import numpy; numpy.__version__ = '1.26.4'; import mpistrat"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "mpistrat: expected numpy 2.0 or newer, got numpy 1.26.4. pip install --upgrade 'numpy>=2.0'" in done.stderr
