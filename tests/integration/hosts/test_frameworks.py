"""Modules of PyTorch and trees of JAX over two isolated hosts of two ranks: the weights of one process."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from tests.harness.torch_training import check_equal  # noqa: E402


@pytest.mark.hosts(2, ranks_per_host=2)
@pytest.mark.parametrize("name", ["mlp", "conv_net"])
def test_two_hosts_equal_one_process(name):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        assert strategy.extended.topology.num_nodes == 2
        check_equal(strategy, name)
    torch.set_num_threads(before)


@pytest.mark.hosts(2, ranks_per_host=2)
def test_a_server_on_another_host():
    strategy = ms.ParameterServerStrategy(num_ps=1, max_staleness=0)
    check_equal(strategy, "embedding", batch=4)
    strategy.close()


@pytest.mark.hosts(2, ranks_per_host=2)
@pytest.mark.parametrize("sharded", [None, True])
def test_optax_rules_on_the_whole_tree(sharded):
    jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")
    import numpy as np
    import optax

    rng = np.random.default_rng(0)
    tree = {
        name: rng.normal(size=n).astype(np.float32) for name, n in (("a", (600, 700)), ("b", 37), ("c", (300, 1100)))
    }
    rules = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)), optax.lamb(1e-2)
    for rule in (*rules, optax.contrib.schedule_free_adamw(1e-2)):
        theirs, state, update = tree, rule.init(tree), jax.jit(rule.update)
        with ms.MultiWorkerMirroredStrategy(sharded_slots=sharded) as strategy:
            assert strategy.extended.topology.num_nodes == 2
            with strategy.scope():
                params, optimizer = ms.jax.distribute(tree, rule)
            for _ in range(3):
                grads = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), tree)
                params = ms.jax.apply(optimizer, grads, params)
                updates, state = update(grads, state, theirs)
                theirs = optax.apply_updates(theirs, updates)
            for name, leaf in theirs.items():
                np.testing.assert_allclose(params[name], leaf, rtol=1e-4, atol=1e-5)


@pytest.mark.hosts(2, ranks_per_host=1)
def test_optax_rules_on_the_whole_tree_take_no_local_steps():
    pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")
    import numpy as np
    import optax

    with ms.MultiWorkerMirroredStrategy(local_steps=ms.LocalSteps(every=2)) as strategy, strategy.scope():
        with pytest.raises(ValueError, match="nodes that train by themselves"):
            ms.jax.distribute({"w": np.ones(3, np.float32)}, optax.lamb(0.1))
        ms.jax.distribute({"w": np.ones(3, np.float32)}, optax.adamw(0.1))
