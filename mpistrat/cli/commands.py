"""The tree of commands. A new one is a file that defines a `Command`, and a line here."""

from __future__ import annotations

from .command import Group

__all__ = ["ROOT"]

ROOT = Group(
    "tf.distribute for MPI programs",
    {
        "run": "run:COMMAND",
        "bench": "bench:COMMAND",
        "shards": "shards:COMMAND",
        "job": "job:COMMAND",
        "doctor": "doctor:COMMAND",
    },
)
