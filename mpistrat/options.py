"""Options of reductions and of `Strategy.run`, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .errors import explain
from .types import CommunicationImplementation

__all__ = ["CommunicationOptions", "RunOptions"]


@dataclass(frozen=True)
class CommunicationOptions:
    """How a reduction is carried out (TF: tf.distribute.experimental.CommunicationOptions). None means: not said here.

    Args:
        bytes_per_pack: largest number of bytes that are reduced in one call; 0 puts everything in one.
        timeout_seconds: seconds after which the collective raises CollectiveTimeoutError.
        implementation: the algorithm; AUTO lets the chooser decide.

    Raises:
        ValueError: for a negative size or a timeout that is not positive.
    """

    bytes_per_pack: int | None = None
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_pack is not None and self.bytes_per_pack < 0:
            raise ValueError(explain("CommunicationOptions", "bytes_per_pack", expected="≥ 0", got=self.bytes_per_pack))
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ValueError(
                explain("CommunicationOptions", "timeout_seconds", expected="> 0", got=self.timeout_seconds)
            )
        if isinstance(self.implementation, str):
            name = self.implementation.upper()
            if name not in CommunicationImplementation.__members__:
                legal = ", ".join(CommunicationImplementation.__members__)
                raise ValueError(
                    explain("CommunicationOptions", "implementation", expected=f"one of {legal}", got=repr(name))
                )
            object.__setattr__(self, "implementation", CommunicationImplementation[name])

    def __repr__(self) -> str:
        """What was said, as it would be written."""
        said = [(f.name, getattr(self, f.name)) for f in fields(self)]
        words = [
            f"{name}={value.name!r}" if isinstance(value, CommunicationImplementation) else f"{name}={value!r}"
            for name, value in said
            if value is not None
        ]
        return f"CommunicationOptions({', '.join(words)})"

    def merge(self, override: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options with every field that the other one sets.

        Example:
            >>> CommunicationOptions(bytes_per_pack=8).merge(CommunicationOptions(bytes_per_pack=0)).bytes_per_pack
            0
        """
        if override is None:
            return self
        said = {f.name: getattr(override, f.name) for f in fields(override)}
        return CommunicationOptions(
            **{f.name: getattr(self, f.name) if said[f.name] is None else said[f.name] for f in fields(self)}
        )


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`, accepted for TF's programs; none has an effect here (there is no graph compiler)."""

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
