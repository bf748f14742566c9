"""Standby ranks: processes that have imported the program's modules, have started MPI, and wait to run the program.

`mpistrat run --restarts N --standby` starts them next to the job, by a launcher of their own, as a world of their own. Each
connects to the supervisor and waits. A connection loses no message that is sent before the process listens, and closes if the
supervisor dies.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
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
from ..base.programs import put_on_path, run_program
from ..comm import job_files
from .end_with_parent import end_with_parent

__all__ = ["Standby", "environment_with", "main", "words_of"]

_PLACE = "MPISTRAT_STANDBY_AT"
_GIVEN = "MPISTRAT_STANDBY_GIVEN"  # original values of variables that the program changed, as JSON
_NAME_BYTES = 52  # of the socket
_LOOK, _ENDING = 0.02, 5.0  # seconds between two checks for a message; seconds that a launcher has to end


def environment_with(*added: dict[str, str]) -> dict[str, str]:
    """Return the environment of a launcher: this process's plus `added`, without the marks of a rank's children."""
    whole = dict(os.environ)
    for one in added:
        whole |= one
    for name in (RANK_PROCESS, STARTED):
        whole.pop(name, None)
    return whole


@final
class Standby:
    """A launcher whose processes wait to become the ranks of a program.

    Args:
        command: its command line, made by `words_of` the program's.
        environment: additions to this process's.
        put: variables that the program has set, which modules read on import.
        number: index among the job's standby launchers, from 1.
        ranks: the requested number of ranks, None for the initial one.
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
        """Run the program in the processes, with these additions to the environment; return their launcher."""
        self._message = json.dumps(environment).encode() + b"\n"
        return self.launcher

    def end(self) -> None:
        """End the processes, which are still waiting."""
        self._ended = True
        try:
            self.launcher.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            self.launcher.wait()

    def _serve(self) -> None:
        """Hold connections until a message or the end is sent; some arrive later."""
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
                except OSError:  # too many open files: release waiting connections first
                    time.sleep(_LOOK)
                while waiting and (self._message or self._ended):
                    with contextlib.suppress(OSError), waiting.pop() as connection:
                        connection.sendall(self._message)


def words_of(program: list[str]) -> list[str] | None:
    """Return the command line of a process that waits to run a Python program; None for another program."""
    if program[0] != sys.executable or len(program) < 2:
        return None
    return own_program("mpistrat.launcher.standby", *program[1:])


def main(words: list[str]) -> None:
    """Wait as a standby process, then run a program. `words` is its command line without the interpreter."""
    with local_socket.connect(os.environ[_PLACE].encode()) as connection:
        put_on_path(words)
        _import_ahead()
        message = connection.makefile("rb").readline()
    if not message:
        return  # the supervisor has died, or the job has ended
    _put_back()
    os.environ.update(json.loads(message))
    job_files.expect_end_under_launcher(waited=True)
    run_program(words)


def _put_back() -> None:
    """Restore the variables that the first rank 0's program had changed; this rank's program sets its own."""
    given: dict[str, str | None] = json.loads(os.environ.pop(_GIVEN, "{}"))
    for name, value in given.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _import_ahead() -> None:
    """Import the installed modules that rank 0 has imported. The program's own modules may act on import, so they wait."""
    installed = tuple(sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib"))
    own = str(Path(__file__).parents[2])  # this package's folder, for an editable install
    names, _ = job_files.imported(os.environ["MPISTRAT_JOB"])
    for name in names:
        parent = name.rpartition(".")[0]  # find_spec would import it
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
