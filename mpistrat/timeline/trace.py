"""Traces: the recorded events of ranks in one file for Perfetto and chrome://tracing.

All times are on the monotonic clock of rank 0's node.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from ..base import context
from ..base.errors import explain
from ..base.files import replacing
from ..base.text import encoded
from ..comm.process_group import ProcessGroup
from ..comm.recorder import GROUPS, KINDS, RECORDER, THREADS, Ring

__all__ = [
    "Offset",
    "clock_offset",
    "process_group_of",
    "save",
    "span",
]


_JOURNEYS = 20  # round trips of a message; the quickest counts
_TAG = 7301


class Offset(NamedTuple):
    """The offset of rank 0's clock from this rank's.

    Attributes:
        ns: nanoseconds to add.
        doubt: its largest error, in nanoseconds.
    """

    ns: int
    doubt: int


def clock_offset(group: ProcessGroup) -> Offset:
    """Return the offset of rank 0's monotonic clock from this rank's. Collective; inside `collective()`.

    The ranks of a node share a clock. The first rank of each node asks one that already knows its offset, in ⌈log2(nodes)⌉
    rounds. The doubt is half a round trip, summed over the rounds.

    Source: F. Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989).
    """
    topology = group.topology
    found = np.zeros(2, np.int64)
    if topology.num_nodes > 1:
        if topology.local_rank == 0:
            found[:] = _ask(topology.inter, topology.node_index, topology.num_nodes)
        assert topology.intra is not None
        topology.intra.Bcast(found)
    return Offset(int(found[0]), int(found[1]))


def _ask(comm: object, node: int, nodes: int) -> tuple[int, int]:
    mine, theirs = np.zeros(3, np.int64), np.zeros(3, np.int64)  # a time, an offset, a doubt
    ns, doubt, known = 0, 0, 1
    while known < nodes:
        if node < known and node + known < nodes:
            for _ in range(_JOURNEYS):
                comm.Recv(theirs, node + known, _TAG)  # type: ignore[attr-defined]
                mine[:] = perf_counter_ns(), ns, doubt
                comm.Send(mine, node + known, _TAG)  # type: ignore[attr-defined]
        elif known <= node < 2 * known:
            quickest = None
            for _ in range(_JOURNEYS):
                before = perf_counter_ns()
                comm.Send(mine, node - known, _TAG)  # type: ignore[attr-defined]
                comm.Recv(theirs, node - known, _TAG)  # type: ignore[attr-defined]
                after = perf_counter_ns()
                if quickest is None or after - before < quickest:
                    quickest = after - before
                    ns = int(theirs[0]) - (before + after) // 2 + int(theirs[1])
                    doubt = (after - before) // 2 + int(theirs[2])
        known *= 2
    return ns, doubt


_ARROWS = 1 << 16  # at most
_ALL = 64  # of more ranks, only the first of each node is written by default


def span(name: str) -> AbstractContextManager[None]:
    """Return a context that records an event of this rank's timeline, under a name of yours. Local.

    Args:
        name: use one name per kind of work: the recorder stores each name once, some thousands in all.

    Example:
        >>> with ms.timeline.span("augment"):
        ...     pass
    """
    return RECORDER.span("u", name)


def process_group_of(strategy: Any, function: str) -> ProcessGroup:
    """Return the group of the ranks of a strategy, or of torch.distributed: see `context.ranks_of`."""
    group: ProcessGroup = context.ranks_of(strategy, function).extended.process_group
    return group


def save(path: str | os.PathLike[str], strategy: Any = None, ranks: Sequence[int] | None = None) -> Path:
    """Write the last events of ranks as a trace for https://ui.perfetto.dev. Collective.

    The file is Chrome's JSON, gzipped: a process for each rank with its threads, a slice for each `run`, collective, batch, save
    and `span`. The arguments of a collective give how long this rank waited in it for others. In a collective of all ranks an
    arrow leads from the rank that came last to each that waited for it. Counters are rows per second, memory, and the bytes of
    arrays in collectives, pulls and pushes so far. Times are on rank 0's clock. A rank records its last MPISTRAT_EVENTS events,
    by default 16384.

    Args:
        path: the file, such as trace.json.gz. An existing file is replaced.
        strategy: a strategy, or a process group of torch.distributed; default the current strategy, or outside of scopes the
            default group.
        ranks: default all; of more than 64 ranks the first of each node.

    Raises:
        ValueError: on every rank: there is no such rank.
        OSError: on rank 0: the file cannot be written.

    Example:
        >>> import tempfile
        >>> strategy = ms.OneDeviceStrategy()
        >>> with tempfile.TemporaryDirectory() as folder, strategy:
        ...     strategy.run(lambda: None)
        ...     ms.timeline.save(f"{folder}/trace.json.gz", strategy).name
        'trace.json.gz'

    Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
    group = process_group_of(strategy, "timeline.save")
    group.in_order("timeline.save", partial(_save, group, path, ranks))
    return Path(path)


def _save(group: ProcessGroup, path: str | os.PathLike[str], ranks: Sequence[int] | None) -> None:
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
        part, meetings = b"", np.empty((0, 4), np.int64)
        if topology.rank in ranks:
            rows = [
                *_metadata(group, ring, offset),
                *_slices(group, ring, offset, zero),
                *_counters(group, offset, zero),
            ]
            part, meetings = _packed(rows), _meetings(group, ring, offset, zero)[-(_ARROWS // len(ranks)) :]
        alone = topology.comm is None or topology.size == 1
        found = [(part, meetings)] if alone else topology.comm.gather((part, meetings))
    # After the collective: an error in it would raise on the other ranks, too.
    if topology.rank == 0 and found is not None:
        parts = [part for part, _ in found]
        parts.append(_packed(_arrows({rank: found[rank][1] for rank in ranks})))
        with replacing(Path(path)) as beside, open(beside, "wb") as file:
            file.write(gzip.compress(b'{"displayTimeUnit": "ms", "traceEvents": [\n'))
            for number, one in enumerate(filter(None, parts)):
                file.write((gzip.compress(b",\n") if number else b"") + one)  # gzip files can be concatenated
            file.write(gzip.compress(b"\n]}\n"))


def _packed(rows: Sequence[dict[str, Any]]) -> bytes:
    """Return events as compressed JSON, without the brackets around them; b"" for none."""
    text = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return gzip.compress(encoded(text), 6) if rows else b""


def _metadata(group: ProcessGroup, ring: Ring, offset: Offset) -> list[dict[str, Any]]:
    """Return the names of this rank and its threads."""
    rank = group.topology.rank
    about = f"rank {rank} on {group.topology.hostname or 'this host'}"
    if offset.doubt:
        about += f" (± {offset.doubt / 1000:.0f} µs)"
    found = [("process_name", 0, {"name": about}), ("process_sort_index", 0, {"sort_index": rank})]
    for thread in sorted({0, *ring.thread.tolist()}):
        found.append(("thread_name", thread, {"name": RECORDER.threads[thread]}))
        found.append(("thread_sort_index", thread, {"sort_index": thread}))
    return [
        {"ph": "M", "name": name, "pid": rank, "tid": _tid(rank, thread), "args": args} for name, thread, args in found
    ]


def _tid(rank: int, thread: int = 0) -> int:
    """Return the number of a thread, which no other rank has: Perfetto finds the thread of a name by this number alone."""
    return THREADS * rank + thread


def _slices(group: ProcessGroup, ring: Ring, offset: Offset, zero: int) -> list[dict[str, Any]]:
    """Return this rank's events."""
    rows, rank, now = [], group.topology.rank, perf_counter_ns()
    for kind, group_number, text, number, begin, end, waited, thread in _events(ring):
        row: dict[str, Any] = {
            "ph": "X", "name": text, "cat": KINDS.get(kind, "other"), "pid": rank, "tid": _tid(rank, thread),
            "ts": (begin + offset.ns - zero) / 1000, "dur": ((end or now) - begin) / 1000,
        }  # fmt: skip
        if kind in "cpi":
            row["args"] = {"number": number}
        if kind == "c" and group_number:  # 0: a wait for a collective that was started earlier
            apart = (group_number - group.monitor.group + GROUPS // 2) % GROUPS
            row["args"]["group"] = apart - GROUPS // 2  # 0 is the group of `save`, on all ranks
            row["args"]["waited_us"] = waited / 1000 if end else None
        if not end:
            row["args"] = {**row.get("args", {}), "unfinished": True}
        rows.append(row)
    return rows


def _events(ring: Ring) -> Iterator[tuple[str, int, str, int, int, int, int, int]]:
    columns = (ring.name, ring.group, ring.number, ring.begin, ring.end, ring.waited, ring.thread)
    for name, group, number, begin, end, waited, thread in zip(*(column.tolist() for column in columns), strict=True):
        kind, text = ring.names[name]
        yield kind, group, text, number, begin, end, waited, thread


def _counters(group: ProcessGroup, offset: Offset, zero: int) -> list[dict[str, Any]]:
    """Return this rank's counters; a value lasts until the next one of its name."""
    rank, counts = group.topology.rank, RECORDER.counts()
    found = [("memory", "bytes", time, value) for time, value in counts.get("memory", ())]
    moved = 0
    for time, value in counts.get("bytes", ()):
        moved += value
        found.append(("moved", "bytes", time, moved))
    rows = counts.get("rows", [])
    for (time, value), (end, _) in itertools.pairwise(rows):
        found.append(("rows", "per second", time, round(value / max(end - time, 1) * 1e9)))
    found += [("rows", "per second", time, 0) for time, _ in rows[-1:]]
    return [
        {"ph": "C", "name": name, "pid": rank, "tid": _tid(rank), "ts": at / 1000, "args": {unit: value}}
        for name, unit, time, value in found
        if (at := time + offset.ns - zero) >= 0
    ]


def _meetings(group: ProcessGroup, ring: Ring, offset: Offset, zero: int) -> np.ndarray:
    """Return number, thread, begin and end of each ended collective of the group's ranks: a row each, times as in the trace."""
    ours = np.array([kind == "c" for kind, _ in ring.names])[ring.name]
    ours &= (ring.group == group.monitor.group) & (ring.number > 0) & (ring.end > 0) & (group.topology.size > 1)
    threads, shift = _tid(group.topology.rank) + ring.thread[ours].astype(np.int64), offset.ns - zero
    return np.stack([ring.number[ours], threads, ring.begin[ours] + shift, ring.end[ours] + shift], axis=1)


def _arrows(meetings: Mapping[int, np.ndarray]) -> list[dict[str, Any]]:
    """Return a pair of flow events for each rank that waited in a collective: from the rank that came last to it.

    Args:
        meetings: the rows of `_meetings` by rank. Collectives that not all of these ranks have recorded are left out.
    """
    calls: dict[int, list[tuple[int, int, int, int]]] = {}  # begin, rank, thread and end, by number
    for rank, rows in meetings.items():
        for number, thread, begin, end in rows.tolist():
            calls.setdefault(number, []).append((begin, rank, thread, end))
    found: list[dict[str, Any]] = []
    for each in calls.values():
        latest, last, from_thread, _ = max(each)
        if len(each) < len(meetings):
            continue
        for _, rank, thread, end in each:
            if rank != last and end - latest > 1:  # not if it left before, as the root of a broadcast may
                about = {"name": "came last", "cat": "collective", "id": len(found)}
                found.append({"ph": "s", **about, "pid": last, "tid": from_thread, "ts": latest / 1000})
                # Perfetto takes the innermost slice; none inside the collective has begun yet.
                found.append({"ph": "f", "bp": "e", **about, "pid": rank, "tid": thread, "ts": (latest + 1) / 1000})
    return found
