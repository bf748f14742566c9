"""The compiled loops and NumPy give the same bits; what is not for the loops is left to NumPy; errors are reported as NumPy's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.arena.arithmetic import combine
from mpistrat.base import loops
from mpistrat.comm.arrays import as_buffer
from mpistrat.optimizers.kernels import Around

compiled = pytest.mark.skipif(not loops.used()[0], reason=f"no compiled loops: {loops.used()[1]}")

RULES = {
    "sgd": lambda: ms.optimizers.SGD(0.1),
    "momentum": lambda: ms.optimizers.SGD(0.1, 0.9),
    "nesterov": lambda: ms.optimizers.SGD(0.1, 0.9, nesterov=True),
    "adam": lambda: ms.optimizers.Adam(0.01),
    "amsgrad": lambda: ms.optimizers.Adam(0.01, 0.8, 0.9, 1e-3, amsgrad=True),
    "adagrad": lambda: ms.optimizers.Adagrad(0.1),
    "rmsprop": lambda: ms.optimizers.RMSProp(0.1),
    "rmsprop with momentum": lambda: ms.optimizers.RMSProp(0.1, 0.8, momentum=0.7),
    "centered rmsprop": lambda: ms.optimizers.RMSProp(0.1, centered=True),
    "centered rmsprop with momentum": lambda: ms.optimizers.RMSProp(0.1, 0.8, momentum=0.7, centered=True),
}
NEVER_NEGATIVE = ("velocity", "velocity_hat", "accumulator")

# Zeros of both signs, subnormal numbers, the largest ones, what is not finite: between ordinary ones.
ODD = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 3.4e38, -3.4e38, 1e30, np.inf, -np.inf, np.nan, 5e-324, 1e308, 1.0]


def numbers(random: np.random.Generator, size: int, dtype: type, odd: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = (random.normal(size=size) * 10.0 ** random.integers(-6, 6, size)).astype(dtype)
        where = random.random(size) < odd
        values[where] = random.choice(np.array(ODD).astype(dtype), int(where.sum()))
    return values


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal as bits, except that any NaN is as good as another."""
    bits = np.uint64 if found.itemsize == 8 else np.uint32 if found.itemsize == 4 else np.uint16
    with np.errstate(invalid="ignore"):
        different = (found.view(bits) != expected.view(bits)) & ~(np.isnan(found) & np.isnan(expected))
    assert not different.any(), (found[different][:5], expected[different][:5])


def errors_of(function, *arguments) -> set[str]:
    """Call a function; return the first words of NumPy's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*arguments)
    return {str(warning.message).split(" encountered")[0] for warning in caught}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_nan_is_no_error_of_amsgrad(dtype) -> None:
    """As np.maximum takes none for one."""
    gradient = np.array([np.nan, 1.0] * 40, dtype)
    arrays = [np.ones_like(gradient) for _ in range(4)]
    with np.errstate(all="raise"):
        optimizer = ms.optimizers.Adam(amsgrad=True)
        slots = dict(zip(optimizer.slot_names, arrays[1:], strict=True))
        optimizer.update(gradient, arrays[0], slots, 1, 1e-3, [np.empty_like(gradient)] * 4)


def test_they_are_built_where_there_is_a_compiler() -> None:
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip(f"no {compiler}, or no headers of Python")
    instructions, reason = loops.used()
    assert instructions or "MPISTRAT_COMPILED_LOOPS" in reason, f"{reason}: install the package again"


def test_no_function_has_a_name_of_the_c_library(tmp_path) -> None:
    """Of those that <unistd.h>, which Python.h includes, declares in musl, macOS and older glibc, and not here."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip(f"no {compiler}, or no headers of Python")
    header = tmp_path / "posix.h"
    header.write_text(
        "void encrypt(char *, int);\nchar *crypt(const char *, const char *);\nvoid swab(const void *, void *, long);\n"
    )
    sources = sorted(Path(__file__).parents[3].joinpath("mpistrat/base/loops").glob("*.c"))
    assert sources
    found = subprocess.run(
        [compiler, "-fsyntax-only", "-include", header, f"-I{sysconfig.get_path('include')}", *sources],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr


@compiled
@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(RULES)),
    st.sampled_from([np.float32, np.float64]),
    st.one_of(st.integers(0, 70), st.integers(0, 3000)),
    st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    st.integers(0, 2**32 - 1),
)
def test_a_rule_has_the_same_bits_and_the_same_errors(name, dtype, size, odd, seed) -> None:
    random = np.random.default_rng(seed)
    optimizer = RULES[name]()
    names = ("gradient", "weights", *optimizer.slot_names)
    ours = {key: numbers(random, size, dtype, odd) for key in names}
    for key in NEVER_NEGATIVE:
        if key in ours:
            ours[key] = np.abs(ours[key])
    expected = {key: array.copy() for key, array in ours.items()}
    gradient = ours["gradient"].copy()
    step, rate = int(random.integers(1, 1000)), float(random.choice([0.1, 1e-3, 1 / 3]))

    def update(arrays: dict[str, np.ndarray]) -> None:
        slots = {key: arrays[key] for key in optimizer.slot_names}
        scratch = [np.empty(size, dtype) for _ in range(4)]
        optimizer.update(arrays["gradient"], arrays["weights"], slots, step, rate, scratch)

    found = errors_of(update, ours)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "update", loops.leave_to_numpy)
        wanted = errors_of(update, expected)
    for key in names[1:]:
        assert_same_bits(ours[key], expected[key])
    assert found == wanted
    assert_same_bits(ours["gradient"], gradient)  # which NumPy overwrites: so the loop did it


@compiled
@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]),
    st.one_of(st.integers(0, 70), st.integers(0, 9000)),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.02, 0.5]),
    st.integers(0, 2**32 - 1),
)
def test_a_sum_has_the_same_bits(dtype, size, count, odd, seed) -> None:
    random = np.random.default_rng(seed)
    parts = [numbers(random, size, dtype, odd) for _ in range(count)]
    out = np.empty(size, np.float64 if dtype is np.float64 else np.float32)
    expected = out.copy()
    found = errors_of(combine, np.add, parts, out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "add", loops.leave_to_numpy)
        wanted = errors_of(combine, np.add, parts, expected)
    assert_same_bits(out, expected)
    assert found == wanted


@compiled
@pytest.mark.parametrize("first", [0, 1])
def test_a_sum_may_be_written_over_one_of_its_first_two_parts(first) -> None:
    parts = [np.arange(5000.0), np.full(5000, 0.5), np.ones(5000)]
    assert loops.add(parts[first], parts)
    np.testing.assert_array_equal(parts[first], np.arange(5000) + 1.5)


@compiled
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_16_bit_number_is_widened_and_rounded_back(dtype) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wide, back = np.empty(1 << 16, np.float32), np.empty(1 << 16, dtype)
    assert loops.add(wide, [as_buffer(every)])
    assert_same_bits(wide, every.astype(np.float32))
    assert loops.narrow(as_buffer(back), wide)
    assert_same_bits(back, every)


@compiled
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_rounding_to_16_bits_is_numpys(dtype) -> None:
    """Of the neighbours of all halves between two 16-bit numbers, and of random bits."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32).view(np.uint32)
    half = np.uint32(1 << (12 if dtype is np.float16 else 15))
    around = [every, every + half, every + half - np.uint32(1), every + half + np.uint32(1), every - np.uint32(1)]
    around.append(np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32))
    values = np.concatenate(around).view(np.float32)
    found = np.empty(values.size, dtype)
    with np.errstate(over="ignore"):
        assert loops.narrow(as_buffer(found), values)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(found, values.astype(dtype))


@compiled
@pytest.mark.parametrize(("value", "reported"), [(65519.0, set()), (65520.0, {"overflow"}), (np.inf, set())])
def test_too_large_for_float16_is_reported_as_numpy_does(value, reported) -> None:
    values, out = np.array([1.0, value], np.float32), np.empty(2, np.float16)
    assert errors_of(loops.narrow, out, values) == reported
    assert errors_of(values.astype, np.float16) == reported


@compiled
def test_errstate_says_how_errors_are_reported() -> None:
    huge = np.full(3, 3e38, np.float32)
    out = np.empty_like(huge)
    with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow encountered"):
        loops.add(out, [huge, huge])
    with np.errstate(over="ignore"):
        assert errors_of(loops.add, out, [huge, huge]) == set()
    assert errors_of(loops.add, out, [np.full(3, np.inf), np.full(3, -np.inf)]) == set()  # float64: not done at all
    infinite = np.full(3, np.inf, np.float32)
    assert errors_of(loops.add, out, [infinite, -infinite]) == {"invalid value"}
    zero = np.zeros(3, np.float32)
    one = np.ones(3, np.float32)
    assert errors_of(loops.update, "adagrad", (1.0, 0.0), [one], zero.copy(), (zero - 1,), Around()) == {
        "divide by zero"
    }


def flat(values=8, dtype=np.float32) -> np.ndarray:
    return np.ones(values, dtype)


MEMORY = np.ones(64, np.float32)
READ_ONLY = flat()
READ_ONLY.flags.writeable = False
NOT_FOR_LOOPS = {
    "another dtype": (flat(), flat(dtype=np.float64)),
    "integers": (flat(dtype=np.int32), flat(dtype=np.int32)),
    "complex": (flat(dtype=np.complex64), flat(dtype=np.complex64)),
    "another length": (flat(), flat(9)),
    "not contiguous": (flat(), flat(16)[::2]),
    "two dimensions": (flat(), flat().reshape(2, 4)),
    "another byte order": (flat(), flat(dtype=">f4")),
    "not aligned": (flat(), memoryview(bytearray(33))[1:].cast("f")),
    "read-only": (READ_ONLY, flat()),
    "across": (MEMORY[:8], MEMORY[4:12]),
    "no buffer": (flat(), [1.0] * 8),
}


@compiled
@pytest.mark.parametrize("what", NOT_FOR_LOOPS)
def test_other_arrays_are_left_to_numpy_untouched(what) -> None:
    first, second = NOT_FOR_LOOPS[what]
    before = np.array(first)
    assert loops.add(first, [second, second]) is False
    assert loops.update("sgd", (0.1, 0.0, False), [second], first, (None,), Around()) is False
    assert loops.narrow(first, second) is False
    np.testing.assert_array_equal(first, before)


@compiled
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.complex128, ml_dtypes.bfloat16])
def test_copies(dtype) -> None:
    values = np.arange(600_000).reshape(3, -1).astype(dtype)
    for count in (1, 3):
        loops.set_threads(count)
        out = np.zeros_like(values)
        assert loops.copy(as_buffer(out), as_buffer(values))
        assert out.tobytes() == values.tobytes()
    loops.set_threads(1)
    assert loops.copy(as_buffer(values[:2]), as_buffer(values[1:])) is False  # across
    assert loops.copy(np.zeros(4, np.float32), np.zeros(4, np.int32)) is False
    assert loops.copy(np.zeros(4), np.zeros(8)[::2]) is False
    assert loops.copy(np.zeros(4), np.zeros(5)) is False
    assert loops.copy(np.zeros(4, object), np.zeros(4, object)) is False  # references are counted


@compiled
def test_a_sum_of_nothing_and_wrong_arguments() -> None:
    assert loops.add(flat(), []) is False
    with pytest.raises(TypeError):
        loops.add(flat(), (flat(),))
    good = "sgd", (0.1, 0.0, False), [flat()], flat(), (None,), Around()
    wrong = {0: "speed", 1: (0.1, 0.0), 2: [], 4: (), 5: (None,)}
    for place, argument in wrong.items():
        with pytest.raises(TypeError, match="update"):
            loops.update(*good[:place], argument, *good[place + 1 :])
    with pytest.raises(TypeError):
        loops.update("sgd", ("fast", 0.0, False), *good[2:])
    with pytest.raises(TypeError):
        loops.update(*good[:5], Around(decays=[(0, 1)]))
    for border in (np.nan, np.inf, -1e30):
        with pytest.raises(ValueError, match="border"):
            loops.update(*good[:5], Around(decays=[(border, 1, 2.0)]))
        with pytest.raises(ValueError, match="border"):
            loops.update(*good[:5], Around(scales=[(0, border, 2.0)]))
    assert loops.update(*good)


@compiled
@pytest.mark.parametrize(
    ("rule", "numbers", "slots", "needed"),
    [("adam", 4, 3, 2), ("sgd", 3, 1, 0), ("adagrad", 2, 1, 1), ("rmsprop", 5, 3, 1), ("accumulate", 0, 1, 1)],
)
def test_a_slot_that_a_rule_needs_is_there(rule, numbers, slots, needed) -> None:
    for missing in range(slots):
        given = tuple(None if slot == missing else np.ones(300, np.float32) for slot in range(slots))
        arguments = rule, (0.1,) * numbers, [np.ones(300, np.float32)], np.ones(300, np.float32), given, Around()
        if missing < needed:
            with pytest.raises(TypeError, match=f"{rule} needs its slot {missing}, got None"):
                loops.update(*arguments)
        else:
            assert loops.update(*arguments)


@compiled
def test_a_variable_says_that_they_are_not_used() -> None:
    code = "from mpistrat.base import loops; print(*loops.used(), loops.update is loops.leave_to_numpy)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MPISTRAT_COMPILED_LOOPS": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == " switched off by MPISTRAT_COMPILED_LOOPS=0 True\n"
