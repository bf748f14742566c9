"""Pictures of benchmarks and plans, with matplotlib if it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import explain
from .result import Result, caption, layout

if TYPE_CHECKING:
    from .plan import Prediction

__all__ = ["check_ending", "colour", "draw", "draw_plan", "finish", "new_figure"]

_PLAN_LINES = 5  # of a plan
COLOURS = {
    "raw MPI_Allreduce": "#7f7f7f",
    "raw MPI_Allreduce + NumPy Adam": "#7f7f7f",
    "one flat MPI_Allreduce, fused Adam": "#7f7f7f",
    "one flat MPI_Allreduce, optax.adam": "#7f7f7f",
    "the same in one compiled loop": "#3c8d53",
    "torch gloo": "#d62728",
    "torch DDP, fused Adam": "#d62728",
    "torch DDP, plain Adam": "#ff9896",
    "mpistrat, own arrays": "#6baed6",
    "mpistrat, arenas": "#08519c",
    "mpistrat": "#08519c",
    "TensorFlow": "#ff7f0e",
    "TensorFlow, 20 steps a call": "#ffbb78",
    "torch RPC": "#d62728",
    "pull": "#08519c",
    "push": "#6baed6",
    "shared_window": "#08519c",
    "one_sided": "#6baed6",
    "messages": "#7f7f7f",
    "Send/Recv to worker": "#3f3f3f",
    "Send/Recv to server": "#9f9f9f",
}


def colour(name: str) -> str:
    """Return a contender's colour, the same in every plot."""
    return COLOURS.get(name, "#2ca02c")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, without a window system.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def check_ending(option: str, file: str) -> None:
    """Raise ValueError for a name whose ending matplotlib, if installed, does not know."""
    try:
        known = sorted(new_figure(1, 1).canvas.get_supported_filetypes())
    except ImportError:
        return
    ending = Path(file).suffix[1:]
    if ending and ending.lower() not in known:
        expected, got = f"a name that ends with one of .{', .'.join(known)}", f".{ending}"
        raise ValueError(explain(option, file, expected=expected, got=got))


def finish(figure: Any, heading: str, footnote: str, path: Path, top: float = 1.0) -> None:
    """Add heading and footnote to a figure, and write it."""
    figure.suptitle(heading)
    figure.text(0.5, 0.005, footnote, ha="center", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, top))
    figure.savefig(path, dpi=110)


def draw(path: Path, results: Mapping[str, Result], about: Mapping[str, Any]) -> None:
    """Draw a panel for each result, two in a row.

    Args:
        results: by name of the benchmark.
        about: the result of `machine`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    results = {
        name: result for name, result in results.items() if result.values
    }  # all sizes of a benchmark may be skipped
    if not results:
        raise ValueError("bench: expected a result to draw, got none: too little memory for any")
    columns = min(2, len(results))
    rows = -(-len(results) // columns)
    figure = new_figure(6.2 * columns, 3.9 * rows + 0.4)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[len(results) :]:
        axis.set_visible(False)
    for axis, result in zip(axes, results.values(), strict=False):
        axis.set_title(result.title, fontsize=10)
        if result.first_column == "size":
            _lines(axis, result)
        else:
            _bars(axis, result)
        axis.set_xlabel(result.first_column)
        if axis.get_yscale() == "log":
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.grid(alpha=0.3, axis="y")
        axis.set_axisbelow(True)
        if len(result.columns) > 1:
            axis.legend(fontsize=8)
    finish(figure, f"mpistrat bench: {layout(about)}", caption([about]), path)


def _lines(axis: Any, result: Result) -> None:
    """Draw seconds over size."""
    for name in result.columns:
        times = [1e3 * values[name] for values in result.values.values()]
        axis.plot(range(len(times)), times, marker="o", label=name, color=colour(name))
    axis.set_xticks(range(len(result.values)), list(result.values))
    axis.set_yscale("log")
    axis.set_ylabel("ms")


def _bars(axis: Any, result: Result) -> None:
    """Draw a group of bars for each case."""
    scale, unit = {"seconds": (1e3, "ms"), "per second": (1.0, "per second"), "bytes per second": (1e-6, "MB/s")}[
        result.unit
    ]
    width = 0.8 / len(result.columns)
    for index, name in enumerate(result.columns):
        known = [(case, values[name] * scale) for case, values in enumerate(result.values.values()) if name in values]
        places = [case + (index - (len(result.columns) - 1) / 2) * width for case, _ in known]
        bars = axis.bar(places, [value for _, value in known], width, label=name, color=colour(name))
        axis.bar_label(bars, fmt=_short, fontsize=7)
    axis.set_xticks(range(len(result.values)), [case.replace(", ", ",\n") for case in result.values], fontsize=9)
    values = [value for each in result.values.values() for value in each.values()]
    if max(values) > 20 * min(values):
        axis.set_yscale("log")
    axis.margins(y=0.15)
    axis.set_ylabel(unit)


def _short(value: float) -> str:
    if value >= 10_000:  # a group's labels would overlap
        return f"{value / 1000:,.0f} K"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def draw_plan(path: Path, found: Sequence[Prediction], parameters: float, about: Mapping[str, Any]) -> None:
    """Draw predicted efficiency over nodes, a band per number of ranks per node.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the file's name has an unknown ending.
    """
    figure = new_figure(7.0, 4.2)
    axis = figure.subplots()
    counts = sorted({each.ranks for each in found})
    for ranks in counts[:: -(-len(counts) // _PLAN_LINES)]:
        mine = [each for each in found if each.ranks == ranks]
        nodes = [each.nodes for each in mine]
        low, high = ([100 * each.efficiency[i] for each in mine] for i in (0, 1))
        axis.fill_between(nodes, low, high, alpha=0.25)
        axis.plot(nodes, [(a + b) / 2 for a, b in zip(low, high, strict=True)], marker="o", label=f"{ranks} a node")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set(xlabel="nodes", ylabel="% of a step in which the program computes", ylim=(0, 100))
    axis.grid(alpha=0.3)
    axis.legend(title="ranks", fontsize=8)
    footnote = (
        f"constants measured on {about['cpu']}, {about['ranks']} ranks on {about['nodes']} nodes, {about['date']}"
    )
    finish(figure, f"mpistrat plan: {parameters:.3g} parameters", footnote, path)
