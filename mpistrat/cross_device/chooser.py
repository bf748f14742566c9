"""Which algorithm carries a reduction: a table by device, layout and size that ships with the package, and its reader.

The table was measured by benchmarks/tune_chooser.py. It is never tuned at run time: the same layout gives the same bits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ..errors import explain

__all__ = ["Chooser", "Rule"]

ALGORITHMS = ("MPI", "HIERARCHICAL", "NCCL")
DEVICES = ("cpu", "gpu")
NODES = ("one", "several")


@final
@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Attributes:
        device: "cpu" or "gpu".
        nodes: "one" or "several".
        below: the rule holds for fewer bytes; None for any number.
        algorithm: MPI, HIERARCHICAL or NCCL.
        why: the reason, for people.
    """

    device: str
    nodes: str
    below: int | None
    algorithm: str
    why: str = ""


@final
class Chooser:
    """Picks an algorithm by device, number of nodes and bytes. `print(chooser)` shows the table and the reasons.

    Args:
        table: a table as the JSON file holds it, or the path of such a file; default: the one that ships.

    Raises:
        ValueError: the table is malformed, or leaves a case without a rule; naming the file and the place.
        FileNotFoundError: there is no such file.

    Example:
        >>> Chooser().choose("cpu", "one", 1 << 24).algorithm
        'HIERARCHICAL'
    """

    def __init__(self, table: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
        if table is None:
            table = Path(__file__).with_name("chooser_table.json")
        if isinstance(table, Mapping):
            self.source = "a table given as argument"
            content: Any = table
        else:
            self.source = os.fspath(table)
            content = _read(Path(self.source))
        self.measured = str(content.get("measured", "")) if isinstance(content, Mapping) else ""
        self._rules = _parse(content, self.source)

    def choose(self, device: str, nodes: str, nbytes: int) -> Rule:
        """Return the rule for an array of so many bytes.

        Args:
            device: "cpu" or "gpu": where the array is.
            nodes: "one" or "several".
            nbytes: of one replica's array.
        """
        for rule in self._rules[device, nodes]:
            if rule.below is None or nbytes < rule.below:
                return rule
        raise ValueError(f"Chooser: no rule for {nbytes} bytes")  # _parse made sure there is one

    @property
    def rules(self) -> list[Rule]:
        """All rules, in the order of the table."""
        return [rule for rules in self._rules.values() for rule in rules]

    def __str__(self) -> str:
        lines = [f"all-reduce algorithms, from {self.source}", self.measured] if self.measured else [self.source]
        lines.append(f"{'device':7}{'nodes':9}{'bytes':>14}  {'algorithm':14}why")
        for rule in self.rules:
            size = "any more" if rule.below is None else f"< {rule.below:,}"
            lines.append(f"{rule.device:7}{rule.nodes:9}{size:>14}  {rule.algorithm:14}{rule.why}".rstrip())
        return "\n".join(lines)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(explain("Chooser", "table", expected=f"JSON in {path}", got=str(error))) from error


def _parse(content: Any, source: str) -> dict[tuple[str, str], list[Rule]]:
    if not isinstance(content, Mapping) or not isinstance(content.get("rules"), Sequence):
        raise ValueError(
            explain("Chooser", source, expected="an object with a list named rules", got=f"{content!r:.60}")
        )
    rules: dict[tuple[str, str], list[Rule]] = {(device, nodes): [] for device in DEVICES for nodes in NODES}
    for number, entry in enumerate(content["rules"]):
        rule = _rule(entry, f"{source}, rule {number}")
        rules[rule.device, rule.nodes].append(rule)
    for (device, nodes), found in rules.items():
        borders = [rule.below for rule in found]
        finite = [border for border in borders if border is not None]
        if not borders or borders[-1] is not None or len(finite) != len(borders) - 1 or finite != sorted(finite):
            expected = f"rules for {device}, {nodes} node(s) with ascending 'below', the last one null"
            raise ValueError(explain("Chooser", source, expected=expected, got=str(borders)))
    return rules


def _rule(entry: Any, where: str) -> Rule:
    try:
        rule = Rule(**entry)
    except TypeError as error:
        expected = "device, nodes, below, algorithm and why"
        raise ValueError(explain("Chooser", where, expected=expected, got=f"{entry!r:.80}")) from error
    legal = {"device": DEVICES, "nodes": NODES, "algorithm": ALGORITHMS}
    for field, words in legal.items():
        if getattr(rule, field) not in words:
            expected = f"{field} to be one of {', '.join(words)}"
            raise ValueError(explain("Chooser", where, expected=expected, got=repr(getattr(rule, field))))
    if rule.below is not None and (not isinstance(rule.below, int) or rule.below < 1):
        raise ValueError(explain("Chooser", where, expected="below: a number of bytes or null", got=repr(rule.below)))
    return rule
