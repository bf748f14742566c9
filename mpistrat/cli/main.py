"""Parse the command line, start MPI if a launcher started several processes, run the command, return its status."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from ..base.agree import Ranks
from ..base.errors import ClusterError, MissingDependencyError, MpistratError, ShardError
from ..base.text import did_you_mean, printable
from ..base.version import __version__
from ..cluster.launcher_variables import launched_rank, launched_size
from .command import PROBLEM, ROOT, STATUS, WRONG_USE, Command, Group
from .completion import SHELLS, PrintCompletion
from .terminal import complain, read_or_not

__all__ = ["main"]

_STATUS = f"exit status: {STATUS}"


class _Folding(argparse.HelpFormatter):
    """Folds each paragraph to the terminal. One with an indented line, as examples have, stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(part if "\n " in part else fill(part, width, indent) for part in text.split("\n\n"))


class Parser(argparse.ArgumentParser):
    """A parser, and those of its commands, that knows what a misspelt word may have meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an option that is none here, where its neighbours are known, and not in the parser of all commands."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """End with status 2 and a message, which names the nearest legal word if one is near."""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        option = re.search(r"unrecognized arguments: .*?(--?[\w-]+)", message)
        near = ""
        if choice:
            near = did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2]))
        elif option:  # compared without dashes, by which all options are alike
            names = [name[2:] for name in self._option_string_actions if name.startswith("--")]
            near = did_you_mean(option[1].lstrip("-"), names).replace("mean ", "mean --", 1)
        super().error(printable(f"{message}. {near}" if near else message))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 fine, 1 a problem was found, 2 wrong use. Collective under mpiexec.

    Args:
        arguments: the words behind the program's name; default those of this process.
    """
    with read_or_not():
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                parsed = _parser().parse_args(arguments)
                if "command" not in parsed:
                    parsed.group.print_help()
                    parsed.group.exit(WRONG_USE, f"\n{parsed.group.prog}: error: expected a command, got none\n")
        except SystemExit as end:
            if launched_rank() in (None, 0):  # one speaks for all, and MPI need not start for that
                print(said.getvalue(), end="", file=sys.stderr if end.code else sys.stdout)
            raise
        try:
            ranks = Ranks(_world() if parsed.command.collective else None, "mpistrat")
        except MpistratError as error:  # the launcher and MPI do not find each other
            complain(error)
            return PROBLEM
        with contextlib.ExitStack() as stack:
            if ranks.rank:
                silence = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(silence))
            return _run(parsed, ranks)


def _world() -> Any:
    """COMM_WORLD where a launcher says that it started several processes; else None, and MPI is not started."""
    launched = launched_size()
    if launched is None or launched[0] == 1:
        return None
    from ..cluster.topology import check_comm, running_mpi

    return check_comm(running_mpi("mpistrat"), None, "mpistrat")


def _run(parsed: argparse.Namespace, ranks: Ranks) -> int:
    try:
        status: int = parsed.command.run(parsed, ranks)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except (ClusterError, MissingDependencyError, ShardError, OSError) as error:
        status, text = PROBLEM, str(error)
    except ValueError as error:
        status, text = WRONG_USE, str(error)
    except Exception:
        if ranks.size == 1:
            raise
        from ..comm.monitor.abort import end_job

        end_job(f"rank {ranks.rank} of {ranks.size}: the job ends on this exception\n{traceback.format_exc()}")
        raise
    if ranks.rank == 0:
        complain(text)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser("mpistrat", description=ROOT.summary + ".", epilog=_STATUS)
    parser.add_argument("--version", action="version", version=f"mpistrat {__version__}")
    parser.add_argument(
        "--print-completion", action=PrintCompletion, choices=SHELLS, metavar="SHELL",
        help=f"print the completion of commands and options for a shell: {', '.join(SHELLS)}",
    )  # fmt: skip
    _add(parser, ROOT)
    return parser


def _add(parser: argparse.ArgumentParser, group: Group) -> None:
    """Add a group's commands to its parser."""
    parser.set_defaults(group=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="subcommand")
    for name, where in group.commands.items():
        module, _, attribute = where.partition(":")
        command: Command | Group = getattr(importlib.import_module(f"mpistrat.cli.{module}"), attribute)
        if isinstance(command, Group):
            inner = commands.add_parser(
                name, help=command.summary, description=_sentence(command.summary), epilog=_STATUS
            )
            _add(inner, command)
            continue
        inner = commands.add_parser(
            name,
            help=command.summary,
            description=command.text,
            epilog="\n  ".join(["examples:", *command.examples]) + f"\n\nexit status: {command.status}",
            formatter_class=_Folding,
        )
        command.arguments(inner)
        inner.set_defaults(command=command)


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."
