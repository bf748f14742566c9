"""The command line as a whole: help without words, folded to the terminal; near words; numbers; exit statuses; completion."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpistrat.cli import main as cli
from mpistrat.cli.completion import SHELLS
from mpistrat.cli.main import main
from tests.launch.launcher import ROOT


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int) -> str:
    try:
        found: object = main(words)
    except SystemExit as end:
        found = end.code or 0
    out, err = capsys.readouterr()
    assert found == status, out + err
    return err if status else out


@pytest.mark.parametrize("words", [(), ("shards",)])
def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    help, _, error = said(capsys, *words, status=2).rpartition("\n\n")
    assert f"{help}\n" == said(capsys, *words, "--help", status=0)
    assert error.endswith(": error: expected a command, got none\n")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for parser in parsers(cli._parser()):
        usage, _, rest = parser.format_help().partition("\n\n")
        copied = ("  mpistrat ", "  srun ", "  mpiexec ")  # examples
        lines = [line for line in rest.splitlines() if not line.startswith(copied) and len(line.split()) > 1]
        assert max(map(len, lines)) <= columns, parser.prog
        assert max(map(len, usage.splitlines())) <= max(columns, 75), parser.prog
        if columns == 200 and parser.description and len(parser.description) > 300:
            assert max(map(len, lines)) > 130, "folded to the terminal, not to a width of its own"


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["--versoin"], "--version"),
        (["jbo"], "job"),
        (["top", "--onec"], "--once"),
        (["job", "--site", "frontire", "a.py"], "frontier"),
        (["doctor", "--need", "ncl"], "nccl"),
        (["bench", "--seconds", "3"], None),
        (["plan", "--quiet"], None),
    ],
)
def test_the_nearest_word(capsys: pytest.CaptureFixture[str], words: list[str], nearest: str | None) -> None:
    text = said(capsys, *words, status=2)
    assert f"Did you mean {nearest}?" in text if nearest else "Did you mean" not in text


def test_numbers_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    """Each argument says what it expects: argparse would name a function of this package."""
    checked = 0
    for parser in parsers(cli._parser()):
        for action in parser._actions:
            if action.type not in (None, str, Path):
                assert action.type not in (int, float), (parser.prog, action.dest)
                try:
                    parser._get_value(action, "-")
                except argparse.ArgumentError as error:
                    assert ": expected " in str(error) and "invalid" not in str(error)
                    checked += 1
    assert checked > 30


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["resize", "0"], 2, "expected a whole number from 1 to 65535, got '0'"),
        (["resize", "100000"], 2, "from 1 to 65535"),
        (["resize", "4"], 1, "name one job: there is none here"),
        (["plan", "--parameters", "x"], 2, "--parameters: expected a number > 0, got 'x'"),
        (["plan", "--parameters", "1", "--compute", "nan"], 2, "--compute: expected a number >= 0, got 'nan'"),
        (["plan", "--parameters", "1", "--compute", "1", "--like", "none.json"], 1, "No such file"),
        (["top", "--seconds", "0"], 2, "--seconds: expected a number > 0, got '0'"),
        (["doctor", "--time-limit", "-1"], 2, "--time-limit: expected a number > 0, got '-1'"),
        (["replay", "none.h5", "true"], 1, "none.h5: expected a checkpoint, got no such file"),
        (["replay", "none.h5", "none.py"], 2, "program: expected a file that is there, got none.py"),
        (
            ["shards", "info", "none"],
            1,
            "none: expected a folder, a pattern or an HDF5 file that exists, got no such file",
        ),
        (["shards", "check", "none.h5"], 1, "that exists, got no such file"),
        (["job", "-o", "none/job.sh", "true"], 1, "--output: none/job.sh: expected a file in a folder that exists"),
    ],
)
def test_exit_statuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mpistrat.comm.job_files.supervisors", dict)  # wherever the tests run
    assert text in said(capsys, *words, status=status)


def test_completion_needs_its_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install 'mpistrat[completion]'" in said(capsys, "--print-completion", "bash", status=1)
    assert "Did you mean bash?" in said(capsys, "--print-completion", "bahs", status=2)


def test_completion_in_every_shell(capsys: pytest.CaptureFixture[str]) -> None:
    shtab = pytest.importorskip("shtab")
    assert set(SHELLS) <= set(shtab.SUPPORTED_SHELLS)
    for shell in SHELLS:
        assert "multi_worker_mirrored" in said(capsys, "--print-completion", shell, status=0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mpistrat re", "resize replay"),
        ("mpistrat run --st", "--strategy --standby"),
        ("mpistrat run --strategy m", "mirrored multi_worker_mirrored"),
        ("mpistrat run -n 2 tr", "train.py"),
        ("mpistrat run --log-dir f", "folder"),
        ("mpistrat shards check --j", "--json"),
    ],
)
def test_bash_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, expected: str) -> None:
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    script = said(capsys, "--print-completion", "bash", status=0)
    ask = f'COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_mpistrat; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run([bash, "-c", f"{script}\n{ask}"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{expected}\n", done.stderr


def test_the_script_of_the_package(tmp_path: Path) -> None:
    """`mpistrat` is also `python -m mpistrat`, and both are called mpistrat in usage lines."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "mpistrat"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stderr.startswith("usage: mpistrat [-h]")
