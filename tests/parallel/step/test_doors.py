"""Each option of a step is a part that can be taken out: without its files and its rows of the table all else works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.step.table import TABLE
from tests.launch.launcher import ROOT

OPTIONS = {
    "sharded gradients": ["step/handed_over.py", "arena/buckets.py", "variables/own_gradients.py"],
    "early sums": ["step/early_start.py"],
    "fewer bytes": ["step/fewer_bytes.py", "arena/encoded.py", "arena/wire.py", "cross_device/fewer_bytes.py"],
    "local steps": ["step/outer.py"],
    "mesh": ["step/mesh.py", "strategy/mesh.py", "strategy/mesh_strategy.py", "strategy/axes.py"],
    "GPUs": ["step/on_stream.py", "step/early_on_gpu.py", "optimizers/kernels.py", "optimizers/device_scale.py"],
    "several GPUs on a rank": [],
    "parameter servers": ["parameter_server"],
}
ROWLESS = ["parameter servers"]  # a step of them is one of `Store`, not of the table

# Each way of a step adds up gradients that are small whole numbers, so that any order of sums gives the same weights.
PROGRAM = """
import sys
import numpy as np
import mpistrat as ms

WITHOUT = sys.argv[1]
assert ms.__file__.startswith(sys.argv[2])
WAYS = {
    "": lambda: ms.MultiWorkerMirroredStrategy(),
    "whole slots": lambda: ms.MultiWorkerMirroredStrategy(sharded_slots=False),
    "sharded gradients": lambda: ms.MultiWorkerMirroredStrategy(sharded_gradients=True),
    "early sums": lambda: ms.MultiWorkerMirroredStrategy(),
    "fewer bytes": lambda: ms.MultiWorkerMirroredStrategy(
        communication_options=ms.CommunicationOptions(wire="bfloat16")),
    "local steps": lambda: ms.MultiWorkerMirroredStrategy(
        local_steps=ms.LocalSteps(1, outer_learning_rate=1.0, outer_momentum=0.0)),
    "mesh": lambda: ms.MeshStrategy({"data": -1}),
}
LACKING = {  # what takes qualities from a strategy
    "sharded gradients": "sharded_gradients=True", "local steps": "local_steps=LocalSteps(every=1,", "mesh": "a mesh",
}
RULES = {
    "SGD": (lambda: ms.optimizers.SGD(0.5, momentum=0.5), [-0.5, -1.25]),  # times the sum of the gradients
    "clipped": (lambda: ms.optimizers.SGD(0.5, global_clipnorm=1e30, momentum=0.5), [-0.5, -1.25]),
}
SIZE = 600_000

for name, make in WAYS.items():
    if name == WITHOUT:
        continue
    for make_rule, factors in RULES.values():
        with make() as strategy:
            words = [*strategy.extended.placement.lacking.values()]
            assert len(words) == (name in LACKING) and "".join(words).startswith(LACKING.get(name, "")), words
            with strategy.scope():
                w = ms.Variable(np.zeros(SIZE, np.float32), name="w")
                optimizer = make_rule()

            def step():
                replica = ms.get_replica_context().replica_id_in_sync_group
                w.grad[...] = (np.arange(SIZE) % 8) * (replica + 1)
                if name == "early sums":
                    optimizer.begin([w])
                optimizer.apply_gradients([(w.grad, w)])

            n = strategy.num_replicas_in_sync
            for factor in factors:
                strategy.run(step)
                expected = factor * (np.arange(SIZE) % 8) * (n * (n + 1) // 2)
                assert np.array_equal(np.asarray(w), expected), name
print("all ways work")
"""


def without(option: str, folder: Path) -> str:
    """Copy the package without an option; return the folder that has it."""
    package = folder / "mpistrat"
    shutil.copytree(ROOT / "mpistrat", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in OPTIONS[option]:
        path = package / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    table = package / "step" / "table.py"
    lines = table.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not (line.lstrip().startswith("Row(") and f'"{option}"' in line)]
    assert (len(kept) < len(lines)) != (option in ROWLESS)
    table.write_text("".join(kept))
    return str(folder)


def test_every_row_belongs_to_an_option_or_to_all():
    names = {row.name for row in TABLE} - {"every other", "CPUs", "slots divided over nodes"}
    assert names == set(OPTIONS) - set(ROWLESS)


@pytest.mark.parametrize("option", OPTIONS)
def test_all_other_ways_work_without_an_option(option, mpi_run, tmp_path):
    folder = without(option, tmp_path)
    program = tmp_path / "program.py"  # beside the package, which it imports
    program.write_text(PROGRAM)
    result = mpi_run([str(program), option, folder], 2, 120, env={"MPISTRAT_SHARED_MEMORY": "0"})
    assert result.returncode == 0, result
    assert all("all ways work" in text for text in result.out), result


@pytest.mark.parametrize("option", OPTIONS)
def test_the_contract_of_all_other_strategies_holds_without_an_option(option, mpi, tmp_path):
    folder = without(option, tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--mpi-env", f"{mpi.name}={mpi.python}"]
    chosen = ["tests/contract/test_strategies.py", "-k", "np2" + " and not mesh" * (option == "mesh")]
    environment = dict(os.environ, PYTHONPATH=folder)
    found = subprocess.run([*words, *chosen], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout[-3000:]
