"""What every benchmark shares beyond `mpistrat.bench`: peers, the command line, a table, JSON."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpistrat.base.text import duration
from mpistrat.bench import result as about
from mpistrat.bench.measure import Operation, largest, medians, pair, total
from mpistrat.bench.result import version

__all__ = [
    "ALONE", "OURS", "Operation", "addresses", "arguments", "comm_nodes", "duration", "gloo", "largest", "machine",
    "medians", "pair", "proportional_memory", "save", "show_ratios", "table", "tensorflow_strategy", "version",
]  # fmt: skip

OURS, ALONE = "mpistrat", "forward and backward alone"  # of frameworks

PACKAGES = ("mpistrat", "numpy", "mpi4py", "h5py", "torch", "tensorflow-cpu")


def machine(comm: Any, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the figures depend on: the machine, MPI, versions, date, ranks and nodes. Collective.

    `packages` are peers beside those that many benchmarks have.
    """
    return about.machine(comm, tuple(dict.fromkeys((*PACKAGES, *packages))))


def proportional_memory(comm: Any) -> float:
    """Return the bytes that the ranks use together, shared pages counted once. Collective."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return total(comm, float(found.group(1)) * 1024 if found else 0.0)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table under a title."""
    lines = [f"### {title}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def show_ratios(result: dict[str, Any], tables: dict[str, dict[str, dict[str, float]]], peer: str) -> None:
    """Print seconds by contender, and a peer's time over each, in a table for each operation."""
    about = result["machine"]
    print(f"{about['ranks']} ranks on {about['nodes']} node(s), {about['mpi']}; (×) {peer}'s time / this\n")
    for call, sizes in tables.items():
        names = list(next(iter(sizes.values()))) if sizes else []
        rows = [
            [label, *(f"{duration(times[n])} ({times[peer] / times[n]:.2f} ×)" for n in names)]
            for label, times in sizes.items()
        ]
        print(table(call, ["size", *names], rows) + "\n", flush=True)


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


def comm_nodes(comm: Any) -> int:
    """Return the number of nodes that the ranks lie on. Collective."""
    return int(machine(comm)["nodes"])


def arguments(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Return the parsed command line: `--output` and one option for each default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, help="folder for the JSON file; nothing is written without it")
    for name, value in defaults.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true", default=value)
        else:
            parser.add_argument(flag, type=type(value), default=value)
    return parser.parse_args()


def save(folder: Path | None, result: dict[str, Any]) -> None:
    """Write a result as `<benchmark>-<MPI>-<nodes>x<ranks per node>.json`, when a folder is given."""
    if folder is None:
        return
    ran = result["machine"]
    vendor = "openmpi" if "Open MPI" in ran["mpi"] else "mpich"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['benchmark']}-{vendor}-{ran['nodes']}x{ran['ranks'] // ran['nodes']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
