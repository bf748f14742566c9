"""What gradients of JAX weigh where replicas have unequal parts of batches: the numbers of one process, or an error."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import mpistrat as ms  # noqa: E402
from mpistrat.errors import BatchError  # noqa: E402
from tests.harness import jax_training  # noqa: E402, F401 - float64

RATE = 0.1


def rows(count, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4))
    return x, x @ [[1.0], [-2.0], [0.5], [3.0]] + 0.1 * rng.normal(size=(count, 1))


FIRST, SECOND = rows(22, 0), rows(31, 1)  # in batches of 7: 7, 7, 7, 1; of 10: 10, 10, 10, 1
START = {"w": np.zeros((4, 1)), "b": np.zeros(1)}


def loss_of(params, x, y):
    return ((x @ params["w"] + params["b"] - y) ** 2).mean()


def batches(data, size):
    return [tuple(a[low : low + size] for a in data) for low in range(0, len(data[0]), size)]


def expected(steps, start=START):
    """Each step is a list of batches, whose gradients are summed."""
    params = jax.tree.map(jnp.asarray, start)
    for parts in steps:
        grads = [jax.grad(loss_of)(params, *part) for part in parts]
        total = jax.tree.map(lambda *g: sum(g), *grads)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, total)
    return params


def check(params, steps):
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(expected(steps)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def put(strategy=None, **options):
    strategy = strategy or ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        params, optimizer = ms.jax.distribute(START, optax.sgd(RATE), **options)
    return strategy, params, optimizer


def dataset(strategy, data=FIRST, size=7):
    return strategy.distribute_dataset(ms.data.from_arrays(data).batch(size))


SINGLE = [[part] for part in batches(FIRST, 7)]
PAIRED = [[a, b] for a, b in zip(batches(FIRST, 7), batches(SECOND, 10), strict=True)]
step = ms.jax.value_and_grad(jax.jit(loss_of))


def plain_loop(strategy, params, optimizer):
    for x, y in dataset(strategy):
        _, grads = step(params, x, y)
        params = ms.jax.apply(optimizer, grads, params)
    return params


def drawn_ahead(strategy, params, optimizer):
    for x, y in list(dataset(strategy)):
        params = ms.jax.apply(optimizer, ms.jax.grad(loss_of)(params, x, y), params)
    return params


def converted(strategy, params, optimizer):
    for x, y in list(dataset(strategy)):
        x, y = jnp.asarray(x), jnp.asarray(y)
        params = ms.jax.apply(optimizer, step(params, x, y)[1], params)
    return params


def views_and_names(strategy, params, optimizer):
    named = ms.jax.value_and_grad(jax.jit(lambda params, *, y, x: loss_of(params, x.reshape(-1, 4), y)))
    for x, y in list(dataset(strategy)):
        params = ms.jax.apply(optimizer, named(params, x=x.reshape(-1), y=y)[1], params)
    return params


def unweighted_of(strategy, params, optimizer):
    for x, y in list(dataset(strategy)):
        params = ms.jax.apply(optimizer, jax.grad(loss_of)(params, x, y), params, of=x)
    return params


def unweighted_in_a_named_batch(strategy, params, optimizer):
    for batch in list(dataset(strategy)):
        with strategy.batch(batch):
            params = ms.jax.apply(optimizer, jax.grad(loss_of)(params, *batch), params)
    return params


def closure_in_a_named_batch(strategy, params, optimizer):
    for x, y in list(dataset(strategy)):
        features = jnp.concatenate([x, x])[: len(x)]  # of no batch's memory
        with strategy.batch(x):
            grads = ms.jax.grad(lambda p, features=features, y=y: loss_of(p, features, y))(params)
        params = ms.jax.apply(optimizer, grads, params)
    return params


def steps_of_run(strategy, params, optimizer):
    def one(params, x, y):
        return ms.jax.apply(optimizer, jax.grad(loss_of)(params, x, y), params, of=x)

    for batch in list(dataset(strategy)):
        params = strategy.run(one, args=(params, *batch))
    return params


def weighted_steps_of_run(strategy, params, optimizer):
    def one(params, x, y):
        return ms.jax.apply(optimizer, step(params, jnp.asarray(x), y)[1], params)

    for batch in list(dataset(strategy)):
        params = strategy.run(one, args=(params, *batch))
    return params


def closures_of_run(strategy, params, optimizer):
    for x, y in list(dataset(strategy)):

        def one(params, x=x, y=y):
            return ms.jax.apply(optimizer, step(params, x, y)[1], params)

        params = strategy.run(one, args=(params,))
    return params


def scanned(strategy, params, optimizer):
    """Rows one by one within the function."""

    @jax.jit
    def summed(params, x, y):
        total, _ = jax.lax.scan(lambda sum_, row: (sum_ + loss_of(params, *row), None), 0.0, (x[:, None], y[:, None]))
        return total / len(x) if len(x) else total * jnp.nan

    own = ms.jax.value_and_grad(summed)
    for x, y in list(dataset(strategy)):
        params = ms.jax.apply(optimizer, own(params, x, y)[1], params)
    return params


def auxiliary(strategy, params, optimizer):
    own = ms.jax.value_and_grad(lambda p, x, y: (loss_of(p, x, y), {"rows": len(x)}), has_aux=True)
    both = ms.jax.grad(lambda p, x, y: (loss_of(p, x, y), {"rows": len(x)}), has_aux=True)
    for number, (x, y) in enumerate(list(dataset(strategy))):
        if number % 2:
            (_, aux), grads = own(params, x, y)
        else:
            grads, aux = both(params, x, y)
        assert aux == {"rows": len(x)}
        params = ms.jax.apply(optimizer, grads, params)
    return params


def parts_of_a_tree(strategy, params, optimizer):
    own = ms.jax.value_and_grad(jax.jit(lambda w, x, y, b: loss_of({"w": w, "b": b}, x, y)), argnums=(0, 3))
    for x, y in list(dataset(strategy)):
        w, b = own(params["w"], x, y, params["b"])[1]
        params["w"] = ms.jax.apply(optimizer, w, params["w"])
        params["b"] = ms.jax.apply(optimizer, b, params["b"])
    return params


def two_datasets(strategy, params, optimizer):
    for first, second in zip(dataset(strategy), dataset(strategy, SECOND, 10), strict=True):
        grads = [step(params, *batch)[1] for batch in (first, second)]
        params = ms.jax.apply(optimizer, jax.tree.map(jnp.add, *grads), params)
    return params


def two_datasets_in_run(strategy, params, optimizer):
    def one(params, first, second):
        grads = [step(params, *batch)[1] for batch in (second, first)]
        return ms.jax.apply(optimizer, jax.tree.map(jnp.add, *grads), params)

    for pair in zip(dataset(strategy), dataset(strategy, SECOND, 10), strict=True):
        params = strategy.run(one, args=(params, *pair))
    return params


def sums_over_steps_of_run(strategy, params, optimizer):
    """A step of `run` for each batch, the second of which applies the sum."""
    kept = []

    def one(params, last, *batch):
        kept.append(step(params, *batch)[1])
        if not last:
            return params
        return ms.jax.apply(optimizer, jax.tree.map(jnp.add, kept.pop(), kept.pop()), params)

    for first, second in zip(dataset(strategy), dataset(strategy, SECOND, 10), strict=True):
        params = strategy.run(one, args=(params, False, *first))
        params = strategy.run(one, args=(params, True, *second))
    return params


def two_applications(strategy, params, optimizer):
    """The gradients of both losses first, then a step of each."""
    for first, second in zip(dataset(strategy), dataset(strategy, SECOND, 10), strict=True):
        for grads in [step(params, *batch)[1] for batch in (first, second)]:
            params = ms.jax.apply(optimizer, grads, params)
    return params


ONE_BATCH = [
    plain_loop, drawn_ahead, converted, views_and_names, unweighted_of, unweighted_in_a_named_batch, closure_in_a_named_batch,
    steps_of_run, weighted_steps_of_run, closures_of_run, scanned, auxiliary, parts_of_a_tree,
]  # fmt: skip
PAIRS = [two_datasets, two_datasets_in_run, sums_over_steps_of_run, two_applications]


@pytest.mark.ranks(1, 2, 3, timeout=180)
@pytest.mark.parametrize(
    ("patterns", "expected"), [(ONE_BATCH, SINGLE), (PAIRS, PAIRED)], ids=["one batch", "two batches"]
)
def test_patterns_equal_one_process(patterns, expected):
    for pattern in patterns:
        strategy, params, optimizer = put()
        with strategy:
            check(pattern(strategy, params, optimizer), expected)


@pytest.mark.ranks(1, 2, timeout=180)
def test_local_replicas_have_marks_of_their_own():
    for pattern in (weighted_steps_of_run, steps_of_run):
        strategy, params, optimizer = put(ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]))
        with strategy:
            check(pattern(strategy, params, optimizer), SINGLE)


@pytest.mark.ranks(1, 2, 3, timeout=180)
def test_parts_of_a_whole_loss_are_not_weighted():
    strategy, params, optimizer = put(loss="sum")
    with strategy:
        total = ms.jax.value_and_grad(jax.jit(lambda p, x, y, rows: ((x @ p["w"] + p["b"] - y) ** 2).sum() / rows))
        for x, y in dataset(strategy):
            grads = total(params, x, y, ms.context.global_batch_size(x))[1]
            params = ms.jax.apply(optimizer, grads, params)
        check(params, SINGLE)


@pytest.mark.ranks(1, 2, 3, timeout=180)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weighted_gradients_keep_their_dtype(dtype):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params = ms.jax.distribute({"w": jnp.ones((4, 1), dtype)})
        for x, _ in dataset(strategy):
            value, grads = ms.jax.value_and_grad(lambda p, x: (x.astype(dtype) @ p["w"]).mean())(params, x)
            assert grads["w"].dtype == dtype
            if not len(x):
                assert np.isnan(value)
                assert not np.asarray(grads["w"], np.float32).any()


@pytest.mark.ranks(2, 3, timeout=180)
def test_what_cannot_be_known_is_an_error():
    strategy, params, optimizer = put()
    with strategy:
        for x, y in dataset(strategy):
            grads = jax.grad(loss_of)(params, x, y)
            with pytest.raises(BatchError, match=r"no weight.* ms\.jax\.value_and_grad.*of=x"):
                ms.jax.apply(optimizer, grads, params)
            with pytest.raises(
                BatchError, match=r"or sum of several"
            ):  # of which that of the arguments may be the last
                strategy.run(
                    lambda p, a, b: ms.jax.apply(optimizer, jax.grad(loss_of)(p, a, b), p), args=(params, x, y)
                )
            with pytest.raises(BatchError, match=r"ms\.jax\.grad.*strategy\.batch"):
                ms.jax.grad(lambda p, z: loss_of(p, z[:, :4], z[:, 4:]))(params, np.ones((97, 5)))
            params = ms.jax.apply(optimizer, grads, params, of=(x, y))
        check(params, SINGLE)


@pytest.mark.ranks(2, timeout=180)
def test_a_mixture_that_cannot_be_known_is_an_error():
    strategy, params, optimizer = put()
    with strategy:
        x, y = next(iter(dataset(strategy)))
        grads = step(params, x, y)[1]
        with pytest.raises(BatchError, match="of= is given"):
            ms.jax.apply(optimizer, grads, params, of=x)
        doubled = jax.tree.map(lambda g: 2 * g, grads)
        params = ms.jax.apply(optimizer, grads, params)
        with pytest.raises(BatchError, match="unknown whether this gradient is weighted"):
            ms.jax.apply(optimizer, doubled, params)
        params = ms.jax.apply(optimizer, grads, params)  # one that value_and_grad returned
        ms.jax.apply(optimizer, jax.grad(loss_of)(params, x, y), params, of=x)


@pytest.mark.ranks(1, 2, timeout=180)
def test_calls_that_cannot_be_weighted_are_refused():
    strategy, params, _ = put()
    with strategy:
        with pytest.raises(TypeError, match=r"ms\.jax\.value_and_grad\(jax\.jit\(fun\)\)"):
            jax.jit(lambda p: step(p, *FIRST)[1])(params)
        with pytest.raises(ValueError, match="argnums=0: expected parameters"):
            step(START, *FIRST)


@pytest.mark.ranks(1, timeout=180)
def test_functions_with_static_arguments_and_their_errors():
    strategy, params, _ = put()
    with strategy:

        def loss(params, x, y, kind, power=2):
            return (abs(x @ params["w"] - y) ** power).mean() if kind == "mean" else loss_of(params, x, y)

        x, y = FIRST
        own = ms.jax.value_and_grad(jax.jit(loss, static_argnums=3, static_argnames="power"))
        expected = jax.value_and_grad(loss)(params, x, y, "mean", power=4)
        for _ in range(2):
            found = own(params, x, y, "mean", power=4)
            assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-12)
            np.testing.assert_allclose(found[1]["w"], expected[1]["w"], rtol=1e-12)
        with pytest.raises(TypeError, match="incompatible shapes"):
            step(params, x, y[:3])
        assert step(params, x, y)[0] == loss_of(params, x, y)
