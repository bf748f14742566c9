"""What every benchmark shares: paired timing of contenders, the machine's description, a table, JSON and a plot."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat import __version__

Operation = Callable[[], object]


def pair(comm: Any, operations: dict[str, Operation], *, repetitions: int, seconds: float) -> dict[str, float]:
    """Return the seconds of each operation: the median of its repetitions on the slowest rank. Collective.

    The operations take turns (A B A B …), so that a machine that drifts drifts for all. Each is done once untimed before
    it is timed, so that it finds its own data in the caches and not its predecessor's; a barrier precedes both.
    `seconds` bounds the whole measurement; rank 0 decides for all, and at least three rounds are made.
    """
    times: dict[str, list[float]] = {name: [] for name in operations}
    for operation in operations.values():
        operation()
    start, go_on = time.perf_counter(), np.ones(1, np.int32)
    for done in range(repetitions):
        for name, operation in operations.items():
            comm.Barrier()
            operation()
            comm.Barrier()
            before = time.perf_counter()
            operation()
            times[name].append(time.perf_counter() - before)
        go_on[0] = done < 2 or time.perf_counter() - start < seconds
        comm.Bcast(go_on, root=0)
        if not go_on[0]:
            break
    return {name: slowest(comm, statistics.median(values)) for name, values in times.items()}


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over several runs. Not collective.

    Example:
        >>> medians([{"a": 1.0}, {"a": 9.0}, {"a": 2.0}])
        {'a': 2.0}
    """
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def slowest(comm: Any, value: float) -> float:
    """Return the largest value over the ranks. Collective."""
    from mpi4py import MPI

    out = np.empty(1)
    comm.Allreduce(np.array([value]), out, op=MPI.MAX)
    return float(out[0])


def machine(comm: Any) -> dict[str, Any]:
    """Return what the figures depend on: processor, memory, MPI, versions, date, ranks and nodes. Collective."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = np.empty(1, np.int32)
    comm.Allreduce(np.array([node.rank == 0], np.int32), leaders)
    node.Free()
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ": unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu.split(":", 1)[1].strip(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "system": platform.platform(),
        "python": platform.python_version(),
        "mpi": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        "versions": {
            name: version(name) for name in ("mpistrat", "numpy", "mpi4py", "h5py", "torch", "tensorflow-cpu")
        },
        "ranks": comm.size,
        "nodes": int(leaders[0]),
    }


def version(package: str) -> str | None:
    """Return the installed version of a package, None where it is not installed. Not collective."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return __version__ if package == "mpistrat" else None  # run from the checkout


def describe(seconds: float) -> str:
    """Return a time with a fitting unit. Not collective.

    Example:
        >>> describe(0.0123)
        '12.3 ms'
    """
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table under a title. Not collective."""
    lines = [f"### {title}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def gloo(comm: Any) -> Any:
    """Return torch.distributed with a gloo process group over the ranks of `comm`, None without PyTorch. Collective."""
    try:
        import torch.distributed as dist
    except ImportError:
        return None
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = addresses(comm)[0].split(":")
    dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
    return dist


def tensorflow_strategy(comm: Any) -> Any:
    """Return TensorFlow's MultiWorkerMirroredStrategy over the ranks, each a worker on its host. Collective."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    task = {"type": "worker", "index": comm.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses(comm)}, "task": task})
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    return tf.distribute.MultiWorkerMirroredStrategy()


def addresses(comm: Any) -> list[str]:
    """Return "host:port" of a free port of each rank, by rank. Collective."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    host = socket.gethostbyname(socket.gethostname()) if comm_nodes(comm) > 1 else "127.0.0.1"
    return list(comm.allgather(f"{host}:{port}"))


def share_text(comm: Any, text: str) -> str:
    """Return rank 0's text on every rank. Collective."""
    data = np.frombuffer(text.encode().ljust(4096), np.uint8).copy()
    comm.Bcast(data)
    return data.tobytes().decode().rstrip()


def comm_nodes(comm: Any) -> int:
    """Return the number of nodes that the ranks lie on. Collective."""
    return int(machine(comm)["nodes"])


def arguments(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Return the parsed command line: `--output` and one option for each default. Not collective."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, help="folder for the JSON file; nothing is written without it")
    for name, value in defaults.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true", default=value)
        else:
            parser.add_argument(flag, type=type(value), default=value)
    return parser.parse_args()


def save(folder: Path | None, name: str, result: dict[str, Any]) -> None:
    """Write a result as `NAME-<MPI>-<nodes>x<ranks per node>.json`, when a folder is given. Not collective."""
    if folder is None:
        return
    about = result["machine"]
    vendor = "openmpi" if "Open MPI" in about["mpi"] else "mpich"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{vendor}-{about['nodes']}x{about['ranks'] // about['nodes']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
