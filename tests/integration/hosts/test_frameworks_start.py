"""torch.distributed and jax.distributed start over two isolated hosts: at an address that the other host can reach."""

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


JAX = """
import socket
import jax, jax.numpy as jnp, numpy as np
import mpistrat as ms
from jax.sharding import NamedSharding, PartitionSpec as P
from mpi4py import MPI
from mpistrat.cluster import addresses as own

rank = MPI.COMM_WORLD.rank
{before}
ms.jax.initialize()
mesh = jax.make_mesh((4,), ("ranks",))
rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("ranks")), np.float32([rank + 1]))
print("sum", float(jax.jit(jnp.sum)(rows)))
"""

ADDRESSES = """
found = own.own_addresses()
own._CONNECT, own.own_addresses = 0.5, lambda: ["192.0.2.1", "127.0.0.1", *found]
"""


def test_jax_over_two_hosts(mpi_run, hosts):
    """Addresses that reach nothing, or only the first host, are passed over."""
    pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")
    ended = mpi_run(JAX.format(before=ADDRESSES), 4, hosts=hosts, timeout=90)
    assert ended.returncode == 0 and all("sum 10.0" in out for out in ended.out), str(ended)


NAME = """
if rank >= 2:
    socket.gethostname = lambda: "localhost"  # as /etc/hosts of some systems gives a machine's name the loopback address
"""


def test_jax_on_a_host_whose_name_is_not_reachable(mpi_run, hosts):
    """gloo would listen where only the ranks of that host can connect. Every rank raises."""
    pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")
    ended = mpi_run(JAX.format(before=NAME), 4, hosts=hosts, timeout=90)
    expected = (
        "ClusterError: rank 2: ms.jax.initialize: address: expected an address of the network for the name localhost"
    )
    assert ended.returncode != 0 and expected in "".join(ended.err), str(ended)
    assert not any("sum" in out for out in ended.out), str(ended)
