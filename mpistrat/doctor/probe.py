"""Probes: programs that may crash or hang, so they run in a child process that reports its steps.

`report` writes a line of JSON after a record separator (RFC 7464), so that no output of a library is mistaken for one.
`step("MPI_Init_thread")` names a step that may not return.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ..base.programs import program

__all__ = ["Outcome", "Probe", "command", "last_line", "records_of", "report", "step", "without_records"]

_SEPARATOR = "\x1e"
_LONGEST = 200  # characters of a quoted line
_LOOK = 0.5  # seconds between polls for a probe that has ended without closing its pipes
_LAST = 2.0  # seconds for its last output
_START = str(Path(__file__).with_name("start_probe.py"))


def report(**record: Any) -> None:
    """Send a record to the parent process, in one write: ranks may share the pipe."""
    sys.stdout.write(f"{_SEPARATOR}{json.dumps(record)}\n")
    sys.stdout.flush()


def step(name: str) -> None:
    """Report the next step to the parent process."""
    report(step=name)


@dataclass(frozen=True)
class Outcome:
    """The result of a probe.

    Attributes:
        records: its reports, in order.
        step: its last step.
        returncode: its exit status, negative for a signal; None if it was killed.
        stderr: its output there.
    """

    records: tuple[dict[str, Any], ...]
    step: str
    returncode: int | None
    stderr: str

    @property
    def ended_well(self) -> bool:
        """True if it ran to its end."""
        return self.returncode == 0

    def get(self, key: str) -> Any:
        """Return its last report under a key; None without one."""
        return next((record[key] for record in reversed(self.records) if key in record), None)

    def end(self) -> str:
        """Describe how it ended, with its last output."""
        if self.returncode is None:
            how = "did not return"
        elif self.returncode < 0:
            how = f"ended with signal {-self.returncode}"
        else:
            how = f"ended with exit status {self.returncode}"
        last = last_line(self.stderr)
        return f"{how}: {last}" if last else how


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a module as a main program, with this process's import folders."""
    return program(_START, json.dumps(sys.path), module, *arguments)


@final
class Probe:
    """A running probe: a module of this package as a main program."""

    def __init__(self, module: str, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        # The child inherits a launcher's file descriptors: through them a rank finds the others.
        self._process = subprocess.Popen(
            command(module, *arguments), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            close_fds=False, text=True, errors="replace",
        )  # fmt: skip

    def finish(self, limit: float) -> Outcome:
        """Return its result; after `limit` seconds it is killed."""
        until = time.monotonic() + limit
        try:
            while True:
                left = until - time.monotonic()
                try:
                    out, err = self._process.communicate(timeout=max(0.0, min(_LOOK, left)))
                    return _outcome(out, err, self._process.returncode)
                except subprocess.TimeoutExpired:
                    code = self._process.poll()
                if code is not None or left <= 0:
                    return _outcome(*self._stop(), code)
        except BaseException:
            self._stop()
            raise

    def kill(self) -> None:
        """Kill it now."""
        self._process.kill()

    def _stop(self) -> tuple[str, str]:
        """Kill it, and return its output."""
        self._process.kill()
        try:
            return self._process.communicate(timeout=_LAST)
        except (
            subprocess.TimeoutExpired
        ) as error:  # a child of its own holds the pipe, such as one that reports its end
            return _text(error.output), _text(error.stderr)


def _text(written: Any) -> str:
    """Return an output of `subprocess.TimeoutExpired`, which may be bytes, as text."""
    return written.decode(errors="replace") if isinstance(written, bytes) else written or ""


def records_of(out: str) -> list[dict[str, Any]]:
    """Return the records in an output."""
    records = []
    for piece in out.split(_SEPARATOR)[1:]:
        with contextlib.suppress(ValueError):  # an incomplete line
            records.append(json.loads(piece.splitlines()[0] if piece else ""))
    return records


def without_records(out: str) -> str:
    """Return an output without the records in it.

    Example:
        >>> without_records('begun\\n\\x1e{"number": 1}\\nended')
        'begun\\nended'
    """
    return re.sub(f"{_SEPARATOR}.*\n?", "", out)


def _outcome(out: str, err: str, code: int | None) -> Outcome:
    records = records_of(out)
    steps = [record["step"] for record in records if "step" in record]
    return Outcome(tuple(records), steps[-1] if steps else "starting Python", code, err)


def last_line(text: str) -> str:
    """Return the last line with letters or digits, shortened.

    Example:
        >>> last_line("one\\n  two \\n-----\\n")
        'two'
    """
    lines = [line.strip() for line in text.replace("\0", "").splitlines()]
    lines = [line for line in lines if any(map(str.isalnum, line))]
    return lines[-1][:_LONGEST] if lines else ""
