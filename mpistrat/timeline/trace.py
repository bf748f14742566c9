"""Traces: the recorded events of ranks as one file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from ..base import context
from ..base.errors import explain
from ..base.files import replacing
from ..base.text import encoded
from ..comm.process_group import ProcessGroup
from ..comm.recorder import GROUPS, KINDS, RECORDER, Ring
from .clocks import Offset, clock_offset

__all__ = ["process_group_of", "save", "span"]

_ALL = 64  # up to so many ranks are all written, unless some are asked for


def span(name: str) -> AbstractContextManager[None]:
    """Return a context that is an event of this rank's timeline, under a name of yours. Local.

    Args:
        name: the same one for the same kind of work: the recorder keeps each once, some thousands in all.

    Example:
        >>> with ms.timeline.span("augment"):
        ...     pass
    """
    return RECORDER.span("u", name)


def process_group_of(strategy: Any) -> ProcessGroup:
    """Return the ranks of a strategy, by default of the current one."""
    found = context.current().strategy if strategy is None else strategy
    group: ProcessGroup = found.extended.process_group
    return group


def save(path: str | os.PathLike[str], strategy: Any = None, ranks: Sequence[int] | None = None) -> Path:
    """Write the last events of ranks as a trace, which https://ui.perfetto.dev opens. Collective.

    It is Chrome's JSON, gzipped: a process for each rank, a slice for each `run`, collective, batch, save and `span`; in a
    collective's arguments is how long this rank waited in it for others. Times are those of rank 0's clock, with which the other
    nodes' are compared now. How many events a rank keeps MPISTRAT_EVENTS says, 16384 by default.

    Args:
        path: the file; ".json.gz" is its usual end. One that exists is replaced.
        strategy: default the current one.
        ranks: which; default all, of more than 64 the first of each node.

    Raises:
        ValueError: on every rank: there is no such rank.
        OSError: on rank 0, when it cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, ms.OneDeviceStrategy() as strategy:
        ...     strategy.run(lambda: None)
        ...     ms.timeline.save(f"{folder}/trace.json.gz", strategy).name
        'trace.json.gz'

    Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
    group = process_group_of(strategy)
    topology = group.topology
    if ranks is None:
        firsts = [topology.node_of.index(node) for node in range(topology.num_nodes)]
        ranks = range(topology.size) if topology.size <= _ALL else firsts
    if wrong := [rank for rank in ranks if not 0 <= rank < topology.size]:
        expected = f"ranks below {topology.size}"
        raise ValueError(explain("timeline.save", "ranks", expected=expected, got=str(wrong[0])))
    ring = RECORDER.ring()
    with group.collective("timeline.save", detail=(os.fspath(path), tuple(ranks))):
        offset = clock_offset(group)
        first = int(ring.begin[0]) + offset.ns if len(ring) and topology.rank in ranks else np.iinfo(np.int64).max
        if topology.size > 1:
            zero = int(group.all_gather_int([first]).min())
        else:
            zero = first
        part = b""
        if topology.rank in ranks:
            part = gzip.compress(encoded(_fragment(group, ring, offset, zero)), 6)
        parts = [part] if topology.comm is None or topology.size == 1 else topology.comm.gather(part)
    # After the collective, whose error the other ranks would get, too.
    if topology.rank == 0 and parts is not None:
        with replacing(Path(path)) as beside, open(beside, "wb") as file:
            file.write(gzip.compress(b'{"displayTimeUnit": "ms", "traceEvents": [\n'))
            for number, one in enumerate(filter(None, parts)):
                file.write((gzip.compress(b",\n") if number else b"") + one)  # gzip's files may be put end to end
            file.write(gzip.compress(b"\n]}\n"))
    return Path(path)


def _fragment(group: ProcessGroup, ring: Ring, offset: Offset, zero: int) -> str:
    """This rank's events as JSON, without the brackets around them."""
    topology = group.topology
    about = f"rank {topology.rank} on {topology.hostname or 'this host'}"
    if offset.doubt:
        about += f" (± {offset.doubt / 1000:.0f} µs)"
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": topology.rank, "args": {"name": about}},
        {"ph": "M", "name": "process_sort_index", "pid": topology.rank, "args": {"sort_index": topology.rank}},
    ]
    now = perf_counter_ns()
    for kind, group_number, text, number, begin, end, waited in _events(ring):
        row: dict[str, Any] = {
            "ph": "X", "name": text, "cat": KINDS.get(kind, "other"), "pid": topology.rank, "tid": 0,
            "ts": (begin + offset.ns - zero) / 1000, "dur": ((end or now) - begin) / 1000,
        }  # fmt: skip
        if kind in "cpi":
            row["args"] = {"number": number}
        if kind == "c" and group_number:  # else it is a wait for one that was started before
            apart = (group_number - group.monitor.group + GROUPS // 2) % GROUPS
            row["args"]["group"] = apart - GROUPS // 2  # 0 is the strategy's, on all ranks
            row["args"]["waited_us"] = waited / 1000 if end else None
        if not end:
            row["args"] = {**row.get("args", {}), "unfinished": True}
        rows.append(row)
    return ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)


def _events(ring: Ring) -> Iterator[tuple[str, int, str, int, int, int, int]]:
    columns = (ring.name, ring.group, ring.number, ring.begin, ring.end, ring.waited)
    for name, group, number, begin, end, waited in zip(*(column.tolist() for column in columns), strict=True):
        kind, text = ring.names[name]
        yield kind, group, text, number, begin, end, waited
