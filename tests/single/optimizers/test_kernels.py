"""The CUDA kernels of the update rules: g++ compiles their source, and they give the bits of the CPU."""

from __future__ import annotations

import re
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.base import loops
from mpistrat.optimizers import kernels
from mpistrat.optimizers.hyperparameters import GRADIENT_SUM
from mpistrat.optimizers.rule import BlockUpdate
from tests.models import honest_cupy
from tests.single.base.test_loops import NEVER_NEGATIVE, RULES, assert_same_bits, numbers

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles the kernels for this test")

MORE_RULES = {
    **RULES,
    "adadelta": lambda: ms.optimizers.Adadelta(0.1),
    "adamax": lambda: ms.optimizers.Adamax(0.1),
    "nadam": lambda: ms.optimizers.Nadam(0.1),
    "ftrl": lambda: ms.optimizers.Ftrl(0.1),
    "ftrl with all": lambda: ms.optimizers.Ftrl(0.1, -0.5, 0.2, 0.3, 0.1, 0.05, 0.4),
    "lion": lambda: ms.optimizers.Lion(0.01),
    "lamb": lambda: ms.optimizers.Lamb(0.01),
    "adafactor": lambda: ms.optimizers.Adafactor(0.01),
}
TYPES = [
    (np.float32, np.float32),
    (np.float64, np.float64),
    (np.float16, np.float16),
    (np.float16, np.float32),
    (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    (ml_dtypes.bfloat16, np.float32),
]
AROUND = {
    "alone": {},
    "clipped": {"clipvalue": 1e-3},
    "averaged": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
    "accumulated": {"gradient_accumulation_steps": 3, "use_ema": True},
}


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in for CuPy, on which no error was found when the test ends."""
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        monkeypatch.setitem(sys.modules, name, sys)  # after the test they are as before
    yield honest_cupy.install()
    assert not honest_cupy.report()[0]


def made(name: str, settings: dict) -> ms.optimizers.Optimizer:
    """A rule with other settings of those that all have."""
    plain = MORE_RULES[name]()
    names = type(plain).__init__.__code__.co_varnames[2 : type(plain).__init__.__code__.co_argcount]
    return type(plain)(0.01, **{key: getattr(plain, key) for key in names}, **settings)


def launches() -> int:
    return honest_cupy.report()[1].get("kernel", 0)


class Case:
    """Weights, slots and gradients, on the host and on the stand-in's GPU."""

    def __init__(self, optimizer, types, size: int, odd: float = 0.0) -> None:
        random = np.random.default_rng(size)
        (self.dtype, gradients), wide = types, np.float64 if types[0] is np.float64 else np.float32
        self.optimizer = optimizer
        slots = {name: numbers(random, size, wide, odd) for name in optimizer.slot_names}
        slots |= {name: np.abs(slots[name]) for name in (*NEVER_NEGATIVE, "norm") if name in slots}
        slots |= {name: np.abs(slot) for name, slot in slots.items() if name.startswith("accumulated_")}
        self.host = {"weights": numbers(random, size, self.dtype, odd), **slots}
        self.gradients = [numbers(random, size, gradients, odd) for _ in range(4)]
        self.update = BlockUpdate(optimizer, np.dtype(self.dtype), lambda: [np.empty(500, wide) for _ in range(4)])
        self.no_scratch = BlockUpdate(optimizer, np.dtype(self.dtype), pytest.fail)

    def both(self, cupy):
        """What is updated on the host, and on the GPU."""
        device = {}
        for name, array in self.host.items():
            device[name] = cupy.empty(array.shape, array.dtype)
            device[name].set(array)
        return [(self.update, self.host, lambda x: x), (self.no_scratch, device, lambda x: _moved(cupy, x))]


def _moved(cupy, array):
    moved = cupy.empty(array.shape, array.dtype)
    moved.set(array)
    return moved


def run(case: Case, update, arrays, move, decays=(), scales=(), factor=1.0) -> None:
    """Four steps."""
    slots = {name: array for name, array in arrays.items() if name != "weights"}
    accumulates = GRADIENT_SUM in slots
    for step, gradient in enumerate(case.gradients, 1):
        update.begin(step, 0.01, factor)
        if accumulates and step % 3:
            update.accumulate(arrays["weights"], [move(gradient)], slots)
        else:
            calls = 3 if accumulates else 0
            update.update(arrays["weights"], [move(gradient)], slots, decays, 0, scales, calls)


def compare(on_gpu, arrays) -> None:
    for name, expected in arrays.items():
        assert_same_bits(on_gpu[name].get(), expected)


def check(cupy, case: Case, decays=(), scales=(), factor=1.0) -> None:
    """Run a case on both, and compare; on the GPU with the scales of gradients on the host, and there."""
    (host, arrays, same), (device, on_gpu, moved) = case.both(cupy)
    _, (_, on_gpu_too, _) = case.both(cupy)
    with np.errstate(all="ignore"):
        run(case, host, arrays, same, decays, scales, factor)
    run(case, device, on_gpu, moved, decays, scales, factor)
    compare(on_gpu, arrays)
    if scales:
        there = _moved(cupy, np.array([number for _, _, number in scales]))
        places = [(low, high, kernels.DeviceScale(there, place)) for place, (low, high, _) in enumerate(scales)]
        run(case, device, on_gpu_too, moved, decays, places, factor)
        compare(on_gpu_too, arrays)


SPANS = [(0, 400, 0.1), (700, 1000, 0.3)], [(100, 800, 0.5)], 4 / 3


@pytest.fixture(scope="module")
def _all_kernels():
    """Compiled together, which is quicker."""
    rules = {made(name, {})._kernel(1, 0.1).rule for name in MORE_RULES} | {"accumulate"}
    kinds = [[np.dtype(each).name for each in types] for types in TYPES]
    honest_cupy.compiled(*(kernels.source(rule, *kind) for rule in sorted(rules) for kind in kinds))


@pytest.mark.usefixtures("_all_kernels")
@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(np.dtype(each).name for each in types))
@pytest.mark.parametrize("name", MORE_RULES)
def test_a_kernel_gives_the_bits_of_the_cpu(cupy, name, types) -> None:
    """Over four steps, with all that may happen around a rule, and with numbers that are not finite, or hardly any."""
    for settings in AROUND.values():
        for size, odd, how in ((1000, 0.0, SPANS), (257, 0.2, ()), (1, 0.0, ())):
            check(cupy, Case(made(name, settings), types, size, odd), *how)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_power_is_within_two_units_in_the_last_place(cupy, dtype) -> None:
    """Of the rule in float64: NumPy's own power of float32 may be further from it."""
    random = np.random.default_rng(0)
    arrays = {name: random.uniform(1, 2, 1000).astype(dtype) for name in ("weights", "accumulator", "linear")}
    exact = {name: array.astype(np.float64) for name, array in arrays.items()}
    on_gpu = {name: _moved(cupy, array) for name, array in arrays.items()}
    for found, gradient in ((exact, np.zeros(1000)), (on_gpu, _moved(cupy, np.zeros(1000, dtype)))):
        kind = np.float64 if found is exact else dtype
        update = BlockUpdate(ms.optimizers.Ftrl(0.5, -0.75), np.dtype(kind), lambda: [np.empty(1000) for _ in range(4)])
        update.begin(1, 0.5)
        update.update(found["weights"], [gradient], {name: found[name] for name in ("accumulator", "linear")})
    np.testing.assert_array_max_ulp(on_gpu["weights"].get(), exact["weights"].astype(dtype), 2)


def test_a_thread_takes_several_elements_of_many(cupy, monkeypatch) -> None:
    """Of more than there are threads: no launch has more than so many blocks."""
    monkeypatch.setattr(kernels, "MOST_BLOCKS", 2)
    check(cupy, Case(made("adam", {}), TYPES[0], 1300))


def test_pieces_with_factors_of_their_own_share_a_launch(cupy) -> None:
    """As many as the arguments of a launch hold: 300 pieces of 10 elements by three, with scales on the host and on the GPU."""
    case = Case(made("adam", {}), TYPES[0], 3000)
    before = launches()
    check(cupy, case, [(low, low + 10, low / 3000) for low in range(20, 3000, 20)], [(5, 2500, 0.5)])
    assert launches() == before + 2 * 3 * len(case.gradients)


def test_what_no_kernel_takes_is_left_to_numpy(cupy) -> None:
    """Several parts, integers, other types of gradients; of nothing there is no launch."""
    around, before = loops.Around(), launches()

    def taken(weights, *gradients) -> bool:
        arrays = [cupy.empty(4, dtype) for dtype in (weights, *gradients)]
        return kernels.update("sgd", (0.1, 0.0, 0.0), arrays[1:], arrays[0], (None,), around)

    assert not taken("float32", "float32", "float32")
    assert not taken("int32", "int32")
    assert not taken("float32", "float16")
    assert launches() == before
    assert taken("float32", "float32")
    assert kernels.update("sgd", (0.1, 0.0, 0.0), [cupy.empty(0, "f4")], cupy.empty(0, "f4"), (None,), around)
    assert launches() == before + 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_squares_have_the_bits_of_the_cpu(cupy, dtype) -> None:
    random = np.random.default_rng(0)
    for size in (0, 1, 63, 64, 65, 4095, 4096, 4097, 50_000):
        for odd in (0.0, 0.001):
            values, before = numbers(random, size, dtype, odd), launches()
            with np.errstate(all="ignore"):
                expected = loops.squares(values)
            found = kernels.squares(_moved(cupy, values))
            assert_same_bits(np.array([found]), np.array([expected]))
            assert launches() == before + (2 if size else 0)


# Signs are changed: each of a body, and of what is common to all but for indices, with which a kernel would not end.

_CHANGED = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "<": ">",
    ">": "<",
    ">=": "<",
    "!=": "==",
    "==": "!=",
    "&": "|",
    ">>": "<<",
}
_CHANGED |= {"<<": ">>", "|": "&"}
_SIGN = re.compile(r"(?<= )(" + "|".join(map(re.escape, sorted(_CHANGED, key=len, reverse=True))) + r")(?= )")


def mutants(code: str, low: int, high: int):
    """Sources with one sign changed in [low, high), and the line of each."""
    for found in _SIGN.finditer(code, low, high):
        begin, end = code.rfind("\n", 0, found.start()) + 1, code.find("\n", found.end())
        changed = code[: found.start()] + _CHANGED[found[0]] + code[found.end() :]
        yield changed, f"{code[begin : found.start()].strip()} [{found[0]}] {code[found.end() : end].strip()}"


def survivors(cupy, rule: str, types, low: str, high: str) -> list[str]:
    """The changed lines between two words in the source of a rule that no case tells from the rule."""
    code = kernels.source(rule, *(np.dtype(each).name for each in types))
    changed = list(mutants(code, code.index(low), code.index(high, code.index(low))))
    assert changed
    honest_cupy.compiled(*(mutant for mutant, _ in changed))
    everything = {"clipvalue": 1.0, "use_ema": True, "ema_overwrite_frequency": 2, "gradient_accumulation_steps": 3}
    alive = []
    for mutant, line in changed:
        kernel = honest_cupy.RawKernel(mutant, "update")
        plain = kernels._kernel.__wrapped__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "_kernel", lambda c, r, *k, m=kernel, p=plain: m if r == rule else p(c, r, *k))
            if not any(
                tells(cupy, name, settings, rule, types) for name in MORE_RULES for settings in ({}, everything)
            ):
                alive.append(line)
    return alive


def tells(cupy, name: str, settings: dict, rule: str, types) -> bool:
    """Whether a rule does not do what it does on a CPU."""
    optimizer = made(name, settings)
    if optimizer._kernel(1, 0.1).rule != rule and not (rule == "accumulate" and settings):
        return False
    try:
        check(cupy, Case(optimizer, types, 257, 0.1), [(0, 100, 0.1)], [(50, 150, 0.5)], 4 / 3)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("rule", sorted(kernels._BODIES))
def test_each_changed_sign_of_a_rule_is_found(cupy, rule) -> None:
    assert survivors(cupy, rule, TYPES[0], kernels._BODIES[rule].code.strip(), "if (averages)") == []


def test_each_changed_sign_around_a_rule_is_found(cupy) -> None:
    assert survivors(cupy, "adam", TYPES[0], "REAL g =", "put(weights") == []


def test_each_changed_sign_of_a_function_is_found(cupy) -> None:
    """Adam takes no power."""
    assert [
        line for line in survivors(cupy, "adam", TYPES[0], "float root(", 'extern "C"') if "raised(" not in line
    ] == []


def test_each_changed_sign_of_widening_and_rounding_is_found(cupy) -> None:
    """Each by weights of its own type."""
    alive = [set(survivors(cupy, "sgd", types, "wide(Bfloat16", "typedef")) for types in (TYPES[2], TYPES[4])]
    assert alive[0] & alive[1] == set()


def test_each_changed_sign_of_sums_of_squares_is_found(cupy) -> None:
    """But for indices: a kernel would not end."""
    code, random = kernels.squares_source("float32"), np.random.default_rng(0)
    values, alive = numbers(random, 5000, np.float32, 0.0), []
    expected = loops.squares(values)
    for low, high in (("sum = sum", "sums[lane]"), ("own[lane] = own", "totals[i]")):
        for mutant, line in mutants(code, code.index(low), code.index(high)):
            made = tuple(honest_cupy.RawKernel(mutant, name) for name in ("lanes", "halves"))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels, "_squares", lambda *_, made=made: made)
                if kernels.squares(_moved(cupy, values)) == expected:
                    alive.append(line)
    assert alive == []
