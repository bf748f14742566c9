"""The compiled loops where they were built and are not switched off; else functions that leave all to NumPy.

`_loops.pyi` says what each takes. A caller goes on in NumPy where one returns False: without the module, for arrays of a GPU or
of other dtypes.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

__all__ = [
    "adagrad",
    "adam",
    "add",
    "decode_int8",
    "encode_int8",
    "gather",
    "leave_to_numpy",
    "meet",
    "narrow",
    "permute",
    "report",
    "rest",
    "rmsprop",
    "sgd",
    "unshuffle",
    "used",
]


def leave_to_numpy(*_: Any) -> bool:
    """Do nothing, in place of a compiled loop."""
    return False


_instructions, _reason = "", ""
try:
    if os.environ.get("MPISTRAT_COMPILED_LOOPS") == "0":
        raise ImportError("switched off by MPISTRAT_COMPILED_LOOPS=0")
    from ._loops import INSTRUCTIONS as _instructions
    from ._loops import (
        adagrad,
        adam,
        add,
        decode_int8,
        encode_int8,
        gather,
        meet,
        narrow,
        permute,
        rest,
        rmsprop,
        sgd,
        unshuffle,
    )
except ModuleNotFoundError:
    _reason = "not built when mpistrat was installed, which takes a C compiler and Python's headers"
except ImportError as error:
    _reason = error.msg
if _reason:
    _instructions = ""
    adagrad = adam = add = gather = meet = narrow = permute = rmsprop = sgd = unshuffle = leave_to_numpy
    decode_int8 = encode_int8 = rest = leave_to_numpy


def used() -> tuple[str, str]:
    """Return which instructions of the processor the compiled loops use, or "" and why there are none."""
    return _instructions, _reason


def report(divide: bool, overflow: bool, invalid: bool) -> None:
    """Report floating-point errors that a compiled loop met as NumPy reports its own: `np.errstate` says how."""
    one = np.ones(1)
    if divide:
        np.divide(one, 0)
    if overflow:
        np.multiply(one * 1e300, 1e300)
    if invalid:
        np.subtract(one * np.inf, np.inf)
