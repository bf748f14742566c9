"""The guides in docs/ and the README say what is so: their programs run and print what is shown, their tables hold."""

import contextlib
import doctest
import importlib
import inspect
import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms

FOLDER = Path(__file__).parents[2] / "docs"
INPUT, SERVERS, README = "input.md", "parameter_servers.md", "../README.md"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "ms": 1e-3, "s": 1}
FILE = re.compile(r"# (\w+\.py)\n")  # the first line of a program that is a file, for a command to run


def blocks(page):
    """The language, the text and the line before the text of every fenced block."""
    text = (FOLDER / page).read_text()
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2], text.count("\n", 0, match.start(2))


def commands(page):
    """The words of every command of the page, what it shows, and the line."""
    for language, text, line in blocks(page):
        if language == "console":
            for words, shown in re.findall(r"^\$ (.*)\n((?:[^$].*\n|\n)*)", text, re.MULTILINE):
                yield shlex.split(words), shown, line


def cells(page, title):
    """The cells of the rows of the tables under a title."""
    part = (FOLDER / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]


def printed_by(action):
    """What an action prints on all ranks, in their order. Collective."""
    from mpi4py import MPI

    with contextlib.redirect_stdout(io.StringIO()) as out:
        action()
    return "".join(MPI.COMM_WORLD.allgather(out.getvalue()))


def compare(page, shown, printed, line):
    """Compare what the page shows with what was printed; ... stands for anything."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    same = doctest.OutputChecker().check_output(shown, printed, flags)
    assert same, f"{page}, line {line}, shows\n{shown}but the program printed\n{printed}"


def run_command(words):
    from mpistrat.cli.main import main

    assert main(words) == 0


def run_page(page):
    """Run the page's programs from top to bottom, and compare. Return how many ran and were compared. Collective."""
    names = {"__name__": "__main__"}
    printed = ""
    ran = compared = 0
    for language, text, line in blocks(page):
        if language == "python" and not FILE.match(text):
            code = compile("\n" * line + text, page, "exec")
            printed = printed_by(lambda code=code: exec(code, names))
            ran += 1
            continue
        if language == "console":
            for words, shown, at in commands(page):
                if at == line and words[:3] == ["python", "-m", "mpistrat"]:
                    compare(page, shown, printed_by(lambda words=words: run_command(words[3:])), line)
                    compared += 1
        elif printed:  # a text right behind a program that prints
            compare(page, text, printed, line)
            compared += 1
        printed = ""
    return ran, compared


@pytest.mark.ranks(1)
def test_programs_of_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran, compared = run_page(INPUT)
    assert ran > 8
    assert compared > 8


@pytest.mark.ranks(4)
def test_programs_of_parameter_servers(mpi_tmp_path, monkeypatch):
    monkeypatch.chdir(mpi_tmp_path)
    ran, compared = run_page(SERVERS)
    assert ran > 8
    assert compared > 8


JOBS = [
    pytest.param(page, words, shown, line, id=" ".join(words))
    for page in (INPUT, SERVERS, README)
    for words, shown, line in commands(page)
    if "mpiexec" in words
]


@pytest.mark.parametrize(("page", "words", "shown", "line"), JOBS)
def test_jobs(mpi_run, tmp_path, page, words, shown, line):
    """What stands as [NAME=value …] mpiexec -n RANKS python …"""
    start = words.index("mpiexec")
    assert [words[start + 1], words[start + 3]] == ["-n", "python"]
    for language, text, _ in blocks(page):
        if language == "python" and (file := FILE.match(text)):
            (tmp_path / file[1]).write_text(text)
    env = dict(word.split("=", 1) for word in words[:start])
    result = mpi_run(words[start + 4 :], int(words[start + 2]), timeout=100, env=env, cwd=tmp_path)
    assert result.returncode == 0, result
    compare(page, shown, result.stdout, line)


@pytest.mark.ranks(2)
def test_policies(mpi_tmp_path):
    shown = {row[0]: row[1:] for row in cells(INPUT, "Over the ranks") if row[0] in ("auto", "file", "off", "hint")}
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
@pytest.mark.parametrize(("page", "least"), [(INPUT, 10), (SERVERS, 5)])
def test_fixed_numbers(page, least):
    rows = [row for row in cells(page, "Fixed numbers") if row[2].startswith("`")]
    assert len(rows) > least
    for what, value, where in rows:
        module, name, more = re.fullmatch(r"`([a-z_0-9.]+)\.([\w.]+)`(?: \+ (\d+))?", where).groups()
        found = importlib.import_module(f"mpistrat.{module}")
        for part in name.split("."):  # a name, or an argument with its default
            found = getattr(found, part) if hasattr(found, part) else inspect.signature(found).parameters[part].default
        number, _, unit = value.partition(" ")
        assert found + int(more or 0) == pytest.approx(int(number) * UNITS[unit], rel=1e-12), what
