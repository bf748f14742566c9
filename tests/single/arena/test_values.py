"""Digests by which ranks compare memory."""

import numpy as np
import pytest

from mpistrat.arena.values import quick_digest


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i4", "u1"])
def test_a_quick_digest_sees_changes_of_a_number_and_of_all_signs(dtype):
    values = np.arange(1, 65).astype(dtype)
    changed = values.copy()
    changed[3] += 1
    others = [changed]
    if values.dtype.kind != "u":
        one = values.copy()
        one[1] = -one[1]
        others += [one, -values]
    digests = [quick_digest(each) for each in [values, *others]]
    assert len(set(digests)) == len(digests)
    assert all(0 <= digest < 1 << 63 for digest in digests)
    assert quick_digest(values.copy()) == digests[0]
