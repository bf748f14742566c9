"""Entry point of the group `torch.backends`: PyTorch 2.5 and newer call `load` at the end of `import torch`.

Under a launcher of MPI it registers the names "mpistrat" and "mpi" with torch.distributed, and a rendezvous that needs no
variables. The functions behind these names are imported from `mpistrat.torch.backend` when a program makes a process group: until
then neither mpistrat nor mpi4py is imported, and `import torch` takes less than a millisecond longer.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

__all__ = ["LAUNCHERS", "SWITCH", "TORCHRUN", "chosen", "load", "register", "set_variables"]

SWITCH = "MPISTRAT_TORCH"  # "0": no registration at `import torch`; "mpi": "mpi" is this package's also where torch has its own
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun, whose ranks are no ranks of MPI
# The variables by which launchers show the number of ranks: those of mpistrat/cluster/launcher_variables.py.
LAUNCHERS = (
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "JSM_NAMESPACE_SIZE",
    "FLUX_JOB_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
_ENVIRONMENT = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
# Functions of torch for some backends; no version has all.
_BY_NAME = "monitored_barrier", "split_group", "shrink_group", "_shutdown_backend", "_maybe_attach_flight_recorder"
_MAKER = "_new_process_group_helper"  # torch's function that makes every group
_set: dict[str, str] = {}  # the variables that a rendezvous has set
_chosen = ""


def load() -> None:
    """Register the backend if a launcher of MPI, or torchrun, started this process. PyTorch calls it; it never raises."""
    global _chosen
    try:
        if os.environ.get(SWITCH) == "0":
            _chosen = f"off ({SWITCH}=0)"
        elif any(os.environ.get(name) for name in (*LAUNCHERS, TORCHRUN)):
            register()
        else:
            _chosen = "off (no launcher of MPI started this process)"
    except Exception as error:
        _chosen = f"off ({type(error).__name__}: {error})"


def chosen() -> str:
    """Return the state of the registration in words; "" before `load` and `register`.

    Example:
        >>> chosen() == "" or chosen().startswith(("off", "on"))
        True
    """
    return _chosen


def register() -> None:
    """Register "mpistrat", "mpi" and the rendezvous with torch.distributed. A second call has no effect.

    Under torchrun the names are there to raise an error: its ranks are no ranks of MPI.
    """
    global _chosen
    dist: Any = importlib.import_module("torch.distributed")
    if not dist.is_available():
        _chosen = "off (this PyTorch was built without torch.distributed)"
        return
    if "mpistrat" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("mpistrat", _imported("create"), extended_api=True, devices=["cpu"])
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    names = ["mpistrat"]
    if TORCHRUN in os.environ:
        _chosen = "off (torchrun started this process)"
        if getattr(c10d, "_MPI_AVAILABLE", True) is False and _has(c10d, _MAKER):
            setattr(c10d, _MAKER, _of_mpi(getattr(c10d, _MAKER)))
        return
    for name in _BY_NAME:
        if hasattr(c10d, name):
            setattr(c10d, name, _of_own_groups(getattr(c10d, name)))
            if hasattr(dist, name):
                setattr(dist, name, getattr(c10d, name))
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    if _has(module, "_rendezvous_handlers") and "env" in module._rendezvous_handlers:
        module._rendezvous_handlers["env"] = _rendezvous(module._rendezvous_handlers["env"])
        names.append("env://")
    if (
        _has(c10d, "_MPI_AVAILABLE")
        and (not c10d._MPI_AVAILABLE or os.environ.get(SWITCH) == "mpi")
        and _has(c10d, _MAKER)
    ):
        c10d._MPI_AVAILABLE, c10d.ProcessGroupMPI = True, _GroupMaker
        setattr(c10d, _MAKER, _of_mpi(getattr(c10d, _MAKER)))
        names.insert(1, "mpi")
    _chosen = f"on ({', '.join(names)})"


def set_variables(values: dict[str, str]) -> None:
    """Set environment variables, such that a later rendezvous does not take them for the user's."""
    _set.update(values)
    os.environ.update(values)


def _has(module: Any, name: str) -> bool:
    """Return True if a module of torch has a private name that is about to be replaced; warn if not."""
    if hasattr(module, name):
        return True
    warnings.warn(
        f"mpistrat: this PyTorch has no {module.__name__}.{name}: some of torch.distributed over MPI is not available."
        ' dist.init_process_group("mpistrat") works if you set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT',
        stacklevel=2,
    )
    return False


def _imported(name: str) -> Callable[..., Any]:
    """Return a function of `mpistrat.torch.backend.register`, which is imported at the first call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module("mpistrat.torch.backend.register"), name)(*args, **kwargs)

    return call


def _of_own_groups(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that asks one of `mpistrat.torch.backend.register` where groups of this package exist."""
    ours = _imported(theirs.__name__)

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        there = "mpistrat.torch.backend.group" in sys.modules
        return ours(theirs, *args, **kwargs) if there else theirs(*args, **kwargs)

    return call


def _of_mpi(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function that makes groups; it asks one of `mpistrat.torch.backend.register` for those of "mpi"."""
    ours = _imported("make_mpi")

    @functools.wraps(theirs)
    def call(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        maker = functools.partial(ours, theirs) if "mpi" in re.split("[:,]", str(backend)) else theirs
        return maker(size, rank, ranks, backend, *args, **kwargs)

    return call


class _GroupMaker:
    """The class that torch.distributed asks for groups of "mpi"."""

    create = staticmethod(_imported("create_mpi"))


def _rendezvous(theirs: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return the handler of env://: torch's own if the user gives all four variables, else the one over MPI."""

    def handler(url: str, **kwargs: Any) -> Iterator[Any]:
        query = {name.upper(): values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        given = {name: query.get(name) or os.environ.get(name) for name in _ENVIRONMENT}
        ours = all(os.environ.get(name) == _set.get(name) for name in _ENVIRONMENT)
        # A child that multiprocessing has started is no rank of MPI.
        if (all(given.values()) and not ours) or multiprocessing.parent_process() is not None:
            return theirs(url, **kwargs)
        numbers = {name: given[name] for name in ("RANK", "WORLD_SIZE") if given[name]}
        kept = {name: value for name, value in numbers.items() if name in query or value != _set.get(name)}
        return _imported("rendezvous")(kept, **kwargs)

    return handler
