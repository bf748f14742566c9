"""Probes: each way to end is reported, and none outlives its parent process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from mpistrat.doctor.probe import Probe, last_line
from tests.launch.launcher import ROOT

PROGRAM = """
import os, sys, time
from mpistrat.doctor.probe import report, step
step("first")
print("a library prints, without an end of line", end="")
report(number=1)
step("second")
report(number=2)
os.write(2, b"it said this\\n--------\\n")
{end}
"""


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Watch a program that ends in its own way."""

    def run(end: str, limit: float = 60.0):
        (tmp_path / "watched_program.py").write_text(PROGRAM.format(end=end))
        monkeypatch.syspath_prepend(str(tmp_path))
        return Probe("watched_program", ["word"]).finish(limit)

    return run


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("", 0, ""),
        ("assert sys.argv[1:] == ['word']", 0, ""),
        ("sys.exit(3)", 3, "ended with exit status 3: it said this"),
        ("os.kill(os.getpid(), 11)", -signal.SIGSEGV, "ended with signal 11: it said this"),
        ("raise KeyError('lost')", 1, "ended with exit status 1: KeyError: 'lost'"),
    ],
)
def test_how_it_ended(watch, end, code, says):
    outcome = watch(end)
    assert outcome.returncode == code and outcome.ended_well == (code == 0), outcome.stderr
    assert outcome.step == "second" and outcome.get("number") == 2 and outcome.get("nothing") is None
    assert not says or outcome.end() == says


def test_what_hangs_is_ended(watch):
    start = time.monotonic()
    outcome = watch("time.sleep(60)", limit=8)
    assert outcome.returncode is None and time.monotonic() - start < 30
    assert outcome.end() == "did not return: it said this" and outcome.get("number") == 2


def test_what_is_cut_off_is_left_out(watch):
    outcome = watch("print(chr(30) + '{\"number\": 3', end='')")
    assert outcome.get("number") == 2


def test_it_does_not_outlive_its_parent(tmp_path):
    sleeper = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    (tmp_path / "sleeper.py").write_text(sleeper)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from mpistrat.doctor.probe import Probe\nProbe('sleeper').finish(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    child = int((tmp_path / "pid").read_text())
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    while time.monotonic() < until and os.path.exists(f"/proc/{child}") and _runs(child):
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{child}") or not _runs(child)


def _runs(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_the_last_that_was_said():
    assert last_line("first\n\n  the cause\n----\n\0\n") == "the cause" and last_line("\n--\n") == ""
