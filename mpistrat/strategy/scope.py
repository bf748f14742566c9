"""The scope of a strategy, and the strategy that holds outside every scope."""

from __future__ import annotations

from contextvars import Token
from types import TracebackType
from typing import Any, final

from .. import context
from ..cluster.cores import limit_new_libraries
from ..context import Frame
from ..errors import explain

__all__ = ["Scope", "set_strategy"]


@final
class Scope:
    """Makes a strategy the current one for a `with` block. One object may be entered several times."""

    def __init__(self, strategy: Any, frame: Frame) -> None:
        self._strategy, self._frame = strategy, frame
        self._tokens: list[Token[tuple[Frame, ...]]] = []

    def __enter__(self) -> Any:
        context.expect_cross(self._strategy, "Strategy.scope")
        self._tokens.append(context.push(self._frame))
        limit_new_libraries()
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        context.leave(self._tokens[-1], self._frame)
        self._tokens.pop()


def set_strategy(strategy: Any | None) -> None:
    """Make a strategy the current one outside every scope, in all threads; None resets.

    Raises:
        ContextError: inside a scope.
        TypeError: it is no strategy.
    """
    if strategy is None:
        context.set_global(None)
        return
    extended = getattr(strategy, "extended", None)
    if extended is None:
        raise TypeError(explain("set_strategy", "strategy", expected="a Strategy or None", got=repr(strategy)))
    context.set_global(None if extended.is_default else extended.frame)
