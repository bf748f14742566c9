"""`ms.shadow`: find the first tensor in which a program on several ranks differs from the same program on one process.

`mpistrat shadow -n 4 train.py` does all of it. In a program of your own, or a notebook:

    with ms.shadow.record("reference"):      # on one process
        train()
    with ms.shadow.round_off("reference"):   # twice: measures how far rounding carries
        train()
    with ms.shadow.compare("reference"):     # on several ranks
        train()
"""

from __future__ import annotations

from .contexts import compare, record, round_off, tensor

__all__ = ["compare", "record", "round_off", "tensor"]
