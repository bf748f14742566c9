"""Findings of the doctor: the result of one check, and what to do about it; and all findings of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["Finding", "Status", "Summary", "ok", "problem", "warning", "worst"]

Status = Literal["OK", "warning", "problem"]
_ORDER: tuple[Status, ...] = ("OK", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        name: of the check, the same in every version.
        status: "OK"; "warning" if it works, but slowly, or not on every machine; "problem" if it fails, hangs, or does not do
            what it seems to do.
        what: the result, as text.
        remedy: what to do; "" for nothing.
    """

    name: str
    status: Status
    what: str
    remedy: str = ""


def ok(name: str, what: str, remedy: str = "") -> Finding:
    """Return a finding without a problem, perhaps with a hint."""
    return Finding(name, "OK", what, remedy)


def warning(name: str, what: str, remedy: str) -> Finding:
    """Return a finding of something that works, but slowly, or not everywhere."""
    return Finding(name, "warning", what, remedy)


def problem(name: str, what: str, remedy: str) -> Finding:
    """Return a finding of something that fails."""
    return Finding(name, "problem", what, remedy)


def worst(findings: Iterable[Finding]) -> Status:
    """Return the worst status among findings.

    Example:
        >>> worst([ok("a", ""), warning("b", "", "")])
        'warning'
    """
    return max((finding.status for finding in findings), key=_ORDER.index, default="OK")


@dataclass(frozen=True)
class Summary:
    """All findings of a run.

    Attributes:
        findings: in the order of the output.
        ranks: facts of each rank, by rank; empty on a login node.
    """

    findings: Sequence[Finding]
    ranks: Sequence[dict[str, Any]] = field(default=())

    def document(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {
            "status": worst(self.findings),
            "findings": [asdict(finding) for finding in self.findings],
            "ranks": list(self.ranks),
        }
