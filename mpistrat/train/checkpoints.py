"""Checkpoints of a run in one folder: when to save, which to keep, and the newest readable one.

Also the states of random generators besides `ms.rng`: Python's, NumPy's global one, PyTorch's on the CPU.
"""

from __future__ import annotations

import base64
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from ..base.agree import same, together
from ..base.arguments import integer
from ..base.environment import RESTART_EXIT_CODE
from ..base.errors import CollectiveMismatchError, ContextError, SharedMemoryError, by_rank, explain
from ..base.log import logger
from ..data.files.remote import is_url
from ..state.extra import has_state, state_of_text, text_of_state
from ..state.writing import Saving
from ..timeline.trace import process_group_of
from .checkpoint_folders import LocalFolder, folder_of, newest_file

__all__ = [
    "Checkpoints",
    "checkpoints_iterator",
    "gather_states",
    "get_states",
    "hand_back",
    "set_states",
]


_RANKS = 256  # states are saved for at most this many ranks, 5 KB each


def gather_states(strategy: Any) -> list[dict[str, Any]]:
    """Return the states of all ranks, up to a number of ranks. Collective."""
    return list(strategy.all_gather_object(get_states())) if strategy.size <= _RANKS else []


def hand_back(strategy: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Set each rank's state from a list of `gather_states`; on another number of ranks do nothing."""
    if len(states) == strategy.size:
        set_states(states[strategy.rank])


def get_states() -> dict[str, Any]:
    """Return the states of this process's generators for JSON: some kilobytes.

    Example:
        >>> states, number = get_states(), np.random.rand()
        >>> set_states(states)
        >>> np.random.rand() == number
        True
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - the one that programs use
    states: dict[str, Any] = {
        "python": [version, _text(np.array(words, np.uint32)), gauss],
        "numpy": [str(name), _text(np.asarray(keys)), int(position), int(has_gauss), float(cached)],
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = _text(torch.get_rng_state().numpy())
    return states


def set_states(states: Mapping[str, Any]) -> None:
    """Set the generators to states that `get_states` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(_array(words, np.uint32).tolist()), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, _array(keys, np.uint32), *rest))  # noqa: NPY002
    torch: Any = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(torch.from_numpy(_array(states["torch"], np.uint8)))


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).copy()


_POLL_SECONDS = 1.0  # between looks at a folder
_SHARE = 0.01  # of the time, for snapshots at most
_COSTS = 4  # the last ones considered
_LONGEST = 60  # the longest time between two meetings, as a multiple of the wanted one
_LAYOUTS, _OBJECTS, _BY_RANK = "layouts", "states of objects", "states of objects by rank"  # in the notes


@final
class Checkpoints:
    """A folder with a file of `Strategy.save` for each saved step; or one of an object store, such as s3://bucket/run.

    A file is complete or absent; any strategy on any number of ranks restores it. Files are written in the background: a save
    only takes the time to copy each rank's share. Given to a `Trainer`, a restarted run resumes from the newest one; in a
    loop of your own call `step`, `wait` at the end, and `restore_latest`.

    Attributes:
        folder: the folder; the URL of one of an object store.
        strategy: its variables and optimizers are saved.
        restore_file: the function that restores a file and returns its notes; default the strategy's `restore`.
    """

    def __init__(
        self,
        strategy: Any,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        asynchronous: bool = True,
        snapshot_seconds: float | None = 1.0,
        objects: Mapping[str, Any] | None = None,
        objects_by_rank: Mapping[str, Any] | None = None,
    ) -> None:
        """Set a folder, which is created with the first file.

        Args:
            strategy: its variables and optimizers are saved; or an `ms.torch.TrainingState`.
            folder: on a file system that all ranks see; or a URL that fsspec can write to, such as "s3://bucket/run" (s3fs),
                with credentials from the environment. A node of rank 0 then writes a file into its folder of temporary
                files (TMPDIR) and uploads it, then a small .json object, without which the file does not exist. That
                another run writes there cannot be seen.
            keep: how many of the newest files stay; 0 for all.
            every_steps: `step` saves at its multiples.
            every_seconds: `step` saves when this time has passed since the last file, by rank 0's clock.
            asynchronous: True to write in the background, which needs memory for a copy, divided over the ranks; see
                `Strategy.begin_save`.
            snapshot_seconds: under `mpistrat run --restarts`, `step` also copies the state to memory after this time and at
                least 100 times the time of a copy; see `Strategy.take_snapshot`. None for never.
            objects: objects with `state_dict` and `load_state_dict`, by names for the file, such as schedulers and
                GradScalers of PyTorch: saved and loaded with the rest. They must be equal on all ranks.
            objects_by_rank: such objects whose states differ by rank, with equal names on all ranks, as a StatefulDataLoader
                of torchdata over this rank's rows. The number of ranks must not change.

        Raises:
            ValueError: an argument is out of range; a name in both `objects` and `objects_by_rank`.
            TypeError: an object without `state_dict` or `load_state_dict`.

        Example:
            >>> import tempfile
            >>> strategy = ms.OneDeviceStrategy()
            >>> with tempfile.TemporaryDirectory() as folder, strategy:
            ...     with strategy.scope():
            ...         w = ms.Variable([1.0, 2.0], name="w")
            ...     checkpoints = ms.train.Checkpoints(strategy, folder, every_steps=2)
            ...     for step in range(1, 6):
            ...         saved = checkpoints.step(step, {"epoch": 0})
            ...     checkpoints.wait()
            ...     checkpoints.steps(), checkpoints.restore_latest()
            ([2, 4], {'epoch': 0, 'step': 4})
        """
        for argument, value, least in (("keep", keep, 0), ("every_steps", every_steps, 1)):
            if value is not None and value < least:
                raise ValueError(explain("Checkpoints", argument, expected=f"{least} or more", got=str(value)))
        for argument, seconds in (("every_seconds", every_seconds), ("snapshot_seconds", snapshot_seconds)):
            if seconds is not None and not seconds > 0:
                raise ValueError(explain("Checkpoints", argument, expected="a number > 0", got=str(seconds)))
        self._objects, self._by_rank = dict(objects or {}), dict(objects_by_rank or {})
        for argument, given in (("objects", self._objects), ("objects_by_rank", self._by_rank)):
            for name, value in given.items():
                if not has_state(value):
                    expected, got = "an object with state_dict and load_state_dict", f"a {type(value).__name__}"
                    raise TypeError(explain("Checkpoints", f"{argument}[{name!r}]", expected=expected, got=got))
        if twice := [repr(name) for name in self._by_rank if name in self._objects]:
            expected, got = "other names than those of objects", ", ".join(twice)
            raise ValueError(explain("Checkpoints", "objects_by_rank", expected=expected, got=got))
        self._folder = folder_of(strategy, folder)
        self.restore_file: Callable[[Path], Any] = strategy.restore
        self.strategy, self._keep, self._every = strategy, keep, every_steps
        self._asynchronous, self._prepared = asynchronous, False
        self._saving: Saving | None = None
        self._period = None if every_seconds is None else _Period(strategy, every_seconds)
        self._snapshots: _Period | None = None
        if snapshot_seconds is not None and strategy.takes_snapshots:
            self._snapshots = _Period(strategy, snapshot_seconds)
        self._saved, self._saving_step = False, 0
        self._claimed = False
        self._postponed = False  # until nodes have the same weights
        group = process_group_of(strategy, "Checkpoints")
        self._until, self._layouts = group.environment.until, [(0, group.topology.ranks_per_node)]

    @property
    def folder(self) -> Path | str:
        """The folder; the URL of one of an object store."""
        return self._folder.folder if isinstance(self._folder, LocalFolder) else str(self._folder)

    @property
    def layouts(self) -> list[tuple[int, tuple[int, ...]]]:
        """The layouts of the run so far, also before restarts: (first step, number of ranks on each node).

        `mpistrat replay` runs a program with the same ones.
        """
        return list(self._layouts)

    @property
    def periodic(self) -> bool:
        """True if `step` saves."""
        return self._every is not None or self._period is not None

    def steps_until_due(self, step: int) -> int | None:
        """Return the number of steps until `step` may save; None if it never does.

        For ranks that step independently, and meet to call it.
        """
        counts = [] if self._every is None else [self._every - step % self._every]
        counts += [max(1, period.next - step) for period in (self._period, self._snapshots) if period is not None]
        return min(counts, default=None)

    def steps(self) -> list[int]:
        """Return the steps that have files, as this rank sees the folder."""
        return self._folder.steps()

    def latest(self) -> Any:
        """Return the newest file, as this rank sees the folder; None without files. In an object store it is a URL."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def path(self, step: int) -> Any:
        """Return the file of a step; in an object store its URL.

        Raises:
            TypeError, ValueError: the step is not an integer, or below 0.
        """
        return self._folder.path(integer("Checkpoints.path", "step", step, 0))

    def step(
        self,
        step: int,
        notes: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        met_after: float = 0.0,
    ) -> Path | None:
        """Save after a step if a file is due. Collective; with the same step on all ranks.

        If a file cannot be written, as on a full disk, it warns, and training continues. While the weights of nodes differ
        (`local_steps`), saving waits for the next outer step.

        Args:
            step: the number of steps so far.
            notes: the result of `restore_latest`, equal on all ranks; or a function that returns it.
            met_after: seconds that independent ranks waited to meet: the longer, the less often they do.

        Returns:
            The file; None if none is written.

        Raises:
            TypeError: the step is not an integer.
            ValueError: on every rank, when another run writes into the folder; a step below 0.
        """
        step = integer("Checkpoints.step", "step", step, 0)
        self.strategy.reach(step)
        if not self._claimed and (self.periodic or self._snapshots is not None):
            self._claimed = True
            self._folder.take()
        if self._asynchronous and not self._prepared:
            self._prepared = True
            self.strategy.prepare_save()
        if step == self._until:
            self.strategy.outer_step()  # if nodes differ, that file was saved after an outer step
            self.save(step, notes)
            self.wait()
            sys.exit(RESTART_EXIT_CODE)
        self._postponed |= self._every is not None and step % self._every == 0
        if self.strategy.nodes_differ:
            return None
        if self._snapshots is not None and self._snapshots.due(step, met_after):
            self._snapshots = self._take_snapshot(self._snapshots, step, notes)
        if not self._postponed and not (self._period is not None and self._period.due(step, met_after)):
            return None
        try:
            return self.save(step, notes)
        except OSError as error:
            if self.strategy.rank == 0:
                logger.warning("Checkpoints: step %d is not saved; training continues: %s", step, error)
            return None

    def _take_snapshot(self, period: _Period, step: int, notes: Any) -> _Period | None:
        began = time.monotonic()
        try:
            self.strategy.take_snapshot(step, self._with_step(notes, step), str(self.folder))
        except SharedMemoryError as error:
            if self.strategy.rank == 0:
                logger.warning("Checkpoints: training continues without snapshots: %s", error)
            return None
        period.begin(step, time.monotonic() - began)
        return period

    def save(self, step: int, notes: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None) -> Path:
        """Save now, and remove all but the newest `keep` files. Collective.

        The file is complete after `wait`, with `asynchronous=False` at once. If that fails, the next call warns, unless
        `wait` has raised the error.

        Raises:
            OSError: on every rank, when it cannot be written, if known now.
            TypeError: on every rank, when notes are not numbers, text, lists and dicts; the step is not an integer.
            ContextError: between two outer steps; `postpone` waits for the next one.
            CollectiveMismatchError: on every rank, when step or notes differ between ranks.
            ValueError: on every rank, when another run writes into the folder; a step below 0.
        """
        step = integer("Checkpoints.save", "step", step, 0)
        strategy = self.strategy
        self._folder.take()
        self._postponed = False
        if strategy.rank == 0:
            with contextlib.suppress(OSError):  # `Strategy.save` raises it on all ranks
                self._folder.prepare(self._saved)
        extra, self._saved, self._saving_step = self._with_step(notes, step), True, step
        target = self._folder.target(step)
        if self._asynchronous or not isinstance(self._folder, LocalFolder):
            self._saving = strategy.begin_save(target, extra, then=partial(self._publish, step))
            if not self._asynchronous:
                self.wait()
        else:
            strategy.save(target, extra)
            strategy.note_saved(step, str(self.folder))
            if strategy.rank == 0:
                self._remove_old()
        if self._period is not None:
            self._period.begin(step)
        return self.path(step)

    def _publish(self, step: int) -> None:
        self._folder.publish(step)
        self._remove_old()

    def postpone(self) -> None:
        """Make `step` save after the next outer step. Every rank calls it."""
        self._postponed = True

    def wait(self) -> None:
        """Wait until the last file is complete. Collective.

        Raises:
            OSError: on every rank, when it could not be written; earlier files stay.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()
            self.strategy.note_saved(self._saving_step, str(self.folder))

    def _remove_old(self) -> None:
        try:
            for old in self.steps()[: -self._keep] if self._keep else ():
                self._folder.remove(old)
        except OSError as error:
            logger.warning("Checkpoints: old files are not removed: %s", error)

    def batches(self, data: Any, epochs: int = 1, **lists: list[Any]) -> Iterator[Any]:
        """Yield the batches of some epochs, resumed at the newest checkpoint, and save as `step` does. Collective.

        A batch counts as done when the loop asks for the next one. Files and snapshots also have the position in the data and
        the states of random generators. After `should_stop` it ends with a file of that step, or the next one with equal
        weights on all nodes. At the end they are equal.

        Args:
            data: a distributed dataset, with equally many batches on all ranks.
            epochs: their total number, over all runs.
            lists: filled by the loop with numbers, text and lists of them, equal on all ranks, by a name in the file: they
                are restored at the start.

        Raises:
            ContextError: under parameter servers, whose workers have their own batches, and for an `ms.torch.TrainingState`.
            OSError, ValueError: as `restore_latest`.

        Example:
            >>> import tempfile
            >>> strategy = ms.OneDeviceStrategy()
            >>> with tempfile.TemporaryDirectory() as folder, strategy:
            ...     rows = ms.data.from_arrays(np.arange(6.0)).batch(2)
            ...     data = strategy.distribute_dataset(rows)
            ...     for epochs in (1, 2):
            ...         sums = []
            ...         checkpoints = ms.train.Checkpoints(strategy, folder)
            ...         for x in checkpoints.batches(data, epochs, sums=sums):
            ...             sums.append(float(x.sum()))
            ...     sums
            [1.0, 5.0, 9.0, 1.0, 5.0, 9.0]
        """
        strategy = self.strategy
        if not hasattr(strategy, "run") or not strategy.extended.common_steps:
            expected, got = "a strategy whose ranks have the same batches", type(strategy).__name__
            raise ContextError(explain("Checkpoints.batches", "strategy", expected=expected, got=got))
        notes = self.restore_latest() or {"step": 0, "epoch": 0, "position": None, "lists": {}, "random": ()}
        step, first, position = notes["step"], notes["epoch"], notes["position"]
        for name, values in lists.items():
            values[:] = notes["lists"].get(name, ())
        hand_back(strategy, notes["random"])
        if first < epochs and hasattr(data, "set_epoch"):
            data.set_epoch(first)
        for epoch in range(first, epochs):
            iterator = iter(data)
            if position is not None:
                iterator.restore(position)

            def now(epoch: int = epoch, iterator: Any = iterator) -> dict[str, Any]:
                about = {"epoch": epoch, "position": iterator.state(), "lists": lists}
                return {**about, "random": gather_states(strategy)}

            for batch in iterator:
                yield batch
                step += 1
                self.step(step, now)
                if strategy.should_stop() and not strategy.nodes_differ:
                    self.save(step, now)
                    self.wait()
                    iterator.close()
                    return
            position = None
        if first < epochs:
            strategy.outer_step()
            self.save(step, {"epoch": epochs, "position": None, "lists": lists, "random": gather_states(strategy)})
            self.wait()

    def restore_latest(self) -> dict[str, Any] | None:
        """Restore the newest readable file, or a newer snapshot in memory. Collective.

        It waits for a file that is being written. Damaged ones are skipped with a warning.

        Returns:
            Its notes and "step"; None without files.

        Raises:
            OSError: on every rank, when there are files, and none can be read.
            ValueError: on every rank, when the newest is of another program: names, shapes or dtypes differ.
        """
        self.wait()
        steps = self._steps_of_rank_0()
        snapshot = None
        if self._snapshots is not None:
            snapshot = self.strategy.newest_snapshot(str(self.folder))
        if snapshot is not None and snapshot.step >= max(steps, default=0):
            return self._taken_over(self.strategy.restore_snapshot(snapshot))
        for step in reversed(steps):
            try:
                with self._folder.source(step) as path:
                    saved = self.restore_file(path)
            except OSError as error:
                if self.strategy.rank == 0:
                    logger.warning("Checkpoints: step %d is skipped: %s", step, error)
                continue
            return self._taken_over(saved)
        if steps:
            expected, got = "a file that can be read", f"{len(steps)} that cannot"
            raise OSError(explain("Checkpoints.restore_latest", str(self.folder), expected=expected, got=got))
        return None

    def _steps_of_rank_0(self) -> list[int]:
        """Return the steps that have files, and make its folder that of all ranks. Collective.

        Raises:
            OSError: on every rank, if the folder cannot be listed.
        """
        group, steps = process_group_of(self.strategy, "Checkpoints"), list[int]()
        with together(partial(group.exchange, "restore", detail="steps")):
            if self.strategy.rank == 0:
                steps = self.steps()
        steps, path = self.strategy.broadcast_object((steps, self.folder))
        if isinstance(self._folder, LocalFolder):
            self._folder.folder = path
        return list(steps)

    def _with_step(self, notes: Any, step: int) -> dict[str, Any]:
        about = (notes() if callable(notes) else notes) or {}
        states: dict[str, Any] = {_OBJECTS: self._objects} if self._objects else {}
        if self._by_rank:
            states[_BY_RANK] = self._states_by_rank()
        return {**about, "step": step, **states, _LAYOUTS: [[begin, list(ranks)] for begin, ranks in self._layouts]}

    def _states_by_rank(self) -> list[dict[str, str]]:
        """Return each rank's states of objects by name, as text. Collective.

        Raises:
            TypeError, ValueError: on every rank, when text cannot hold a state.
            CollectiveMismatchError: on every rank, when the names of objects differ.
        """
        group, names = process_group_of(self.strategy, "Checkpoints"), sorted(self._by_rank)
        exchange = partial(group.exchange, "save", detail="objects_by_rank")
        with together(exchange):
            own = {name: text_of_state(self._by_rank[name], f"objects_by_rank[{name!r}]") for name in names}

        def differ(texts: Mapping[int, str]) -> CollectiveMismatchError:
            expected, got = "objects of the same names on every rank", by_rank(texts)
            return CollectiveMismatchError(explain("Checkpoints", "objects_by_rank", expected=expected, got=got))

        same(exchange, ", ".join(names), differ)
        return list(self.strategy.all_gather_object(own))

    def _load_by_rank(self, states: Sequence[Mapping[str, str]], step: int) -> None:
        """Load this rank's states. Collective.

        Raises:
            Exception: on every rank, when an object of one cannot load its state.
        """
        if not self._by_rank:
            return
        group, rank = process_group_of(self.strategy, "Checkpoints"), self.strategy.rank
        with together(partial(group.exchange, "restore", detail="objects_by_rank")):
            for name, value in self._by_rank.items():
                if states and name in states[rank]:
                    value.load_state_dict(state_of_text(states[rank][name]))
                else:
                    self._warn_of_missing(name, step)

    def _check_ranks(self, states: Sequence[Mapping[str, str]], step: int) -> None:
        """Raise ValueError, on every rank, if states of objects by rank are of another number of ranks."""
        size = self.strategy.size
        if states and self._by_rank and len(states) != size:
            expected, got = f"states of {len(states)} ranks, as in the file of step {step}", f"{size} ranks"
            remedy = f"Start {len(states)} ranks; or use a dataset of ms.data, which any number of ranks can read"
            raise ValueError(explain("Checkpoints", "objects_by_rank", expected=expected, got=got, remedy=remedy))

    def _warn_of_missing(self, name: str, step: int) -> None:
        if self.strategy.rank == 0:
            logger.warning("Checkpoints: step %d has no state of object %r, which does not change", step, name)

    def _taken_over(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Load objects' states, continue at the restored step and its layouts, and return the notes."""
        notes, own = dict(saved), self._layouts[-1][1]
        states, of_ranks, step = notes.pop(_OBJECTS, {}), notes.pop(_BY_RANK, []), notes["step"]
        self._check_ranks(of_ranks, step)
        for name, value in self._objects.items():
            if name in states:
                value.load_state_dict(states[name])
            else:
                self._warn_of_missing(name, step)
        self._load_by_rank(of_ranks, step)
        self._layouts = [(begin, tuple(ranks)) for begin, ranks in notes.pop(_LAYOUTS, [])]
        if not self._layouts or self._layouts[-1][1] != own:
            self._layouts.append((step, own))
        self.strategy.reach(step)
        return notes


@final
class _Period:
    """A period by rank 0's clock; all ranks call it after the same steps.

    Attributes:
        next: the step after which the ranks next look at the clock.
    """

    def __init__(self, strategy: Any, seconds: float) -> None:
        self._strategy, self._seconds = strategy, seconds
        self._begun: tuple[int, float] | None = None  # a step, and its time
        self._costs: list[float] = []
        self._asking: list[float] = []  # costs of the last looks at the clock
        self._least = 1  # steps between two looks
        self.next = 0

    def begin(self, step: int, cost: float = 0.0) -> None:
        """Restart the period; a task of `cost` seconds then takes at most a hundredth of the time.

        The first two costs, which include allocation, do not count; of the last ones the shortest does, as ranks wait for each
        other.
        """
        done = 0 if self._begun is None else step - self._begun[0]
        self._begun = step, time.monotonic()
        self.next = step + max(self._least, done // 4)  # as if steps took the same time as before
        self._costs = [*self._costs[-_COSTS - 1 :], cost]  # of the start, of the first, …

    def due(self, step: int, cost: float) -> bool:
        """Return whether the period has passed; the first call starts it. Collective.

        Args:
            step: the number of steps so far.
            cost: seconds that ranks waited to meet: the longer, the less often they look at the clock, within a limit, as a
                slow rank makes every wait longer.
        """
        if self._begun is None:
            self.begin(step)
            return False
        if step < self.next:
            return False
        self.next, self._least = self._strategy.broadcast_object(self._look(step, cost))
        return self.next <= step

    def _look(self, step: int, cost: float) -> tuple[int, int]:
        """Return the next step to look at the clock, this one if the period has passed; and the least steps between looks.

        Ranks do not communicate at each step: the next look is estimated from the time per step, at most three times as many
        steps ahead.
        """
        assert self._begun is not None
        if cost:  # else no rank has waited, as at an epoch's end, where all meet in any case
            self._asking = [*self._asking[1 - _COSTS :], cost]
        first, begun = self._begun
        passed, done = time.monotonic() - begun, step - first
        took, asking, each = min(self._costs[2:], default=0.0), min(self._asking, default=0.0), passed / done
        left = max(self._seconds, took / _SHARE) - passed
        pause = min((took + asking) / _SHARE, _LONGEST * self._seconds) if asking else 0.0
        least, ahead = (max(1, min(3 * done, int(seconds / each))) for seconds in (pause, left))
        return (step if left <= each / 2 else step + max(least, ahead)), least


def checkpoints_iterator(
    folder: str | os.PathLike[str],
    min_interval_secs: float = 0.0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[Path]:
    """Return an iterator over the checkpoints of a folder as they appear, to evaluate them. Local.

    It returns the newest each time, skipping older and removed ones.

    Args:
        folder: of `Checkpoints`; it need not exist yet.
        min_interval_secs: least time between two.
        timeout: seconds to wait for a new one; None for no limit.
        timeout_fn: called after a timeout: True ends the iterator, else the wait restarts. Default: it ends.

    Example:
        >>> import tempfile
        >>> strategy = ms.OneDeviceStrategy()
        >>> with tempfile.TemporaryDirectory() as folder, strategy:
        ...     checkpoints = ms.train.Checkpoints(strategy, folder, asynchronous=False)
        ...     path = checkpoints.save(7)
        ...     files = ms.train.checkpoints_iterator(folder, timeout=0.1)
        ...     [file.name for file in files]
        ['step-0000000007.h5']

    Source: https://www.tensorflow.org/api_docs/python/tf/train/checkpoints_iterator.
    """
    if is_url(folder):
        expected = "a folder on this machine"
        raise ValueError(explain("checkpoints_iterator", "folder", expected=expected, got=f"the URL {folder}"))
    return _iterate(Path(folder).absolute(), min_interval_secs, timeout, timeout_fn)


def _iterate(
    folder: Path, min_interval_secs: float, timeout: float | None, timeout_fn: Callable[[], bool] | None
) -> Iterator[Path]:
    last: Path | None = None
    while True:
        began = time.monotonic()
        newest = newest_file(folder)
        while newest is None or newest == last:
            if timeout is not None and time.monotonic() - began >= timeout:
                if timeout_fn is None or timeout_fn():
                    return
                began = time.monotonic()
            time.sleep(_POLL_SECONDS if timeout is None else min(_POLL_SECONDS, max(timeout / 10, 1e-3)))
            newest = newest_file(folder)
        given, last = time.monotonic(), newest
        yield newest
        time.sleep(max(0.0, given + min_interval_secs - time.monotonic()))
