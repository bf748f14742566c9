"""Checkpoints: variables, optimizer states and the program's `extra` in one file, for any layout and any strategy.

This module divides the writing among ranks; `writing` writes, in threads if the program continues; `restore` reads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np

from ..base import context, log
from ..base.agree import as_told, together
from ..base.files import replacing
from ..comm.process_group import ProcessGroup
from ..comm.recorder import RECORDER
from ..variables import Placement
from .extra import agree_extra
from .file import complete_file, from_rank_0
from .list import Form, Slice, Writers, entries, locations, name_of, slices_of, variable_entries, wholes
from .optimizer_states import OptimizerStates
from .snapshot import Snapshot, SnapshotFile, Snapshots
from .writing import Layout, Saving, check_space

__all__ = ["Checkpoint", "SavedState", "StrategyState"]

_ALIGNMENT = 64  # bytes, of copies
_mentioned: set[str] = set()  # unsaved variables that were logged


class SavedState(Protocol):
    """The contents of a checkpoint: variables and optimizers of a strategy, or of a PyTorch module."""

    def arrays(self, ranks: Sequence[int], each_node: bool) -> tuple[dict[str, Form], list[Slice]]:
        """Return the forms of all arrays, and this rank's slices. Collective. See `Writers`."""

    def optimizers(self) -> list[dict[str, Any]]:
        """Return name, iterations and settings of each optimizer, the same on all ranks."""

    def check(self) -> None:
        """Log the variables that are in no file. Local."""

    def restore(
        self, path: str, opening: Callable[[], SnapshotFile] | None, root: int, names: Mapping[str, str], strict: bool
    ) -> dict[str, Any]:
        """Read everything; return the program's `extra`. Collective. See `Strategy.restore` and `OpenState`."""


@final
class StrategyState:
    """The variables and optimizers of a strategy."""

    def __init__(self, group: ProcessGroup, placement: Placement, states: OptimizerStates) -> None:
        self._group, self._placement, self._states = group, placement, states

    def arrays(self, ranks: Sequence[int], each_node: bool) -> tuple[dict[str, Form], list[Slice]]:
        """Return forms and slices, see `SavedState.arrays`. Collective."""
        writers = Writers(self._group, self._placement.replica_ranks, ranks, each_node)
        return slices_of(entries(self._placement, self._states, writers), writers)

    def variables(self) -> tuple[dict[str, Form], list[Slice]]:
        """Return the forms of the variables alone, and on rank 0 all their slices. Collective."""
        writers = Writers(self._group, self._placement.replica_ranks, [0])
        return slices_of(variable_entries(self._placement, locations(self._placement), writers), writers)

    def optimizers(self) -> list[dict[str, Any]]:
        """Return the numbers and settings of each optimizer, see `SavedState.optimizers`."""
        return [kept.about() for kept in self._states.kept()]

    def check(self) -> None:
        """Log the variables that are in no file: those made outside of every scope."""
        outside = context.default_strategy()
        if outside is None or outside.extended.placement is self._placement:
            return
        names = [variable.name for variable in outside.extended.variables if variable.name not in _mentioned]
        _mentioned.update(names)
        if names:
            remedy = "make them in the scope, or pass their values: strategy.save(path, extra={...})"
            what = (
                f"variables made outside strategy.scope() are neither saved nor restored: {', '.join(map(repr, names))}"
            )
            log.once(logging.WARNING, f"{what}; {remedy}")

    def restore(
        self, path: str, opening: Callable[[], SnapshotFile] | None, root: int, names: Mapping[str, str], strict: bool
    ) -> dict[str, Any]:
        """Read everything, see `SavedState.restore`. Collective."""
        from .restore import Restoring

        return Restoring(self._group, self._placement, self._states, path, opening, root).restore(names, strict)


@final
class Checkpoint:
    """Saves and restores of one state by the ranks of one group."""

    def __init__(self, group: ProcessGroup, state: SavedState) -> None:
        self._group, self._state = group, state
        self._layout: Layout | None = None
        self._memory = np.empty(0, np.uint8)  # copies for a file that is written while the program continues
        self._saving: Saving | None = None
        self._seconds = 0.0
        self._snapshots = Snapshots(group)
        group.attach(self)

    @property
    def seconds(self) -> float:
        """The longest time to write this rank's slices, on rank 0 to complete a file, in seconds."""
        if self._saving is not None:
            self._seconds = max(self._seconds, self._saving.seconds)
        return self._seconds

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None) -> None:
        """Write all variables and optimizer states. Collective. See `Strategy.save`."""
        with RECORDER.span("s", "save"):
            saving = self._saving = self._prepare(path, extra, keeps=False)
            saving.write()
            try:
                saving.wait()
            finally:
                self._forget()

    def begin(
        self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None, then: Callable[[], None] | None
    ) -> Saving:
        """Copy this rank's slices, and write them in a thread. Collective. See `Strategy.begin_save`."""
        with RECORDER.span("s", "begin_save"):
            saving = self._saving = self._prepare(path, extra, keeps=True)
            saving.then = then
            saving.start()
        return saving

    def prepare(self) -> None:
        """Allocate memory for the copies of a save. Collective. See `Strategy.prepare_save`."""
        _, slices = self._state.arrays(range(self._group.topology.size), False)
        self._reserve(slices)

    def export(self, path: str | os.PathLike[str], forms: dict[str, Form], slices: list[Slice]) -> None:
        """Write the variables alone, as safetensors. Collective. See `Strategy.export`."""

        def write() -> dict[str, Any]:
            from .safetensors import write_safetensors

            arrays = {name_of(key.removeprefix("variables/")): array for key, array in wholes(forms, slices).items()}
            write_safetensors(Path(path), arrays)
            return {}

        from_rank_0(self._group, "export", path, write)

    def end(self) -> None:
        """Wait for a file being written; log an error as a warning. Collective."""
        saving = self._saving
        if saving is not None:
            try:
                saving.wait()
            except OSError as error:
                if self._group.topology.rank == 0:
                    log.logger.warning("%s", error)
            self._forget()

    def end_runs(self) -> None:
        """Free the memory of unneeded snapshots. Local."""
        self._snapshots.end()

    def note_saved(self, run: str, step: int) -> None:
        """Record the step of a complete checkpoint of a run. Local."""
        self._snapshots.note_saved(run, step)

    def _forget(self) -> None:
        self._seconds, self._saving = self.seconds, None

    def restore(self, path: str | os.PathLike[str], names: Mapping[str, str], strict: bool) -> dict[str, Any]:
        """Read all variables and optimizer states; return the program's `extra`. Collective. See `Strategy.restore`."""
        self.end()
        self._state.check()
        with RECORDER.span("s", "restore"):
            return self._state.restore(os.fspath(path), None, 0, names, strict)

    def close(self) -> None:
        """Do nothing: the strategy called `end` while ranks could still communicate."""

    def leave(self) -> Callable[[], None] | None:
        """See `comm.process_group.Attachment`."""
        return None if self._saving is None else self._saving.leave()

    def abandon(self) -> None:
        """Do nothing: this rank's writing needs no other rank."""

    def _prepare(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None, keeps: bool) -> Saving:
        """Agree on a file, and on the slices that each rank writes. Collective.

        Args:
            path, extra: see `Strategy.save`.
            keeps: whether to copy the slices, because the program continues.
        """
        self.end()
        began = time.monotonic()
        group, target = self._group, Path(path)
        text = agree_extra(group, path, extra)
        self._state.check()
        optimizers = self._state.optimizers()
        replacement = contextlib.ExitStack()
        try:

            def create() -> dict[str, Any]:
                return {"beside": str(replacement.enter_context(replacing(target)))}

            beside = Path(from_rank_0(group, "save", path, create)["beside"])
            writers = self._writers(beside)
            forms, slices = self._state.arrays(writers, False)
            layout = self._layout_of(forms, beside, path)
            kept = self._copied(slices) if keeps else slices
            with group.collective("save", "pieces"):
                pieces = int(group.all_gather_int([layout.pieces(kept)]).max())  # also: all have copied
        except BaseException as error:
            with contextlib.suppress(BaseException):
                replacement.__exit__(type(error), error, error.__traceback__)
            raise
        complete = partial(complete_file, beside, optimizers=optimizers, extra=text)
        return Saving(target, group, beside, layout, kept, writers, pieces, complete, replacement, began)

    def _writers(self, beside: Path) -> list[int]:
        """Return the ranks that can write the file: all, if the folder is on a shared file system. Collective."""
        with self._group.collective("save", "writers"):
            reached = self._group.all_gather_int([os.access(beside, os.W_OK)])[:, 0]
        return [rank for rank, reaches in enumerate(reached) if reaches]

    def _layout_of(self, forms: dict[str, Form], beside: Path, path: str | os.PathLike[str]) -> Layout:
        if self._layout is None or self._layout.forms != forms:
            own: list[Layout] = []

            def make() -> dict[str, Any]:
                own.append(Layout.made(beside, forms))
                return {"offsets": list(own[0].offsets.values()), "end": own[0].end}

            found = from_rank_0(self._group, "save", path, make)
            self._layout = own[0] if own else Layout(forms, found["offsets"], found["end"])
        layout = self._layout
        with together(
            partial(self._group.exchange, "save", detail=f"{len(forms)} arrays, {layout.end} bytes"), as_told
        ):
            if self._group.topology.rank == 0:
                try:
                    check_space(beside.parent, layout.end)
                except OSError as error:
                    raise OSError(f"Strategy.save: {os.fspath(path)}: {error}") from None
        return layout

    def _copied(self, slices: list[Slice]) -> list[Slice]:
        """Return copies of slices, in memory that later saves reuse."""
        copied = []
        for part, low in zip(slices, self._reserve(slices), strict=True):
            target = self._memory[low : low + part.array.nbytes].view(part.array.dtype)
            np.copyto(target, part.array)
            copied.append(part._replace(array=target))
        return copied

    def _reserve(self, slices: list[Slice]) -> list[int]:
        """Allocate memory for copies of slices; return the offset of each."""
        begins, end = [], 0
        for part in slices:
            begins.append(end)
            end += -(-part.array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._memory.size < end:
            self._memory = np.full(end, 0, np.uint8)  # touched, so that all pages are allocated
        return begins

    def take_snapshot(self, step: int, extra: Mapping[str, Any], run: str) -> None:
        """Copy the state into the memory of each node. Collective. See `Strategy.take_snapshot`."""
        with RECORDER.span("s", "snapshot"):
            self._state.check()
            text = agree_extra(self._group, "", extra)
            forms, slices = self._state.arrays(range(self._group.topology.size), True)
            notes = {"extra": json.loads(text or "{}"), "optimizers": self._state.optimizers()}
            self._snapshots.take(run, step, forms, slices, notes)

    def reach(self, step: int) -> None:
        """Record the step that the job has reached, for the supervisor. Local."""
        self._snapshots.reach(step)

    def newest_snapshot(self, run: str) -> Snapshot | None:
        """Return the newest state of a run that is complete on some node. Collective."""
        return self._snapshots.newest(run)

    def restore_snapshot(self, snapshot: Snapshot) -> dict[str, Any]:
        """Restore a state from memory; return the program's `extra`. Collective."""
        with RECORDER.span("s", "restore"):
            opening = partial(self._snapshots.open, snapshot)
            return self._state.restore(f"the snapshot of step {snapshot.step}", opening, snapshot.root, {}, True)
