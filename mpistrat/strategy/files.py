"""The calls by which a strategy saves and restores, implemented in `checkpoint`."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ContextError, explain
from ..base.types import Quality
from ..state.checkpoint import Checkpoint, StrategyState
from ..state.snapshot import Snapshot, check_restarts
from ..state.writing import Saving
from ..variables.equal import different_weights

if TYPE_CHECKING:
    from .extended import StrategyExtended

__all__ = ["Files"]


class Files(ABC):
    """The calls of a strategy that write its variables and optimizers to files, and read them."""

    _extended: StrategyExtended
    _checkpoint: Checkpoint
    _state: StrategyState

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write all variables, optimizer states and the program's `extra` to one HDF5 file. Collective.

        The file is complete or absent: it is written under a temporary name, and renamed. Any layout and strategy can restore
        it. It has a digest of every array, so `restore` detects later changes. It lacks variables made outside the scope; the
        log reports them.

        Args:
            path: the file; an existing one is replaced.
            extra: the dict that `restore` returns: numbers, text, None, and lists and dicts of them, the same on every rank,
                such as a counter of epochs and the `state()` of an iterator. Of an object with `state_dict` and
                `load_state_dict`, such as a scheduler or GradScaler of PyTorch, the state is saved, for its `load_state_dict`.

        Raises:
            OSError: on every rank: it cannot be written.
            TypeError: on every rank: `extra` has another value in it.
            CollectiveMismatchError: on every rank: `extra` differs between ranks, or weights that should be equal differ
                between nodes, or between the ranks of a mesh's replica.

        Example:
            >>> import tempfile
            >>> strategy = ms.OneDeviceStrategy()
            >>> with strategy.scope():
            ...     w = ms.Variable([1.0, 2.0], name="w")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     strategy.save(f"{folder}/run.h5", extra={"epoch": 3})
            ...     strategy.restore(f"{folder}/run.h5")
            {'epoch': 3}
            >>> strategy.close()
        """
        self._begin_file("save", path, extra)
        self._require_equal("save")
        self._checkpoint.save(path, extra)

    def begin_save(
        self,
        path: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        *,
        then: Callable[[], None] | None = None,
    ) -> Saving:
        """Start to write the current state, as `save` does, while the program continues. Collective.

        Each rank copies its part of the variables and optimizer states into reused memory, and writes it in a thread. One file
        at a time: this call, `save`, and `close` wait for the previous one; its error, if `wait` was not called, is then a
        warning.

        Args:
            path, extra: as for `save`.
            then: called on rank 0, in its thread, when the file is complete.

        Returns:
            The save: `running` is True while this rank is writing; `wait`, collective, waits for all.

        Raises:
            As `save`, for errors before the writing; `wait` for the others.

        Example:
            >>> import tempfile
            >>> strategy = ms.OneDeviceStrategy()
            >>> with tempfile.TemporaryDirectory() as folder, strategy:
            ...     with strategy.scope():
            ...         w = ms.Variable([1.0, 2.0], name="w")
            ...     saving = strategy.begin_save(f"{folder}/run.h5", extra={"epoch": 3})
            ...     _ = w.assign([0.0, 0.0])
            ...     saving.wait()
            ...     strategy.restore(f"{folder}/run.h5"), w.numpy().tolist()
            ({'epoch': 3}, [1.0, 2.0])
        """
        self._begin_file("begin_save", path, extra)
        self._require_equal("begin_save")
        return self._checkpoint.begin(path, extra, then)

    def prepare_save(self) -> None:
        """Allocate the memory into which `begin_save` copies, so that the first call is not slower. Collective.

        Call it once, after the first step, when optimizers have their slots; `ms.train.Checkpoints` does.
        """
        self._begin_file("prepare_save", "")
        self._checkpoint.prepare()

    def take_snapshot(self, step: int, extra: Mapping[str, Any], run: str = "") -> None:
        """Copy all variables and optimizer states into memory of each node that outlives its ranks. Collective.

        For a job under `mpistrat run --restarts`; `ms.train.Checkpoints` calls it. The memory is twice that of variables and
        optimizers on each node. It is freed at the end of the job, or when the strategy is closed after `note_saved`.

        Args:
            step: the number of steps, 1 or more.
            extra: as for `save`.
            run: the name of a run, for programs with several; `Checkpoints` uses its folder.

        Raises:
            ContextError: the job has no restarts; with a coordinator.
            SharedMemoryError: on every rank: the memory of a node is too small.
            TypeError, CollectiveMismatchError: as `save`.
        """
        self._begin_snapshot("take_snapshot")
        self._require_equal("take_snapshot")
        self._checkpoint.take_snapshot(step, extra, run)

    def reach(self, step: int) -> None:
        """Report the step reached to `mpistrat run --restarts`, which gives up at a step where ranks keep dying.

        Local; `ms.train.Checkpoints` calls it.
        """
        self._checkpoint.reach(step)

    def note_saved(self, step: int, run: str = "") -> None:
        """Record the step of a complete checkpoint of a run: older snapshots are not needed any more. Local.

        Args:
            step, run: as for `take_snapshot`.
        """
        self._checkpoint.note_saved(run, step)

    def newest_snapshot(self, run: str = "") -> Snapshot | None:
        """Return the newest state that is complete on some node; None if there is none. Collective.

        Args:
            run: as for `take_snapshot`.

        Raises:
            ContextError: as `take_snapshot`.
        """
        self._begin_snapshot("newest_snapshot")
        return self._checkpoint.newest_snapshot(run)

    def restore_snapshot(self, snapshot: Snapshot) -> dict[str, Any]:
        """Restore the result of `newest_snapshot`; return the `extra` of `take_snapshot`. Collective.

        Raises:
            OSError, ValueError: as `restore`.
        """
        self._begin_snapshot("restore_snapshot")
        return self._checkpoint.restore_snapshot(snapshot)

    @property
    def takes_snapshots(self) -> bool:
        """True if the job restarts when ranks die, so its state can be kept in memory."""
        return bool(self._extended.process_group.environment.job)

    def _begin_snapshot(self, function: str) -> None:
        self._begin_file(function, "")
        check_restarts(self._extended.process_group, f"Strategy.{function}")

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the variables alone, whole and by name, as safetensors, for other programs. Collective.

        Needs `pip install 'mpistrat[safetensors]'`. `restore` reads such files, also those of other programs.

        Args:
            path: the file; an existing one is replaced. Its name ends in ".safetensors".

        Raises:
            ValueError: another suffix.
            OSError: on every rank: it cannot be written.
            CollectiveMismatchError: on every rank: weights that should be equal differ, as in `save`.
        """
        self._begin_file("export", path)
        self._require_equal("export")
        from ..state.safetensors import SUFFIX, is_safetensors

        if not is_safetensors(Path(path)):
            remedy = "save writes HDF5, with optimizers"
            expected, got = f'a name that ends in "{SUFFIX}"', os.fspath(path)
            raise ValueError(explain("Strategy.export", "path", expected=expected, got=got, remedy=remedy))
        self._checkpoint.export(path, *self._state.variables())

    def restore(
        self, path: str | os.PathLike[str], map: Mapping[str, str] | None = None, strict: bool = True
    ) -> dict[str, Any]:
        """Read all variables and optimizer states from a file of `save`. Collective.

        Nothing is changed unless all of it can be read and matches its digests.

        Args:
            path: the file; safetensors, recognized by suffix, have variables only, and optimizers are not changed.
            map: the names in the file of variables with other names here: {"name here": "name there"}.
            strict: False to restore what fits, as for another head on a trained model. Variables that are not in the file, or
                have another shape or dtype there, are not changed, nor are optimizers that are not in it, or not created yet.
                The log lists these, and the unused content of the file.

        Returns:
            The `extra` of `save`, on every rank, with the states of objects; {} if there was none.

        Raises:
            ValueError: on every rank: a variable is missing in it or has another shape or dtype; no variable has a name in
                `map`.
            OSError: on every rank: it cannot be read, or differs from what was saved.
        """
        self._begin_file("restore", path, map, strict)
        if not strict:
            self._require_alike("restore")
        extra = self._checkpoint.restore(path, map or {}, strict)
        self._extended.placement.told_apart = False
        return extra

    def _require_alike(self, function: str) -> None:
        """Raise ContextError if nodes have taken local steps since the last outer step."""
        if self._extended.placement.apart:
            expected = "a call after an outer step, when all nodes have the same weights"
            got = f"local steps since then, of {self._extended.placement.lacks(Quality.EQUAL_NODES)}"
            remedy = (
                "Call it while strategy.nodes_differ is false, or call strategy.outer_step() before. "
                "ms.train.Checkpoints waits for the next outer step"
            )
            raise ContextError(explain(f"Strategy.{function}", "", expected=expected, got=got, remedy=remedy))

    def _require_equal(self, function: str) -> None:
        """Raise an error unless weights are equal where they should be. Collective.

        Raises:
            ContextError: nodes have taken local steps since the last outer step.
            CollectiveMismatchError: on every rank: weights differ.
        """
        self._require_alike(function)
        difference = different_weights(f"Strategy.{function}", self._extended.placement)
        if difference is not None:
            raise difference

    def _begin_file(self, function: str, path: str | os.PathLike[str], *more: Any) -> None:
        """Prepare each call: bring variables to rest."""
        self._extended.require_cross(f"Strategy.{function}")
