"""SLURM's short forms: "n[1-3],m5" for hosts, "3(x2),1" for the tasks on each of them."""

from __future__ import annotations

import itertools
import re

from ..errors import ClusterError, explain

__all__ = ["expand_hostlist", "expand_tasks_per_node"]

# SLURM itself stops at 64 K nodes; a longer list is an error or an attack, and is refused before it is built.
_MAX_HOSTS = 1 << 16
_MAX_CHARACTERS = 1 << 20
_MAX_NAME = 255

_PIECE = re.compile(r"([^\[\],\s]+)|\[([0-9,\-]+)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the host names of SLURM's host list, in its order.

    Raises:
        ClusterError: the text is malformed, or names more than 65,536 hosts.

    Example:
        >>> expand_hostlist("n[1-2],m5,rack[0-1]n[08-09]")
        ['n1', 'n2', 'm5', 'rack0n08', 'rack0n09', 'rack1n08', 'rack1n09']
    """
    if len(hostlist) > _MAX_CHARACTERS:
        raise _error("expand_hostlist", f"at most {_MAX_CHARACTERS} characters", f"{len(hostlist)}")
    hosts: list[str] = []
    for entry in _split(hostlist):
        pieces: list[list[str]] = []
        count, width = 1, 0
        for piece in _pieces(entry):
            pieces.append(_alternatives(piece))
            count, width = count * len(pieces[-1]), width + len(pieces[-1][0])
            if len(hosts) + count > _MAX_HOSTS or width > _MAX_NAME:
                expected = f"at most {_MAX_HOSTS} hosts with names of at most {_MAX_NAME} characters"
                raise _error("expand_hostlist", expected, hostlist)
        hosts += map("".join, itertools.product(*pieces))
    return hosts


def _split(hostlist: str) -> list[str]:
    """Split at the commas outside brackets."""
    entries, depth, start = [], 0, 0
    for position, character in enumerate(hostlist):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            entries.append(hostlist[start:position])
            start = position + 1
    return [*entries, hostlist[start:]]


def _pieces(entry: str) -> list[re.Match[str]]:
    """Cut "rack[0-1]n[1-2]" into its fixed parts and its brackets."""
    pieces, position = [], 0
    while position < len(entry):
        match = _PIECE.match(entry, position)
        if match is None:
            raise _error("expand_hostlist", "a host list such as 'n[1-3,7],m5'", entry)
        pieces.append(match)
        position = match.end()
    if not pieces:
        raise _error("expand_hostlist", "a host list such as 'n[1-3,7],m5'", "an empty name")
    return pieces


def _alternatives(piece: re.Match[str]) -> list[str]:
    """Return the texts that one piece stands for; numbers keep the width of the first of their range."""
    if piece.group(1):
        return [piece.group(1)]
    result: list[str] = []
    for text in piece.group(2).split(","):
        match = _RANGE.fullmatch(text)
        first, last = (match.group(1), match.group(2) or match.group(1)) if match else ("1", "0")
        if int(last) < int(first):
            raise _error("expand_hostlist", "an ascending range such as [1-3]", f"[{text}]")
        if len(result) + int(last) - int(first) >= _MAX_HOSTS:
            raise _error("expand_hostlist", f"at most {_MAX_HOSTS} hosts", f"[{text}]")
        result += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return result


def expand_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node from SLURM's short form.

    Raises:
        ClusterError: the text is malformed, or speaks of more than 65,536 nodes.

    Example:
        >>> expand_tasks_per_node("3(x2),2,1")
        [3, 3, 2, 1]
    """
    if len(text) > _MAX_CHARACTERS:
        raise _error("expand_tasks_per_node", f"at most {_MAX_CHARACTERS} characters", f"{len(text)}")
    tasks: list[int] = []
    for entry in text.split(","):
        match = _TASKS.fullmatch(entry)
        if match is None:
            raise _error("expand_tasks_per_node", "counts such as '3(x2),1'", text)
        repeat = int(match.group(2) or 1)
        if len(tasks) + repeat > _MAX_HOSTS:
            raise _error("expand_tasks_per_node", f"at most {_MAX_HOSTS} nodes", text)
        tasks += [int(match.group(1))] * repeat
    return tasks


def _error(function: str, expected: str, got: str) -> ClusterError:
    return ClusterError(explain(function, "", expected=expected, got=f"{got!r:.120}"))
