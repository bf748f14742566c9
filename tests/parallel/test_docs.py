"""docs/input.md says what is so: its programs run and print what is shown, its tables hold."""

import contextlib
import doctest
import importlib
import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms

PAGE = Path(__file__).parents[2] / "docs" / "input.md"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def blocks():
    """The language, the text and the line before the text of every fenced block."""
    page = PAGE.read_text()
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        yield match[1], match[2], page.count("\n", 0, match.start(2))


def cells(title):
    """The cells of the rows of the tables under a title."""
    part = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]


def printed_by(action):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        action()
    return out.getvalue()


def compare(shown, printed, line):
    """Compare what the page shows with what was printed; ... stands for anything."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    same = doctest.OutputChecker().check_output(shown, printed, flags)
    assert same, f"{PAGE.name}, line {line}, shows\n{shown}but the program printed\n{printed}"


def run_command(words):
    from mpistrat.cli.main import main

    assert main(shlex.split(words)) == 0


@pytest.mark.ranks(1)
def test_programs_print_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    printed = ""
    ran = compared = 0
    for language, text, line in blocks():
        if language == "python":
            code = compile("\n" * line + text, PAGE.name, "exec")
            printed = printed_by(lambda code=code: exec(code, names))
            ran += 1
            continue
        if language == "console":
            for words, shown in re.findall(r"^\$ python -m mpistrat (.*)\n((?:[^$].*\n|\n)*)", text, re.MULTILINE):
                compare(shown, printed_by(lambda words=words: run_command(words)), line)
                compared += 1
        elif printed:  # a text right behind a program that prints
            compare(text, printed, line)
            compared += 1
        printed = ""
    assert ran > 8 and compared > 8


@pytest.mark.ranks(2)
def test_policies(mpi_tmp_path):
    shown = {row[0]: row[1:] for row in cells("Over the ranks") if row[0] in ("auto", "file", "off", "hint")}
    assert len(shown) == 4
    strategy = ms.MultiWorkerMirroredStrategy()
    if strategy.rank == 0:
        ms.data.write_shards(mpi_tmp_path / "set", {"x": np.arange(10)}, rows_per_shard=4)
    strategy.comm.Barrier()
    rows = ms.data.HDF5Dataset(mpi_tmp_path / "set", fields="x")
    hinted = rows.shard(ms.data.SHARD_HINT, ms.data.SHARD_HINT)
    got = {}
    for policy in shown:
        dataset = (hinted if policy == "hint" else rows).batch(4).with_options(ms.data.Options(policy))
        got[policy] = " ".join(str(batch.tolist()) for batch in strategy.distribute_dataset(dataset))
    rank = strategy.rank
    strategy.close()
    assert got == {policy: of_rank[rank] for policy, of_rank in shown.items()}


@pytest.mark.ranks(1)
def test_fixed_numbers():
    rows = [row for row in cells("Fixed numbers") if row[2].startswith("`")]
    assert len(rows) > 10
    for what, value, where in rows:
        module, name, more = re.fullmatch(r"`([a-z_0-9.]+)\.([\w.]+)`(?: \+ (\d+))?", where).groups()
        found = importlib.import_module(f"mpistrat.{module}")
        for part in name.split("."):
            found = getattr(found, part)
        number, _, unit = value.partition(" ")
        assert found + int(more or 0) == int(number) * UNITS[unit], what
