"""Errors travel by their names; frameworks of other versions than those tried are refused before they compute."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import mpistrat as ms
from mpistrat.base.errors import check_framework
from mpistrat.errors import MissingDependencyError
from tests.launch.launcher import ROOT


@pytest.mark.parametrize("version", ["0.5.3", "0.4.31", "0.5"])
def test_an_old_version_names_both_and_the_reason(version: str) -> None:
    with pytest.raises(
        MissingDependencyError, match=f"mpistrat.jax: expected jax 0.6 or newer, got jax {version}.*pip .*memory"
    ):
        check_framework("mpistrat.jax", "jax", version, "0.6", "it keeps memory")


@pytest.mark.parametrize("version", ["0.6.0", "0.10.2", "1.0", "0.6.0.dev20250101", "0.6.0rc1", "unknown"])
def test_this_version_and_newer_ones_pass(version: str) -> None:
    check_framework("mpistrat.jax", "jax", version, "0.6", "")


def test_a_process_sends_an_error_by_its_name_though_it_has_not_used_mpistrat_errors() -> None:
    program = (
        "import sys, cloudpickle, mpistrat\n"
        "from mpistrat.base.errors import ContextError\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(ContextError('here')))"
    )
    sent = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    assert type(pickle.loads(sent)) is ms.errors.ContextError
