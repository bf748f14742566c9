"""Whom the process that speaks for the dead names, for every order in which a node's ranks may be seen to end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import types

import pytest

from mpistrat.comm.monitor import exit_report_process

TERM, KILL, SEGV = int(signal.SIGTERM), int(signal.SIGKILL), int(signal.SIGSEGV)
UNSEEN = None  # the launcher was quicker
EXIT_3 = 3 << 8


@pytest.fixture
def named(monkeypatch):
    """named(ends): the rank that is named, after (rank, status, seconds) of deaths and (rank, words); None for nobody."""

    def name(*events: tuple) -> int | None:
        now, said = [1000.0], []
        clock = types.SimpleNamespace(
            time=lambda: now[0], monotonic=lambda: now[0], localtime=lambda at: (2026, 1, 1, 0, 0, 0, 0, 1, 0),
            strftime=lambda form, when: "00:00:00",
        )  # fmt: skip
        monkeypatch.setattr(exit_report_process, "time", clock)
        monkeypatch.setattr(
            exit_report_process.ExitMonitor, "report", lambda self, death, ranks: said.append(death.rank.number)
        )
        monitor = exit_report_process.ExitMonitor()
        now[0] += 100
        ranks = [types.SimpleNamespace(number=n, pid=-n - 1, ended=False, who=f"rank {n}", status=0) for n in range(4)]
        for number, what, *later in events:
            now[0] += later[0] if later else 0.001
            if isinstance(what, str):
                monitor.receive(ranks[number], what)
            else:
                monkeypatch.setattr(exit_report_process, "status_of", lambda pid, status=what: status)
                monitor.closed(ranks[number])
        monitor.finish()
        monitor.finish()
        assert len(said) < 2
        return said[0] if said else None

    return name


@pytest.mark.parametrize(
    ("events", "victim"),
    [
        ([(2, KILL), (0, TERM), (1, TERM)], 2),
        ([(2, UNSEEN), (0, UNSEEN), (1, UNSEEN)], 2),
        ([(0, TERM), (2, KILL), (1, TERM)], 2),  # the launcher's signal to another rank is seen first
        ([(0, TERM), (1, TERM), (2, UNSEEN, 0.05)], 2),
        ([(1, TERM), (2, SEGV), (0, KILL)], 2),
        ([(1, EXIT_3), (0, TERM)], 1),
        ([(0, TERM), (1, TERM), (2, TERM)], None),  # somebody ended the job
        ([(0, TERM), (1, TERM), (2, KILL, 0.3)], None),  # and the launcher had no patience with one of them
        ([(0, "told"), (0, EXIT_3), (1, KILL)], None),  # the ranks say why themselves
        ([(2, KILL), (0, "told"), (0, EXIT_3), (1, TERM)], 2),  # what they say is what the death did to them
        ([(0, "bye 3"), (0, EXIT_3), (1, KILL)], None),  # one ended by an error, and the launcher ends the others
        ([(0, "bye 3"), (0, EXIT_3), (1, KILL, 10.0)], 1),
        ([(0, "bye 0"), (0, 0), (1, KILL)], 1),  # no launcher ends the others after status 0
        ([(0, "bye 0"), (1, KILL), (0, KILL)], 1),  # one waits in MPI's end
        ([(0, "bye 0"), (1, "bye 0"), (0, 0), (1, 0)], None),
    ],
)
def test_who_is_named(named, events, victim):
    assert named(*events) == victim


@pytest.fixture
def process():
    """The process, and a function that connects to it and says something."""
    listener = socket.socket(socket.AF_UNIX)
    name = b"\0mpistrat-test-" + os.urandom(8).hex().encode()
    listener.bind(name)
    listener.listen()
    words = [sys.executable, "-S", "-I", exit_report_process.__file__, str(listener.fileno()), str(os.getpid())]
    made = subprocess.Popen(words, pass_fds=[listener.fileno()], stderr=subprocess.PIPE, text=True)
    listener.close()

    def connect(said):
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(10)
        line.connect(name)
        assert line.recv(1) == b"!"
        line.sendall(said)
        return line

    yield made, connect
    made.kill()
    made.communicate()


def test_who_watches_before_the_first_rank_does_not_end_it(process):
    made, connect = process
    with connect(b"watch\n") as watcher:
        assert watcher.recv(100) == b"all\n"
    with connect(b"who rank 0\n") as rank:
        with connect(b"watch\n") as watcher:
            with watcher.makefile() as lines:
                assert [next(lines), next(lines)] == [f"rank {os.getpid()} rank 0\n", "all\n"]
            watcher.sendall(b"stacks?\n")
            assert rank.recv(100) == b"stacks\n"
            rank.sendall(b"stacks {}\n")
            assert watcher.recv(100) == f"stacks {os.getpid()} {{}}\n".encode()
        rank.sendall(b"bye\n")
    assert made.wait(10) == 0, "it ends with the last rank"
    assert made.stderr.read() == ""


def test_a_watcher_does_not_keep_it_alive(process):
    made, connect = process
    with connect(b"who rank 0\n") as rank, connect(b"watch\n"):
        rank.sendall(b"bye\n")
        rank.close()
        assert made.wait(10) == 0


def test_names_of_ranks_are_printed_without_control_characters(capfd):
    rank = types.SimpleNamespace(pid=1, who="rank 1\x1b[2J", events=None)
    exit_report_process.ExitMonitor().report(types.SimpleNamespace(rank=rank, status=KILL, at=0.0), [rank])
    assert capfd.readouterr().err.startswith("mpistrat: rank 1\\x1b[2J, process 1, was ended by SIGKILL")
