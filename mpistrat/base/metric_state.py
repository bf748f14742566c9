"""The states of other libraries' metrics, in the form in which ranks exchange them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["MetricAdapter", "MetricState"]


class MetricState(NamedTuple):
    """One state of a metric on this rank.

    Attributes:
        value: an array, or a nest of lists and tuples with arrays.
        adds: True if the states of several ranks are added up.
    """

    value: Any
    adds: bool


class MetricAdapter(Protocol):
    """A metric of another library; it may consist of several parts, which are updated separately."""

    @property
    def name(self) -> str:
        """Its key in results."""

    def states(self) -> list[list[MetricState] | None]:
        """Return the states of each part; None for a part without updates on this rank. Local."""

    def result(self, values: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Any]:
        """Compute the results, by name, of given states instead of this rank's. Local.

        Args:
            values: for each part and state the values of the ranks that have it, in rank order; one value is the state itself. A
                part without updates has none, and its own states are used.
        """

    def reset(self) -> None:
        """Remove all updates of this rank."""
