"""Files that commands write: what cannot be written is an error before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.shards_command import mpistrat


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json", "none/x.json"], "--json: none/x.json: expected a file in a folder that exists, got no such folder"),
        (["--plot", "none/x.png"], "--plot: none/x.png: expected a file in a folder that exists"),
        (["--json", "."], "--json: .: expected a file, got a directory"),
        (["--plot", "x.weird"], "--plot: x.weird: expected a name that ends with one of ."),
    ],
)
@pytest.mark.parametrize("command", ["bench", "plan"])
def test_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str, command: str
) -> None:
    from mpistrat.cli import bench, plan

    def measure(*_: Any, **__: Any) -> None:
        raise AssertionError("it was measured first")

    monkeypatch.setattr(bench, "run", measure)
    monkeypatch.setattr(plan.Machine, "read", measure)
    more = ["--like", "x.json", "--parameters", "1000", "--compute", "1"] if command == "plan" else []
    if "x.weird" in words:
        pytest.importorskip("matplotlib")
    done = mpistrat(command, *more, *words, cwd=tmp_path, status=2 if "x.weird" in words else 1)
    assert message in done.stderr


@pytest.mark.parametrize("folder", ["none/x", "a-file"])
def test_a_folder_for_measuring_that_is_none(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a-file").touch()
    done = mpistrat("bench", "--only", "all_reduce", "--quick", "--folder", folder, cwd=tmp_path, status=1)
    assert f"--folder: {folder}: expected a folder that can be written, got no such folder" in done.stderr
    assert not done.stdout
