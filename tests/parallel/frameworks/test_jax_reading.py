"""What `mpistrat.jax.reading` finds in a transformation: programs that are right on any range, or what mixes elements."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from mpistrat.jax.reading import Mixes, digest, read  # noqa: E402
from tests.harness import jax_training  # noqa: E402, F401 - float64

pytestmark = pytest.mark.ranks(1)

TREE = {"w": jax.ShapeDtypeStruct((6, 4), "float64"), "b": jax.ShapeDtypeStruct((4,), "float64")}
TWINS = {"w": jax.ShapeDtypeStruct((4,), "float64"), "b": jax.ShapeDtypeStruct((4,), "float64")}
TABLE = np.arange(24.0).reshape(6, 4)


def found(tx, tree=TREE):
    return read(tx.init, tx.update, tree)


def stateless(function):
    return optax.stateless(lambda updates, params: function(updates))


def each(function):
    return stateless(lambda updates: jax.tree.map(function, updates))


RULES = {
    "size": each(lambda g: g / g.size),
    "shape": each(lambda g: g if g.shape == (4,) else -g),
    "same_shape": each(lambda g: g.reshape(g.shape) + jnp.zeros_like(g)),
    "clamp": each(lambda g: jnp.clip(g, -0.5, 0.25)),
    "where": each(lambda g: jnp.where(g > 0, g, 2.0)),
    "select": each(lambda g: jnp.where(jnp.isfinite(g), jnp.full_like(g, 0.5), g)),
    "branch": each(lambda g: jax.lax.cond(True, lambda x: x * 2, lambda x: jnp.zeros_like(x), g)),
    "switch": each(lambda g: jax.lax.switch(jnp.asarray(7), [lambda x: x, lambda x: x * 2, lambda x: x * 3], g)),
    "compiled": each(jax.jit(lambda g: jnp.sign(g) * jnp.sqrt(jnp.abs(g)))),
    "equal_constants": each(lambda g: g * np.full(g.shape, 3.0)),
    "free_sums": each(lambda g: g * jnp.arange(3.0).sum()),
    "uniform_sums": each(lambda g: g + jnp.full((2, 5), 1.5).sum()),
    "remat": each(jax.checkpoint(lambda g: jnp.sin(g))),
    "adam": optax.adamw(
        optax.linear_schedule(0.0, 1e-2, 5), weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_programs_on_ranges_give_the_wholes_numbers(name):
    tx, rng = RULES[name], np.random.default_rng(0)
    reading = found(tx)
    params = {"w": jnp.asarray(rng.normal(size=(6, 4))), "b": jnp.asarray(rng.normal(size=4))}
    grads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), params)
    updates, _ = tx.update(grads, tx.init(params), params)
    expected = optax.apply_updates(params, updates)
    free = dict(zip(reading.free_state, reading.first({}), strict=True))
    for program, starts, leaf in zip(reading.programs, reading.starts, ("b", "w"), strict=True):
        flat = [np.asarray(tree[leaf]).reshape(-1) for tree in (params, grads, expected)]
        for low, high in ((0, 1), (1, 4), (0, flat[0].size), (3, flat[0].size)):
            weights, gradient, theirs = (array[low:high] for array in flat)
            slots = {f"slot {key}": np.full(high - low, start) for key, start in starts.items()}
            ours = program({"weights": weights, "gradient": gradient, **free, **slots}, high - low)[0]
            np.testing.assert_allclose(ours, theirs, rtol=1e-14)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        pytest.param(lambda g: g / g.sum(), "reduce_sum", id="sum"),
        pytest.param(lambda g: jnp.cumsum(g, axis=0), "cumsum", id="cumsum"),
        pytest.param(lambda g: g[::-1], "rev", id="order"),
        pytest.param(lambda g: jnp.sort(g), "sort", id="sort"),
        pytest.param(lambda g: g * (TABLE if g.ndim > 1 else 1.0), "constants", id="constants"),
        pytest.param(lambda g: g + jnp.arange(g.size).reshape(g.shape), "constants", id="iota"),
        pytest.param(lambda g: g + jax.random.normal(jax.random.key(0), g.shape), "random", id="noise"),
        pytest.param(lambda g: jax.lax.cond(g.ravel()[0] > 0, jnp.abs, jnp.negative, g), "slice|gather|reshape", id="cond"),
        pytest.param(lambda g: jax.lax.scan(lambda c, x: (c + x, c), g[0], g)[1], "slice|scan|squeeze", id="scan"),
        pytest.param(lambda g: g + jnp.linalg.norm(g), "reduce_sum|dot", id="norm"),
    ],
)  # fmt: skip
def test_what_mixes_elements_is_named(function, text):
    with pytest.raises(Mixes, match=text):
        found(each(function))


def test_elements_of_several_leaves():
    with pytest.raises(Mixes, match="several leaves"):
        found(stateless(lambda u: {"w": u["w"] + u["b"], "b": u["b"]}), TWINS)
    with pytest.raises(Mixes, match="several leaves"):
        found(stateless(lambda u: {"w": u["b"], "b": u["w"]}), TWINS)


def test_effects_and_state_of_other_forms():
    def shown(g):
        jax.debug.print("{}", 1)
        return g

    with pytest.raises(Mixes, match="effects"):
        found(each(shown))

    def grows(updates, state, params=None):
        return updates, jnp.concatenate([state, state])

    with pytest.raises(Mixes, match="changes its form"):
        found(optax.GradientTransformation(lambda params: jnp.zeros(1), grows))


def test_masks_by_shape_make_programs_of_their_own():
    plain, masked = (
        found(optax.adamw(0.1, weight_decay=0.5, mask=mask))
        for mask in (None, lambda p: jax.tree.map(lambda x: x.shape[0] > 4, p))
    )
    assert len({program.text for program in plain.programs}) == 1  # as shapes are no part of them
    assert len({program.text for program in masked.programs}) == 2


def test_digests_show_settings_and_nothing_else():
    def of(tx):
        return digest(found(tx).text)

    assert of(optax.adam(0.1)) == of(optax.adam(0.1))
    values = (
        of(optax.adam(0.1)), of(optax.adam(0.2)), of(optax.adam(0.1, b1=0.8)), of(optax.adam(optax.linear_schedule(0.1, 0, 9))),
        of(optax.adam(optax.linear_schedule(0.1, 0, 8))), of(optax.adagrad(0.1)), of(optax.adagrad(0.1, 1)),
        of(each(lambda g: g * np.full(g.shape, 3.0))), of(each(lambda g: g * np.full(g.shape, 4.0))),
    )  # fmt: skip
    assert len(set(values)) == len(values)
