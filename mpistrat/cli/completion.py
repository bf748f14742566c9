"""`mpistrat --print-completion SHELL`: the script by which a shell completes commands, options and files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from .command import PROBLEM

__all__ = ["SHELLS", "PrintCompletion"]

SHELLS = ("bash", "zsh", "tcsh")
_FILES = {"FILE", "FILES", "INPUT", "IMAGE", "PROGRAM", "PROGRAM …", "NAME|FILE", "NAME=FILE.npy"}
_FOLDERS = {"DIR", "FOLDER"}


class PrintCompletion(argparse.Action):
    """Print the script of a shell, and end. It is made from the parser, by shtab."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: Any = None
    ) -> None:
        try:
            import shtab
        except ImportError:
            remedy = "Install it: pip install 'mpistrat[completion]'"
            parser.exit(PROBLEM, f"error: {option}: expected the package shtab, got no such module. {remedy}\n")
        _name_files(parser, shtab.FILE, shtab.DIRECTORY)
        print(shtab.complete(parser, value))
        parser.exit()


def _name_files(parser: argparse.ArgumentParser, files: Mapping[str, object], folders: Mapping[str, object]) -> None:
    """Set for each argument of all commands whether its values are files or folders, by its name in the help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _name_files(inner, files, folders)
        elif action.metavar in _FILES:
            action.complete = files  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = folders  # type: ignore[attr-defined]
