"""`mpistrat plan`: what a step would take on other nodes and ranks, from what `mpistrat bench` has measured."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..base.agree import Ranks
from ..base.files import read_whole
from ..base.text import counted, decimal_size, duration
from ..bench.plan import Machine, Prediction, layouts, predict
from ..bench.plot import draw_plan
from ..bench.training_step import OURS, SIZES
from .command import DONE, PROBLEM, WRONG_USE, Command
from .terminal import check_folders, complain, console, draw_or_tell, not_negative, positive, whole

__all__ = ["COMMAND"]

_WIDTH = 79
_ENOUGH = 0.03  # of efficiency that a layout with fewer ranks may lose against the best, as it needs less memory


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parameters", type=positive, required=True, metavar="M", help="of the model, as 1e9")
    parser.add_argument(
        "--compute", type=not_negative, required=True, metavar="SECONDS",
        help="that all cores of a node need for the gradients of its part of a batch",
    )  # fmt: skip
    parser.add_argument(
        "--like", required=True, nargs="+", metavar="FILE",
        help="what mpistrat bench --json has written, on one layout or on several",
    )  # fmt: skip
    parser.add_argument(
        "--nodes", type=whole(1), default=16, metavar="N", help="the largest number of nodes; default %(default)s"
    )
    parser.add_argument("--cores", type=whole(1), metavar="N", help="of a node; default those of the file")
    parser.add_argument("--memory", type=positive, metavar="GB", help="of a node; default that of the file")
    parser.add_argument(
        "--network", type=positive, metavar="GB/S", help="of a node, each way; default what was measured between nodes"
    )
    parser.add_argument(
        "--latency", type=not_negative, metavar="US", help="of a message between nodes, in microseconds"
    )
    parser.add_argument("--json", metavar="FILE", help="write the predictions there")
    parser.add_argument("--plot", metavar="FILE", help="draw efficiency over nodes")


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    check_folders({"--json": args.json, "--plot": args.plot})
    try:
        documents = [json.loads(read_whole(name)) for name in args.like]
        measured = Machine.read(documents)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        complain(f"--like {' '.join(args.like)}: {error}")
        return PROBLEM if isinstance(error, OSError) else WRONG_USE
    told = 1e9 * (args.network or 0.0)
    machine = replace(
        measured,
        cores=args.cores or measured.cores,
        memory=measured.memory if args.memory is None else 1e9 * args.memory,
        network=measured.network if args.network is None else (told, told, told),
        adds=args.network is None,
        latency=measured.latency if args.latency is None else 1e-6 * args.latency,
    )
    nodes = args.nodes
    if nodes > 1 and not machine.network[0]:
        print(
            "one node only: the file has no measurement of the network between nodes; give it by --network and --latency\n"
        )
        nodes = 1
    found = [predict(machine, args.parameters, args.compute, *layout) for layout in layouts(machine.cores, nodes)]
    best = [_best([each for each in found if each.nodes == count]) for count in sorted({each.nodes for each in found})]
    _show("The best layouts", best)
    _show(f"On {counted(found[-1].nodes, 'node')}", [each for each in found if each.nodes == found[-1].nodes])
    for text in _advice(machine, best[-1]):
        print(textwrap.fill(text, _WIDTH))
    for text in _compared(documents, measured):
        print(textwrap.fill(text, _WIDTH))
    if args.json:
        Path(args.json).write_text(
            json.dumps({"machine": asdict(machine), "steps": [asdict(f) for f in found]}, indent=1)
        )
    if not args.plot:
        return DONE
    return draw_or_tell(args.plot, lambda path: draw_plan(path, found, args.parameters, documents[0]["machine"]))


def _best(found: Sequence[Prediction]) -> Prediction:
    """Return the layout with the fewest ranks of those that are nearly the quickest, among those that fit, if any does."""
    fitting = [each for each in found if each.fits] or found
    middle = {each: each.compute / each.expected for each in fitting}
    good = (each for each in fitting if middle[each] >= max(middle.values()) - _ENOUGH)
    return min(good, key=lambda each: each.ranks)


def _show(title: str, found: Sequence[Prediction]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in (
        "nodes",
        "ranks ×\nthreads",
        "sum and\nupdate",
        "network",
        "step",
        "expected",
        "efficiency",
        "memory\na node",
    ):
        table.add_column(head, justify="right")
    table.add_column("bottleneck")
    for each in found:
        low, high = (f"{100 * value:.0f}" for value in each.efficiency)
        table.add_row(
            str(each.nodes), f"{each.ranks} × {each.threads}", _range(each.memory), _range(each.network), _range(each.step),
            duration(each.expected),
            f"{low} %" if low == high else f"{low}-{high} %",
            decimal_size(each.bytes) + ("" if each.fits else ": too much"), each.bottleneck,
        )  # fmt: skip
    out = console(plain=False)
    out.print(f"{title}:")
    out.print(table)
    out.print()


def _range(seconds: tuple[float, float]) -> str:
    low, high = map(duration, seconds)
    if not seconds[1]:
        return "-"
    return low if low == high else f"{low.split()[0] if low.split()[1] == high.split()[1] else low}-{high}"


def _advice(machine: Machine, best: Prediction) -> list[str]:
    if not best.fits:
        return [f"No layout fits: a node has {decimal_size(machine.memory)}."]
    lines = [
        f"Best on {counted(best.nodes, 'node')}: {counted(best.ranks, 'rank')} each, the fewest that are nearly the quickest."
    ]
    if best.gradient_bytes > best.bytes / 2 and best.ranks > 1:
        lines.append(
            f"{decimal_size(best.gradient_bytes)} of its {decimal_size(best.bytes)} are gradients, of which each rank has all:"
            " fewer ranks, of several threads each, or 16-bit gradients take less."
        )
    if best.bottleneck == "network":
        saved = duration(best.network[1] / 2)
        lines.append(f"The network is the limit: two gradients accumulated for each step save {saved} of each.")
    elif best.bottleneck == "memory":
        lines.append("The sum of gradients and the update are the limit: a larger batch computes longer for each.")
    if machine.cores != machine.node.cores:
        lines.append("How fast the memory of nodes with other cores is, is not known: measure there for closer ranges.")
    if best.doubt:
        least, most = (100 * (seconds / best.expected - 1) for seconds in best.step)
        lines.append(f"Its step may differ by {least:+.0f} to {most:+.0f} % from what is expected: {best.doubt}.")
    return lines


def _compared(documents: Sequence[dict[str, Any]], measured: Machine) -> list[str]:
    """Say how the model meets the steps of the layouts that were measured, where they are in the files."""
    lines = []
    for document in documents:
        about, steps = document["machine"], document["benchmarks"].get("step")
        each = about["ranks"] // about["nodes"]
        found = []
        for case, values in (steps or {"values": {}})["values"].items():
            step = predict(measured, SIZES[case], 0.0, about["nodes"], each)
            found.append(f"{case}: {duration(step.expected)} predicted, {duration(values[OURS])} measured")
        if found:
            where = f"{counted(each, 'rank')} on {counted(about['nodes'], 'node')}"
            lines.append(f"As it was measured, {where}: {'; '.join(found)}.")
    return lines


COMMAND = Command(
    summary="predict step time and memory on other nodes and ranks",
    text="""\
Predict what a training step (Adam, float32), from gradients to new weights, takes over nodes and ranks a node: the sum of
gradients and the update, the network, memory, efficiency, and what is the bottleneck. The constants are those that mpistrat
bench has measured (--like), on one node or on several; cores, memory and network of another machine can be told. Predictions
are ranges, with what is expected in between; where they are wider than 15 %, it says why.""",
    examples=(
        "mpistrat run -n 4 -m mpistrat bench --only constants --only step --json bench.json",
        "mpistrat plan --parameters 1e8 --compute 0.1 --like one-node.json two-nodes.json --nodes 16",
        "mpistrat plan --parameters 1e9 --compute 0.5 --like bench.json --cores 64 --memory 300 --network 25 --latency 2",
    ),
    arguments=_arguments,
    run=_run,
    collective=False,
)
