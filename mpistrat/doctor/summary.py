"""What the doctor hands over: findings, and the ranks where it saw them; as data for `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .finding import Finding, worst

__all__ = ["Summary"]


@dataclass(frozen=True)
class Summary:
    """The result of one visit.

    Attributes:
        findings: in the order in which they are shown.
        ranks: what each rank said of itself, by rank; empty on a login node.
    """

    findings: Sequence[Finding]
    ranks: Sequence[dict[str, Any]] = field(default=())

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        return {
            "status": worst(self.findings),
            "findings": [asdict(finding) for finding in self.findings],
            "ranks": list(self.ranks),
        }
