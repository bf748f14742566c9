"""Writing a checkpoint on all ranks: each writes its slices at their offsets, rank 0 completes the file.

Rank 0 lays out the arrays with HDF5, contiguous and each from a page's start, and sends the offsets. Each rank writes with
`pwrite`, flushes to the disk, and reports digests in its own page after the arrays. Rank 0 waits for the reports, cuts them
off, adds digests and `extra`, and renames the file. No message is sent meanwhile, so it runs in threads while the ranks train.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from ..base.errors import RanksLostError
from ..base.files import PAGE, digest_of_array
from ..comm.process_group import ProcessGroup
from ..data.shards.unfailing_file import unfailing
from .file import Digests, about_slice, stored
from .list import Form, Slice

__all__ = ["Layout", "Saving", "check_space"]

_PIECE = 16 << 20  # bytes of a digest
_RECORD = 160  # bytes per piece in a report, at most
_HEAD = 21  # bytes of a report's length and checksum
_PATIENCE = 600.0  # seconds without a report
_LONGEST_PAUSE = 0.05


@final
class Layout:
    """The offsets of the arrays in a file. Reused while names, shapes and dtypes stay equal.

    Attributes:
        forms: of the arrays, by key.
        offsets: bytes from the file's start to each; None for arrays without elements.
        end: the size of the file.
    """

    def __init__(
        self,
        forms: Mapping[str, Form],
        offsets: Sequence[int | None],
        end: int,
        gaps: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """Store the results of `made`. `gaps`, on rank 0, are the bytes between the arrays."""
        self.forms, self.end, self._gaps = dict(forms), end, list(gaps)
        self.offsets = dict(zip(forms, offsets, strict=True))

    @classmethod
    def made(cls, path: Path, forms: Mapping[str, Form]) -> Layout:
        """Lay out arrays in a file with HDF5, without writing them.

        Names and forms come first, then the arrays, each from a page's start. HDF5 aligns only the arrays, else each name would
        take its own pages. It does not search for free space: the time would grow with each array.

        Raises:
            OSError, RuntimeError, ValueError: from h5py and the system.
        """
        import h5py

        with unfailing(path, "w", fs_strategy="none") as (file, check):
            file.create_group("variables")
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_layout(h5py.h5d.CONTIGUOUS)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            for key, form in forms.items():
                kind = h5py.h5t.py_create(stored(form.kind), logical=True)
                space = h5py.h5s.create_simple(form.shape) if form.shape else h5py.h5s.create(h5py.h5s.SCALAR)
                dataset = h5py.Dataset(h5py.h5d.create(file.id, None, kind, space, properties))
                file[key] = dataset
                if stored(form.kind) != form.kind:
                    dataset.attrs["dtype"] = form.dtype
                check()
        with unfailing(path, "r+", alignment_threshold=1, alignment_interval=PAGE) as (file, check):
            offsets: list[int | None] = []
            for key, form in forms.items():
                offsets.append(_allocated(h5py.h5d.open(file.id, key.encode())) if form.size else None)
                check()
        end = -(-path.stat().st_size // PAGE) * PAGE
        arrays = sorted(
            (at, at + form.nbytes) for at, form in zip(offsets, forms.values(), strict=True) if at is not None
        )
        gaps, low = [], 0
        with path.open("rb") as raw:
            for begin, after in [*arrays, (end, end)]:
                raw.seek(low)
                data = raw.read(begin - low)
                if data.strip(b"\0"):  # zeros need not be written
                    gaps.append((low, data))
                low = after
        return cls(forms, offsets, end, gaps)

    def write_gaps(self, descriptor: int) -> None:
        """Write the bytes between the arrays into an empty file."""
        for at, data in self._gaps:
            _write(descriptor, memoryview(data), at)

    def pieces(self, slices: Sequence[Slice]) -> int:
        """Return the number of pieces of slices."""
        return sum(-(-part.array.nbytes // _PIECE) for part in slices)


@final
@dataclass(eq=False, repr=False)
class Saving:
    """A file being written, as `Strategy.begin_save` returns it.

    Attributes:
        path: the name of the complete file.
        seconds: the time until this rank's slices were written, on rank 0 until the file was complete; 0 before.
        then: called on rank 0 when it is complete.
    """

    path: Path
    _group: ProcessGroup
    _beside: Path  # the file's name until it is complete
    _layout: Layout
    _slices: Sequence[Slice]  # of this rank
    _writers: Collection[int]  # ranks
    _pieces: int  # in a report, at most
    _complete: Callable[[Digests], None]  # adds all else to the file, on rank 0
    _replacement: contextlib.ExitStack  # renames the file on exit, on rank 0
    _began: float  # when the save was called, by the monotonic clock
    then: Callable[[], None] | None = None
    seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._rank = self._group.topology.rank
        self._block = -(-(_HEAD + _RECORD * (self._pieces + 2)) // PAGE) * PAGE  # bytes of a report
        self._error: BaseException | None = None  # of this rank
        self._unreported = ""  # an error that this rank could not report in the file
        self._lost = ""  # those errors of all ranks, once exchanged
        self._thread: threading.Thread | None = None
        self._outcome: str | None = None

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread = threading.Thread(target=self._run, name="mpistrat checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.write()
        if not self._rank:
            self._finish()

    def write(self) -> None:
        """Write this rank's slices and its report. Errors are stored."""
        try:
            if self._rank in self._writers:
                self._write_slices()
        except Exception as error:
            self._error = error
            try:
                self._report(json.dumps(f"{type(error).__name__}: {error}"[: 2 * _RECORD // 3]))
            except Exception:
                self._unreported = f"{type(error).__name__}: {error}"
        self._slices = ()
        self.seconds = time.monotonic() - self._began

    def _write_slices(self) -> None:
        layout, records = self._layout, list[Any]()
        index_of = {key: index for index, key in enumerate(layout.forms)}
        descriptor = os.open(self._beside, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if not self._rank:
                layout.write_gaps(descriptor)
            for part in self._slices:
                offset = layout.offsets[part.key]
                if offset is None:
                    continue
                form, step = layout.forms[part.key], max(1, _PIECE // part.array.itemsize)
                for low in range(0, part.array.size, step):
                    piece, start = part.array[low : low + step], part.start + low
                    _write(descriptor, piece.view(np.uint8).data, offset + start * piece.itemsize)
                    digest = digest_of_array(piece, about_slice(part.key, form.shape, start))
                    records.append((index_of[part.key], start, start + piece.size, digest))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._report(json.dumps(records))

    def _report(self, text: str) -> None:
        data = text.encode()
        head = f"{len(data):012}{zlib.crc32(data):08x}\n".encode()
        descriptor = os.open(self._beside, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _write(descriptor, memoryview(head + data), self._layout.end + self._rank * self._block)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # rank 0

    def _finish(self) -> None:
        """Complete and rename the file when all ranks have written, or remove it. Errors are stored."""
        try:
            with self._replacement:
                if self._error is not None:
                    raise self._error
                records = self._reports()
                os.truncate(self._beside, self._layout.end)
                self._complete(self._digests(records))
            self.seconds = time.monotonic() - self._began
            if self.then is not None:
                self.then()
        except Exception as error:
            self._error = error

    def _reports(self) -> list[Any]:
        """Wait for the reports of all ranks, and return their pieces.

        Raises:
            OSError: a rank could not write, or did not in time.
        """
        missing, records, pause, last = set(self._writers), [], 0.001, time.monotonic()
        while missing:
            descriptor = os.open(self._beside, os.O_RDONLY | os.O_CLOEXEC)  # reopened: NFS then asks the server
            try:
                found = {rank: self._read_report(descriptor, rank) for rank in missing}
            finally:
                os.close(descriptor)
            for rank, report in found.items():
                if isinstance(report, str):
                    raise OSError(f"rank {rank}: {report}")
                if report is not None:
                    records += report
                    missing.remove(rank)
                    pause, last = 0.001, time.monotonic()
            if self._lost or isinstance(self._group.monitor.refusal, RanksLostError):
                raise OSError(self._lost or "ranks were lost")
            if missing and time.monotonic() - last > _PATIENCE:
                raise OSError(f"rank {min(missing)} has not written its part in {_PATIENCE:.0f} s")
            if missing:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        return records

    def _read_report(self, descriptor: int, rank: int) -> Any:
        data = os.pread(descriptor, self._block, self._layout.end + rank * self._block)
        head, body = data[:_HEAD], data[_HEAD:]
        if len(head) < _HEAD or head[-1:] != b"\n":
            return None
        body = body[: int(head[:12])]
        return json.loads(body) if f"{zlib.crc32(body):08x}".encode() == head[12:20] else None

    def _digests(self, records: Sequence[Any]) -> Digests:
        keys = list(self._layout.forms)
        digests: Digests = {key: [] for key in keys}
        for index, start, stop, digest in sorted(records):
            digests[keys[index]].append((start, stop, digest))
        for key, form in self._layout.forms.items():
            ends = [0, *(stop for _, stop, _ in digests[key])]
            if [start for start, _, _ in digests[key]] != ends[:-1] or ends[-1] != form.size:
                raise RuntimeError(f"{key} was not written once by the ranks: {digests[key]}")
        return digests

    # all ranks

    @property
    def running(self) -> bool:
        """True while this rank is writing. Local."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the file is complete. Collective; a second call returns at once.

        Raises:
            OSError: on every rank: the file could not be written. An older file of that name is unchanged.
        """
        if self._outcome is None:
            self._outcome = self._group.in_order("Strategy.save", self._agree)
        if self._outcome:
            raise OSError(f"Strategy.save: {os.fspath(self.path)}: {self._outcome}")

    def _agree(self) -> str:
        exchange = partial(self._group.exchange, "save", detail=f"{os.fspath(self.path)}, when it is written")
        if self._thread is not None and self._rank:
            self._thread.join()
        texts = exchange(self._unreported)
        self._lost = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        if not self._rank:
            if self._thread is None:
                self._finish()
            else:
                self._thread.join()
        error = self._error if not self._rank else None
        words = "" if error is None else str(error) if type(error) is OSError else f"{type(error).__name__}: {error}"
        return exchange(words)[0]

    def leave(self) -> Callable[[], None] | None:
        """Return a function that waits for this rank's thread, for a program that ends without waiting."""
        return None if self._thread is None or self._outcome is not None else self._thread.join


def check_space(folder: Path, nbytes: int) -> None:
    """Raise OSError if a file system has less than `nbytes` free."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"No space left on device: {nbytes:,} bytes needed, {free:,} free")


def _allocated(dataset: Any) -> int:
    """Allocate space for an array in HDF5, by writing its first element; return the offset."""
    import h5py

    first, axes = dataset.get_space(), len(dataset.shape)
    if axes:
        first.select_hyperslab((0,) * axes, (1,) * axes)
    dataset.write(h5py.h5s.create(h5py.h5s.SCALAR), first, np.zeros((), dataset.dtype))
    return int(dataset.get_offset())


def _write(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, at)
        data, at = data[count:], at + count
