"""Does a strategy fit a number of nodes and ranks? Said before the job waits in a queue to find out."""

from __future__ import annotations

from ..environment import STRATEGIES
from ..errors import LayoutError, explain

__all__ = ["check_fit"]


def check_fit(strategy: str, nodes: int, ranks_per_node: int, num_ps: int, ps_nodes: int) -> None:
    """Raise unless the strategy fits.

    Raises:
        LayoutError: naming the strategies that do.
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
    """The strategies that fit."""
    one_node, one_rank = nodes == 1, nodes * ranks_per_node == 1
    fits = (one_rank, one_node, True, one_node, not one_rank)
    return [name for name, fit in zip(STRATEGIES, fits, strict=True) if fit]


def _check_servers(ranks: int, num_ps: int, ps_nodes: int) -> None:
    def refuse(expected: str, got: str, remedy: str = "") -> LayoutError:
        return LayoutError(explain("Job", "num_ps", expected=expected, got=got, remedy=remedy))

    if num_ps < 1:
        raise refuse("at least one server for parameter_server", "none", "Say how many: --ps, num_ps")
    if ps_nodes and num_ps % ps_nodes:
        raise refuse(f"a multiple of {ps_nodes}, the servers' nodes", str(num_ps))
    if not ps_nodes and num_ps >= ranks:
        others = ", ".join(_fitting(1, 1)) if ranks == 1 else "multi_worker_mirrored"
        remedy = (
            f"Add ranks, or servers on nodes of their own (ps_nodes). Without servers these strategies fit: {others}"
        )
        raise refuse("at least one worker among the ranks", f"{num_ps} servers in {ranks} ranks", remedy)
