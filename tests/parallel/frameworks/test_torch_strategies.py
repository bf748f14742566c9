"""PyTorch under every strategy: the weights of one process of plain torch, after uneven last batches too."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from tests.harness.torch_training import (  # noqa: E402
    BATCH,
    EPOCHS,
    MODULES,
    check_equal,
    difference,
    distributed,
    make,
    plain,
)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", MODULES)
def test_one_device(name):
    with ms.OneDeviceStrategy("cpu:0") as strategy:
        check_equal(strategy, name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MODULES)
def test_mirrored_with_two_devices(name):
    with ms.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        check_equal(strategy, name)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", MODULES)
def test_multi_worker_mirrored(name):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        check_equal(strategy, name)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", MODULES)
def test_central_storage(name):
    with ms.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        check_equal(strategy, name)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", MODULES)
def test_halves_of_the_world(name):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    half = 2 * world.rank // world.size
    comm = world.Split(half)
    make_strategy = [ms.MultiWorkerMirroredStrategy, ms.MirroredStrategy][half]
    with make_strategy(comm=comm) as strategy:
        check_equal(strategy, name)
    comm.Free()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["mlp", "conv_net"])
def test_two_ranks_save_and_three_or_one_go_on(name, mpi_tmp_path):
    from mpi4py import MPI

    build, kind, rule, options = MODULES[name]
    path, world, half = mpi_tmp_path / "run.h5", MPI.COMM_WORLD, EPOCHS // 2
    reference = build()
    plain(reference, make(rule, reference), kind)
    expected = reference.state_dict()

    def train(comm, first, restored):
        module = build()
        optimizer = make(rule, module)
        with ms.MultiWorkerMirroredStrategy(comm=comm) as strategy:
            with strategy.scope():
                ms.torch.distribute(module, optimizer, **options)
            if restored:
                strategy.restore(path)
            distributed(strategy, module, optimizer, kind, epochs=half, first=first)
            if not restored:
                strategy.save(path)
            module.eval()
            return {key: value.clone() for key, value in module.state_dict().items()}

    two = world.Split(0 if world.rank < 2 else MPI.UNDEFINED)
    if two != MPI.COMM_NULL:
        train(two, 0, restored=False)
        two.Free()
    world.Barrier()
    for comm in (world, MPI.COMM_SELF):
        state = train(comm, half, restored=True)
        assert {key for key in expected if difference([state[key]], [expected[key]]) >= 1e-9} == set()


# Parameter servers. With 52 rows in batches of 6 one of two workers has a step less in each epoch.


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("name", ["mlp", "embedding", "transformer"])
def test_workers_that_wait(name):
    strategy = ms.ParameterServerStrategy(num_ps=1, max_staleness=0)
    check_equal(strategy, name, BATCH // strategy.num_workers)
    strategy.close()


@pytest.mark.ranks(4)
def test_parameters_in_parts_on_two_servers():
    parts = ms.partitioners.FixedShardsPartitioner(2)
    strategy = ms.ParameterServerStrategy(num_ps=2, max_staleness=0, variable_partitioner=parts)
    check_equal(strategy, "mlp", BATCH // 2)
    strategy.close()


@pytest.mark.ranks(3)
def test_workers_in_sync():
    strategy = ms.ParameterServerStrategy(num_ps=1, workers_in_sync=2)
    check_equal(strategy, "conv_net")
    strategy.close()


@pytest.mark.ranks(2)
def test_a_worker_with_two_devices():
    strategy = ms.ParameterServerStrategy(num_ps=1, devices=["cpu:0", "cpu:1"])
    check_equal(strategy, "conv_net")
    strategy.close()


@pytest.mark.ranks(3)
def test_what_workers_that_step_apart_cannot_do_is_refused():
    build = MODULES["conv_net"][0]
    strategy = ms.ParameterServerStrategy(num_ps=1, max_staleness=0)
    with strategy.scope():
        with pytest.raises(ValueError, match="SyncBatchNorm: expected replicas that run their forward passes together"):
            ms.torch.distribute(build(), sync_batch_norm=True)
        module = build()
        with pytest.raises(ValueError, match="max_norm: expected None, where servers sum"):
            ms.torch.distribute(module, make("SGD", module), max_norm=1.0)
    strategy.close()
