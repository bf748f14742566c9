"""The pages of the documentation say what is so: their programs run and print what is shown, their tables hold.

docs/developing.md has the conventions, under Pages.
"""

import doctest
import importlib
import inspect
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from tests.harness import pages
from tests.launch import launcher
from tests.launch.launcher_plugin import ENVS

INPUT, SERVERS = "docs/input.md", "docs/parameter_servers.md"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "ms": 1e-3, "s": 1}
UNDER_EACH_MPI = ("docs/command_line.md", SERVERS, "docs/quickstart.md")  # the others take turns
PAGES = [pages.read(path) for path in pages.paths()]
WIDTH = 76  # columns of a page that show without scrolling
# what a console block may start
PROGRAMS = ("python", "mpistrat", "cat", "cmp", "head", "tail", "ls", "grep", "bash", "echo")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
PATIENCE = 200  # seconds for a command, and for a block


def some(wanted):
    return [pytest.param(page, id=page.path) for page in PAGES if wanted(page)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", some(lambda page: page.runs and page.path in UNDER_EACH_MPI))
def test_page_under_each_mpi(page, mpi, tmp_path):
    Session(page, mpi, tmp_path).run()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", some(lambda page: page.runs and page.path not in UNDER_EACH_MPI))
def test_page(page, pytestconfig, tmp_path):
    mpis = list(pytestconfig.stash[ENVS].all.values())
    if not mpis:
        pytest.skip(pytestconfig.stash[ENVS].why_none)
    if page.needs:
        mpis = [mpi for mpi in mpis if subprocess.run([mpi.python, "-c", f"import {page.needs}"]).returncode == 0]
        if not mpis:
            pytest.skip(f"the page needs {page.needs}")
    Session(page, mpis[PAGES.index(page) % len(mpis)], tmp_path).run()


def test_programs_are_found():
    programs = {page.path: sum(block.program for block in page.blocks) for page in PAGES}
    assert programs[INPUT] > 8
    assert programs[SERVERS] > 8
    assert sum(block.language == "console" for page in PAGES for block in page.blocks) > 8


@pytest.mark.parametrize("page", some(bool))
def test_blocks_are_as_contributing_says(page):
    consoles = "".join(block.text for block in page.blocks if block.language == "console")
    for block in page.blocks:
        where = f"{page.path}, line {block.line}"
        assert block.language in pages.LANGUAGES, f"{where}: a block's language is one of {sorted(pages.LANGUAGES)}"
        assert block.mark != "not run:", f"{where}: why is it not run?"
        assert not block.mark or block.language in ("python", "console", "bash"), (
            f"{where}: {block.mark} means nothing here"
        )
        if block.language == "python":
            compile("\n" * block.line + block.text, page.path, "exec")
            assert not block.file or not block.runs or block.file in consoles, f"{where}: no command runs {block.file}"
        if block.language == "console":
            assert block.commands(), f"{where}: no line begins with $"
        if block.language == "bash" and block.runs:
            reply = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
            assert reply.returncode == 0, f"{where}: {reply.stderr}"


@pytest.mark.parametrize("page", some(bool))
def test_code_is_not_cut_at_the_right_edge(page):
    for block in page.blocks:
        wide = [line for line in block.text.splitlines() if len(line) > WIDTH]
        assert not wide, f"{page.path}, after line {block.line}: more than {WIDTH} columns: {wide[0]}"


@pytest.mark.parametrize("page", some(bool))
def test_pictures_have_words(page):
    for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", page.text):
        assert len(words) > 5, f"{page.path}: {target} has no description"
        assert ((pages.ROOT / page.path).parent / target).exists(), f"{page.path}: there is no {target}"


class Session:
    """A page from top to bottom, in one folder: its programs on ranks that wait for each other, its commands beside them."""

    def __init__(self, page, mpi, tmp_path):
        self.page, self.mpi, self.job = page, mpi, None
        self.folder, self.exchange = tmp_path / "page", tmp_path / "exchange"
        self.folder.mkdir()
        self.exchange.mkdir()
        self.env = {"PATH": f"{Path(mpi.python).parent}:{os.environ['PATH']}", **AS_ROOT}

    def run(self):
        printed = None
        try:
            for number, block in enumerate(self.page.blocks):
                self.where = f"{self.page.path}, line {block.line}"
                if block.language == "text" and block.behind and printed:
                    compare(self.where, block.text, printed)
                printed = None
                if block.runs and block.file:
                    (self.folder / block.file).write_text(block.text)
                elif block.program:
                    printed = self.program(number, block)
                elif block.runs and block.language == "console":
                    self.console(block)
            self.end()
        finally:
            if self.job is not None:
                self.job.end()

    def program(self, number, block):
        """What a program printed on all ranks, in their order; where it shall raise, the forms its message may have."""
        if self.job is None:
            words = [
                self.mpi.python,
                str(Path(pages.__file__).with_name("page_program.py")),
                self.page.path,
                str(self.exchange),
            ]
            self.job = launcher.Job(words, self.page.ranks, self.mpi, self.exchange, cwd=self.folder, env=self.env)
        (self.exchange / f"run-{number}").touch()
        replies = self.replies(number)
        for rank, reply in enumerate(replies):
            if reply["error"] != block.raises:
                pytest.fail(
                    f"{self.where}: rank {rank} raised {reply['error'] or 'nothing'}\n{reply['trace']}", pytrace=False
                )
        if block.raises:
            return [replies[0]["message"], f"{block.raises}: {replies[0]['message']}"]
        return ["".join(reply["out"] for reply in replies)]

    def replies(self, number):
        """Wait until all ranks have run a program; of one that raised, until none can follow."""
        paths = [self.exchange / f"{number}.{rank}.json" for rank in range(self.page.ranks)]
        until = time.monotonic() + PATIENCE
        while not all(path.exists() for path in paths):
            there = [json.loads(path.read_text()) for path in paths if path.exists()]
            if any(reply["error"] for reply in there):
                until = min(until, time.monotonic() + 5)
            if self.job.poll() is not None or time.monotonic() > until:
                traces = "".join(reply["trace"] for reply in there)
                what = launcher.texts(*self.job.outputs())
                pytest.fail(f"{self.where}: {len(there)} of {len(paths)} ranks ran it\n{traces}{what}", pytrace=False)
            time.sleep(0.01)
        return [json.loads(path.read_text()) for path in paths]

    def console(self, block):
        commands = block.commands()
        for number, (command, shown) in enumerate(commands, 1):
            status, printed = self.command(command)
            expected = block.status if number == len(commands) else 0
            assert status == expected, f"{self.where}: $ {command}\nended with status {status}\n{printed}"
            if shown.strip():
                compare(f"{self.where}: $ {command}", shown, [printed])

    def command(self, command):
        """Run a command as [NAME=value …] PROGRAM …; return its exit status and what it printed."""
        words = shlex.split(command)
        if words[0] == "export":
            self.env.update(word.split("=", 1) for word in words[1:])
            return 0, ""
        settings = list(itertools.takewhile(re.compile(r"\w+=").match, words))
        program, *arguments = words[len(settings) :]
        if program == "mpiexec":
            flag, ranks, python, *arguments = arguments
            assert (flag, python) == ("-n", "python"), f"{self.where}: expected mpiexec -n RANKS python …"
            env = {**self.env, **dict(word.split("=", 1) for word in settings)}
            result = launcher.launch(arguments, int(ranks), self.mpi, PATIENCE, env=env, cwd=self.folder)
            assert not result.timed_out, f"{self.where}: {result}"
            assert not result.leftover, f"{self.where}: {result}"
            return result.returncode, result.stdout + (result.stderr if result.returncode else "")
        assert program in PROGRAMS, f"{self.where}: {program} is none of {PROGRAMS}; say <!-- not run: why -->"
        line = f'set -o pipefail; mpistrat() {{ "{self.mpi.python}" -m mpistrat "$@"; }}; {command}'
        mark = uuid.uuid4().hex
        env = launcher.job_environment(mark, self.folder.parent, self.env)
        options = {"cwd": self.folder, "env": env, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            reply = subprocess.run(["bash", "-c", line], timeout=PATIENCE, **options)
        finally:
            left = launcher.with_variable(f"{launcher.MARK}={mark}")
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert not left, f"{self.where}: $ {command}\nleft processes behind"
        return reply.returncode, reply.stdout + (reply.stderr if reply.returncode else "")

    def end(self):
        if self.job is not None:
            (self.exchange / "end").touch()
            status = self.job.wait(30)
            assert status == 0, f"{self.page.path}: the ranks of its programs ended with status {status}"
            assert not self.job.leftover()


def compare(where, shown, printed):
    """Compare what the page shows with what was printed, or one form of it; ... stands for anything."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if "[Gloo]" not in shown:  # PyTorch 2.6 to 2.8 print such lines, other versions do not
        printed = [re.sub(r"^\[Gloo\] Rank .*\n", "", form, flags=re.M) for form in printed]
    same = any(doctest.OutputChecker().check_output(shown, form, flags) for form in printed)
    assert same, f"{where} shows\n{shown}but what was printed is\n{printed[0]}"


def cells(page, title):
    """The cells of the rows of the tables under a title."""
    part = pages.read(page).text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]


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
