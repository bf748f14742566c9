"""Ranks in reserve: processes that have imported what the program imports, have begun MPI, and wait to run the program.

`mpistrat run --restarts N --standby` starts them beside the job, by a launcher of their own: they are a world of their own.
Each connects to the supervisor, and waits there: a message that comes before it listens is not lost, and a supervisor that
has died is an end of the connection.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any, final

from ..base import local_socket
from ..base.environment import RANK_PROCESS, STANDBY, STARTED
from ..base.programs import program as own_program
from ..comm import job_files
from .end_with_parent import end_with_parent

__all__ = ["Standby", "environment_with", "main", "words_of"]

_PLACE = "MPISTRAT_STANDBY_AT"
_GIVEN = "MPISTRAT_STANDBY_GIVEN"  # what the environment had where the program had put something else, as JSON
_NAME_BYTES = 52  # of the socket
_LOOK, _ENDING = 0.02, 5.0  # seconds: between two looks for a message; that a launcher has to end


def environment_with(*added: dict[str, str]) -> dict[str, str]:
    """Return the environment of a launcher: this process's, and what is added; its ranks are no children of another rank."""
    whole = dict(os.environ)
    for one in added:
        whole |= one
    for name in (RANK_PROCESS, STARTED):
        whole.pop(name, None)
    return whole


@final
class Standby:
    """A launcher whose processes wait to be the ranks of a program.

    Args:
        command: its words, made of `words_of` the program's.
        environment: for it, besides this process's.
        put: what the program has put into its environment, which modules look at when they are imported.
        number: which of the job's it is, from 1.
        ranks: how many were asked for, None for as many as at the begin.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], put: dict[str, str], number: int, ranks: int | None
    ) -> None:
        self.number, self.ranks = number, ranks
        self._message, self._ended = b"", False
        self._listener, name = local_socket.listen(b"standby-of-mpistrat-", _NAME_BYTES)
        self._listener.settimeout(_LOOK)
        given = environment_with(environment)
        own = {_PLACE: name.decode(), STANDBY: str(number)}
        own[_GIVEN] = json.dumps({name: given.get(name) for name in put})
        self.launcher = subprocess.Popen(command, env={**given, **put, **own}, preexec_fn=end_with_parent)
        self._thread = threading.Thread(target=self._serve, name="mpistrat-standby", daemon=True)
        self._thread.start()

    def release(self, environment: dict[str, str]) -> subprocess.Popen[Any]:
        """Have the processes run the program, with this added to the environment; return their launcher."""
        self._message = json.dumps(environment).encode() + b"\n"
        return self.launcher

    def end(self) -> None:
        """End the processes, which wait still."""
        self._ended = True
        try:
            self.launcher.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            self.launcher.wait()

    def _serve(self) -> None:
        """Hold connections until there is a message for them, or none will come; some come later."""
        waiting: list[socket.socket] = []
        with self._listener:
            while self.launcher.poll() is None:
                try:
                    connection = self._listener.accept()[0]
                    if local_socket.is_of_this_user(connection):
                        waiting.append(connection)
                    else:
                        connection.close()
                except TimeoutError:
                    pass
                except OSError:  # too many open files: what waits is released first
                    time.sleep(_LOOK)
                while waiting and (self._message or self._ended):
                    with contextlib.suppress(OSError), waiting.pop() as connection:
                        connection.sendall(self._message)


def words_of(program: list[str]) -> list[str] | None:
    """Return the words of a process that waits to run a program of Python; None of another program."""
    if program[0] != sys.executable or len(program) < 2:
        return None
    return own_program("mpistrat.launcher.standby", *program[1:])


def main(words: list[str]) -> None:
    """Wait as one of them, and then run a program, whose words come behind the interpreter's."""
    with local_socket.connect(os.environ[_PLACE].encode()) as connection:
        if not getattr(sys.flags, "safe_path", False):  # as Python does for the program
            sys.path.insert(0, os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent))
        _import_ahead()
        message = connection.makefile("rb").readline()
    if not message:
        return  # the supervisor has died, or the job has ended
    _put_back()
    os.environ.update(json.loads(message))
    job_files.expect_end_under_launcher(waited=True)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _put_back() -> None:
    """Take the variables out of the environment that the first rank 0's program had put there: this rank's puts its own."""
    given: dict[str, str | None] = json.loads(os.environ.pop(_GIVEN, "{}"))
    for name, value in given.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _import_ahead() -> None:
    """Import what rank 0 has imported, as far as it is installed: it may do more when the program's own modules are imported."""
    installed = tuple(sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib"))
    own = str(Path(__file__).parents[2])  # where this package is, if it was installed to be edited
    names, _ = job_files.imported(os.environ["MPISTRAT_JOB"])
    for name in names:
        parent = name.rpartition(".")[0]  # which a look for it would import
        if name in sys.modules or name == "__main__" or name.startswith("mpi4py") or parent not in ("", *sys.modules):
            continue
        with contextlib.suppress(Exception):
            spec = importlib.util.find_spec(name)
            if spec is not None and (spec.origin or "").startswith((*installed, own)):
                importlib.import_module(name)
    with contextlib.suppress(Exception):
        importlib.import_module("mpi4py.MPI")


if __name__ == "__main__":
    main(sys.argv[1:])
