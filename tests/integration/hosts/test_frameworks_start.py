"""torch.distributed starts over two isolated hosts: the address of the store is one that the other host can reach."""

import os

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import torch.distributed as dist  # noqa: E402

from mpistrat.cluster import addresses as own  # noqa: E402
from mpistrat.errors import ClusterError  # noqa: E402


@pytest.mark.hosts(2, ranks_per_host=2)
def test_two_hosts():
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    for _ in range(2):
        dist.init_process_group("gloo")
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        assert (dist.get_rank(), dist.get_world_size(), value.item()) == (rank, 4, 10)
        assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == (str(rank % 2), "2")
        assert not os.environ["MASTER_ADDR"].startswith("127.")
        dist.destroy_process_group()


@pytest.mark.hosts(2, ranks_per_host=2)
def test_an_address_that_the_other_host_cannot_reach_is_passed_over(monkeypatch):
    """No host has the address 192.0.2.1. The loopback address reaches the store on one host only."""
    addresses = own.own_addresses()
    monkeypatch.setattr(own, "_CONNECT", 0.5)
    monkeypatch.setattr(own, "own_addresses", lambda: ["192.0.2.1", "127.0.0.1", *addresses])
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 4
    from mpi4py import MPI

    assert os.environ["MASTER_ADDR"] in MPI.COMM_WORLD.bcast(addresses)
    dist.destroy_process_group()


@pytest.mark.hosts(2, ranks_per_host=2)
def test_no_address_is_an_error_on_every_rank(monkeypatch):
    monkeypatch.setattr(own, "_CONNECT", 0.5)
    for addresses in (["127.0.0.1"], []):
        monkeypatch.setattr(own, "own_addresses", lambda found=addresses: found)
        with pytest.raises(ClusterError, match="address: expected an address of rank 0's machine that every node"):
            dist.init_process_group("gloo")


@pytest.mark.hosts(2, ranks_per_host=2)
def test_ranks_of_one_host():
    """Of the second: its first rank is rank 0, and no address of the network is needed."""
    from mpi4py import MPI

    import mpistrat as ms

    comm = MPI.COMM_WORLD
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    dist.distributed_c10d._world.group_count = 0
    ms.torch.use(node)
    dist.init_process_group("gloo")
    value = torch.tensor([comm.rank + 1.0])
    dist.all_reduce(value)
    assert value.item() == (3 if comm.rank < 2 else 7)
    assert (dist.get_rank(), os.environ["MASTER_ADDR"]) == (node.rank, "127.0.0.1")
    dist.destroy_process_group()
    ms.torch.use()
    node.Free()


PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("mpi")
value = torch.ones(1)
dist.all_reduce(value)
if {destroys}:
    dist.destroy_process_group()
print(value.item())
"""


@pytest.mark.parametrize("destroys", [True, False])
def test_the_program_ends_well(mpi_run, hosts, destroys):
    """Over OFI, whose MPI_Finalize fails if a rank has sent what no other received; `mpistrat run` chooses it, too."""
    ended = mpi_run(PROGRAM.format(destroys=destroys), 4, hosts=hosts, timeout=90, env={"MPIR_CVAR_CH4_NETMOD": "ofi"})
    assert ended.returncode == 0, ended
    assert [out.split()[0] for out in ended.out] == ["4.0"] * 4, ended
