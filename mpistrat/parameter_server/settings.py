"""Settings of the parameter servers, validated once for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from ..errors import explain
from ..options import CommunicationOptions
from .placing import PLACEMENTS

__all__ = ["Settings"]

_NAME = "ParameterServerStrategy"


@final
@dataclass(frozen=True)
class Settings:
    """The arguments of ParameterServerStrategy that are not one rank's own; see there."""

    variable_partitioner: Callable[..., Sequence[int]] | None
    num_ps: int | None
    max_staleness: int | None
    backup_workers: int
    placement: str
    transport: str
    workers_in_sync: int
    back_off: float
    check_numerics: bool
    communication_options: CommunicationOptions | None

    def compared(self) -> tuple[Any, ...]:
        """Return those that ranks compare: the resolver and the parts of the strategy see to the others."""
        return (
            self.max_staleness,
            self.backup_workers,
            self.placement,
            self.transport,
            self.workers_in_sync,
            self.back_off,
            self.check_numerics,
        )

    def check(self) -> None:
        """Raise ValueError for one that can never be right."""
        self._check_number("max_staleness", 0, optional=True)
        self._check_number("backup_workers", 0)
        self._check_number("workers_in_sync", 1)
        if self.backup_workers and self.max_staleness != 0:
            expected, got = "max_staleness=0 with backup workers", repr(self.max_staleness)
            raise ValueError(explain(_NAME, "max_staleness", expected=expected, got=got))
        if self.workers_in_sync > 1 and self.max_staleness == 0:
            expected = "1 with max_staleness=0, where all workers step together"
            raise ValueError(explain(_NAME, "workers_in_sync", expected=expected, got=self.workers_in_sync))
        if self.placement not in PLACEMENTS:
            expected = f"one of {', '.join(PLACEMENTS)}"
            raise ValueError(explain(_NAME, "placement", expected=expected, got=repr(self.placement)))

    def _check_number(self, name: str, least: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if not (value is None and optional) and (type(value) is not int or value < least):
            expected = f"an integer of at least {least}{' or None' * optional}"
            raise ValueError(explain(_NAME, name, expected=expected, got=repr(value)))
