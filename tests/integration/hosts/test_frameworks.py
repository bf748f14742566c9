"""Modules of PyTorch over two isolated hosts of two ranks: the weights of one process."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

from torch_training import check_equal  # noqa: E402

import mpistrat as ms  # noqa: E402


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
