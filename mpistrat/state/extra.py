"""The program's addition to a file, in JSON: notes, and the states of objects such as learning rate schedulers."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ..base.agree import same, together
from ..base.errors import CollectiveMismatchError, by_rank, explain
from ..base.masks import plain_array
from ..comm.process_group import ProcessGroup

__all__ = ["agree_extra", "has_state", "read_extra"]

_SHOWN = 200  # characters of what a rank has given
# A dict with one of these keys alone has keys that are numbers: a list of pairs, since JSON's keys are text.
_ITEMS: dict[str, type[dict[Any, Any]]] = {"mpistrat:dict": dict, "mpistrat:Counter": Counter}


def agree_extra(group: ProcessGroup, path: str | os.PathLike[str], extra: Mapping[str, Any] | None) -> str | None:
    """Return the program's addition to a file as JSON. Collective.

    Raises:
        TypeError, ValueError: on every rank, for values that JSON cannot hold.
        CollectiveMismatchError: on every rank, when it is not the same on all.
    """
    exchange = partial(group.exchange, "save", detail=os.fspath(path))
    with together(exchange):
        text = None if extra is None else _json_of(extra)

    def differ(texts: Mapping[int, str]) -> CollectiveMismatchError:
        remedy = "Pass what all ranks have alike; of what each has of its own, all of it: strategy.gather"
        expected, got = "the same on every rank", by_rank(texts)
        return CollectiveMismatchError(explain("Strategy.save", "extra", expected=expected, got=got, remedy=remedy))

    same(exchange, text or "", differ, "none" if text is None else text[:_SHOWN] + "..." * (len(text) > _SHOWN))
    return text


def has_state(value: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`, as a scheduler or a GradScaler of PyTorch."""
    if isinstance(value, type):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def read_extra(value: Any) -> Any:
    """Return what `agree_extra` was given, from JSON that was parsed: the state of an object instead of it, and no tuples."""
    if isinstance(value, list):
        return list(map(read_extra, value))
    if not isinstance(value, dict):
        return value
    kind = _ITEMS.get(next(iter(value))) if len(value) == 1 else None
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
    """Return a value as JSON holds it: lists for tuples, Python's numbers for NumPy's, of an object its state.

    In the state of an object (`of_object`) keys may be numbers, as MultiStepLR's milestones are.
    """
    if isinstance(value, np.ndarray):
        value = plain_array(value, "Strategy.save", where)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # as v.numpy() returns it; torch's tensors, too
        value = value.item()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each, f"{where}[{index}]", of_object) for index, each in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int, float) if of_object else str) or key in _ITEMS:
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
