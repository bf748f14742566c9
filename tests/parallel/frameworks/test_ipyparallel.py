"""Notebooks: ipyparallel's engines, started by MPI, are ranks of a strategy that stays between cells, as the page says."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("ipyparallel")

PROGRAM = """
import ipyparallel as ipp

with ipp.Cluster(engines="mpi", n=2, log_level=40) as client:
    view = client[:]
    view.block = True

    def train():
        import mpistrat as ms

        with ms.MultiWorkerMirroredStrategy() as strategy:
            return strategy.rank, float(strategy.reduce("SUM", 1.0))

    assert view.apply_sync(train) == [(0, 2.0), (1, 2.0)]
    view.execute('''
import numpy as np
import mpistrat as ms
strategy = ms.MirroredStrategy()
with strategy.scope():
    w = ms.Variable(np.zeros(3), name="w")
    optimizer = ms.optimizers.SGD(0.5)
''')
    for _ in range(2):
        view.execute("strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w)]))")
    view.execute("found = w.numpy().tolist(); strategy.close()")
    assert view["found"] == [[-2.0] * 3] * 2
print("done")
"""


def test_engines_are_ranks(mpi, tmp_path):
    folder = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": folder + os.pathsep + os.environ["PATH"], "IPYTHONDIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0 and "done" in result.stdout, result.stdout + result.stderr
