"""Tests that `.ci/run` runs once more: a list, which only shrinks, has their causes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MOST = 0  # entries of .ci/flaky.json; lower it with each that goes


def test_the_list_only_shrinks():
    known = json.loads((ROOT / ".ci" / "flaky.json").read_text())
    assert len(known) <= MOST
    for name, cause in known.items():
        file, _, function = name.partition("::")
        assert f"def {function.rpartition('::')[2]}(" in (ROOT / file).read_text(), name
        assert cause.strip(), name


@pytest.mark.parametrize(
    ("failed", "status", "out", "err"),
    [
        (["tests/a.py::test_late[np2]"], 0, "1 0\n", "is run once more: the launcher is late"),
        (["tests/a.py::test_late[np2]", "tests/a.py::test_late[np3]"], 0, "2 0\n", "the launcher is late"),
        (
            ["tests/a.py::test_late[np2]", "tests/a.py::test_other"],
            0,
            "2 1\n",
            "tests/a.py::test_other is run once more: its",
        ),
        ([f"tests/a.py::test_late[{number}]" for number in range(6)], 1, "", "6 tests failed, and none is run"),
    ],
)
def test_what_is_run_once_more(tmp_path, failed, status, out, err):
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "flaky").write_text((ROOT / ".ci" / "flaky").read_text())
    (tmp_path / ".ci" / "flaky.json").write_text(json.dumps({"tests/a.py::test_late": "the launcher is late"}))
    cache = tmp_path / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
    done = subprocess.run([sys.executable, ".ci/flaky"], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (status, out), done
    assert err in done.stderr, done
