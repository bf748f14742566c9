"""Operations of a group, as dispatch modes and subclasses of tensors see them.

PyTorch calls its own groups through operators of its dispatcher. So `CommDebugMode` counts their operations, other modes print
or time them, and a tensor that wraps others gives these to the operator. A group of Python it calls directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from ...base.errors import explain
from .work import WorkOfSeveral

__all__ = ["seen_as"]

F = TypeVar("F", bound=Callable[..., Any])

_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_ABSENT = torch.Tensor.__torch_dispatch__  # what types have that do not dispatch
_TRACED = "torch._subclasses"  # the module of tensors that PyTorch traces or fakes
_PLAIN = {torch.Tensor, torch.nn.Parameter}  # types of arguments that do not dispatch, of those that calls had so far


def seen_as(name: str) -> Callable[[F], F]:
    """Pass calls of a group's method to this thread's active dispatch modes and to the subclasses of the call's tensors.

    These see a call of an operator of `torch.ops.c10d` with the tensors and the group. The options, which have other forms in
    operators, they do not see.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _modes():
                for arg in args:
                    if not (_PLAIN.issuperset(map(type, arg)) if type(arg) is list else type(arg) in _PLAIN):
                        types = _subclasses(args)
                        if types:
                            return _dispatch(self, name, call, args, kwargs, types[0])
                return method(self, *args, **kwargs)
            mode = _get_current_dispatch_mode()
            if getattr(mode, "_mode_key", None) is not None:  # PyTorch's own parts, which trace or fake tensors
                return method(self, *args, **kwargs)
            with _pop_mode_temporarily():
                return _dispatch(self, name, call, args, kwargs, mode)

        _uncompiled(call)
        return call  # type: ignore[return-value]

    return decorate


def _uncompiled(function: Any) -> None:
    """Let torch.compile leave a function, and what it calls, as they are: it compiles frames after a graph break.

    `torch.compiler.disable` would do the same, in a longer time for each call.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # not in older versions
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def _subclasses(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the types of tensors, in lists of any depth, that dispatch operators by themselves."""
    found: tuple[Any, ...] = ()
    for value in values:
        kind = type(value)
        if kind is list or kind is tuple:
            found += _subclasses(value)
        elif getattr(kind, "__torch_dispatch__", _ABSENT) is _ABSENT or kind.__module__.startswith(_TRACED):
            _PLAIN.add(kind)
        else:
            found += (kind,)
    return found


def _dispatch(group: Any, name: str, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], handler: Any) -> Any:
    """Let a mode or a subclass run a call, which the others see then. Return its work."""
    operator = getattr(torch.ops.c10d, name).default
    schema = operator._schema
    count = [argument.name for argument in schema.arguments].index("process_group")
    has_tensors = len(args) >= count and name != "barrier"  # that has options only
    works = list[Any]()

    def run(*given: Any, **more: Any) -> Any:
        if handler in _subclasses(given):  # a DTensor, which leaves itself to C++
            expected, remedy = (
                "a tensor that torch.distributed can move",
                "Pass a DTensor's local tensor: tensor.to_local()",
            )
            raise NotImplementedError(
                explain(
                    f"dist.{name.strip('_')}", "tensor", expected=expected, got=f"a {handler.__name__}", remedy=remedy
                )
            )
        work = call(group, *(given[:count] if has_tensors else ()), *args[count if has_tensors else 0 :], **kwargs)
        works.append(work)
        return work if len(schema.returns) == 1 else (given[0], work)

    tensors = args[:count] if has_tensors else (torch.empty(1),)
    types = tuple(dict.fromkeys(_subclasses(tensors)))
    result = handler.__torch_dispatch__(_Operator(operator, run), types, (*tensors, group.boxed()), {})
    if len(works) > 1:  # one for each tensor that a tensor wraps
        return WorkOfSeveral(works)
    return result if len(schema.returns) == 1 else result[-1]


class _Operator(torch._ops.OpOverload):  # type: ignore[misc]
    """An operator that runs a function, and is the operator for all else. It is equal to it: dicts have it as a key."""

    def __init__(self, operator: Any, run: Callable[..., Any]) -> None:
        self.__dict__.update(vars(operator))
        self._operator, self._run = operator, run

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self._operator is getattr(other, "_operator", other)

    def __hash__(self) -> int:
        return hash(self._operator)
