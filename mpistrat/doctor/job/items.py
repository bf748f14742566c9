"""The items of the check: each is a job step with its own time limit."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ITEMS", "TOTAL_SECONDS", "CheckItem"]


@dataclass(frozen=True)
class CheckItem:
    """One item of the check.

    Attributes:
        name: for reports.
        proves: a sentence on the result of a passed item.
        seconds: its time limit, if all together have `TOTAL_SECONDS`.
        module: its module here, whose `run` each rank calls.
        restarts: True if ranks are restarted when one is killed.
    """

    name: str
    proves: str
    seconds: float
    module: str
    restarts: bool = False


ITEMS = (
    CheckItem("start", "MPI starts on all ranks, which agree on versions and settings", 90, "start"),
    CheckItem("collectives", "Sums, gathers, exchanges and broadcasts give the right values at all sizes", 100, "collectives"),
    CheckItem("windows", "Ranks write and read memory of other ranks, within a node and between nodes", 70, "windows"),
    CheckItem("torch", 'torch.distributed with the backend "mpistrat": collectives, and a step of DDP', 90, "torch_backend"),
    CheckItem("restart", "A rank is killed; all start again from a snapshot, and end with the same bits", 110, "restart", True),
    CheckItem("files", "HDF5 shards and a checkpoint are written and read, and all values are right", 80, "files"),
)  # fmt: skip
TOTAL_SECONDS = sum(item.seconds for item in ITEMS)
