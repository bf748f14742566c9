"""What the doctor finds: one thing that it looked at, how it is, and what to do about it; and all of a visit."""

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
        name: what was looked at, the same in every version.
        status: "OK"; "warning" for what works, but slowly, or not on every machine; "problem" for what fails, hangs, or does
            something else than it seems to.
        what: was found, in words.
        remedy: what to do; "" where there is nothing to do.
    """

    name: str
    status: Status
    what: str
    remedy: str = ""


def ok(name: str, what: str, remedy: str = "") -> Finding:
    """Return a finding that all is well, perhaps with a hint."""
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
