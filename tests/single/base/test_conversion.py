"""Arrays in another dtype: what it holds is converted, and all else is an error that names the value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpistrat.base.conversion import converted

NAT = np.array(["NaT"], "M8[D]")


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (["True", "false", "0", "1"], "?", [True, False, False, True]),
        (np.array(["False", "1"], object), "?", [False, True]),
        ([b"False"], "?", [False]),
        ([1.0, 0.0], "?", [True, False]),
        ([0.1], "f4", [float(np.float32(0.1))]),
        ([np.inf, 1e-300], "f4", [np.inf, 0]),
        ([16777216, -16777216], "f4", [2.0**24, -(2.0**24)]),
        ([2**53, 2**53 + 2], "f8", [2.0**53, 2.0**53 + 2]),
        ([1 + 0j], "i4", [1]),
        ([2.0**63], "u8", [2**63]),
        ([-(2.0**63)], "i8", [-(2**63)]),
        (["abcd"], "S4", [b"abcd"]),
        (["12", " 3"], "i4", [12, 3]),
        (["0.1", "inf"], "f8", [0.1, np.inf]),
        (np.array(["1970-01-03"], "M8[D]"), "i8", [2]),
        ([], "u1", []),
    ],
)
def test_what_a_dtype_holds(values: Any, dtype: str, expected: list[Any]) -> None:
    found = converted("f", "x", np.asarray(values), np.dtype(dtype))
    assert found.dtype == np.dtype(dtype)
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("values", "dtype", "named"),
    [
        (["True", "no"], "?", "'no'"),
        ([0, 2], "?", "2"),
        ([0.5], "?", "0.5"),
        ([1.0, 70000.0], "f2", "70000.0"),
        ([70000], "f2", "70000"),
        ([1e300], "f4", "1e.300"),
        ([16777217], "f4", "16777217"),
        ([2**53 + 1], "f8", "9007199254740993"),
        ([2**63 - 1], "f8", "9223372036854775807"),
        (np.array([2**64 - 1], np.uint64), "f8", "18446744073709551615"),
        ([1 + 2j], "f4", "1.2j"),
        (["abcdef"], "S2", "abcdef"),
        (["abcdef"], "U2", "abcdef"),
        (np.array(["ab", "abcdef"], object), "S2", "abcdef"),
        ([12345], "U2", "12345"),
        (NAT, "i8", "NaT"),
        (NAT, "f8", "NaT"),
        (np.array(["2020-01-02T03"], "M8[h]"), "M8[D]", "2020-01-02T03"),
        ([np.nan], "i8", "nan"),
        ([1.5], "i8", "1.5"),
        ([2.0**63], "i8", "9.22337"),
        ([300], "u1", "300"),
        ([-1], "u8", "-1"),
        (["1.5"], "i4", "1.5"),
        (["1e400"], "f8", "1e400"),
        (["9007199254740993"], "f8", "9007199254740993"),
    ],
)
def test_what_it_does_not_hold_is_refused(values: Any, dtype: str, named: str) -> None:
    with pytest.raises(ValueError, match=rf"f: x: expected values (that \S+ holds|of \S+), got .*{named}"):
        converted("f", "x", np.asarray(values), np.dtype(dtype))
