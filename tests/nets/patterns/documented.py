"""Differences from the plain framework that the documentation promises, in one list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """A program whose numbers differ, and the page that says so."""

    framework: str
    programs: tuple[str, ...]  # names of programs, models, transformations or optimizers
    reason: str
    page: str
    kinds: tuple[str, ...] = ("unequal", "last", "empty", "equal")
    refused: str = ""  # what the plain framework says of a program that the package runs; else numbers differ

    def covers(self, framework: str, config: Mapping[str, Any], refused: str = "") -> bool:
        """Return whether this is the program of a configuration, which the plain framework has refused with this text."""
        if bool(refused) != bool(self.refused) or self.refused not in refused:
            return False
        names = {config.get("program"), config.get("model"), config.get("transformation"), config.get("optimizer")}
        named = bool(names & set(self.programs)) and config["kind"] in self.kinds
        return framework.startswith(self.framework) and named


DIFFERENCES = (
    Difference(
        "torch", ("embedding_sparse",), "Rules that refuse sparse gradients take them: they are summed as dense ones.",
        "docs/frameworks/pytorch.md", refused="add(sparse, dense) is not supported",
    ),
    Difference(
        "keras", ("embed_mask", "masked_metric", "y_ragged_mask", "masking", "mean_weight_loss"),
        "Masks and mean_with_sample_weight divide by the sum of each rank's own weights, as in DDP.",
        "docs/frameworks/keras.md",
    ),
    Difference(
        "keras", ("spectral",), "A rank without rows does not take the step of the power iteration.",
        "docs/frameworks/keras.md", kinds=("empty",),
    ),
)  # fmt: skip
