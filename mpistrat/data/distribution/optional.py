"""What may hold an element or none: the answer of `get_next_as_optional`."""

from __future__ import annotations

from typing import Any, final

from ...errors import explain

__all__ = ["Optional"]

_NOTHING: Any = object()


@final
class Optional:
    """An element, or the word that there is none (TF: tf.experimental.Optional).

    Example:
        >>> Optional.from_value(3).get_value(), Optional.empty().has_value()
        (3, False)
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    @classmethod
    def from_value(cls, value: Any) -> Optional:
        """Return one that holds a value."""
        return cls(value)

    @classmethod
    def empty(cls, element_spec: Any = None) -> Optional:
        """Return one that holds nothing.

        Args:
            element_spec: accepted for TF's programs, without effect.
        """
        return cls(_NOTHING)

    def has_value(self) -> bool:
        """Return whether there is a value."""
        return self._value is not _NOTHING

    def get_value(self) -> Any:
        """Return the value.

        Raises:
            ValueError: when there is none.
        """
        if self._value is _NOTHING:
            remedy = "Ask has_value() first: the dataset has come to its end."
            raise ValueError(explain("Optional.get_value", "", expected="a value", got="none", remedy=remedy))
        return self._value

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self.has_value() else "Optional()"
