"""Elastic training: a state with commits, and a function that restarts from the last one when ranks were lost.

Under `mpistrat run --survive` (Open MPI) the remaining ranks continue. Under `mpistrat run --restarts N` all ranks restart
and find the last commit in the memory of their nodes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, TypeVar, final

import torch

from ...base.environment import Environment
from ...base.log import logger
from ...cluster.world import is_loss, survives
from ...comm import job_files
from ...comm.shared_memory import map_file
from ...launcher.survive import Job, survive
from ..errors import HorovodInternalError, HostsUpdatedInterrupt
from .basics import init, is_initialized, rank, shutdown, size
from .objects import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

T = TypeVar("T")
_ATTEMPTS = 3  # in a row without a commit


class ElasticState:
    """Base of states for `run`; `hvd.elastic.State`. Subclasses define `save`, `restore`, `sync_from` and `content`."""

    def __init__(self) -> None:
        self.commits = 0
        self._callbacks = list[Callable[[], None]]()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Register functions to call when the ranks have changed, such as one that scales a learning rate."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the registered functions. `run` calls it when the ranks have changed."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def reset(self) -> None:
        """Adapt to other ranks; overridden by subclasses, called when the ranks have changed."""

    def commit(self) -> None:
        """Save the state in memory, for `restore`. All ranks call it after the same step.

        With `mpistrat run --restarts` it is also copied to the memory of the node, for restarted ranks.
        """
        self.commits += 1
        self.save()
        environment = Environment.read()
        if environment.job:
            buffer = io.BytesIO()
            torch.save((self.commits, self.content()), buffer)
            data = buffer.getvalue()
            job_files.make_file(_path(environment.job), data, len(data))
            if rank() == 0:
                job_files.state(environment.job)[job_files.STEP] = self.commits
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: no host joins a running job of MPI."""

    def save(self) -> None:
        """Copy the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Set rank 0's state on all ranks. Collective."""
        self.sync_from(0)

    def sync_from(self, root: int) -> None:
        """Set the state of one rank on all. Collective."""
        raise NotImplementedError

    def content(self) -> Any:
        """Return the last copy, for `load`."""
        raise NotImplementedError

    def load(self, content: Any) -> None:
        """Load a result of `content`."""
        raise NotImplementedError


State = ElasticState


class ObjectState(ElasticState):
    """Python objects as attributes.

    Args:
        bcast_object, get_rank: as in Horovod; not used.
        **kwargs: names and objects.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self._saved = dict(kwargs)
        self._show()

    def _show(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def save(self) -> None:
        """Copy the attributes."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        """Return to the last copy."""
        self._show()

    def sync_from(self, root: int) -> None:
        """Set one rank's attributes on all ranks. Collective."""
        current = {name: getattr(self, name) for name in self._saved}
        self._saved, self.commits = broadcast_object((current, self.commits), root, "elastic.objects")
        self._show()

    def content(self) -> Any:
        """Return the last copy."""
        return self._saved

    def load(self, content: Any) -> None:
        """Load a copy."""
        self._saved = {**self._saved, **content}
        self._show()


@final
class TorchState(ObjectState):
    """Modules, optimizers, samplers and Python objects as attributes.

    Args:
        model: a module, or None.
        optimizer: an optimizer, or None.
        **kwargs: more modules, optimizers, `ElasticSampler`s, and objects.

    Example:
        >>> import mpistrat.horovod.torch as hvd
        >>> hvd.init()
        >>> state = hvd.elastic.TorchState(torch.nn.Linear(2, 1), epoch=0)
        >>> state.epoch = 1
        >>> state.commit()
        >>> state.epoch = 2
        >>> state.restore()
        >>> state.epoch
        1
        >>> hvd.shutdown()
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        kinds = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
        self._parts = {name: value for name, value in given.items() if isinstance(value, kinds)}
        for name, value in self._parts.items():
            setattr(self, name, value)
        self._states: dict[str, Any] = {}
        super().__init__(**{name: value for name, value in given.items() if name not in self._parts})
        self._save_parts()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A module, optimizer or sampler replaces the one of its name."""
        super().__setattr__(name, value)
        if "_states" in vars(self) and name in self._parts:
            self._parts[name] = value
            self._save_parts()

    def _save_parts(self) -> None:
        self._states = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}

    def save(self) -> None:
        """Copy all modules, optimizers, samplers and attributes."""
        self._save_parts()
        super().save()

    def restore(self) -> None:
        """Return to the last copy."""
        for name, state in self._states.items():
            self._parts[name].load_state_dict(copy.deepcopy(state))
        super().restore()

    def reset(self) -> None:
        """Divide the remaining rows among the ranks."""
        for part in self._parts.values():
            if isinstance(part, ElasticSampler):
                part.reset()

    def sync_from(self, root: int) -> None:
        """Set one rank's state on all ranks. Collective."""
        for name, part in self._parts.items():
            if isinstance(part, torch.nn.Module):
                broadcast_parameters(part.state_dict(), root)
            elif isinstance(part, torch.optim.Optimizer):
                broadcast_optimizer_state(part, root)
            else:
                part.load_state_dict(broadcast_object(part.state_dict(), root, f"elastic.{name}"))
        super().sync_from(root)
        self._save_parts()

    def content(self) -> Any:
        """Return the last copy."""
        return self._states, super().content()

    def load(self, content: Any) -> None:
        """Load a copy."""
        self._states = {**self._states, **content[0]}
        super().load(content[1])
        self.restore()


@final
class ElasticSampler(torch.utils.data.Sampler[int]):
    """The rows of a dataset for this rank; the rest of an epoch is divided again when the ranks change.

    Pass it to a `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch. Rows are
    repeated so that all ranks have the same number.

    Args:
        dataset: with a length.
        shuffle: True to shuffle the rows, in another order in each epoch.
        seed: of the shuffle, the same on all ranks.

    Attributes:
        epoch: the number of the epoch.
        processed_num: the rows that all ranks have processed in it.

    Example:
        >>> import mpistrat.horovod.torch as hvd
        >>> hvd.init()
        >>> sampler = hvd.elastic.ElasticSampler(range(5), shuffle=False)
        >>> sampler.record_batch(0, 2)
        >>> sampler.reset()
        >>> list(sampler)
        [2, 3, 4]
        >>> hvd.shutdown()
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch without processed rows."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch, of `batch_size` rows on each rank, as processed."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of processed rows."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Load a state, and divide the remaining rows."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining rows of the epoch among the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        """Return the numbers of this rank's rows."""
        left = self.remaining_indices
        total = self.num_samples * self.num_replicas
        return iter([left[place % len(left)] for place in range(self.rank, total, self.num_replicas)])

    def __len__(self) -> int:
        """Return the number of this rank's rows."""
        return self.num_samples


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Return a training function as one that continues when ranks were lost. A decorator.

    The function is called with equal states on all ranks. When ranks were lost, under `mpistrat run --survive`, the remaining
    ones return to the last commit, take rank 0's state, and call it again. Under `--restarts` a restarted program does so
    with the newest commit that a rank finds. Another HorovodInternalError of all ranks has the same effect without a change
    of ranks, at most three times without a commit.

    Args:
        func: a function whose first argument is an `hvd.elastic.State`.

    Example:
        >>> import mpistrat.horovod.torch as hvd
        >>> hvd.init()
        >>> @hvd.elastic.run
        ... def train(state):
        ...     while state.epoch < 3:
        ...         state.epoch += 1
        ...         state.commit()
        ...     return state.epoch
        >>> train(hvd.elastic.ObjectState(epoch=0))
        3
        >>> hvd.shutdown()
    """

    @functools.wraps(func)
    def wrapper(state: ElasticState, *args: Any, **kwargs: Any) -> T:
        started = False

        def train(job: Job) -> T:
            nonlocal started
            if started or survives():
                shutdown()
            init()
            if started:
                state.restore()
                state.on_reset()
                state.sync()
            else:
                _find_commit(state)
            started = True
            return _attempts(func, state, *args, **kwargs)

        return survive(train)

    return wrapper


def _attempts(func: Callable[..., T], state: ElasticState, *args: Any, **kwargs: Any) -> T:
    """Return the function's result, calling it again after errors that all ranks have."""
    failed, commits = 0, state.commits
    while True:
        synchronize = True
        try:
            return func(state, *args, **kwargs)
        except HorovodInternalError as error:
            failed = failed + 1 if state.commits == commits else 1
            commits = state.commits
            if is_loss(error) or failed >= _ATTEMPTS:
                raise
            logger.warning("hvd.elastic.run: the ranks return to the last commit: %s", error)
            state.restore()
        except HostsUpdatedInterrupt as interrupt:
            synchronize = not interrupt.skip_sync
        shutdown()
        init()
        state.on_reset()
        if synchronize:
            state.sync()


def _path(job: str) -> Any:
    return job_files.mark(job, f"horovod.r{rank()}")


def _find_commit(state: ElasticState) -> None:
    """Load the newest commit of the job's earlier ranks, or rank 0's state. Collective."""
    if not is_initialized():
        init()
    environment, commits, content = Environment.read(), 0, None
    if environment.job:
        with contextlib.suppress(OSError):
            commits, content = torch.load(io.BytesIO(bytes(map_file(_path(environment.job)))), weights_only=False)
    found = allgather_object(commits, "elastic.commits")
    root = found.index(max(found))
    if rank() == root and content is not None:
        state.commits = commits
        state.load(content)
        logger.info("hvd.elastic.run: continue from commit %d, of rank %d", commits, root)
    state.sync_from(root)
