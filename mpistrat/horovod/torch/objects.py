"""Objects, parameters and states of optimizers, from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...base.errors import explain
from ..process_sets import RankSet, global_process_set
from .basics import engine, rank
from .calls import allgather, broadcast_, broadcast_async_, synchronize

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def _bytes(function: str, obj: Any) -> torch.Tensor:
    from mpi4py import MPI

    try:
        data = MPI.pickle.dumps(obj)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        text = explain(f"hvd.{function}", "obj", expected="an object that can be pickled", got=got, rank=rank())
        raise TypeError(text) from None
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _object(data: torch.Tensor) -> Any:
    from mpi4py import MPI

    return MPI.pickle.loads(data.contiguous().numpy())


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: RankSet = global_process_set
) -> Any:
    """Return the object of one rank on all. Collective over the process set.

    Args:
        obj: an object that pickle supports; only the root's is used.
        root_rank: the number of the rank in the job.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.

    Raises:
        TypeError: the object cannot be pickled. Other ranks wait for the root's next call of this name.
        HorovodInternalError: ranks do not arrive in time.

    Example:
        >>> import mpistrat.horovod.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3})
        {'epoch': 3}
        >>> hvd.shutdown()
    """
    here = engine("broadcast_object").rank == root_rank
    name = name or "object"
    data = _bytes("broadcast_object", obj) if here else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    broadcast_(length, root_rank, f"{name}.length", process_set)
    if not here:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.bytes", process_set)
    return obj if here else _object(data)


def allgather_object(obj: Any, name: str | None = None, process_set: RankSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, by rank. Collective over the process set. See `broadcast_object`.

    Example:
        >>> import mpistrat.horovod.torch as hvd
        >>> hvd.init()
        >>> hvd.allgather_object("rank 0")
        ['rank 0']
        >>> hvd.shutdown()
    """
    name, data = name or "object", _bytes("allgather_object", obj)
    lengths = allgather(torch.tensor([data.numel()]), f"{name}.lengths", process_set)
    return [_object(part) for part in allgather(data, f"{name}.all", process_set).split(lengths.tolist())]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: RankSet = global_process_set
) -> None:
    """Overwrite tensors with those of one rank. Collective over the process set.

    Args:
        params: `module.state_dict()`, `module.named_parameters()`, or tensors. Other values are skipped.
        root_rank: the number of the rank in the job.
        process_set: the ranks that take part.

    Raises:
        ValueError: `params` is something else.
        HorovodInternalError: shapes or dtypes differ, or ranks do not arrive in time.
    """
    listed = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    pairs = [each if isinstance(each, tuple) else (f"{number}", each) for number, each in enumerate(listed)]
    for name, value in pairs:
        if not isinstance(name, str):
            expected = "a state_dict, named parameters or tensors"
            got = f"{name!r} and {type(value).__name__}"
            raise ValueError(explain("hvd.broadcast_parameters", "params", expected=expected, got=got))
    handles = [
        broadcast_async_(value.detach(), root_rank, f"parameter.{name}", process_set)
        for name, value in pairs
        if isinstance(value, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None, process_set: RankSet = global_process_set
) -> None:
    """Set the options and the state of one rank's optimizer on every rank. Collective over the process set.

    Args:
        optimizer: of any class but LBFGS, whose state differs between ranks.
        root_rank: the number of the rank in the job.
        model: as in Horovod; not used.
        process_set: the ranks that take part.

    Raises:
        ValueError: an LBFGS optimizer.
        HorovodInternalError: ranks do not arrive in time.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        text = explain("hvd.broadcast_optimizer_state", "optimizer", expected="any but LBFGS", got="LBFGS")
        raise ValueError(text)
    state, here = optimizer.state_dict(), rank() == root_rank
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    tensors: dict[tuple[Any, str], torch.Tensor] = {}
    plain: dict[Any, dict[str, Any]] = {}
    for number, values in state["state"].items() if here else ():
        plain[number] = {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                tensors[number, key] = value
            else:
                plain[number][key] = value
    forms = [(place, tensor.dtype, tuple(tensor.shape)) for place, tensor in tensors.items()]
    groups, plain, forms = broadcast_object((groups, plain, forms), root_rank, "optimizer.state", process_set)
    if not here:
        tensors = {place: torch.empty(shape, dtype=dtype) for place, dtype, shape in forms}
    handles = [
        broadcast_async_(tensor.detach(), root_rank, f"optimizer.{number}.{key}", process_set)
        for (number, key), tensor in tensors.items()
    ]
    for handle in handles:
        synchronize(handle)
    if here:
        return
    for group, given in zip(state["param_groups"], groups, strict=True):
        group.update(given)
    for (number, key), tensor in tensors.items():
        plain[number][key] = tensor
    state["state"] = plain
    torch.optim.Optimizer.load_state_dict(optimizer, state)
