"""Runs of `mpistrat shards` for tests, in this process or another, and input for them."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.cli.main import main
from mpistrat.data import HDF5Dataset
from tests.launch.launcher import ROOT

ROWS = 50


@dataclass
class Done:
    stdout: str
    stderr: str


def mpistrat(*words: Any, cwd: Path = ROOT, status: int = 0) -> Done:
    """Run the program in this process; it must end with this status."""
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            found = main([str(word) for word in words])
    except SystemExit as end:  # argparse
        found = end.code
    finally:
        os.chdir(before)
    assert found == status, out.getvalue() + err.getvalue()
    return Done(out.getvalue(), err.getvalue())


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, cwd=cwd, env=env)


def read(target: Any) -> dict[str, np.ndarray]:
    dataset = HDF5Dataset(target, verify=True)
    return dataset.rows(range(len(dataset)))


def table(path: Path, delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["id", "a", "b", "name"])
        for i in range(ROWS):
            writer.writerow([f"{i:03d}", i / 8, "" if i == 3 else -i, f'é, "{i}"\nnext'])
    return path
