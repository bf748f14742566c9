"""Settings of optimizers: their limits, in their state, and steps that are refused, on one process without MPI."""

import inspect
import math

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.strategies import without_mpi


class Mine(ms.optimizers.Optimizer):
    """A rule with settings of several types, and attributes that are none."""

    def __init__(self):
        self.power, self.mode, self.ranges = np.float32(0.1), "up", (1, (2.5, np.int64(3)))
        self.table = {"a": [1, 2]}
        self.array, self.function, self.mixed = np.ones(3), abs, [1, abs]
        self._private = 5
        super().__init__(0.1)

    def update(self, gradient, weights, slots, step, rate, scratch):
        weights -= rate * self.power * gradient


def test_settings_of_a_rule_are_its_plain_attributes():
    optimizer = Mine()
    (settings,) = optimizer.get_settings()
    own = {name: settings[name] for name in ("learning_rate", "power", "mode", "ranges", "table")}
    power = float(np.float32(0.1))
    assert own == {"learning_rate": 0.1, "power": power, "mode": "up", "ranges": [1, [2.5, 3]], "table": {"a": [1, 2]}}
    assert not {"array", "function", "mixed", "_private", "name", "slot_names", "use_ema", "check_numerics"} & set(
        settings
    )
    other = Mine()
    optimizer.power, optimizer.ranges, optimizer.learning_rate, optimizer.clipnorm = np.float32(0.7), (9,), 0.5, 2.0
    other.set_settings(optimizer.get_settings())
    assert other.power == np.float32(0.7) and type(other.power) is np.float32
    assert other.ranges == (9,) and other.learning_rate == 0.5 and other.clipnorm == 2.0
    assert other.get_settings() == optimizer.get_settings()


def test_other_names_in_settings_change_nothing():
    optimizer = ms.optimizers.SGD(0.1)
    optimizer.set_settings([{"update": 3, "_steps": {}, "unknown": 1, "momentum": 0.0}])
    assert callable(optimizer.update) and not hasattr(optimizer, "unknown")
    with pytest.raises(ValueError, match="settings of 1 groups of parameters, got of 2"):
        optimizer.set_settings([{}, {}])


def test_a_state_has_the_settings():
    first, second = ms.optimizers.Adam(0.1), ms.optimizers.Adam(0.2)
    first.beta_1 = 0.5
    state = first.get_state()
    second.set_state(state)
    assert (second.learning_rate, second.beta_1) == (0.1, 0.5)
    second.learning_rate = 0.3
    second.set_state({"iterations": 4, "slots": {}})  # settings stay where there are none
    assert (second.learning_rate, second.iterations) == (0.3, 4)


@pytest.mark.parametrize("settings", [{}, {"use_ema": True, "ema_momentum": 0.5}, {"gradient_accumulation_steps": 2}])
def test_a_refused_step_updates_no_variable(settings, tmp_path):
    """Neither is the step counted, nor does a variable count as updated, nor is there a slot of it in a file."""
    with without_mpi() as strategy:
        with strategy.scope():
            w, v = (ms.Variable(np.ones(3), name=name) for name in "wv")
            optimizer = ms.optimizers.SGD(0.5, momentum=0.5, check_numerics=True, **settings)
        bad = np.full(3, np.nan)
        for pairs in ([(bad, w)], [(bad, w), (np.ones(3), v)]):
            with pytest.raises(FloatingPointError):
                strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
            assert optimizer.variables == () and optimizer._core.calls == 0
            assert optimizer.slots(w) == optimizer.slots(v) == {}
            assert optimizer.get_state()["slots"] == {}
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))
        with pytest.raises(FloatingPointError):
            strategy.run(lambda: optimizer.apply_gradients([(bad, w), (np.ones(3), v)]))
        assert optimizer.variables == (v,) and optimizer._core.calls == 1 and optimizer.slots(w) == {}
        strategy.save(tmp_path / "x.h5")
        for _ in range(3):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w), (np.ones(3), v)]))
        expected = w.numpy(), v.numpy(), optimizer.slots(w), optimizer.slots(v)
        assert optimizer.variables == (v, w) and optimizer._core.calls == 4
        strategy.restore(tmp_path / "x.h5")
        for _ in range(3):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w), (np.ones(3), v)]))
        for found, array in zip((w.numpy(), v.numpy()), expected[:2], strict=True):
            np.testing.assert_array_equal(found, array)
        for variable, slots in ((w, expected[2]), (v, expected[3])):
            for name, array in slots.items():
                np.testing.assert_array_equal(optimizer.slots(variable)[name], array)


def test_a_refused_first_step_keeps_state_that_was_given():
    w = ms.Variable(np.ones(3), name="given")
    optimizer = ms.optimizers.SGD(0.5, momentum=0.5, check_numerics=True)
    optimizer.set_state({"iterations": 2, "slots": {"given": {"momentum": np.full(3, 4.0)}}})
    with pytest.raises(FloatingPointError):
        optimizer.apply_gradients([(np.full(3, np.inf), w)])
    assert optimizer.iterations == 2
    assert optimizer.get_state()["slots"]["given"]["momentum"].tolist() == [4.0] * 3
    optimizer.apply_gradients([(np.zeros(3), w)])
    assert w.numpy().tolist() == [3.0] * 3


RULES = [getattr(ms.optimizers, name) for name in ms.optimizers.__all__]
RULES = [rule for rule in RULES if isinstance(rule, type) and issubclass(rule, ms.optimizers.Optimizer)]
RULES.remove(ms.optimizers.Optimizer)
COMMON = (
    "learning_rate",
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "loss_scale_factor",
    "ema_momentum",
)


def numbers_of(rule):
    """Return the names of all settings of a rule that are numbers."""
    own = inspect.signature(rule).parameters.values()
    return {each.name for each in own if isinstance(each.default, float)} | set(COMMON)


@pytest.mark.parametrize("rule", RULES)
def test_each_setting_that_is_a_number_or_a_flag_has_limits(rule):
    own = inspect.signature(rule).parameters.values()
    flags = {each.name for each in own if isinstance(each.default, bool)}
    assert numbers_of(rule) - set(COMMON) | flags == set(rule._limits)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, np.float32("nan")])
@pytest.mark.parametrize("rule", RULES)
def test_no_setting_is_nan_or_infinite(rule, number):
    for name in numbers_of(rule):
        with pytest.raises(ValueError, match=f"{name}: expected .*, got {number}"):
            rule(**{name: number})
        optimizer = rule()
        before = getattr(optimizer, name)
        with pytest.raises(ValueError, match=f"{name}: expected .*, got {number}"):
            setattr(optimizer, name, number)
        assert getattr(optimizer, name) == before


@pytest.mark.parametrize("rule", RULES)
def test_settings_out_of_range_are_refused(rule):
    positive = {"learning_rate_power": 0.5, "beta_2_decay": 0.5}  # of which negative ones are legal
    above = {"momentum", "rho", "beta_1", "beta_2", "ema_momentum"}
    for name in numbers_of(rule):
        for number in [positive.get(name, -0.5)] + [2.0] * (name in above):
            with pytest.raises(ValueError, match=f"{name}: expected .*, got {number}"):
                rule(**{name: number})
            with pytest.raises(ValueError, match=f"{name}: expected .*, got {number}"):
                setattr(rule(), name, number)


@pytest.mark.parametrize("value", ["0.5", b"0.5", [0.5], np.ones(1), 1j, object()])
def test_a_setting_that_is_no_number_is_refused(value):
    for name in ("momentum", "clipnorm", "weight_decay", "ema_momentum", "learning_rate"):
        with pytest.raises(TypeError, match=f"SGD: {name}: expected a"):
            ms.optimizers.SGD(**{name: value})


def test_numbers_of_other_libraries_become_floats():
    optimizer = ms.optimizers.SGD(np.float32(0.5), momentum=np.float32(0.25), clipnorm=np.ones(()))
    optimizer.weight_decay = 1
    found = optimizer.learning_rate, optimizer.momentum, optimizer.clipnorm, optimizer.weight_decay
    assert found == (0.5, 0.25, 1.0, 1.0) and set(map(type, found)) == {float}


@pytest.mark.parametrize("rate", [math.nan, math.inf, -0.1])
def test_a_schedule_without_a_rate_ends_its_step(rate):
    with without_mpi() as strategy:
        with strategy.scope():
            v, optimizer = ms.Variable(np.zeros(2)), ms.optimizers.SGD(lambda step: rate if step == 1 else 0.5)
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), v)]))
        with pytest.raises(
            ValueError, match=rf"learning_rate: expected a finite number >= 0, got {rate} from .* in step 2"
        ):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), v)]))
        assert v.numpy().tolist() == [-0.5, -0.5] and optimizer.iterations == 1


@pytest.mark.parametrize("setting", ["initial_scale", "dynamic_growth_steps"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
def test_loss_scales_have_limits(setting, number):
    with pytest.raises(ValueError, match=f"{setting}: expected a finite number .*, got {number}"):
        ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(0.1), **{setting: number})


@pytest.mark.parametrize(
    "settings", [{"dynamic_growth_steps": 1.5}, {"dynamic_growth_steps": True}, {"initial_scale": "2"}]
)
def test_loss_scales_are_numbers_and_their_steps_whole(settings):
    with pytest.raises(
        (TypeError, ValueError), match=f"LossScaleOptimizer: {next(iter(settings))}: expected a finite number"
    ):
        ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(0.1), **settings)


def test_a_rate_that_decays_to_zero_may_end_below_it_by_rounding():
    optimizer = ms.optimizers.SGD(lambda step: 0.3 - step * 0.1)  # -5.6e-17 in step 4
    assert optimizer._core.rate_at(4) == 0.0
    with pytest.raises(ValueError, match="learning_rate: expected a finite number >= 0, got -0.1"):
        optimizer._core.rate_at(5)


@pytest.mark.parametrize(
    ("value", "error"), [(2.7, TypeError), ("3", TypeError), (-1, ValueError), (np.nan, TypeError)]
)
def test_a_count_is_an_integer_of_at_least_0(value, error):
    optimizer = ms.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    with pytest.raises(error, match=f"SGD: iterations: expected .*, got .*{value}"):
        optimizer.iterations = value
    optimizer.iterations = np.int64(3)
    assert (optimizer.iterations, optimizer._core.calls) == (3, 6)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ms.optimizers.SGD(True), "learning_rate"),
        (lambda: ms.optimizers.SGD(0.1, momentum=True), "momentum"),
        (lambda: ms.optimizers.SGD(0.1, weight_decay=False), "weight_decay"),
        (lambda: ms.optimizers.SGD(0.1, nesterov="False"), "nesterov"),
        (lambda: ms.optimizers.Adam(0.1, amsgrad=[0]), "amsgrad"),
        (lambda: ms.optimizers.RMSProp(0.1, centered=0.5), "centered"),
        (lambda: ms.optimizers.Adafactor(0.1, relative_step="no"), "relative_step"),
        (lambda: ms.optimizers.SGD(0.1, use_ema="False"), "use_ema"),
        (lambda: ms.optimizers.SGD(0.1, check_numerics="yes"), "check_numerics"),
        (lambda: setattr(ms.optimizers.SGD(0.1), "nesterov", "False"), "nesterov"),
    ],
)
def test_a_flag_is_no_number_and_text_is_no_flag(make, name):
    with pytest.raises(TypeError, match=rf"\w+: {name}: expected .*, got (bool|str|list|float) "):
        make()


def test_flags_may_be_0_or_1_of_any_type():
    optimizer = ms.optimizers.SGD(0.1, momentum=0.5, nesterov=np.True_, use_ema=0)
    assert (optimizer.nesterov, optimizer.use_ema) == (True, False)
    optimizer.nesterov = 0
    assert optimizer.nesterov is False
