"""PyTorch under a MeshStrategy: the numbers of one process, of modules that all ranks have and of layers that they divide."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from mpistrat.errors import CollectiveMismatchError  # noqa: E402
from tests.harness.torch_meshes import CLIP, EPOCHS, LAYOUTS, Clipped, Pair  # noqa: E402
from tests.harness.torch_training import MODULES, check_equal, dataset, difference, distributed, plain, step_of  # noqa: E402


def meshes():
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    return [{"data": size // model, "model": model} for model in (1, 2, 4) if size % model == 0]


@pytest.mark.ranks(2, 4, timeout=180)
@pytest.mark.parametrize("name", MODULES)
def test_modules_that_all_ranks_have(name):
    for axes in meshes():
        with ms.MeshStrategy(axes=axes) as strategy:
            check_equal(strategy, name)


def put(strategy, seed=0):
    module = Pair(strategy.mesh)
    for parameter in module.parameters() if strategy.rank else ():  # rank 0's count
        parameter.data.add_(seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    with strategy.scope():
        return ms.torch.distribute(module, optimizer, max_norm=CLIP, layouts=LAYOUTS)


def expected(epochs):
    module = Pair()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    plain(module, Clipped(optimizer), epochs=epochs)
    return module.state_dict(), optimizer.state_dict()["state"]


def check(module, optimizer, epochs):
    weights, states = expected(epochs)
    state = module.state_dict()
    assert state.keys() == weights.keys()
    assert difference([state[name] for name in weights], list(weights.values())) < 1e-9
    found = optimizer.state_dict()["state"]
    for index, slots in states.items():
        assert difference([found[index][name] for name in slots], list(slots.values())) < 1e-9


@pytest.mark.ranks(1, 2, 4, timeout=180)
def test_layers_that_ranks_divide(mpi_tmp_path):
    """Uneven last batches, clipping, states whole on every rank; files and states go from each mesh to each other."""
    for number, axes in enumerate(meshes()):
        with ms.MeshStrategy(axes=axes) as strategy:
            module, optimizer = put(strategy, seed=1)
            model = axes["model"]
            assert tuple(module.first.weight.shape) == (16 // model, 6)
            assert tuple(module.second.weight.shape) == (3, 16 // model)
            distributed(strategy, module, optimizer, epochs=EPOCHS)
            check(module, optimizer, EPOCHS)
            strategy.save(mpi_tmp_path / f"{number}.h5")
            states = module.state_dict(), optimizer.state_dict()
    for number, axes in enumerate(meshes()):
        with ms.MeshStrategy(axes=axes) as strategy:
            module, optimizer = put(strategy)
            strategy.restore(mpi_tmp_path / f"{len(meshes()) - 1 - number}.h5")
            distributed(strategy, module, optimizer, epochs=EPOCHS, first=EPOCHS)
            check(module, optimizer, 2 * EPOCHS)
            module.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            distributed(strategy, module, optimizer, epochs=EPOCHS, first=EPOCHS)
            check(module, optimizer, 2 * EPOCHS)
            with pytest.raises(RuntimeError, match=r"first\.weight"):
                module.load_state_dict(torch.nn.Linear(2, 2).state_dict())


@pytest.mark.ranks(4)
def test_steps_of_run():
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        module, optimizer = put(strategy)
        for batch in strategy.distribute_dataset(dataset()):
            strategy.run(step_of(module, optimizer), args=batch)
        check(module, optimizer, 1)


@pytest.mark.ranks(4)
def test_random_numbers_are_those_of_replicas():
    """Ranks of a replica drop the same numbers, replicas others; whatever the ranks have drawn before."""
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        torch.manual_seed(strategy.rank)
        with strategy.scope():
            ms.torch.distribute(torch.nn.Linear(2, 2))
        drawn = strategy.all_gather_object(torch.rand(3).tolist())
        assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


@pytest.mark.ranks(2)
def test_wrong_layouts_are_told():
    with ms.MeshStrategy(axes={"model": 2}) as strategy, strategy.scope():
        for layouts, error, text in [
            ({"fc.weight": ("model",)}, ValueError, r"names of parameters: bias, .*, got 'fc\.weight'"),
            ({"before.weight": ("modle", None)}, ValueError, "axes of the mesh"),
            ({"bias": ("model",)}, ValueError, "Pad it to 4"),
            ([("model",)], TypeError, "a dict of names and layouts"),
        ]:
            with pytest.raises(error, match=text):
                ms.torch.distribute(Pair(strategy.mesh), layouts=layouts)
        shares = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(shares.parameters(), lr=0.1)
        ms.torch.distribute(shares, optimizer)
        shares(torch.full((1, 2), 1.0 + strategy.rank)).sum().backward()
        with pytest.raises(CollectiveMismatchError, match=r"weight: expected the same gradient.*mesh\.all_reduce"):
            optimizer.step()
    refused = pytest.raises(ValueError, match="a strategy with a mesh")
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope(), refused:
        ms.torch.distribute(torch.nn.Linear(2, 2), layouts={"weight": ("model", None)})


@pytest.mark.hosts(2, ranks_per_host=2)
@pytest.mark.parametrize("overlap", [False, True])
def test_replicas_on_two_hosts(overlap):
    """Ranks of a replica share a host; the sums between hosts may begin within backward passes."""
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        module = Pair(strategy.mesh)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        with strategy.scope():
            ms.torch.distribute(module, optimizer, layouts=LAYOUTS, max_norm=CLIP, overlap=overlap)
        distributed(strategy, module, optimizer, epochs=EPOCHS)
        check(module, optimizer, EPOCHS)
