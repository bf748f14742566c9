"""Norms on a GPU: sums of squares of spans and the scales of them, by kernels that g++ compiles for the stand-in of CuPy."""

from __future__ import annotations

import math
import re
import shutil
import sys

import numpy as np
import pytest

from mpistrat.step import on_device
from mpistrat.step.on_device import DeviceSquares, scales, totals_of
from tests.models import honest_cupy
from tests.single.optimizers.test_kernels import _moved, mutants

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles the kernels for this test")

NAMES = ("lanes", "halves", "partials", "totals", "scales")
SPANS = [[(0, 5)], [(5, 4101), (4200, 13_000)], [(13_000, 13_001)], [(20_000, 2_000_003)]]


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in for CuPy, on which no error was found when the test ends."""
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        monkeypatch.setitem(sys.modules, name, sys)  # after the test they are as before
    on_device._kernel.cache_clear()
    yield honest_cupy.install()
    assert not honest_cupy.report()[0]


def squares_of(values: np.ndarray, spans) -> list[float]:
    wide = values.astype(np.float64)
    return [sum(float((wide[low:high] ** 2).sum()) for low, high in ranges) for ranges in spans]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_squares(cupy, dtype):
    values = np.random.default_rng(0).normal(size=2_000_003).astype(dtype)
    there = _moved(cupy, values)
    found = totals_of([(DeviceSquares(there, SPANS), there), (DeviceSquares(there, [[(0, 7)]]), there)]).get()
    np.testing.assert_allclose(
        found, squares_of(values, [*SPANS, [(0, 7)]]), rtol=2e-6 if dtype == np.float32 else 1e-13
    )


def limited(total: float, limit: float) -> float:
    """The scale of a gradient whose squares have a sum, as `tf.clip_by_norm` has it; NaN where the sum is not finite."""
    if not math.isfinite(total):
        return math.nan
    return min(1.0, limit / math.sqrt(total)) if total else 1.0


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("limit", [1e-3, 2.0, 1e30])
@pytest.mark.parametrize("totals", [[4.0, 0.25, 0.0], [1e300, 3.0], [math.inf, 1.0], [math.nan], [0.0, 0.0]], ids=str)
def test_scales(cupy, totals, limit, together):
    found = scales(_moved(cupy, np.array(totals)), limit, together)
    expected = [limited(sum(totals), limit)] * len(totals) if together else [limited(total, limit) for total in totals]
    assert [each.place for each in found] == list(range(len(totals)))
    np.testing.assert_allclose(found[0].array.get(), expected, rtol=1e-15)
    np.testing.assert_allclose(found[-1].cast(np.dtype(np.float32)).get(), np.float32(expected[-1:]), rtol=1e-7)


def test_each_changed_sign_is_found(cupy, monkeypatch):
    """But for those of indices, with which a kernel would not end, or read beyond its arrays."""
    values, code, alive = (
        np.random.default_rng(1).normal(size=13_001).astype(np.float32),
        on_device.source("float32"),
        [],
    )
    there = _moved(cupy, values)
    expected = squares_of(values, SPANS[:3])

    def right() -> bool:
        totals = totals_of([(DeviceSquares(there, SPANS[:3]), there)])
        if not np.allclose(totals.get(), expected, rtol=1e-5):
            return False
        cases = [(totals.get().tolist(), 0.5), ([1e-9, 0.0, math.inf], 0.5), ([0.0], 0.5)]
        for given, limit in cases:
            for together in (False, True):
                found = scales(_moved(cupy, np.array(given)), limit, together)[0].array.get()
                wanted = [limited(sum(given), limit)] * len(given) if together else [limited(t, limit) for t in given]
                if not np.allclose(found, wanted, rtol=1e-12, equal_nan=True):
                    return False
        return True

    assert right()
    tried = 0
    places = [
        ("sum = sum + values", "sums[lane]"),
        ("own[lane] = own", "extern"),
        ("sum = sum + sums", "out[i]"),
        ("sum = sum + partials", "out[span]"),
        ("total = total +", "out[span] = scale"),
    ]

    def of_an_index(line: str) -> bool:
        before = re.split(r" \[\S+\] ", line)[0]
        in_header = before.startswith("for (") and before.count("(") > before.count(")")
        return before.count("[") > before.count("]") or in_header

    for low, high in places:
        first = code.index(low)
        end = code.find(high, first)
        for mutant, line in mutants(code, first, end if end > 0 else len(code)):
            kernel = {
                name: honest_cupy.RawKernel(mutant, name)
                for name in ("lanes", "halves", "partials", "totals", "scales")
            }
            monkeypatch.setattr(on_device, "_kernel", lambda cupy, name, real, kernel=kernel: kernel[name])
            if of_an_index(line):
                continue
            tried += 1
            if right():
                alive.append(line)
    assert alive == []
    assert tried > 12
