"""JAX under a MeshStrategy: the numbers of one process, of trees that each rank has whole and of layers that ranks divide."""

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.experimental import io_callback  # noqa: E402

import mpistrat as ms  # noqa: E402
from mpistrat.errors import CollectiveMismatchError  # noqa: E402
from tests.harness.jax_training import RULES, arrays, dataset, dict_tree, difference, plain, put, train  # noqa: E402

LAYOUTS = {"first/w": (None, "model"), "first/b": ("model",), "second/w": ("model", None)}
CLIP = 0.1


def meshes():
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    return [{"data": size // model, "model": model} for model in (1, 2, 4) if size % model == 0]


def pair(mesh):
    """The step of `dict_tree`, with the first layer split by columns and the second by rows."""

    def collective(call, x):
        return io_callback(lambda array: call(np.asarray(array), "model"), jax.typeof(x), x, ordered=True)

    @jax.custom_vjp
    def all_reduce(x):
        return collective(mesh.all_reduce, x)

    @jax.custom_vjp
    def replicate(x):
        return x

    all_reduce.defvjp(lambda x: (all_reduce(x), None), lambda _, g: (g,))
    replicate.defvjp(lambda x: (x, None), lambda _, g: (collective(mesh.replicate_backward, g),))

    @jax.jit
    @jax.value_and_grad
    def step(p, x, y):
        hidden = jnp.tanh(replicate(x) @ p["first"]["w"] + p["first"]["b"])
        logits = all_reduce(hidden @ p["second"]["w"]) + p["second"]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return step


@pytest.mark.ranks(2, 4, timeout=180)
def test_trees_that_all_ranks_have():
    tree, step = dict_tree()
    expected = plain(tree, step, RULES["adam"][1]())
    for axes in meshes():
        with put(rule="adam", strategy=ms.MeshStrategy(axes=axes)) as (strategy, params, step, optimizer):
            assert difference(arrays(train(strategy, params, step, optimizer)), expected) < 1e-9


@pytest.mark.ranks(1, 2, 4, timeout=180)
def test_layers_that_ranks_divide(mpi_tmp_path):
    """By optax's rule, clipped, with uneven last batches, and saved in each mesh for each other."""
    tree, step = dict_tree()
    clipped = optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(1e-2))
    expected = [plain(tree, step, clipped, epochs=epochs) for epochs in (2, 4)]

    def trained(strategy, source=None):
        tree, _ = dict_tree()
        if strategy.rank:  # rank 0's count
            tree = jax.tree.map(lambda leaf: leaf + 1, tree)
        with strategy.scope():
            params, optimizer = ms.jax.distribute(tree, optax.adam(1e-2), max_norm=CLIP, layouts=LAYOUTS)
        assert params["first"]["w"].shape == (10, 16 // strategy.mesh.sizes["model"])
        data, step = strategy.distribute_dataset(dataset()), pair(strategy.mesh)
        if source is not None:
            strategy.restore(source)
            data.set_epoch(2)
        for _ in range(2):
            for x, y in data:
                params = ms.jax.apply(optimizer, step(params, x, y)[1], params, of=x)
        return params

    def check(strategy, params, wholes):
        variables = strategy.extended.placement.variables  # in the order of the leaves
        for leaf, variable, whole in zip(jax.tree.leaves(params), variables, wholes, strict=True):
            assert np.array_equal(leaf, variable.array)
            assert difference([variable.gathered()], [whole]) < 1e-9

    for number, axes in enumerate(meshes()):
        with ms.MeshStrategy(axes=axes) as strategy:
            check(strategy, trained(strategy), expected[0])
            strategy.save(mpi_tmp_path / f"{number}.h5")
    for number, axes in enumerate(reversed(meshes())):
        with ms.MeshStrategy(axes=axes) as strategy:
            check(strategy, trained(strategy, mpi_tmp_path / f"{number}.h5"), expected[1])


@pytest.mark.ranks(4)
def test_calls_in_another_order_are_told():
    """Callbacks of a jitted function on ranks that differ: an error of the function on the ranks along the axis."""
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        mesh = strategy.mesh

        @jax.jit
        def step(x):
            form = jax.typeof(x)
            op = "MAX" if strategy.rank == 3 else "SUM"
            return io_callback(lambda a: mesh.all_reduce(op, np.asarray(a), mesh_axis="model"), form, x, ordered=True)

        if mesh.at["data"]:
            with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveMismatchError"):
                jax.block_until_ready(step(jnp.ones(3)))
        else:
            assert np.asarray(step(jnp.ones(3))).tolist() == [2.0] * 3


@pytest.mark.ranks(4)
def test_keys_are_those_of_replicas():
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy, strategy.scope():
        drawn = strategy.all_gather_object(jax.random.uniform(ms.jax.key(0), (3,)).tolist())
        assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


@pytest.mark.ranks(2)
def test_wrong_layouts_are_told():
    with ms.MeshStrategy(axes={"model": 2}) as strategy, strategy.scope():
        for layouts, error, text in [
            (
                {"first": (None, "model")},
                ValueError,
                "names of parameters: first/b, first/w, second/b, .*, got 'first'",
            ),
            ({"second/none": ("model",)}, ValueError, "names of parameters"),
            ({"second/b": ("model",)}, ValueError, "Pad it to 4"),
            ([None], TypeError, "a dict of names and layouts"),
        ]:
            with pytest.raises(error, match=text):
                ms.jax.distribute(dict_tree()[0], layouts=layouts)
        with pytest.raises(CollectiveMismatchError, match="model"):
            layout = ("model", None) if strategy.rank else (None, "model")
            ms.jax.distribute({"w": np.zeros((2, 2))}, layouts={"w": layout})
    refused = pytest.raises(ValueError, match="a strategy with a mesh")
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope(), refused:
        ms.jax.distribute({"w": np.zeros((2, 2))}, layouts={"w": ("model", None)})
