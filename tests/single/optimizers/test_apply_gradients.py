"""apply_gradients under the default strategy, on one process without MPI: what it takes, and what it refuses."""

import contextlib
import tracemalloc

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.optimizers.core import find, known
from mpistrat.step.arena_step import _merged
from mpistrat.variables.placement import ORDINAL_STEP
from tests.models import optimizer_reference as reference

SGD = ms.optimizers.SGD


def test_gradients_in_place_and_others_do_the_same():
    a, b = ms.Variable(np.ones(5)), ms.Variable(np.ones(5))
    a.grad[:] = 3.0
    SGD(0.1).apply_gradients([(a.grad, a), ([3.0] * 5, b)])
    assert a.numpy().tolist() == b.numpy().tolist() == [0.7] * 5


def test_a_reshaped_view_of_the_gradient_is_not_copied():
    w = ms.Variable(np.zeros((2, 3)))
    w.grad[...] = [[1, 2, 3], [4, 5, 6]]
    view = w.grad.reshape(-1).reshape(2, 3)
    assert view is not w.grad
    SGD(1.0).apply_gradients([(view, w)])
    assert w.numpy().tolist() == [[-1, -2, -3], [-4, -5, -6]]
    turned = np.asfortranarray(np.arange(6.0).reshape(2, 3))  # another order of the same shape is copied rightly
    SGD(1.0).apply_gradients([(turned, w)])
    assert w.numpy().tolist() == [[-1, -3, -5], [-7, -9, -11]]


def test_sparse_gradients_are_summed_by_row():
    w = ms.Variable(np.zeros((4, 2)))
    w.grad[...] = 7.0  # must not remain
    rows = ms.IndexedSlices(np.array([[1.0, 1], [2, 2], [4, 4]]), np.array([3, 0, 3]))
    SGD(1.0).apply_gradients([(rows, w)])
    assert w.numpy()[:, 0].tolist() == [-2, 0, 0, -5]


def test_a_variable_without_gradient_stays_as_it_is():
    w, v = ms.Variable(np.ones(3), name="kept"), ms.Variable(np.ones(3))
    v.grad[:] = 1.0
    optimizer = ms.optimizers.AdamW(0.1)
    optimizer.apply_gradients([(None, w), (v.grad, v)])
    assert w.numpy().tolist() == [1, 1, 1]
    assert v.numpy()[0] < 1
    assert optimizer.variables == (v,)
    assert optimizer.slots(w) == {}


@pytest.mark.parametrize(
    "build",
    [
        lambda o: o.SGD(0.1),
        lambda o: o.Adam(0.1, clipnorm=1.0),
        lambda o: o.Adam(0.1, global_clipnorm=1.0, gradient_accumulation_steps=2),
        lambda o: o.SGD(0.1, check_numerics=True),
        lambda o: o.Lamb(0.1, global_clipnorm=1.0),
        lambda o: o.Adafactor(0.1, clipnorm=1.0),
        lambda o: o.LossScaleOptimizer(o.SGD(0.1)),
    ],
    ids=["plain", "clipnorm", "global_clipnorm", "check_numerics", "lamb", "adafactor", "loss_scale"],
)
def test_variables_without_elements(build):
    """A step of them alone has nothing to sum, and counts."""
    w, optimizer = ms.Variable(np.zeros((0, 3))), build(ms.optimizers)
    for _ in range(2):
        optimizer.apply_gradients([(w.grad, w)])
    assert w.shape == (0, 3)
    assert optimizer.iterations == (1 if getattr(optimizer, "gradient_accumulation_steps", None) else 2)


def test_another_set_of_variables_at_another_step():
    variables = [ms.Variable(np.zeros(100 + i)) for i in range(4)]
    optimizer = ms.optimizers.Adam(0.1)
    history: list[list[np.ndarray | None]] = []
    for step, chosen in enumerate([(0, 1, 2, 3), (1,), (3, 0), (0, 1, 2, 3), (2,)]):
        random = np.random.default_rng(step)
        history.append([random.normal(size=100 + i) if i in chosen else None for i in range(4)])
        optimizer.apply_gradients([(history[-1][i], variables[i]) for i in chosen])
    for index, variable in enumerate(variables):
        w, slots = np.zeros(100 + index), {}
        for step, gradients in enumerate(history):
            if gradients[index] is not None:
                w = reference.adam()(w, gradients[index], slots, step + 1, 0.1)
        np.testing.assert_allclose(variable.numpy(), w, rtol=1e-12)


def test_variables_made_later_join():
    first = ms.Variable(np.zeros(10))
    optimizer = ms.optimizers.SGD(1.0, momentum=0.5)
    optimizer.apply_gradients([(np.ones(10), first)])
    second = ms.Variable(np.zeros(10))
    optimizer.apply_gradients([(np.ones(10), first), (np.ones(10), second)])
    assert first.numpy()[0] == -2.5
    assert second.numpy()[0] == -1.0
    assert optimizer.variables == (first, second)


@pytest.mark.parametrize("limit", [0.5, 1e6])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_clipping_by_the_global_norm(limit, dtype):
    shapes = [(70001,), (4, 5)]
    gradients = [np.random.default_rng(i).normal(size=s).astype(dtype) for i, s in enumerate(shapes)]
    variables = [ms.Variable(np.zeros(shape), dtype=dtype) for shape in shapes]
    optimizer = SGD(1.0, global_clipnorm=limit)
    for _ in range(2):  # what is kept of one step is no part of the next
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    clipped = reference.clip([g.astype(np.float64) for g in gradients], limit)
    tolerance = {"rtol": 1e-12} if dtype == "float64" else {"rtol": 2e-3, "atol": 1e-6}
    for variable, gradient in zip(variables, clipped, strict=True):
        np.testing.assert_allclose(variable.numpy().astype(np.float64), -2 * gradient, **tolerance)


def test_clipping_zero_and_what_is_not_finite():
    w = ms.Variable(np.ones(3))
    optimizer = SGD(1.0, global_clipnorm=1.0)
    optimizer.apply_gradients([(np.zeros(3), w)])
    assert w.numpy().tolist() == [1, 1, 1]
    optimizer.apply_gradients([(np.array([0.0, np.inf, 0.0]), w)])
    assert np.isnan(w.numpy()).all()  # as in TensorFlow


def test_weight_decay_leaves_out_what_was_excluded():
    a, b, c = (ms.Variable(np.ones(20), name=name) for name in ("dense/kernel", "dense/bias", "scale"))
    optimizer = ms.optimizers.AdamW(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=[c], var_names=["bias"])
    optimizer.apply_gradients([(np.zeros(20), v) for v in (a, b, c)])
    assert a.numpy().tolist() == [0.95] * 20
    assert b.numpy().tolist() == c.numpy().tolist() == [1.0] * 20
    with pytest.raises(RuntimeError, match="before the first apply_gradients"):
        optimizer.exclude_from_weight_decay(var_names=["x"])


def test_weight_decay_over_many_variables_and_blocks():
    sizes = [70000, 3, 70000, 200, 17, 40]
    variables = [ms.Variable(np.ones(size), name=f"{'keep' if i % 2 else 'decay'}_{i}") for i, size in enumerate(sizes)]
    optimizer = ms.optimizers.AdamW(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["^keep"])
    optimizer.apply_gradients([(np.zeros(v.size), v) for v in variables])
    for index, variable in enumerate(variables):
        assert set(variable.numpy().tolist()) == {1.0 if index % 2 else 0.95}, index


def test_decay_ranges_are_merged():
    assert _merged([(16, 32, 0.1), (0, 16, 0.1), (32, 48, 0.0), (48, 64, 0.1), (64, 80, 0.2)]) == [
        (0, 32, 0.1),
        (48, 64, 0.1),
        (64, 80, 0.2),
    ]


def test_constraints_hold_after_the_update():
    w = ms.Variable(np.array([0.5, 2.0]), constraint=lambda value: np.maximum(value, 0.0))
    SGD(1.0).apply_gradients([(np.ones(2), w)])
    assert w.numpy().tolist() == [0.0, 1.0]


def test_learning_rate_and_iterations_can_be_set():
    w = ms.Variable(np.zeros(2))
    optimizer = SGD(1.0)
    optimizer.apply_gradients([(np.ones(2), w)])
    optimizer.learning_rate = np.float32(0.5)
    optimizer.apply_gradients([(np.ones(2), w)])
    optimizer.iterations = 10
    optimizer.learning_rate = ms.optimizers.schedules.PiecewiseConstantDecay([9], [1.0, 8.0])
    optimizer.apply_gradients([(np.ones(2), w)])
    assert w.numpy().tolist() == [-9.5, -9.5]
    assert optimizer.iterations == 11


@pytest.mark.parametrize("name", reference.cases())
def test_state_moves_to_a_new_optimizer(name):
    make, rule, rate = reference.cases()[name]
    gradients = [np.random.default_rng(step).normal(size=50) for step in range(6)]
    w = ms.Variable(np.zeros(50))
    optimizer = make(ms.optimizers)
    for gradient in gradients[:3]:
        optimizer.apply_gradients([(gradient, w)])
    state = optimizer.get_state()
    assert state["iterations"] == 3
    assert set(state["slots"].get(w.name, {})) == set(optimizer.slot_names)
    second = make(ms.optimizers)
    second.set_state(state)  # before it has met the variable
    assert {n: set(s) for n, s in second.get_state()["slots"].items()} == {n: set(s) for n, s in state["slots"].items()}
    for gradient in gradients[3:5]:
        second.apply_gradients([(gradient, w)])
    second.set_state(second.get_state())  # and after
    second.apply_gradients([(gradients[5], w)])
    expected, _ = reference.run(rule, [np.zeros(50)], lambda step: [gradients[step]], range(6), rate)
    np.testing.assert_allclose(w.numpy(), expected[0], rtol=1e-12)


def test_slots_of_another_form_are_refused():
    w = ms.Variable(np.zeros(3), name="w_state")
    optimizer = ms.optimizers.Adam()
    with pytest.raises(ValueError, match=r"expected slots momentum, velocity, got momentum"):
        optimizer.set_slots(w, {"momentum": np.zeros(3)})
    with pytest.raises(ValueError, match=r"momentum of shape \(3,\), got shape \(4,\)"):
        optimizer.set_slots(w, {"momentum": np.zeros(4), "velocity": np.zeros(3)})


# what is refused


def refused(error, match, pairs):
    optimizer = SGD(0.1)
    with pytest.raises(error, match=match):
        optimizer.apply_gradients(pairs)
    assert optimizer.iterations == 0


def test_wrong_gradients_are_refused():
    w = ms.Variable(np.zeros((2, 3)), name="refused")
    refused(
        ValueError, r"refused\S*: expected a gradient of shape \(2, 3\), got shape \(3, 2\)", [(np.ones((3, 2)), w)]
    )
    refused(TypeError, "float64 can hold, got complex128", [(np.ones((2, 3), complex), w)])
    refused(TypeError, "expected an array", [({"g": 1}, w)])
    refused(TypeError, "float64 can hold, got <U1", [(np.full((2, 3), "x"), w)])
    refused(ValueError, "a gradient, got none for refused", [(None, w)])
    refused(ValueError, "a gradient, got none for no variables", [])
    refused(ValueError, "each variable once", [(np.ones((2, 3)), w)] * 2)
    refused(TypeError, "expected variables, got ndarray", [(np.ones(2), np.ones(2))])
    refused(ValueError, r"rows of shape \(3,\)", [(ms.IndexedSlices(np.ones((2, 2)), np.array([0, 1])), w)])
    refused(ValueError, "indices from 0 to 1, got 0 to 2", [(ms.IndexedSlices(np.ones((2, 3)), np.array([0, 2])), w)])
    assert not w.numpy().any()


def test_variables_without_gradients_are_refused():
    fixed = ms.Variable(np.zeros(2), trainable=False)
    refused(ValueError, "trainable", [(np.ones(2), fixed)])
    whole = ms.Variable(np.zeros(2, np.int64))
    refused(ValueError, "floating", [(np.ones(2, np.int64), whole)])


def test_wrong_arguments_are_refused():
    with pytest.raises(
        TypeError, match="learning_rate: expected a number, a LearningRateSchedule or a callable, got str"
    ):
        SGD("fast")
    with pytest.raises(ValueError, match="momentum: expected a number from 0 to 1, got -1"):
        SGD(0.1, momentum=-1)
    with pytest.raises(ValueError, match=r"beta_2: expected 0 <= value < 1, got 1"):
        ms.optimizers.Adam(beta_2=1)
    with pytest.raises(ValueError, match="global_clipnorm: expected a finite number > 0, got 0"):
        ms.optimizers.Adam(global_clipnorm=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_many_sets_of_variables_take_little_memory(dtype, monkeypatch):
    monkeypatch.setattr("mpistrat.optimizers.optimizer._KEPT_STEPS", 50)
    variables = [ms.Variable(np.zeros(1 << 13, dtype)) for _ in range(8)]
    optimizer = ms.optimizers.SGD(1.0, global_clipnorm=1e9)
    for variable in variables:
        variable.grad[:] = 1.0

    def step(chosen):
        optimizer.apply_gradients([(v.grad if chosen >> i & 1 else None, v) for i, v in enumerate(variables)])

    step(255)
    tracemalloc.start()
    for chosen in range(1, 101):
        step(chosen)
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 2 << 20  # every set with blocks of its own would take 1 MiB
    taken = [1 + sum(chosen >> i & 1 for chosen in range(1, 101)) for i in range(8)]
    assert [float(v.numpy()[-1]) for v in variables] == [-n for n in taken]


@pytest.mark.parametrize("scope", [False, True])
def test_an_optimizer_is_found_only_when_it_is_complete(scope):
    """A server looks for optimizers in a thread, while the program makes them."""
    seen = []

    class Own(ms.optimizers.Optimizer):
        def __init__(self, rate):
            before = set(known())
            super().__init__(rate)
            seen.extend(set(known()) - before)
            self.scale = 2.0

        def update(self, gradient, weights, slots, step, rate, scratch):
            weights -= self.scale * rate * gradient

    with ms.OneDeviceStrategy() as strategy, strategy.scope() if scope else contextlib.nullcontext():
        made = Own(0.1)
        assert not seen
        assert find(made._core.ordinal) is made


def test_an_optimizer_whose_constructor_fails_takes_no_number():
    before = SGD(0.1)
    with pytest.raises(ValueError, match="weight_decay"):
        SGD(0.1, weight_decay=-1)
    assert SGD(0.1)._core.ordinal == before._core.ordinal + ORDINAL_STEP
