"""Commands and their tree. A new command is a file that defines a `Command`, and a line in the tree."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..base.agree import Ranks

__all__ = ["DONE", "PROBLEM", "ROOT", "STATUS", "WRONG_USE", "Command", "Group"]

DONE, PROBLEM, WRONG_USE = 0, 1, 2  # exit statuses
STATUS = "0 fine, 1 a problem was found, 2 wrong use"


@dataclass(frozen=True)
class Command:
    """A command that does something.

    Attributes:
        summary: one line for the list of commands.
        text: what it does; shown by --help.
        examples: command lines, shown by --help.
        arguments: adds the command's arguments to a parser.
        run: does it, on all ranks under mpiexec, and returns the exit status.
        collective: under mpiexec MPI is started, and the ranks work together with rank 0 speaking for all. Otherwise
            each process is alone (`ranks.comm` is None), and MPI is not started.
        status: what the exit status means, where it is not that of `STATUS`; shown by --help.
    """

    summary: str
    text: str
    examples: tuple[str, ...]
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Ranks], int]
    collective: bool = True
    status: str = STATUS


@dataclass(frozen=True)
class Group:
    """A command that only has commands of its own, by name.

    Attributes:
        summary: one line for the list of commands.
        commands: where they are defined: "module:name" below `mpistrat.cli`.
    """

    summary: str
    commands: Mapping[str, str] = field(default_factory=dict)


ROOT = Group(
    "tf.distribute for MPI programs",
    {
        "run": "run:COMMAND",
        "shadow": "shadow:COMMAND",
        "bench": "bench:COMMAND",
        "plan": "plan:COMMAND",
        "shards": "shards:COMMAND",
        "job": "job:COMMAND",
        "doctor": "doctor:COMMAND",
        "top": "watch:TOP",
        "stacks": "watch:STACKS",
        "resize": "resize:COMMAND",
        "replay": "replay:COMMAND",
        "serve": "serve:COMMAND",
    },
)
