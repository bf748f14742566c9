"""The picture of `mpistrat plan`: efficiency over nodes, a line for each number of ranks a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .plan import Prediction
from .plot import finish, new_figure

__all__ = ["draw"]

_LINES = 5


def draw(path: Path, found: Sequence[Prediction], parameters: float, about: Mapping[str, Any]) -> None:
    """Draw predictions, each as a band between the least and the most.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the file's name has an ending that is not known.
    """
    figure = new_figure(7.0, 4.2)
    axis = figure.subplots()
    counts = sorted({each.ranks for each in found})
    for ranks in counts[:: -(-len(counts) // _LINES)]:
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
