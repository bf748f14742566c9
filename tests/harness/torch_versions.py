"""Parameters of tests that only some versions of PyTorch can run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has Muon since 2.9")


def rules(names: Iterable[str]) -> list[Any]:
    """Return names of optimizers as parameters, of which those of Muon are skipped where PyTorch has none."""
    return [pytest.param(name, marks=MUON) if name.startswith("Muon") else name for name in names]
