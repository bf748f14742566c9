"""The state of a module and its optimizers, for `ms.train.Checkpoints` with torch.distributed.

PyTorch's `get_state_dict` names the tensors, also of DDP and `fully_shard`. They become the arrays of a checkpoint: each rank
writes its shards, or a share of the tensors that all ranks have.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..arena.layout import Box
from ..arena.values import parse_dtype
from ..base import context
from ..base.agree import fingerprint
from ..base.errors import CollectiveMismatchError, by_rank, explain
from ..base.files import digest_of_array
from ..comm.process_group import ProcessGroup
from ..state.checkpoint import Checkpoint
from ..state.extra import read_extra
from ..state.list import Entry, Form, Slice, Writers, key_of, name_of, slices_of
from ..state.opened import OpenState
from ..state.shards import Shards
from ..state.snapshot import Snapshot, SnapshotFile, check_restarts
from ..state.writing import Saving
from ..strategy.preemption import StopRequest, StopTogether
from ..variables import Receiver
from .backend.transfers import bytes_of, dense, dtype_name
from .tensors import tensor_of

__all__ = ["TrainingState"]

R = TypeVar("R")
_VALUES = "values of optimizers"  # in the notes
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_SHOWN = 5  # names in an error


@final
class TrainingState:
    """A module and its optimizers, for `ms.train.Checkpoints` instead of a strategy.

    The module is one of DistributedDataParallel, one that `fully_shard` or `parallelize_module` has been applied to, or a
    plain one that is equal on all ranks. A file has whole tensors, by the names of `get_state_dict`: it can be restored on
    any number of ranks, and by the other kinds of module.

    Its rank and size are those of the group.

    Attributes:
        extended: that of the ranks.
        process_group: the ranks.
        nodes_differ: False: see `Strategy.nodes_differ`.
        takes_snapshots: True if `mpistrat run --restarts` started the job, so that its state may be cached in memory.
    """

    nodes_differ = False

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        group: Any = None,
    ) -> None:
        """Set a module and its optimizers. Collective over the group.

        Args:
            model: the module; create it first, then its optimizers.
            optimizers: of its parameters.
            group: a process group of the backend "mpi" or "mpistrat"; default the default group.

        Raises:
            ContextError: a group of another backend.

        Example:
            >>> import tempfile, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     checkpoints = ms.train.Checkpoints(state, folder, every_steps=2)
            ...     for step in range(1, 6):
            ...         path = checkpoints.step(step, {"epoch": 0})
            ...     checkpoints.wait()
            ...     checkpoints.steps(), checkpoints.restore_latest()
            ([2, 4], {'epoch': 0, 'step': 4})
        """
        self._model, self._optimizers = model, optimizers
        self._ranks = context.ranks_of(group, "TrainingState")
        self.extended = self._ranks.extended
        self.process_group: ProcessGroup = self.extended.process_group
        self.rank, self.size = int(self._ranks.rank), int(self._ranks.size)
        self.takes_snapshots = bool(self.process_group.environment.job)
        self._stop_request, self._stop_agreement = StopRequest(self.process_group), StopTogether(self.process_group)
        self._tensors = _Tensors(self.process_group)
        self._checkpoint = self.process_group.in_order(
            "TrainingState", lambda: Checkpoint(self.process_group, self._tensors)
        )

    def broadcast_object(self, obj: Any = None, *, root: int = 0) -> Any:
        """Return one rank's Python object on all. Collective. See `Strategy.broadcast_object`."""
        return self._ranks.broadcast_object(obj, root=root)

    def all_gather_object(self, obj: Any = None) -> list[Any]:
        """Return every rank's Python object, by rank. Collective. See `Strategy.all_gather_object`."""
        return list(self._ranks.all_gather_object(obj))

    def outer_step(self) -> None:
        """Do nothing: ranks have equal weights after each step. See `Strategy.outer_step`."""

    def should_stop(self) -> bool:
        """Return whether to stop here: some rank got SIGUSR1 or SIGTERM, or its time is nearly over. Collective.

        Call it after each step. From the first call on the two signals have no other effect. See `Strategy.should_stop`.

        Example:
            >>> TrainingState(torch.nn.Linear(2, 1)).should_stop()
            False
        """
        self._stop_request.save_seconds = self._checkpoint.seconds
        wish = bool(self._stop_request)  # in this thread: Python handles signals in its main thread only
        return self._in_order("should_stop", lambda: self._stop_agreement.ask(wish))

    # what is saved

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write all tensors and settings, and the program's `extra`, to one HDF5 file. Collective. See `Strategy.save`.

        Raises:
            OSError: on every rank, when it cannot be written.
            CollectiveMismatchError: on every rank, when unsharded tensors differ between ranks.
            ValueError: a tensor sharded by other placements than `Shard` and `Replicate`.
        """
        extra = self._collected(extra)
        self._in_order("save", lambda: self._checkpoint.save(path, extra))

    def begin_save(
        self,
        path: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        *,
        then: Callable[[], None] | None = None,
    ) -> Saving:
        """Start to write what `save` writes, in the background. Collective. See `Strategy.begin_save`."""
        extra = self._collected(extra)
        return self._in_order("begin_save", lambda: self._checkpoint.begin(path, extra, then))

    def prepare_save(self) -> None:
        """Allocate memory for the copies of `begin_save`. Collective. See `Strategy.prepare_save`."""
        self._collected(None)
        self._in_order("prepare_save", self._checkpoint.prepare)

    def take_snapshot(self, step: int, extra: Mapping[str, Any], run: str = "") -> None:
        """Copy the state to memory of each node that survives the ranks. Collective. See `Strategy.take_snapshot`.

        A node receives the shards that none of its ranks has, so each node can restore the job alone.

        Raises:
            ContextError: the job has no restarts.
            SharedMemoryError: on every rank, when the memory of a node is too small for two copies of all tensors.
            CollectiveMismatchError, ValueError: as `save`.
        """
        check_restarts(self.process_group, "TrainingState.take_snapshot")
        extra = self._collected(extra)
        self._in_order("take_snapshot", lambda: self._checkpoint.take_snapshot(step, extra, run))

    def reach(self, step: int) -> None:
        """Report the step that the job has reached. Local. See `Strategy.reach`."""
        self._checkpoint.reach(step)

    def note_saved(self, step: int, run: str = "") -> None:
        """Record that there is a complete file of a step. Local. See `Strategy.note_saved`."""
        self._checkpoint.note_saved(run, step)

    # what is restored

    def restore(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read all tensors and settings from a file of `save`; return its `extra`. Collective.

        Raises:
            ValueError: on every rank, when the file has other tensors than the module and its optimizers.
            OSError: on every rank, when it cannot be read, or has changed since it was saved.
        """
        self._collected(None)
        return self._restored(self._in_order("restore", lambda: self._checkpoint.restore(path, {}, True)))

    def newest_snapshot(self, run: str = "") -> Snapshot | None:
        """Return the newest state that some node still has completely. Collective. See `Strategy.newest_snapshot`."""
        check_restarts(self.process_group, "TrainingState.newest_snapshot")
        return self._in_order("newest_snapshot", lambda: self._checkpoint.newest_snapshot(run))

    def restore_snapshot(self, snapshot: Snapshot) -> dict[str, Any]:
        """Restore a result of `newest_snapshot`; return its `extra`. Collective. Raises as `restore`."""
        self._collected(None)
        return self._restored(self._in_order("restore_snapshot", lambda: self._checkpoint.restore_snapshot(snapshot)))

    def _in_order(self, function: str, call: Callable[[], R]) -> R:
        return self.process_group.in_order(f"TrainingState.{function}", call)

    def _collected(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Update the named tensors; return the program's `extra` with the optimizers' other values.

        Call it before the collectives of a checkpoint: PyTorch may use its own for it.
        """
        model, optimizers = get_state_dict(self._model, self._optimizers, options=_OPTIONS)
        buffers = {f"model.{name}" for name in model.keys() - self._names_of_parameters()}
        states = {"model": model, "optimizer": optimizers}
        flat = {f"{kind}.{name}": value for kind, state in states.items() for name, value in state.items()}
        self._tensors.replace({name: value for name, value in flat.items() if torch.is_tensor(value)}, buffers)
        self._values = {name: value for name, value in flat.items() if not torch.is_tensor(value)}
        return {**(extra or {}), _VALUES: self._values}

    def _names_of_parameters(self) -> set[str]:
        names = (name for name, _ in self._model.named_parameters(remove_duplicate=False))
        wrappers = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
        return {".".join(word for word in name.split(".") if word not in wrappers) for name in names} | set(names)

    def _restored(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Load the restored tensors and values into PyTorch; return the program's `extra`."""
        values = saved.pop(_VALUES, {})
        states: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
        own = {**self._tensors.named, **self._values}
        for name, value in {**self._tensors.named, **values}.items():
            kind, _, rest = name.partition(".")
            states[kind][rest] = tuple(value) if isinstance(own.get(name), tuple) else value
        set_state_dict(
            self._model,
            self._optimizers,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
            options=_OPTIONS,
        )
        return saved


@final
class _Tensors:
    """The tensors of a state, by name: the arrays of a checkpoint. See `SavedState`."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._shards = group, Shards(group)
        self.named: dict[str, torch.Tensor] = {}
        self._buffers: set[str] = set()

    def replace(self, named: Mapping[str, torch.Tensor], buffers: Iterable[str]) -> None:
        """Set new tensors; buffers are saved as rank 0 has them, as in DistributedDataParallel."""
        self.named, self._buffers = dict(sorted(named.items())), set(buffers)

    def optimizers(self) -> list[dict[str, Any]]:
        """Return nothing: optimizers' tensors are among the arrays."""
        return []

    def check(self) -> None:
        """Do nothing: all tensors are in a file."""

    def arrays(self, ranks: Sequence[int], each_node: bool) -> tuple[dict[str, Form], list[Slice]]:
        """Return the forms of all arrays, and the slices that this rank writes. Collective."""
        self._compare()
        writers = Writers(self._group, (), ranks, each_node)
        own = [self._entry(name, tensor) for name, tensor in self.named.items()]
        whole = (entry for entry in own if entry.everywhere)
        divided = self._shards.entries([entry for entry in own if not entry.everywhere], writers)
        return slices_of(itertools.chain(whole, divided), writers)

    def _entry(self, name: str, tensor: torch.Tensor) -> Entry:
        """Return this rank's elements of a tensor; rank 0 has those of buffers."""
        key, dtype = f"variables/{key_of(name)}", parse_dtype(dtype_name(tensor.dtype))
        if isinstance(tensor, DTensor):
            local, box, everywhere, has = tensor.to_local(), _box(name, tensor), False, True
        else:
            local, box, everywhere = tensor, Box(tensor.shape), name not in self._buffers
            has = everywhere or self._group.topology.rank == 0
        return Entry(key, dtype, box, [(0, _flat(local, dtype))] if has and local.numel() else [], everywhere)

    def _compare(self) -> None:
        """Raise CollectiveMismatchError if ranks' tensors differ in form, or whole ones in value."""
        table = {}
        for name, tensor in self.named.items():
            table[name] = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
            if isinstance(tensor, DTensor):
                table[name] += ", a DTensor"
            elif name not in self._buffers:
                table[name] += f", {digest_of_array(bytes_of(dense(tensor).reshape(-1)), name)}"
        text = json.dumps(table)
        if len(set(self._group.exchange("save", str(fingerprint(text)), "tensors"))) == 1:
            return
        tables = [json.loads(each) for each in self._group.exchange("save", text, "tensors that differ")]
        names = dict.fromkeys(name for each in tables for name in each)
        name = next(name for name in names if len({each.get(name) for each in tables}) > 1)
        words = by_rank({rank: each.get(name, "none") for rank, each in enumerate(tables)})
        remedy = "Use DistributedDataParallel or fully_shard, and give every rank the same module and optimizers"
        expected, got = "equal tensors on all ranks, or a DTensor", f"tensors that differ: {words}"
        raise CollectiveMismatchError(explain("TrainingState", name, expected=expected, got=got, remedy=remedy))

    def restore(
        self, path: str, opening: Callable[[], SnapshotFile] | None, root: int, names: Mapping[str, str], strict: bool
    ) -> dict[str, Any]:
        """Read all tensors; return the program's `extra`. Collective."""
        wanted = {name: Form(tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in self.named.items()}
        with OpenState(self._group, path, opening, root) as opened:
            found = opened.look(wanted)
            forms = {key: Form(tuple(shape), dtype) for key, (shape, dtype) in found["forms"].items()}
            _fits(path, wanted, {name_of(key.partition("/")[2]): form for key, form in forms.items()}, found["names"])
            opened.check(found["places"], forms)
            extra = opened.extra()
            filled = {name: self._room(name, tensor) for name, tensor in self.named.items()}
            receivers = {f"variables/{key_of(name)}": [receiver] for name, (_, receiver) in filled.items()}
            opened.take(forms, {key: receivers[key] for key in forms})
        with torch.no_grad():
            for name, (array, _) in filled.items():
                tensor = self.named[name]
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local.detach().copy_(tensor_of(array))
        return dict(read_extra(extra or {}))

    def _room(self, name: str, tensor: torch.Tensor) -> tuple[np.ndarray, Receiver]:
        """Return memory for this rank's elements of a tensor, and a receiver for it."""
        whole = not isinstance(tensor, DTensor)
        local, box = (tensor, Box(tensor.shape)) if whole else (tensor.to_local(), _box(name, tensor))
        array = np.empty(tuple(local.shape), parse_dtype(dtype_name(tensor.dtype)))
        return array, box.receiver(Receiver.whole(array)) if array.size else Receiver([], lambda start, flat: None)


def _flat(tensor: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    return bytes_of(dense(tensor).reshape(-1)).view(dtype)


def _box(name: str, tensor: DTensor) -> Box:
    """Return this rank's range of a tensor.

    Raises:
        ValueError: the range is not a box.
    """
    if not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        expected, got = "placements Shard and Replicate", ", ".join(map(repr, tensor.placements))
        remedy = "Save it with torch.distributed.checkpoint"
        raise ValueError(explain("TrainingState", name, expected=expected, got=got, remedy=remedy))
    chunks = tensor.__create_chunk_list__()
    if not chunks:
        return Box(tensor.shape, [(0, 0)])
    (chunk,) = chunks
    return Box(tensor.shape, [(low, low + size) for low, size in zip(chunk.offsets, chunk.sizes, strict=True)])


def _fits(path: str, wanted: Mapping[str, Form], there: Mapping[str, Form], names: Iterable[str]) -> None:
    """Raise ValueError unless a file has the tensors of the program."""
    problems = [f"{name!r} is not in it" for name in wanted if name not in there]
    problems += [
        f"{name!r} is {there[name].dtype} {there[name].shape} in it, here {form.dtype} {form.shape}"
        for name, form in wanted.items()
        if name in there and there[name] != form
    ]
    problems += [f"{name!r} is not here" for name in map(name_of, names) if name not in wanted]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        expected, got = "a file of this module and its optimizers", "; ".join(problems[:_SHOWN]) + more
        raise ValueError(explain("TrainingState.restore", Path(path).name, expected=expected, got=got))
