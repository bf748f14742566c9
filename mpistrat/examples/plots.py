"""The picture of a training run: loss of every step and accuracy of every epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["training_curves"]


def training_curves(path: Path, losses: Sequence[float], accuracies: Sequence[float], title: str) -> bool:
    """Write the curves as a PNG; return False, and write nothing, without matplotlib.

    Args:
        losses: one a step.
        accuracies: one an epoch, between 0 and 1.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps_an_epoch = len(losses) / max(len(accuracies), 1)
    left.plot([(i + 1) / max(steps_an_epoch, 1) for i in range(len(losses))], losses, color="#08519c", linewidth=1)
    left.set(xlabel="epoch", ylabel="loss of a step (mean over the global batch)", yscale="log")
    right.plot(range(1, len(accuracies) + 1), accuracies, color="#2ca02c", marker="o", markersize=4)
    right.set(xlabel="epoch", ylabel="test accuracy")
    if accuracies:
        right.annotate(
            f"{accuracies[-1]:.4f}",
            (len(accuracies), accuracies[-1]),
            textcoords="offset points",
            xytext=(-4, -16),
            ha="right",
        )
    right.xaxis.get_major_locator().set_params(integer=True)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)
    return True
