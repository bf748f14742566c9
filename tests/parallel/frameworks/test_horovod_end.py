"""The end of Horovod's calls: `hvd.shutdown` leaves no thread and no memory to the end of the interpreter."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat.horovod.torch as hvd  # noqa: E402
from mpistrat.horovod import engine, negotiation  # noqa: E402
from mpistrat.horovod.torch import basics  # noqa: E402


@pytest.mark.ranks(1, 2)
def test_the_thread_ends_without_an_answer(monkeypatch):
    monkeypatch.setattr(engine, "_LEAVE", 0.3)
    hvd.init()
    thread = basics.engine("test")._thread
    monkeypatch.setattr(negotiation.Coordinator, "decide", lambda self: None)
    hvd.shutdown()
    assert not thread.is_alive()


@pytest.mark.ranks(1, 2)
def test_all_memory_is_freed_without_the_garbage_collector():
    from mpi4py import MPI

    hvd.init()
    tensor = torch.ones(3)
    hvd.allreduce_(tensor, name="tensor")
    running = weakref.ref(basics.engine("test"))
    MPI.COMM_WORLD.Barrier()  # the first shutdown ends the calls of all
    gc.collect()
    gc.disable()
    try:
        hvd.shutdown()
        assert running() is None
    finally:
        gc.enable()


@pytest.mark.ranks(2)
def test_a_large_message_to_a_rank_that_has_ended_is_not_waited_for(monkeypatch):
    """The engine of rank 0 ends while a message of rank 1 is on the way that MPI sends in parts."""
    from mpi4py import MPI

    hvd.init()
    running, world = basics.engine("test"), MPI.COMM_WORLD
    monkeypatch.setattr(engine, "_LAST_MESSAGES", 0.3)
    world.Barrier()
    if world.rank == 0:
        hvd.shutdown()
    else:
        with running._working:  # the engine does not see the end yet
            world.recv(source=0)
            running._send(bytes(1 << 24), 0, 77)
    if world.rank == 0:
        world.send(None, 1)
    else:
        hvd.shutdown()
        assert not running._thread.is_alive() and engine._unread
    world.Barrier()
    if world.rank == 1:  # MPI's end waits for the message
        world.recv(source=0)
        engine._unread.clear()
    else:
        running._comm.Recv([bytearray(1 << 24), MPI.BYTE], 1, 77)
        world.send(None, 1)
