"""The program's `extra` in a file, as JSON: values, and the states of objects such as learning rate schedulers.

States of objects may hold what JSON lacks: numbers as keys, tuples, bytes, and small arrays, such as those of random
generators.
"""

from __future__ import annotations

import base64
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ..base.agree import same, together
from ..base.errors import CollectiveMismatchError, by_rank, explain
from ..base.masks import plain_array
from ..comm.process_group import ProcessGroup

__all__ = ["agree_extra", "has_state", "read_extra", "state_of_text", "text_of_state"]

_SHOWN = 200  # characters of a rank's value in errors
_LARGEST = 1 << 20  # bytes of an array in the state of an object
# A dict with only one of these keys stands for a dict with numbers as keys: a list of pairs, since JSON's keys are text.
_ITEMS: dict[str, type[dict[Any, Any]]] = {"mpistrat:dict": dict, "mpistrat:Counter": Counter}
# A dict with only one of these keys stands for another value of an object's state.
_TUPLE, _BYTES, _ARRAY, _TENSOR = (f"mpistrat:{name}" for name in ("tuple", "bytes", "array", "tensor"))
_OTHERS = (_TUPLE, _BYTES, _ARRAY, _TENSOR)


def agree_extra(group: ProcessGroup, path: str | os.PathLike[str], extra: Mapping[str, Any] | None) -> str | None:
    """Return the program's `extra` as JSON. Collective.

    Raises:
        TypeError, ValueError: on every rank, for values that JSON cannot hold.
        CollectiveMismatchError: on every rank: ranks passed different values.
    """
    exchange = partial(group.exchange, "save", detail=os.fspath(path))
    with together(exchange):
        text = None if extra is None else _json_of(extra)

    def differ(texts: Mapping[int, str]) -> CollectiveMismatchError:
        remedy = "Pass values that are equal on all ranks; collect per-rank values with strategy.gather first"
        expected, got = "the same on every rank", by_rank(texts)
        return CollectiveMismatchError(explain("Strategy.save", "extra", expected=expected, got=got, remedy=remedy))

    same(exchange, text or "", differ, "none" if text is None else text[:_SHOWN] + "..." * (len(text) > _SHOWN))
    return text


def has_state(value: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`, like a scheduler or GradScaler of PyTorch."""
    if isinstance(value, type):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def text_of_state(value: Any, where: str) -> str:
    """Return the state of an object as text, for `state_of_text`.

    Args:
        value: has `state_dict`.
        where: its description in errors.

    Raises:
        TypeError, ValueError: the state has values that text cannot hold.

    Example:
        >>> class Position:
        ...     def state_dict(self):
        ...         return {"next": (3, b"ab")}
        >>> state_of_text(text_of_state(Position(), "loader"))
        {'next': (3, b'ab')}
    """
    return json.dumps(_plain(value.state_dict(), f"{where}.state_dict()", True))


def state_of_text(text: str) -> Any:
    """Return the state from the text of `text_of_state`."""
    return read_extra(json.loads(text))


def read_extra(value: Any) -> Any:
    """Return the `extra` of parsed JSON, with the states of objects in place of the objects.

    Tuples are lists, except in states of objects.
    """
    if isinstance(value, list):
        return list(map(read_extra, value))
    if not isinstance(value, dict):
        return value
    first = next(iter(value)) if len(value) == 1 else ""
    if first in _OTHERS:
        return _other(first, value[first])
    kind = _ITEMS.get(first)
    if kind is None:
        return {key: read_extra(each) for key, each in value.items()}
    (pairs,) = value.values()
    return kind({key: read_extra(each) for key, each in pairs})


def _json_of(extra: Mapping[str, Any]) -> str:
    given: object = extra
    if not isinstance(given, Mapping):
        expected = "a dict of what JSON holds"
        raise TypeError(explain("Strategy.save", "extra", expected=expected, got=f"a {type(given).__name__}"))
    return json.dumps(_plain(given, "extra"), sort_keys=True)


def _plain(value: Any, where: str, of_object: bool = False) -> Any:
    """Return a value as JSON holds it: tuples as lists, NumPy's numbers as Python's, objects as their states.

    In the state of an object (`of_object`) there may be tuples, bytes and arrays, and keys may be numbers, like MultiStepLR's
    milestones.
    """
    if isinstance(value, np.ndarray):
        value = plain_array(value, "Strategy.save", where)
    if of_object:
        found = _plain_other(value, where)
        if found is not None:
            return found
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # the result of v.numpy(); also torch's tensors
        value = value.item()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each, f"{where}[{index}]", of_object) for index, each in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int, float) if of_object else str) or key in (*_ITEMS, *_OTHERS):
                remedy = "" if of_object else "If it is the state_dict of an object, pass the object"
                expected, got = "text for keys", repr(key)
                raise TypeError(explain("Strategy.save", where, expected=expected, got=got, remedy=remedy))
        entries = {key: _plain(each, f"{where}[{key!r}]", of_object) for key, each in value.items()}
        counts = of_object and isinstance(value, Counter)
        if not counts and all(isinstance(key, str) for key in entries):
            return entries
        return {"mpistrat:Counter" if counts else "mpistrat:dict": [list(entry) for entry in entries.items()]}
    if has_state(value):
        return _plain(value.state_dict(), f"{where}.state_dict()", True)
    expected = "numbers, text, True, False, None, and lists and dicts of them"
    remedy = "Pass int(v), float(v) or v.tolist() of a variable or an array; large ones are better variables"
    raise TypeError(explain("Strategy.save", where, expected=expected, got=f"a {type(value).__name__}", remedy=remedy))


def _plain_other(value: Any, where: str) -> dict[str, Any] | None:
    """Return a tuple, bytes, or an array or tensor with dimensions as JSON holds it; None for another value."""
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(each, f"{where}[{index}]", True) for index, each in enumerate(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {_BYTES: _text(bytes(value), where)}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.dim() and value.layout is torch.strided:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = plain.view(-1).view(torch.uint8).numpy().tobytes()
        return {_TENSOR: [str(plain.dtype), list(plain.shape), _text(data, where)]}
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "biufc":
        return {_ARRAY: [value.dtype.str, list(value.shape), _text(value.tobytes(), where)]}
    return None


def _text(data: bytes, where: str) -> str:
    """Return bytes as text.

    Raises:
        TypeError: there are more than 1 MiB.
    """
    if len(data) > _LARGEST:
        expected, got = f"at most {_LARGEST} bytes in an array of the state of an object", str(len(data))
        raise TypeError(explain("Strategy.save", where, expected=expected, got=got, remedy="Make it a variable"))
    return base64.b64encode(data).decode()


def _other(kind: str, value: Any) -> Any:
    if kind == _TUPLE:
        return tuple(map(read_extra, value))
    if kind == _BYTES:
        return base64.b64decode(value)
    name, shape, text = value
    data = bytearray(base64.b64decode(text))
    if kind == _ARRAY:
        return np.frombuffer(data, name).reshape(shape)
    torch = sys.modules["torch"]  # imported by the program, whose object it is
    dtype = getattr(torch, name.removeprefix("torch."))
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
