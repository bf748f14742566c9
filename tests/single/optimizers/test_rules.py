"""Each optimizer, block by block and in place, does what Keras's formula says of whole arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat as ms
from tests.models import optimizer_reference as reference

CASES = reference.cases()


def gradients_of(shapes, dtype=np.float64):
    return lambda step: [np.random.default_rng((step, i)).normal(size=s).astype(dtype) for i, s in enumerate(shapes)]


def start_of(shapes, dtype=np.float64):
    return [np.random.default_rng(99 + i).normal(size=shape).astype(dtype) for i, shape in enumerate(shapes)]


def train(optimizer, start, gradients, steps):
    variables = [ms.Variable(value) for value in start]
    for step in range(steps):
        for variable, gradient in zip(variables, gradients(step), strict=True):
            variable.grad[...] = gradient
        assert optimizer.apply_gradients([(v.grad, v) for v in variables]) == step + 1
    return variables


@pytest.mark.parametrize("name", CASES)
def test_weights_and_slots_are_those_of_the_formula(name):
    make, rule, rate = CASES[name]
    shapes = [(70001,), (3, 5), (), (2, 65536)]  # blocks have 65,536 elements
    gradients, start = gradients_of(shapes), start_of(shapes)
    optimizer = make(ms.optimizers)
    variables = train(optimizer, start, gradients, 4)
    weights, slots = reference.run(rule, start, gradients, range(4), rate)
    for variable, expected, kept in zip(variables, weights, slots, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-12, atol=1e-14)
        ours = optimizer.slots(variable)
        assert set(ours) == set(kept) == set(optimizer.slot_names)
        for slot, array in kept.items():
            np.testing.assert_allclose(ours[slot], array, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_float32_stays_float32_and_close(name):
    make, rule, rate = CASES[name]
    shapes = [(1000,), (7,)]
    gradients = gradients_of(shapes, np.float32)
    start = start_of(shapes, np.float32)
    variables = train(make(ms.optimizers), start, gradients, 5)
    exact, _ = reference.run(
        rule,
        [w.astype(np.float64) for w in start],
        lambda step: [g.astype(np.float64) for g in gradients(step)],
        range(5),
        rate,
    )
    for variable, expected in zip(variables, exact, strict=True):
        assert variable.dtype == np.float32
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=6), st.sampled_from(sorted(CASES)), st.integers(0, 2**32 - 1))
def test_any_sizes(sizes, name, seed):
    make, rule, rate = CASES[name]
    random = np.random.default_rng(seed)
    start = [random.normal(size=size) for size in sizes]
    steps = [[random.normal(size=size) for size in sizes] for _ in range(3)]
    variables = train(make(ms.optimizers), start, steps.__getitem__, 3)
    weights, _ = reference.run(rule, start, steps.__getitem__, range(3), rate)
    for variable, expected in zip(variables, weights, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-12, atol=1e-14)


# The examples of Keras's documentation: one variable of 10, loss w² / 2, so that the gradient is w.


def nadam_of_the_first_step():
    """Both terms of the step, of a gradient whose size is divided out: m is (1 - beta_1) g."""
    u, ahead = 0.9 * (1 - 0.48), 0.9 * (1 - 0.5 * 0.96**2)
    return ahead * 0.1 / (1 - u * ahead) + (1 - u) / (1 - u)


@pytest.mark.parametrize(
    ("optimizer", "after"),
    [
        (ms.optimizers.SGD(0.1), 9.0),
        (ms.optimizers.RMSProp(0.1), 9.683772),
        (ms.optimizers.Adam(0.1), 9.9),
        (ms.optimizers.AdamW(0.1, weight_decay=0.004), 10 - 10 * 0.004 * 0.1 - 0.1),
        (ms.optimizers.Adagrad(0.1), 10 - 0.1 * 10 / np.sqrt(100.1)),
        (ms.optimizers.Adamax(0.1), 9.9),
        (ms.optimizers.Nadam(0.1), 10 - 0.1 * nadam_of_the_first_step()),
        (ms.optimizers.Lion(0.1), 9.9),
        (ms.optimizers.Adadelta(0.1), 10 - 0.1 * np.sqrt(1e-7) * 10 / np.sqrt(0.05 * 100 + 1e-7)),
        (ms.optimizers.Ftrl(0.1), -(10 - (np.sqrt(100.1) - np.sqrt(0.1)) / 0.1 * 10) / (np.sqrt(100.1) / 0.1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_keras_example_of_one_step(optimizer, after):
    w = ms.Variable(10.0, dtype="float64")
    optimizer.apply_gradients([(w.numpy(), w)])
    assert float(w) == pytest.approx(after, abs=1e-6)


def test_keras_example_of_momentum():
    # Keras: the first step is 0.1, the second 0.18
    w = ms.Variable(1.0, dtype="float64")
    optimizer = ms.optimizers.SGD(0.1, momentum=0.9)
    optimizer.apply_gradients([(1.0, w)])
    assert float(w) == pytest.approx(0.9)
    optimizer.apply_gradients([(0.9, w)])
    assert float(w) == pytest.approx(0.9 - 0.18)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_weights_are_updated_in_float32_and_rounded_once(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    w = ms.Variable(np.linspace(-2, 2, 70001), dtype=dtype)
    start = w.numpy()
    gradient = np.linspace(1, 3, 70001).astype(w.dtype)
    optimizer = ms.optimizers.Adam(0.01)
    optimizer.apply_gradients([(gradient, w)])
    expected, slots = reference.run(
        reference.adam(), [start.astype(np.float32)], lambda step: [gradient.astype(np.float32)], range(1), 0.01
    )
    assert optimizer.slots(w)["momentum"].dtype == np.float32
    np.testing.assert_allclose(optimizer.slots(w)["velocity"], slots[0]["velocity"], rtol=1e-6)
    difference = np.abs(w.numpy().astype(np.float32) - expected[0])
    last_place = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    assert (difference <= np.abs(expected[0]) * last_place / 2 + 1e-7).all()


def test_a_rule_of_ones_own():
    class Sign(ms.optimizers.Optimizer):
        def __init__(self, learning_rate):
            super().__init__(learning_rate, slot_names=("count",), slot_start=2.0)

        def update(self, gradient, weights, slots, step, rate, scratch):
            np.add(slots["count"], 1, out=slots["count"])
            np.sign(gradient, out=gradient)
            np.multiply(gradient, rate, out=scratch[1][: gradient.size])
            np.subtract(weights, scratch[1][: gradient.size], out=weights)

    w = ms.Variable(np.zeros(70001))
    optimizer = Sign(0.5)
    assert optimizer.name == "sign"
    optimizer.apply_gradients([(np.linspace(1, 2, 70001), w)])
    optimizer.apply_gradients([(np.linspace(1, 2, 70001), w)], experimental_aggregate_gradients=False)
    assert (w.numpy() == -1.0).all()
    assert (optimizer.slots(w)["count"] == 4.0).all()


@pytest.mark.parametrize("rule", ["SGD", "Adam", "AdamW", "Adagrad", "RMSProp", "Adamax", "Lion"])
def test_update_with_its_documented_arguments(rule):
    """Called directly, as a rule of one's own may do with another rule, it changes weights and slots in place."""
    optimizer = getattr(ms.optimizers, rule)(0.1)
    weights, gradient = np.ones(3), np.full(3, 2.0)
    slots = {name: np.full(3, optimizer._core.slot_start.get(name, 0.0)) for name in optimizer.slot_names}
    optimizer.update(gradient, weights, slots, 1, 0.1, [np.empty(3), np.empty(3)])
    # At the first step: 1 - 0.1 * 2; Adam's step is the rate; 0.1 * 2 / sqrt(0.1 + 4); 0.1 * 2 / sqrt(0.1 * 4).
    expected = {"SGD": 0.8, "Adam": 0.9, "AdamW": 0.9, "Adagrad": 1 - 0.2 / 4.1**0.5, "RMSProp": 1 - 0.2 / 0.4**0.5}
    expected |= {"Adamax": 0.9, "Lion": 0.9}
    np.testing.assert_allclose(weights, expected[rule], rtol=1e-6)


def test_spellings():
    assert ms.optimizers.RMSprop is ms.optimizers.RMSProp
    assert ms.optimizers.Momentum(0.1).momentum == 0.9


@pytest.mark.parametrize("settings", reference.SETTINGS)
def test_what_all_rules_have_in_common_is_keras(settings):
    said = reference.SETTINGS[settings]
    shapes = [(70001,), (3, 5), ()]
    gradients, start = gradients_of(shapes), start_of(shapes)
    rules = [(ms.optimizers.Adam, reference.adam(), 0.03), (ms.optimizers.SGD, reference.sgd(), 0.1)]
    for make, rule, rate in [
        *rules,
        (ms.optimizers.Lamb, reference.lamb(), 0.03),
        (ms.optimizers.Adafactor, reference.adafactor(), 0.03),
    ]:
        optimizer = make(rate, **said, check_numerics=make is ms.optimizers.SGD)
        variables = [ms.Variable(value) for value in start]
        several = said.get("gradient_accumulation_steps", 1)
        for call in range(7):
            taken = optimizer.apply_gradients(list(zip(gradients(call), variables, strict=True)), name="step")
            assert taken == optimizer.iterations == (call + 1) // several
        weights, averages = reference.apply(rule, start, gradients, 7, rate, **said)
        for variable, expected, average in zip(variables, weights, averages, strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-12, atol=1e-14)
            if "use_ema" in said:
                np.testing.assert_allclose(optimizer.slots(variable)["average"], average, rtol=1e-12, atol=1e-14)
        if "use_ema" in said:
            optimizer.finalize_variable_values(variables)
            np.testing.assert_allclose(variables[0].numpy(), averages[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "rule",
    [
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Ftrl",
        "Lion",
        "Momentum",
        "Nadam",
        "RMSprop",
        "SGD",
    ],
)
def test_every_rule_takes_what_all_have_in_common(rule):
    make = getattr(ms.optimizers, rule)
    for said in reference.SETTINGS.values():
        optimizer = make(0.1, **said)
        assert {name: getattr(optimizer, name) for name in said} == said
    assert make().name == rule.lower()
    assert make(name="mine").name == "mine"
    with pytest.raises(TypeError, match="unexpected keyword argument 'clipnrom'"):
        make(clipnrom=1.0)


def test_16_bit_weights_have_averages_in_float32():
    w = ms.Variable(np.ones(70001), dtype="float16")
    optimizer = ms.optimizers.SGD(2.0**-12, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(70001, np.float16), w)])
    # each weight is rounded to half: 1 - 2^-12 lies between 1 and 1 - 2^-11, and goes to the even one, 1
    assert set(w.numpy().tolist()) == {1.0}
    average = optimizer.slots(w)["average"]
    assert average.dtype == np.float32
    assert set(average.tolist()) == {1 - 2.0**-12}  # of the weights before they were rounded


def test_any_callable_is_a_learning_rate():
    rates = iter([0.5, 0.25, 0.125])
    w = ms.Variable(np.zeros(3))
    optimizer = ms.optimizers.SGD(lambda: next(rates))
    for _ in range(3):
        optimizer.apply_gradients([(np.ones(3), w)])
    assert w.numpy().tolist() == [-0.875] * 3
    warm = ms.optimizers.SGD(lambda step: 0.1 * step)
    assert [warm._core.rate_at(number) for number in (1, 3)] == [0.0, 0.2]  # steps before it: 0 and 2
    assert ms.optimizers.SGD(lambda step=4: 0.1 * step).learning_rate == 0.4  # needs no argument
    assert "0x" not in repr(warm)
    text = repr(ms.optimizers.Adam(0.5, clipnorm=2.0))
    assert text.startswith("Adam(learning_rate=0.5, ")
    assert "clipnorm=2.0" in text
    assert "use_ema" not in text


def test_schedules_count_calls_where_gradients_are_accumulated():
    """As in Keras, where `iterations` is divided by the number of calls and the schedule is asked with all of them."""
    w = ms.Variable(np.zeros(3))
    optimizer = ms.optimizers.SGD(lambda step: float(step), gradient_accumulation_steps=2)
    for _ in range(4):
        optimizer.apply_gradients([(np.ones(3), w)])
    assert w.numpy().tolist() == [-(1.0 + 3.0)] * 3
    assert (optimizer.iterations, optimizer._core.calls) == (2, 4)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"clipvalue: expected one of clipnorm, .*, got clipnorm and clipvalue"):
        ms.optimizers.SGD(clipnorm=1.0, clipvalue=1.0)
    with pytest.raises(
        ValueError, match="gradient_accumulation_steps: expected None or an integer of at least 2, got 1"
    ):
        ms.optimizers.SGD(gradient_accumulation_steps=1)
    with pytest.raises(ValueError, match="ema_momentum: expected a number from 0 to 1, got 2"):
        ms.optimizers.SGD(ema_momentum=2)
    with pytest.raises(ValueError, match="weight_decay: expected a finite number >= 0, got -1"):
        ms.optimizers.RMSprop(weight_decay=-1)
    optimizer = ms.optimizers.SGD()
    with pytest.raises(ValueError, match=r"use_ema: expected the value that it was made with, got True"):
        optimizer.use_ema = True
    with pytest.raises(ValueError, match="an optimizer with use_ema=True, got use_ema=False"):
        optimizer.finalize_variable_values([])


@pytest.mark.parametrize(
    ("optimizer", "setting", "on"),
    [
        (ms.optimizers.SGD, "momentum", 0.5),
        (ms.optimizers.Adam, "amsgrad", True),
        (ms.optimizers.RMSProp, "momentum", 0.5),
        (ms.optimizers.RMSProp, "centered", True),
    ],
)
def test_a_setting_that_needs_a_slot_more_is_refused_later_and_may_be_switched_off(optimizer, setting, on):
    w, gradient = ms.Variable(np.ones(3)), np.arange(3.0)
    without, made_with = optimizer(), optimizer(**{setting: on})
    without.apply_gradients([(gradient, w)])
    setattr(without, setting, on)
    with pytest.raises(ValueError, match=rf"{setting}: expected off, as when the optimizer was made, got {on}"):
        without.apply_gradients([(gradient, w)])
    setattr(made_with, setting, 0)  # before its first step: as if it had been made without
    one, other = ms.Variable(np.ones(3)), ms.Variable(np.ones(3))
    alike = optimizer()
    for _ in range(3):
        made_with.apply_gradients([(gradient, one)])
        alike.apply_gradients([(gradient, other)])
    assert one.numpy().tolist() == other.numpy().tolist()


# what is not finite


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("said", [{}, {"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"gradient_accumulation_steps": 2}])
def test_a_step_with_numbers_that_are_not_finite_changes_nothing(wrong, said):
    a, b = ms.Variable(np.ones(70001), name="fine"), ms.Variable(np.ones((2, 3)), name="spoiled")
    optimizer = ms.optimizers.Adam(0.5, check_numerics=True, **said)
    optimizer.apply_gradients([(np.ones(70001), a), (np.ones((2, 3)), b)])
    before, state = [a.numpy(), b.numpy()], optimizer.get_state()
    bad = np.ones((2, 3))
    bad[1, 1:] = wrong
    expected = (
        r"spoiled\S*: expected finite numbers, got rank 0: 2 that are not, of 6, in step 2\. .*no variable was changed"
    )
    with pytest.raises(FloatingPointError, match=expected):
        optimizer.apply_gradients([(np.ones(70001), a), (bad, b)])
    for variable, value in zip((a, b), before, strict=True):
        np.testing.assert_array_equal(variable, value)
    after = optimizer.get_state()
    assert after["iterations"] == state["iterations"] == 1
    for name, slots in state["slots"].items():
        for slot, array in slots.items():
            np.testing.assert_array_equal(after["slots"][name][slot], array)
    optimizer.apply_gradients([(np.ones(70001), a), (np.ones((2, 3)), b)])  # it goes on
    assert np.isfinite(b.numpy()).all()


def test_large_gradients_whose_squares_are_infinite_are_fine():
    w = ms.Variable(np.zeros(5, np.float32))
    ms.optimizers.SGD(1.0, check_numerics=True).apply_gradients([(np.full(5, 1e30, np.float32), w)])
    assert set(w.numpy().tolist()) == {-float(np.float32(1e30))}
