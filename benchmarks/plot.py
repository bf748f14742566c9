"""Draw the plots of a folder of results: all-reduce, steps, frameworks, torch, input, servers, checkpoints, the wire.

python benchmarks/plot.py benchmarks/results/2026-11-21
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from before_after import ratio

from mpistrat.base.text import counted
from mpistrat.bench import result as machine
from mpistrat.bench.plot import colour, finish, new_figure
from mpistrat.bench.result import layout as title

COLUMNS = 3
FORMS = {"float32": "#7f7f7f", "bfloat16": "#1f77b4", "int8": "#d62728"}  # of numbers between nodes


def panels(count: int, *, sharey: bool) -> tuple[Any, list[Any]]:
    """Return a figure and as many panels, in rows of three."""
    columns = min(count, COLUMNS)
    rows = -(-count // columns)
    figure = new_figure(4.2 * columns, 3.8 * rows)
    grid = figure.subplots(rows, columns, sharey=sharey, squeeze=False)
    axes = list(grid.flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes[:count]


def load(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the results of one benchmark, ordered by MPI, nodes and ranks."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]
    return sorted(results, key=lambda r: (r["machine"]["mpi"], r["machine"]["nodes"], r["machine"]["ranks"]))


def caption(results: list[dict[str, Any]]) -> str:
    """Return a line that says on what machine, with which versions and when."""
    return machine.caption([result["machine"] for result in results])


def draw_all_reduce(folder: Path) -> None:
    """Draw bandwidth (bytes of one buffer / time) over size, one panel a layout."""
    results = load(folder, "all_reduce")
    if not results:
        return
    figure, axes = panels(len(results), sharey=True)
    for axis, result in zip(axes, results, strict=True):
        labels = list(result["seconds"])
        for name in result["seconds"][labels[0]]:
            rates = [size(label) / result["seconds"][label][name] / 1e9 for label in labels]
            axis.plot(range(len(labels)), rates, marker="o", label=name, color=colour(name))
        axis.set_xticks(range(len(labels)), labels, rotation=45)
        axis.set_yscale("log")
        axis.set_title(title(result["machine"]), fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[::COLUMNS]:
        axis.set_ylabel("GB/s (buffer size / time)")
    axes[0].legend(fontsize=8)
    finish(figure, "All-reduce of float32", caption(results), folder / "all_reduce.png")


def size(label: str) -> float:
    """Return the bytes that a size label stands for.

    Example:
        >>> size("16.8 MB")
        16800000.0
    """
    number, unit = label.split()
    return float(number) * {"KB": 1e3, "MB": 1e6}[unit]


def draw_training_step(folder: Path) -> None:
    """Draw the milliseconds of a step as bars, one panel a layout."""
    results = load(folder, "training_step")
    if not results:
        return
    figure, axes = panels(len(results), sharey=False)
    for axis, result in zip(axes, results, strict=True):
        times = {name: 1e3 * t for name, t in result["seconds_without_compute"].items()}
        draw_bars(axis, times, "%.0f")
        axis.set_title(title(result["machine"]), fontsize=10)
    for axis in axes[::COLUMNS]:
        axis.set_ylabel("ms a step")
    parameters = results[0]["parameters"] / 1e6
    finish(figure, f"Reduce and Adam, {parameters:.1f} M parameters", caption(results), folder / "training_step.png")


def draw_frameworks(folder: Path) -> None:
    """Draw what a step adds to the forward and backward pass, and memory; a row of panels a layout, a picture a framework."""
    for name in sorted({path.name.partition("-")[0] for path in folder.glob("frameworks_*-*.json")}):
        results = load(folder, name)
        models = list(results[0]["seconds"])
        figure = new_figure(4.6 * (len(models) + 1), 4.2 * len(results))
        for axes, result in zip(figure.subplots(len(results), len(models) + 1, squeeze=False), results, strict=True):
            for axis, model in zip(axes, models, strict=False):
                *steps, (_, alone) = result["seconds"][model].items()
                draw_bars(axis, {each: max(1e3 * (t - alone), 0.0) for each, t in steps}, "%.3g")
                axis.set_title(f"{model}\n{title(result['machine'])}", fontsize=10)
                axis.set_ylabel("ms a step, less compute")
            *steps, _ = result["memory_bytes"][models[0]]["step"].items()
            draw_bars(axes[-1], {each: size / 1e6 for each, size in steps}, "%.0f")
            axes[-1].set_title(f"{models[0]}: weights, gradients, state\n{title(result['machine'])}", fontsize=10)
            axes[-1].set_ylabel("MB a node")
        heading = "A training step: " + name.removeprefix("frameworks_").replace("_", ", ")
        finish(figure, heading, caption(results), folder / f"{name}.png")


def draw_torch_backend(folder: Path) -> None:
    """Draw gloo's time over ours: of each collective by size, and of steps of DDP and FSDP2; a row of panels a layout."""
    results = load(folder, "torch_backend")
    if not results:
        return
    figure = new_figure(13, 4.6 * len(results))
    for (left, right), result in zip(figure.subplots(len(results), 2, squeeze=False), results, strict=True):
        for call, sizes in result["seconds"].items():
            left.plot(
                list(sizes), [times["gloo"] / times["mpistrat"] for times in sizes.values()], marker="o", label=call
            )
        left.set_yscale("log")
        left.set_ylabel("gloo's time / ours")
        left.axhline(1, color="black", linewidth=1)
        left.grid(alpha=0.3)
        left.legend(fontsize=7, ncols=2, loc="upper right", framealpha=0.6)
        draw_bars(right, {step: times["gloo"] / times["mpistrat"] for step, times in result["steps"].items()}, "%.2f")
        right.axhline(1, color="black", linewidth=1)
        for axis, what in ((left, "collectives, float32 of a rank"), (right, "steps with Adam")):
            axis.set_title(f"{what}\n{title(result['machine'])}", fontsize=10)
    finish(figure, "torch.distributed over MPI beside gloo", caption(results), folder / "torch_backend.png")


def draw_checkpoints(folder: Path) -> None:
    """Draw how long a save stands still, and when the file is complete; a row of panels a layout."""
    results = load(folder, "checkpoints")
    if not results:
        return
    figure = new_figure(13, 4.6 * len(results))
    for axes, result in zip(figure.subplots(len(results), 2, squeeze=False), results, strict=True):
        for axis, what, label in zip(axes, ("stall_seconds", "complete_seconds"), ("stall", "complete"), strict=True):
            draw_bars(axis, {name: 1e3 * seconds for name, seconds in result[what].items()}, "%.3g")
            for bar, name in zip(axis.patches, result[what], strict=True):
                bar.set_color(colour("ours") if name.startswith("ours") else "#7f7f7f")
            axis.set_title(f"{label}: {result['bytes'] / 1e6:.0f} MB\n{title(result['machine'])}", fontsize=10)
            axis.set_ylabel("ms, slowest rank")
    finish(figure, "A checkpoint of weights and Adam's slots", caption(results), folder / "checkpoints.png")


def draw_watching(folder: Path) -> None:
    """Draw what the recorder and the monitor add to a step, and what an event takes; a row of panels a layout."""
    results = load(folder, "watching")
    if not results:
        return
    figure = new_figure(11, 4.2 * len(results))
    for axes, result in zip(figure.subplots(len(results), 2, squeeze=False), results, strict=True):
        draw_bars(axes[0], {name: 1e6 * more for name, more in result["more_seconds_of_short_steps"].items()}, "%.1f")
        axes[0].axhline(50, color="black", linestyle="--", linewidth=1)
        axes[0].set_title(f"added to a step; dashed: 1 % of 5 ms\n{title(result['machine'])}", fontsize=10)
        axes[0].set_ylabel("µs a step, slowest rank")
        draw_bars(axes[1], {name: each / 1e3 for name, each in result["event_ns"].items()}, "%.2f")
        axes[1].set_title(f"an event\n{title(result['machine'])}", fontsize=10)
        axes[1].set_ylabel("µs")
    finish(figure, "Flight recorder and monitor", caption(results), folder / "watching.png")


def draw_wire(folder: Path) -> None:
    """Draw for each layout the step, the bytes of a host, and how two models learn with each form of the wire."""
    results = load(folder, "wire")
    if not results:
        return
    figure, axes = panels(4 * len(results), sharey=False)
    for index, result in enumerate(results):
        step, sent, digits, loss = axes[4 * index : 4 * index + 4]
        draw_bars(step, {name: 1e3 * t for name, t in result["seconds"].items()}, "%.0f")
        step.set_ylabel(f"ms a step, {result['parameters'] / 1e6:.1f} M parameters")
        draw_bars(sent, {name: n / 1e6 for name, n in result["bytes_sent"].items()}, "%.1f")
        sent.set_ylabel("MB that a host sends in a step")
        for name, runs in result["digits_accuracy"].items():
            for number, run in enumerate(runs):
                label = name if number == 0 else None
                digits.plot([100 * accuracy for accuracy in run], color=FORMS[name], label=label, alpha=0.7)
        digits.set_ylabel("digits: % right, a line a seed")
        digits.set_xlabel("epochs")
        for name, losses in result["transformer_loss"].items():
            loss.plot(losses, color=FORMS[name], label=name, alpha=0.8)
        loss.set_ylabel("transformer: loss a symbol")
        loss.set_xlabel("steps")
        for axis in (digits, loss):
            axis.legend(fontsize=7)
            axis.grid(alpha=0.3)
        for axis in (step, sent, digits, loss):
            axis.set_title(title(result["machine"]), fontsize=10)
    finish(figure, "Fewer bytes between nodes", caption(results), folder / "wire.png")


def draw_bars(axis: Any, values: dict[str, float], form: str) -> None:
    """Draw a bar for each contender."""
    bars = axis.bar(range(len(values)), list(values.values()), color=[colour(name) for name in values])
    axis.bar_label(bars, fmt=form, fontsize=9)
    axis.margins(y=0.12)
    names = [name.replace(", ", ",\n").replace(" + ", " +\n") for name in values]
    axis.set_xticks(range(len(values)), names, rotation=45, ha="right", fontsize=8)


def draw_hdf5_input(folder: Path) -> None:
    """Draw each reader's rate as points, one line of the picture a case, one panel a number of ranks."""
    results = load(folder, "hdf5_input")
    if not results:
        return
    names = list(dict.fromkeys(name for r in results for case in r["cases"] for name in case["bytes_per_second"]))
    titles = list(dict.fromkeys(case_title(case) for result in results for case in result["cases"]))[::-1]
    figure = new_figure(6.5 * len(results), 9)
    grid = figure.subplots(1, len(results), sharey=True, squeeze=False)
    for axis, result in zip(grid.flat, results, strict=True):
        for name in names:
            points = [(c["bytes_per_second"].get(name), titles.index(case_title(c))) for c in result["cases"]]
            known = [(rate / 1e6, y) for rate, y in points if rate is not None]
            ours = name == "mpistrat"
            style = {"s": 60, "color": "#08519c", "zorder": 3} if ours else {"s": 28, "marker": "x"}
            axis.scatter(*zip(*known, strict=True), label=name, **style)
        axis.set_xscale("log")
        axis.set_xlabel("MB/s")
        axis.set_yticks(range(len(titles)), titles, fontsize=8)
        axis.set_title(title(result["machine"]), fontsize=10)
        axis.grid(alpha=0.3)
    handles = grid.flat[0].get_legend_handles_labels()
    figure.legend(*handles, loc="upper center", ncol=2 * len(results), fontsize=7, bbox_to_anchor=(0.5, 0.965))
    finish(figure, "Batches out of HDF5 files in the page cache", caption(results), folder / "hdf5_input.png", 0.9)


def case_title(case: dict[str, Any]) -> str:
    """Return a case in a few words."""
    files = counted(case["files"], "file")
    row = f"{case['row_bytes'] / 1000:.3g} KB" if case["row_bytes"] >= 1000 else f"{case['row_bytes']} B"
    return f"{case['layout']}, {files}, {row} rows, {case['order']}"


def draw_parameter_server(folder: Path) -> None:
    """Draw steps a second over sizes, over workers and servers, and bare transfers; a row of panels a layout of hosts."""
    results = load(folder, "parameter_server")
    if not results:
        return
    figure = new_figure(19, 4.4 * len(results))
    grid = figure.subplots(len(results), 4, squeeze=False)
    for axes, result in zip(grid, results, strict=True):
        cells = result["cells"]
        names = list(dict.fromkeys(name for cell in cells for name in cell["steps_per_second"]))
        pairs = [cell for cell in cells if (cell["servers"], cell["workers"]) == (1, 2)]
        labels = [cell["case"].replace(" of ", "\nof ") for cell in pairs]
        for name in names:
            rates = [cell["steps_per_second"].get(name, float("nan")) for cell in pairs]
            places = [i + 0.5 * ("rows" in cell["case"]) for i, cell in enumerate(pairs)]
            whole = sum("rows" not in cell["case"] for cell in pairs)
            axes[0].plot(places[:whole], rates[:whole], marker="o", label=name, color=colour(name))
            axes[0].plot(places[whole:], rates[whole:], marker="o", linestyle="", color=colour(name))
        axes[0].set_xticks(places, labels, fontsize=8)
        axes[0].set_yscale("log")
        axes[0].set_title(f"1 server, 2 workers\n{title(result['machine'])}", fontsize=10)
        for axis, label in zip(axes[1:3], ("4 KB", "67 MB"), strict=True):
            draw_growth(axis, [cell for cell in cells if cell["case"] == label], names)
            axis.set_title(f"{label} a step, over workers\n{title(result['machine'])}", fontsize=10)
        for axis in axes[:3]:
            axis.set_ylabel("steps/s of all workers")
            axis.legend(fontsize=7)
        rates = result["bytes_per_second"]
        for name in next(iter(rates.values()), {}):
            line = "--" if name.startswith("Send") else "-"
            values = [found[name] / 1e9 for found in rates.values()]
            axes[3].plot(range(len(rates)), values, line, marker="o", label=name, color=colour(name))
        axes[3].set_xticks(range(len(rates)), list(rates))
        axes[3].set_yscale("log")
        axes[3].set_ylabel("GB/s")
        axes[3].set_title(f"1 server, 1 worker: one thing at a time\n{title(result['machine'])}", fontsize=10)
        axes[3].legend(fontsize=7)
        for axis in axes:
            axis.grid(alpha=0.3)
    finish(
        figure, "Parameter servers: read all, push a gradient, SGD", caption(results), folder / "parameter_server.png"
    )


def draw_growth(axis: Any, cells: list[dict[str, Any]], names: list[str]) -> None:
    """Draw steps a second over the number of workers: a line for one server, squares for two."""
    for name in names:
        for servers, style in ((1, "o-"), (2, "s--")):
            known = [
                (cell["workers"], cell["steps_per_second"][name])
                for cell in sorted(cells, key=lambda c: c["workers"])
                if cell["servers"] == servers and name in cell["steps_per_second"]
            ]
            if known:
                axis.plot(*zip(*known, strict=True), style, label=name if servers == 1 else None, color=colour(name))
    axis.set_xticks(sorted({cell["workers"] for cell in cells}))
    axis.margins(y=0.1)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("workers (squares: 2 servers)")


def new_rows(width: float, names: Sequence[str]) -> tuple[Any, Any]:
    """Return a figure, and its axis with a row for each name, from the top, and a line at the ratio 1."""
    figure = new_figure(width, 0.35 * len(names) + 2)
    axis = figure.subplots()
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.axvline(1, color="#7f7f7f", linewidth=1)
    return figure, axis


def draw_before_after(folder: Path) -> None:
    """Draw how many times as long an operation takes as before: the median over pairs, and its limits of 95 %."""
    results = load(folder, "before_after")
    if not results:
        return
    every = [pair for result in results for pair in result["seconds"].items()]
    figure, axis = new_rows(10, [name for name, _ in every])
    for number, (_, times) in enumerate(every):
        low, middle, high = ratio(times["before"], times["after"])
        axis.plot([low, high], [number] * 2, color="#1f77b4")
        axis.plot(middle, number, "o", color="#1f77b4")
    axis.set_xlabel("time after / time before, of pairs in turns, with limits of 95 %")
    axis.grid(alpha=0.3, axis="x")
    finish(figure, "Operations and steps, before and after", caption(results), folder / "before_after.png")


def draw_sources_input(folder: Path) -> None:
    """Draw how many times the rate of the library alone each kind of files is read."""
    results = load(folder, "sources_input")
    if not results:
        return
    rates = [pair for result in results for pair in result["rows_per_second"].items()]
    figure, axis = new_rows(16, [name for name, _ in rates])
    bars = axis.barh(
        range(len(rates)), [each["mpistrat"] / each["alone"] for _, each in rates], color=colour("mpistrat")
    )
    axis.bar_label(bars, fmt="%.2f", fontsize=9, padding=3)
    axis.set_xscale("log")
    axis.margins(x=0.1)
    axis.set_xlabel("rows per second / those of the library alone")
    finish(figure, "Rows of files, beside their libraries", caption(results), folder / "sources_input.png")


if __name__ == "__main__":
    draw_all_reduce(Path(sys.argv[1]))
    draw_training_step(Path(sys.argv[1]))
    draw_frameworks(Path(sys.argv[1]))
    draw_torch_backend(Path(sys.argv[1]))
    draw_hdf5_input(Path(sys.argv[1]))
    draw_parameter_server(Path(sys.argv[1]))
    draw_checkpoints(Path(sys.argv[1]))
    draw_watching(Path(sys.argv[1]))
    draw_wire(Path(sys.argv[1]))
    draw_before_after(Path(sys.argv[1]))
    draw_sources_input(Path(sys.argv[1]))
