"""One item as a job step: start it, end it after its time limit, and judge by its ranks' reports."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...base.programs import program
from ...base.text import printable, ranges
from ..probe import last_line, records_of, without_records
from .items import CheckItem

__all__ = ["Ending", "ItemReport", "judge", "run_item"]

Ending = Literal["passed", "failed", "hung", "skipped", "not run"]

_GRACE = 20.0  # seconds that a step has after the end of its ranks' time
_ENDING = 10.0  # seconds between SIGTERM and SIGKILL
_KILLING = 5.0  # seconds that SIGKILL may need
_TAIL = 4000  # characters of output to keep of an item that did not pass
_SHOWN = 4  # reports of ranks in a text
_TRANSPORT = re.compile(
    r"cfg#\d|libfabric provider|component \S+ (selected|returned success)|[Ss]elected provider|\bNIC\b|Using .*provider"
)
_DIED = re.compile(r"^mpistrat: (rank \d+ of .* was ended by \w+)", re.MULTILINE)  # what each node's exit report prints
_STAMP = re.compile(r"^\[[^\]]*\](\s*\[[^\]]*\])?\s*(\S+:\d+\s+UCX\s+\w+\s+)?")


@dataclass
class ItemReport:
    """The result of an item.

    Attributes:
        name, proves: as in `CheckItem`.
        status: how it ended.
        what: the failure, with ranks and hosts; or the reason why it was not run.
        seconds: its duration.
        numbers: row, column, value, unit.
        facts: by name.
        nodes: of the item "start": the hardware and software of each node.
        findings: of the item "start": the doctor's.
        output: the end of the step's output, if it did not pass.
    """

    name: str
    proves: str
    status: Ending
    what: str = ""
    seconds: float = 0.0
    numbers: list[list[Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, str]] = field(default_factory=list)
    output: str = ""


def run_item(item: CheckItem, launcher: Sequence[str], folder: Path, seconds: float) -> ItemReport:
    """Run an item on all ranks, in its own step, and return its result.

    Args:
        item: the item.
        launcher: the command that starts the ranks of a program.
        folder: on a file system that all ranks see.
        seconds: the time limit of each rank.
    """
    ranks = program("mpistrat.doctor.job.rank", item.module, f"{seconds:g}", str(folder))
    words = [*launcher, *ranks]
    if item.restarts:
        words = program("mpistrat.doctor.job.supervised", "supervise", str(len(launcher)), *launcher, *ranks)
    start = time.monotonic()
    try:
        status, output = _run(words, seconds + _GRACE)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}"
        if error.filename is None:
            what = f"no file for the output of the step: {error.strerror}; set TMPDIR to a folder that can be written"
        return ItemReport(item.name, item.proves, "failed", what)
    text = without_records(output)
    report = judge(item, records_of(output), status, text)
    report.seconds = round(time.monotonic() - start, 1)
    if report.status in ("failed", "hung"):
        report.output = printable(text[-_TAIL:], keep="\n")
    if item.module == "start":
        lines = [_STAMP.sub("", line).strip() for line in text.splitlines() if _TRANSPORT.search(line)]
        report.facts["transports"] = [printable(line)[:200] for line in dict.fromkeys(lines)][:40]
    return report


def _run(words: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Return the exit status of a step, None if it was ended, and its output.

    The output goes to an unnamed file: a pipe would only end with the step's last process.
    """
    status: int | None = None
    with tempfile.TemporaryFile() as file:
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # makes reports of ranks atomic
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            _end(process)
        except BaseException:
            _end(process)
            raise
        # Without a seek: a remaining process shares the position in the file.
        return status, os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and its ranks."""
    process.terminate()  # launchers pass it on to ranks of other nodes
    end = time.monotonic() + _ENDING
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # its group has no process
        while time.monotonic() < end:
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLING)


def judge(item: CheckItem, records: Sequence[Mapping[str, Any]], status: int | None, output: str) -> ItemReport:
    """Return the result of an item.

    Args:
        item: the item.
        records: reports of its ranks, in the order of arrival.
        status: of the launcher; None if it was ended.
        output: of the ranks and the launcher, without the reports.

    Example:
        >>> item = CheckItem("sums", "Sums are right", 10, "sums")
        >>> begun = [{"rank": rank, "size": 2, "host": f"n{rank}", "part": "start of MPI"} for rank in range(2)]
        >>> report = judge(item, [*begun, {"rank": 1, "stuck": ""}, {"rank": 0, "part": "barrier"}], None, "")
        >>> report.status, report.what
        ('hung', 'time over: rank 0 on n0 at barrier, without a report; rank 1 on n1 at start of MPI')
    """
    report = ItemReport(item.name, item.proves, "passed")
    if item.restarts:
        records = _of_last_start(records)
    report.numbers = [record["number"] for record in records if "number" in record]
    report.nodes = [record["node"] for record in records if "node" in record]
    report.findings = [record["finding"] for record in records if "finding" in record]
    for record in records:
        report.facts |= record.get("fact", {})
    hosts = {record["rank"]: record["host"] for record in records if "host" in record}
    size = max((record["size"] for record in records if "size" in record), default=0)
    ended = {record["rank"] for record in records if "done" in record or "skipped" in record}
    wrong = [record for record in records if "wrong" in record]
    failed = [record for record in records if "failed" in record]
    skipped = [record["skipped"] for record in records if "skipped" in record]
    silent = sorted(set(range(size)) - ended)
    bad = [finding for finding in report.findings if finding["status"] == "problem"]

    def on(rank: int) -> str:
        return f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}"

    if not size:
        how = "did not end in time" if status is None else f"ended with status {status}"
        last = last_line(output)
        report.status = "hung" if status is None else "failed"
        report.what = f"no rank started: the launcher {how}" + (f": {printable(last)}" if last else "")
    elif wrong:
        shown = [f"{on(record['rank'])}: {record['wrong']}" for record in wrong[:_SHOWN]]
        ranks = ", ".join(ranges({record["rank"] for record in wrong}))
        report.status, report.what = "failed", f"wrong values on ranks {ranks}. {'; '.join(shown)}"
    elif failed:
        shown = [f"{on(record['rank'])}: {record['failed']}" for record in failed[:_SHOWN]]
        report.status, report.what = "failed", "; ".join(shown)
    elif status is None or any("stuck" in record for record in records):
        report.status, report.what = "hung", f"time over: {_places(records, silent, on, size)}"
    elif silent:
        missing = sorted(set(range(size)) - hosts.keys())
        never = [f"never started: ranks {', '.join(ranges(missing))}"] if missing else []
        report.status = "failed"
        places = [_places(records, sorted(set(silent) - set(missing)), on, size), *never]
        died = _DIED.findall(output)[:_SHOWN] or [f"the launcher ended with status {status}"]
        report.what = f"{'; '.join(died)}: {'; '.join(filter(None, places))}"
    elif status:
        report.status, report.what = (
            "failed",
            f"all ranks ended, but the launcher with status {status}: in MPI_Finalize",
        )
    elif bad:
        report.status, report.what = "failed", "; ".join(f"{finding['name']}: {finding['what']}" for finding in bad)
    elif skipped:
        report.status, report.what = "skipped", skipped[0]
    return report


def _of_last_start(records: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the reports since the last start of the ranks, without those of killed starts."""
    begun, first = set[int](), 0
    for index, record in enumerate(records):
        if "host" in record and record["rank"] in begun:
            begun, first = set(), index
        if "host" in record:
            begun.add(record["rank"])
    return records[first:]


def _places(records: Sequence[Mapping[str, Any]], ranks: Sequence[int], on: Callable[[int], str], size: int) -> str:
    """Describe the last positions of ranks, equal ones together."""
    parts = {record["rank"]: record["part"] for record in records if "part" in record}
    stuck = {record["rank"]: record["stuck"] for record in records if "stuck" in record}
    places: dict[str, list[int]] = {}
    for rank in ranks:
        where = f"at {parts.get(rank, 'start')}"
        if rank not in stuck:
            where += ", without a report" if stuck else ""
        elif stuck[rank]:
            where += f", in {stuck[rank]}"
        places.setdefault(where, []).append(rank)
    texts = []
    for where, some in list(places.items())[:_SHOWN]:
        names = on(some[0]) if len(some) == 1 else f"ranks {', '.join(ranges(some))}"
        names = f"all {size} ranks" if 1 < len(some) == size else names
        texts.append(f"{names} {where}")
    return "; ".join(texts)
