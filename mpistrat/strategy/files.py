"""What a strategy saves and restores: the calls, see `checkpoint` for what they do."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ContextError, explain
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
        """Write all variables, all that optimizers keep, and what the program adds, to one HDF5 file. Collective.

        The file is complete or not there: it is written beside, and renamed. Any layout and strategy can restore it. It has a
        digest of every array, by which `restore` notices what was changed since. Variables that were made outside the scope
        are not in it; the log says so.

        Args:
            path: the file; one that exists is replaced.
            extra: the dict that `restore` returns: numbers, text, None, and lists and dicts of them, the same on every rank, such
                as a counter of epochs and the `state()` of an iterator. Of an object with `state_dict` and `load_state_dict`,
                such as a scheduler or a GradScaler of PyTorch, the file has the state, for its `load_state_dict`.

        Raises:
            OSError: on every rank, when it cannot be written.
            TypeError: on every rank, when `extra` has another value in it.
            CollectiveMismatchError: on every rank, when `extra` is not the same on all, or weights that should be equal differ
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
        """Begin to write what `save` writes, as it is now, while the program goes on. Collective.

        Each rank copies its part of the variables and of what optimizers keep, into memory that is used again, and writes it in
        a thread. One file at a time: this call, `save`, and `close` wait for the one before, and then an error that nobody
        has asked for with `wait` is a warning.

        Args:
            path, extra: as for `save`.
            then: called on rank 0, in its thread, when the file is complete.

        Returns:
            What tells whether this rank has written its part (`running`), and waits for all (`wait`, collective).

        Raises:
            As `save`, for what is known before the writing; `wait` for the rest.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder, ms.OneDeviceStrategy() as strategy:
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
        """Have the memory ready into which `begin_save` copies, so that the first one takes no longer. Collective.

        Call it once, after the first step, when optimizers have made what they keep; `ms.train.Checkpoints` does.
        """
        self._begin_file("prepare_save", "")
        self._checkpoint.prepare()

    def take_snapshot(self, step: int, extra: Mapping[str, Any], run: str = "") -> None:
        """Keep all variables, and all that optimizers keep, in memory of each node that outlives its ranks. Collective.

        For a job that `mpistrat run --restarts` starts again; `ms.train.Checkpoints` does it. The memory is twice that of
        variables and optimizers on each node, and is given back when the job has ended, or when the strategy is closed after
        `note_saved`.

        Args:
            step: how many steps there were, 1 or more.
            extra: as for `save`.
            run: a name of what goes on from it, where a program has several runs; `Checkpoints` takes its folder.

        Raises:
            ContextError: the job is not started again; beside a coordinator.
            SharedMemoryError: on every rank, where the memory of any node is too small.
            TypeError, CollectiveMismatchError: as `save`.
        """
        self._begin_snapshot("take_snapshot")
        self._require_equal("take_snapshot")
        self._checkpoint.take_snapshot(step, extra, run)

    def reach(self, step: int) -> None:
        """Tell `mpistrat run --restarts` which step the job has reached: one at which ranks die again and again is given up.

        Local; `ms.train.Checkpoints` calls it.
        """
        self._checkpoint.reach(step)

    def note_saved(self, step: int, run: str = "") -> None:
        """Say that there is a complete checkpoint of a run after a step: snapshots before it are not needed any more. Local.

        Args:
            step, run: as for `take_snapshot`.
        """
        self._checkpoint.note_saved(run, step)

    def newest_snapshot(self, run: str = "") -> Snapshot | None:
        """Return the newest state that some node still has whole, as its step says; None where there is none. Collective.

        Args:
            run: as for `take_snapshot`.

        Raises:
            ContextError: as `take_snapshot`.
        """
        self._begin_snapshot("newest_snapshot")
        return self._checkpoint.newest_snapshot(run)

    def restore_snapshot(self, snapshot: Snapshot) -> dict[str, Any]:
        """Restore what `newest_snapshot` has found; return what `take_snapshot` got as `extra`. Collective.

        Raises:
            OSError, ValueError: as `restore`.
        """
        self._begin_snapshot("restore_snapshot")
        return self._checkpoint.restore_snapshot(snapshot)

    @property
    def takes_snapshots(self) -> bool:
        """Whether the job is started again when ranks die, and its state may be kept in memory."""
        return bool(self._extended.process_group.environment.job)

    def _begin_snapshot(self, function: str) -> None:
        self._begin_file(function, "")
        check_restarts(self._extended.process_group, f"Strategy.{function}")

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the variables alone, whole and by name, as safetensors, for other programs. Collective.

        Needs `pip install 'mpistrat[safetensors]'`. `restore` reads such files, too, ours and others'.

        Args:
            path: the file; one that exists is replaced. Its name ends in ".safetensors".

        Raises:
            ValueError: another suffix.
            OSError: on every rank, when it cannot be written.
            CollectiveMismatchError: on every rank, when weights that should be equal differ, as in `save`.
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
        """Read all variables, and all that optimizers keep, from a file that `save` wrote. Collective.

        Nothing is changed unless all of it can be read and is as it was saved.

        Args:
            path: the file; one of safetensors, by its suffix, has variables only, and optimizers stay as they are.
            map: the names in the file of variables that are called otherwise here: {"name here": "name there"}.
            strict: False to take what fits, as for another head on a trained model: variables that are not in the file, or have
                another shape or dtype there, stay as they are, and so do optimizers that are not in it, or are not made
                yet. The log says what stays, and what of the file is not used.

        Returns:
            The `extra` of `save`, on every rank, with the states of objects; {} if there was none.

        Raises:
            ValueError: on every rank, when a variable is missing in it or has another shape or dtype; a name in `map` that
                no variable has.
            OSError: on every rank, when it cannot be read, or is not as it was saved.
        """
        self._begin_file("restore", path, map, strict)
        if not strict:
            self._require_alike("restore")
        extra = self._checkpoint.restore(path, map or {}, strict)
        self._extended.placement.told_apart = False
        return extra

    def _require_alike(self, function: str) -> None:
        """Do nothing where nodes hold the same weights.

        Raises:
            ContextError: nodes have taken local steps since the last outer step.
        """
        if self._extended.placement.apart:
            expected = "a call after an outer step, when all nodes have the same weights"
            got = f"local steps since then, of {self._extended.placement.local_steps}"
            remedy = (
                "Call it while strategy.nodes_differ is false, as after each so many updates, or strategy.outer_step() before, "
                "which takes one now. ms.train.Checkpoints waits for the next one"
            )
            raise ContextError(explain(f"Strategy.{function}", "", expected=expected, got=got, remedy=remedy))

    def _require_equal(self, function: str) -> None:
        """Raise what is wrong unless weights are equal where they should be. Collective.

        Raises:
            ContextError: nodes have taken local steps since the last outer step.
            CollectiveMismatchError: on every rank, when weights differ.
        """
        self._require_alike(function)
        difference = different_weights(f"Strategy.{function}", self._extended.placement)
        if difference is not None:
            raise difference

    def _begin_file(self, function: str, path: str | os.PathLike[str], *more: Any) -> None:
        """Come before each call: what ranks must do to have variables at rest."""
        self._extended.require_cross(f"Strategy.{function}")
