"""Snapshots: the state of a strategy in each node's memory, which outlives its ranks, for jobs with restarts.

Each node has the whole state, in a file of /dev/shm named by the job's key, in two buffers, written in turn. Each rank stores
in a word the step of its part of a buffer; a buffer is complete if all words have the same step. No rank continues before all
have copied and set their words. So while one buffer is written, the other one is complete on every node, and the newest
complete buffer is always the state after some step.

A killed rank does not remove the file: it stays until the job ends, or until a closed strategy has its state in a checkpoint.

A program may have several runs, such as one per fold of its data. Each run has a name and its own files.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, final

import numpy as np

from ..base.agree import as_told, together
from ..base.errors import ContextError, SharedMemoryError, explain
from ..base.files import PAGE
from ..base.log import logger
from ..comm import job_files
from ..comm.process_group import ProcessGroup
from ..comm.shared_memory import ENLARGE, map_file
from .list import Form, Slice, link_of
from .reading import SliceReader

__all__ = ["Snapshot", "SnapshotFile", "Snapshots", "check_restarts"]

_LEAST_NOTES = 1 << 16  # bytes
_WORD = 8


class Snapshot(NamedTuple):
    """A state of a run that is complete on some node: of the newest generation of ranks, then of the newest step."""

    run: str
    generation: int
    step: int
    root: int  # the first rank on such a node


@final
class SnapshotFile(SliceReader):
    """A snapshot file of this node, read like `CheckpointFile`.

    Attributes:
        path: the file.
        generation: the number of restarts before the file was created.
        arrays: the form of each array, and its offset in a buffer.
        optimizers: of the selected buffer: name, iterations, made and settings of each.
    """

    weights_only = False

    def __init__(self, path: Path) -> None:
        """Map a file.

        Raises:
            OSError: it cannot be opened, or belongs to another user.
            ValueError: it is not a snapshot file, or incomplete.
        """
        self.path, self.generation = path, job_files.generation_of(path)
        weakref.finalize(self, os.close, job_files.hold(path))
        self._memory = map_file(path)
        size = int.from_bytes(self._memory[:_WORD], "little")
        meta = json.loads(self._memory[_WORD : _WORD + size])
        self.ranks, self.notes_bytes = meta["ranks"], meta["notes"]
        self.arrays: dict[str, tuple[Form, int]] = {
            key: (Form(tuple(shape), dtype), start) for key, shape, dtype, start in meta["forms"]
        }
        self._buffer, self._notes = 0, dict[str, Any]()
        self._words = np.frombuffer(self._memory, np.int64, 2 * self.ranks, _rounded(_WORD + size))
        self._notes_at = _rounded(_WORD + size) + _rounded(2 * self.ranks * _WORD)
        self._arrays_at = self._notes_at + 2 * _rounded(self.notes_bytes)
        self._nbytes = meta["nbytes"]

    @classmethod
    def make(cls, path: Path, forms: Mapping[str, Form], ranks: int, notes_bytes: int) -> SnapshotFile:
        """Create a file with all its memory allocated.

        Raises:
            OSError: there is no room.
        """
        table, nbytes = [], 0
        for key, form in forms.items():
            table.append([key, list(form.shape), form.dtype, nbytes])
            nbytes += -(-form.nbytes // PAGE) * PAGE
        meta = json.dumps({"ranks": ranks, "notes": notes_bytes, "nbytes": nbytes, "forms": table}).encode()
        whole = _rounded(_WORD + len(meta)) + _rounded(2 * ranks * _WORD) + 2 * (_rounded(notes_bytes) + nbytes)
        job_files.make_file(path, len(meta).to_bytes(_WORD, "little") + meta, whole)
        return cls(path)

    # writing

    def begin(self, buffer: int, rank: int) -> None:
        """Mark the buffer of a rank of the node as being written."""
        self._words[buffer * self.ranks + rank] = 0

    def write(self, buffer: int, slices: Iterable[Slice]) -> None:
        """Copy slices of arrays into a buffer."""
        for part in slices:
            np.copyto(self._view(buffer, part.key, part.start, part.array.size), part.array)

    def _view(self, buffer: int, key: str, first: int, size: int) -> np.ndarray:
        form, start = self.arrays[key]
        kind = form.kind
        at = self._arrays_at + buffer * self._nbytes + start + first * kind.itemsize
        return np.frombuffer(self._memory, kind, size, at)

    def write_notes(self, buffer: int, data: bytes) -> None:
        """Write the notes of a buffer."""
        at = self._notes_at + buffer * _rounded(self.notes_bytes)
        self._memory[at : at + _WORD + len(data)] = len(data).to_bytes(_WORD, "little") + data

    def end(self, buffer: int, rank: int, step: int) -> None:
        """Mark the buffer of a rank of the node as complete after a step. Call it after a fence."""
        self._words[buffer * self.ranks + rank] = step

    # reading

    def newest(self) -> int:
        """Return the newest step with a complete buffer, which is then read; 0 if there is none."""
        found = {}
        for buffer in (0, 1):
            words = self._words[buffer * self.ranks : (buffer + 1) * self.ranks]
            if words[0] > 0 and (words == words[0]).all():
                found[int(words[0])] = buffer
        step = max(found, default=0)
        if step:
            self._buffer = found[step]
            at = self._notes_at + self._buffer * _rounded(self.notes_bytes)
            size = int.from_bytes(self._memory[at : at + _WORD], "little")
            self._notes = json.loads(self._memory[at + _WORD : at + _WORD + size])
        return step

    @property
    def optimizers(self) -> list[dict[str, Any]]:
        return [{"made": None, "settings": None, **about} for about in self._notes["optimizers"]]

    def extra(self) -> Any:
        """Return the program's `extra`."""
        return self._notes["extra"]

    def names(self) -> list[str]:
        return [key.removeprefix("variables/") for key in self.arrays if key.startswith("variables/")]

    def forms(self, names: Iterable[str]) -> dict[str, Form]:
        """Return shape and dtype of the existing variables of these links, and of their slots."""
        wanted = set(names)
        return {key: form for key, (form, _) in self.arrays.items() if link_of(key) in wanted}

    def places(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return an empty dict: other nodes have the whole snapshot."""
        return {}

    def read_array(self, key: str, form: Form) -> np.ndarray:
        """Return an array, as a view."""
        return self.read(key, form, 0, form.size).reshape(form.shape)

    def check(self, forms: Mapping[str, Form], index: int, count: int) -> None:
        """Do nothing: memory has no digests."""

    def read(self, key: str, form: Form, start: int, stop: int) -> np.ndarray:
        """Return elements of an array, flat, as a view."""
        return self._view(self._buffer, key, start, stop - start)

    def __enter__(self) -> SnapshotFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: the memory is freed with the object."""


@dataclass
class _Run:
    """The snapshots of one run."""

    file: SnapshotFile | None = None
    serial: int = 0  # of the file
    taken: int = 0  # snapshots in it
    newest: int = 0  # step
    saved: int = -1  # the step of the checkpoint on disk


@final
class Snapshots:
    """The snapshots of one strategy."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._job = group, group.environment.job
        self._runs: dict[str, _Run] = {}
        self._reached: memoryview | None = None
        if self._job and group.node.rank == 0:
            if not job_files.mark(self._job, "lock").exists():  # no supervisor is starting on this node
                job_files.sweep(self._job)
            job_files.expect_end(self._job, group.environment.generation, group.topology.rank == 0)
        if self._job and group.topology.rank == 0:
            self._reached = job_files.state(self._job)

    def reach(self, step: int) -> None:
        """Record the step reached, for the supervisor, which gives up at a step where the job keeps dying. Local."""
        if self._reached is not None:
            self._reached[job_files.STEP] = step

    def take(
        self, run: str, step: int, forms: Mapping[str, Form], slices: Sequence[Slice], notes: Mapping[str, Any]
    ) -> None:
        """Copy the state of a run after a step into the memory of each node. Collective.

        Args:
            run: its name.
            step: 1 or more.
            forms: the arrays, the same on all ranks.
            slices: this rank's slices; those of a node's ranks cover everything.
            notes: other data of the state, the same on all ranks.

        Raises:
            SharedMemoryError: on every rank: the memory of some node is too small.
        """
        group, node = self._group, self._group.node
        data = json.dumps(dict(notes)).encode()
        kept = self._runs.setdefault(run, _Run())
        file = kept.file
        with group.collective("snapshot", "file"):
            there = group.agree(int(file is not None and file.path.exists()), "min")
        if file is not None and not there and node.rank == 0 and not file.path.exists():
            text = "%s was removed and is created again. systemd's RemoveIPC=yes removes it when the user logs out"
            logger.warning(text, file.path)
        if (
            file is None
            or not there
            or len(data) + _WORD > file.notes_bytes
            or {key: form for key, (form, _) in file.arrays.items()} != forms
        ):
            file = self._make(run, kept, forms, max(_LEAST_NOTES, 4 * len(data)))
        buffer = kept.taken % 2
        file.begin(buffer, node.rank)
        node.sync()
        file.write(buffer, slices)
        if node.rank == 0:
            file.write_notes(buffer, data)
            with contextlib.suppress(OSError):
                os.utime(file.path)  # mapped writes do not update the time; see `job_files.sweep`
        node.sync()
        file.end(buffer, node.rank, step)
        group.barrier("snapshot")  # all have copied: arrays and the other buffer may change
        kept.taken, kept.newest = kept.taken + 1, step
        if kept.taken == 1 and group.topology.rank == 0:
            job_files.note_modules(self._job)
        if kept.taken == 2 and node.rank == 0:  # every node has a complete snapshot in this file
            job_files.remove_older(self._job, file.path)

    def _make(self, run: str, kept: _Run, forms: Mapping[str, Form], notes_bytes: int) -> SnapshotFile:
        group, node = self._group, self._group.node
        kept.serial, kept.taken = kept.serial + 1, 0

        def path() -> Path:  # the leader creates the folder, the other ranks find its name
            return job_files.path_of(self._job, run, group.environment.generation, kept.serial, node.ranks[0])

        exchange = partial(group.exchange, "snapshot", detail=f"{len(forms)} arrays")

        def attempt(call: Callable[[], SnapshotFile | None]) -> SnapshotFile | None:
            with together(exchange, as_told):
                try:
                    return call()
                except (OSError, ValueError) as error:  # no room; or the file was removed or changed
                    text = f"snapshots on the node of rank {group.topology.rank}: {error}"
                    raise SharedMemoryError(
                        f"{text}. Enlarge it: {ENLARGE}; or disable snapshots: snapshot_seconds=None"
                    ) from None

        leads = node.rank == 0
        made = attempt(lambda: SnapshotFile.make(path(), forms, node.size, notes_bytes) if leads else None)
        kept.file = attempt(lambda: made or SnapshotFile(path()))
        assert kept.file is not None
        return kept.file

    def newest(self, run: str) -> Snapshot | None:
        """Return the newest state of a run that is complete on some node; None if there is none. Collective."""
        group, best = self._group, (0, 0)
        if group.node.rank == 0:
            best = max(((f.generation + 1, step) for f, step in self._here(run)), default=best)
        with group.collective("snapshot", "newest"):
            table = group.all_gather_int(best)
        generation, step = max(map(tuple, table.tolist()))
        if not step:
            return None
        self._runs.setdefault(run, _Run()).newest = step
        return Snapshot(run, generation - 1, step, table.tolist().index([generation, step]))

    def open(self, snapshot: Snapshot) -> SnapshotFile:
        """Return the file of a state, on its root: this node's own file, if the machine has several.

        Raises:
            OSError: the file no longer exists.
        """
        wanted, found = (snapshot.generation, snapshot.step), self._here(snapshot.run)
        files = {job_files.first_of(file.path): file for file, step in found if (file.generation, step) == wanted}
        if not files:
            raise OSError(f"the snapshot of step {snapshot.step} no longer exists")
        return files.get(self._group.node.ranks[0]) or next(iter(files.values()))

    def note_saved(self, run: str, step: int) -> None:
        """Record the step of a complete checkpoint of a run. Local."""
        if self._job:
            self._runs.setdefault(run, _Run()).saved = step

    def end(self) -> None:
        """Free the memory of runs whose newest state is in a checkpoint, unless an error is being raised. Local."""
        if sys.exc_info()[0] is None and self._group.node.rank == 0:
            for run, kept in self._runs.items():
                for path in job_files.paths(self._job, run) if kept.saved >= kept.newest else ():
                    with contextlib.suppress(OSError):
                        path.unlink()
        self._runs.clear()

    def _here(self, run: str) -> list[tuple[SnapshotFile, int]]:
        found = []
        for path in job_files.paths(self._job, run):
            try:
                file = SnapshotFile(path)
            except (OSError, ValueError):  # its rank was killed while creating it
                continue
            if step := file.newest():
                found.append((file, step))
        return found


def check_restarts(group: ProcessGroup, function: str) -> None:
    """Raise ContextError unless the job runs under `mpistrat run --restarts`."""
    if not group.environment.job:
        expected, remedy = "a job with restarts", "Start it with mpistrat run --restarts 20 train.py"
        raise ContextError(explain(function, "", expected=expected, got="a job without", remedy=remedy))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
