"""Measure the all-reduce algorithms on this machine and write a table for the chooser.

    mpiexec -n 4 python benchmarks/tune_chooser.py table.json
    MPISTRAT_CHOOSER=table.json mpiexec -n 4 python train.py

Ranks on one node measure that half of the table, ranks on several nodes the other; the rest is taken from the table that
ships. Take turns in one run and the slowest rank's median, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrat.cluster.topology import Topology
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.cross_device.auto import Chooser, ChooserRule, make_cross_device_ops
from mpistrat.types import ReduceOp

SIZES = [1 << bits for bits in range(3, 27)]
ALGORITHMS = ("HIERARCHICAL", "MPI")  # the first wins where they are about as quick
CLEARLY = 0.95


def measure(group: ProcessGroup, turns: int) -> dict[int, dict[str, float]]:
    """Return seconds by bytes and algorithm, the same on every rank. Collective."""
    comm = group.topology.comm
    algorithms = {name: make_cross_device_ops(name) for name in ALGORITHMS}
    for ops in algorithms.values():
        ops.bind(group)
    table: dict[int, dict[str, float]] = {}
    for nbytes in SIZES:
        value = np.ones(nbytes // 4, np.float32)
        repeats = max(1, min(200, (1 << 21) // nbytes))
        times: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
        for turn in range(turns + 1):
            for name, ops in algorithms.items():
                comm.Barrier()
                begin = time.perf_counter()
                for _ in range(repeats):
                    ops.reduce(ReduceOp.SUM, value)
                if turn:
                    times[name].append((time.perf_counter() - begin) / repeats)
        medians = np.array([statistics.median(times[name]) for name in ALGORITHMS])
        comm.Allreduce(MPI.IN_PLACE, medians, op=MPI.MAX)
        table[nbytes] = dict(zip(ALGORITHMS, medians.tolist(), strict=True))
    return table


def rules(measured: dict[int, dict[str, float]], nodes: str) -> list[ChooserRule]:
    """Return rules from the smallest size to the largest; a single odd size makes no rule of its own."""
    default, other = ALGORITHMS
    wins = [times[other] < CLEARLY * times[default] for times in measured.values()]
    smooth = [sum(wins[max(0, i - 1) : i + 2]) >= 2 for i in range(len(wins))]
    found: list[ChooserRule] = []
    sizes, first = list(measured), 0
    for index, wins_other in enumerate(smooth):
        last = index == len(sizes) - 1
        if not last and smooth[index + 1] == wins_other:
            continue
        ratio = statistics.median(measured[s][default] / measured[s][other] for s in sizes[first : index + 1])
        why = f"{default} takes {ratio:.2f} of the time of {other} (median over these sizes)"
        found.append(
            ChooserRule("cpu", nodes, None if last else sizes[index + 1], other if wins_other else default, why)
        )
        first = index + 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a table for the chooser.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--turns", type=int, default=11)
    arguments = parser.parse_args()
    with Topology.create(devices="cpu:0") as topology:
        group = ProcessGroup.create(topology)
        measured = measure(group, arguments.turns)
        nodes = "one" if group.num_nodes == 1 else "several"
        found = rules(measured, nodes)
        if topology.rank == 0:
            write(arguments.output, found, measured, topology)
        group.close()


def write(path: Path, found: list[ChooserRule], measured: dict[int, dict[str, float]], topology: Topology) -> None:
    """Print the measurements and write the table."""
    for nbytes, times in measured.items():
        print(f"{nbytes:>12,}", "  ".join(f"{name} {seconds * 1e6:12.1f} µs" for name, seconds in times.items()))
    kept = [rule for rule in Chooser().rules if (rule.device, rule.nodes) != (found[0].device, found[0].nodes)]
    where = f"{topology.size} ranks on {topology.num_nodes} node(s), {platform.machine()}, {MPI.get_vendor()[0]}"
    content: dict[str, Any] = {
        "measured": f"{datetime.date.today()}, {where} {'.'.join(map(str, MPI.get_vendor()[1]))}",
        "rules": [vars(rule) for rule in found + kept],
    }
    chooser = Chooser(content)  # is it a table that the chooser reads?
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(chooser)


if __name__ == "__main__":
    main()
