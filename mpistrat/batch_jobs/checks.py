"""Checks of a job's and a site's values, and of its strategy, before the job waits in a queue.

They reject every value that a batch system or a shell could interpret.
"""

from __future__ import annotations

import re

from ..base.environment import STRATEGIES
from ..base.errors import LayoutError, explain

__all__ = ["check_fit", "chosen", "matching", "text", "whole"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST = 4096


def _wrong(owner: str, name: str, expected: str, value: object, remedy: str = "") -> ValueError:
    return ValueError(explain(owner, name, expected=expected, got=f"{value!r:.80}", remedy=remedy))


def whole(owner: str, name: str, value: object, low: int, high: int) -> None:
    """Raise unless the value is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(owner, name, f"a whole number from {low} to {high}", value)


def chosen(owner: str, name: str, value: object, legal: tuple[str, ...]) -> None:
    """Raise unless the value is one of `legal`."""
    if value not in legal:
        raise _wrong(owner, name, f"one of {', '.join(word or repr(word) for word in legal)}", value)


def matching(owner: str, name: str, value: object, pattern: str, expected: str) -> None:
    """Raise unless the whole value is ASCII text that matches the pattern."""
    if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
        raise _wrong(owner, name, expected, value)


def text(owner: str, name: str, value: object, *, dash: bool = False, path: bool = False) -> None:
    """Raise unless the value is one line of text. Scripts quote it.

    Args:
        dash: allow an empty value and a leading dash, as in a program's argument.
        path: the value is a path, which is not expanded.
    """
    if not isinstance(value, str) or _CONTROL.search(value) or not _encodes(value):
        raise _wrong(owner, name, "one line of text without control characters", value)
    if len(value) > _LONGEST:
        raise _wrong(owner, name, f"at most {_LONGEST} characters", f"{len(value)} characters")
    if not dash and (not value or value.startswith("-")):
        raise _wrong(owner, name, "text that does not begin with a dash", value)
    if path and (value.startswith("~") or "$" in value):
        raise _wrong(owner, name, "a path", value, "~ and $ are not expanded: write the path itself")


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_fit(strategy: str, nodes: int, ranks_per_node: int, num_ps: int, ps_nodes: int) -> None:
    """Raise unless the strategy fits the ranks and nodes.

    Raises:
        LayoutError: with the strategies that fit.
    """
    if strategy == "parameter_server":
        return _check_servers(nodes * ranks_per_node, num_ps, ps_nodes)
    if num_ps or ps_nodes:
        got = f"{num_ps} servers with strategy {strategy}"
        raise LayoutError(explain("Job", "num_ps", expected="servers only with parameter_server", got=got))
    fitting = _fitting(nodes, ranks_per_node)
    if strategy not in fitting:
        ranks = "one rank" if strategy == "one_device" else "ranks on one node"
        raise LayoutError(
            explain(
                "Job",
                "strategy",
                expected=f"{ranks} for {strategy}",
                got=f"{nodes} nodes with {ranks_per_node} ranks each",
                remedy=f"These strategies fit: {', '.join(fitting)}",
            )
        )
    return None


def _fitting(nodes: int, ranks_per_node: int) -> list[str]:
    """Return the strategies that fit."""
    one_node, one_rank = nodes == 1, nodes * ranks_per_node == 1
    fits = (one_rank, one_node, True, one_node, not one_rank)
    return [name for name, fit in zip(STRATEGIES, fits, strict=True) if fit]


def _check_servers(ranks: int, num_ps: int, ps_nodes: int) -> None:
    def refuse(expected: str, got: str, remedy: str = "") -> LayoutError:
        return LayoutError(explain("Job", "num_ps", expected=expected, got=got, remedy=remedy))

    if num_ps < 1:
        raise refuse("at least one server for parameter_server", f"{num_ps}", "Set --ps (num_ps)")
    if ps_nodes and num_ps % ps_nodes:
        raise refuse(f"a multiple of {ps_nodes}, the servers' nodes", str(num_ps))
    if not ps_nodes and num_ps >= ranks:
        others = ", ".join(_fitting(1, 1)) if ranks == 1 else "multi_worker_mirrored"
        remedy = (
            f"Add ranks, or servers on nodes of their own (ps_nodes). Without servers these strategies fit: {others}"
        )
        raise refuse("at least one worker among the ranks", f"{num_ps} servers in {ranks} ranks", remedy)
