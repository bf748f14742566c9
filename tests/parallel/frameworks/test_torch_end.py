"""The end of a program that does not destroy its groups: no thread of them, with objects of PyTorch, lives on.

PyTorch's destructors abort the process in a thread that is still there when the interpreter ends, by chance.
"""

import threading

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

from mpistrat.torch.backend.lane import Lane
from mpistrat.torch.backend.work import OperationWork

LAST = """
import atexit, sys, threading
atexit.register(lambda: print("at the end", sorted(each.name for each in threading.enumerate()), flush=True))
"""

BACKEND = """
import torch, torch.distributed as dist
dist.init_process_group("mpi")
other, value = 1 - dist.get_rank(), torch.ones(3)
dist.all_reduce(value, async_op=True).wait()
for work in [dist.isend(value, other), dist.irecv(torch.empty(3), other)]:
    work.wait()
late = dist.irecv(torch.empty(3), other, tag=1)  # of a message that no rank sends
future = late.get_future()
print("before", sum(each.name.startswith("mpistrat") for each in threading.enumerate()) >= 2, flush=True)
"""

HOROVOD = """
import torch, mpistrat.horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(3), op=hvd.Adasum)
print("before", any(each.name.startswith("mpistrat") for each in threading.enumerate()), flush=True)
"""


@pytest.mark.parametrize("program", [BACKEND, HOROVOD], ids=["backend", "horovod"])
def test_no_thread_lives_on(mpi_run, program):
    ended = mpi_run(LAST + program, 2, timeout=120)
    assert ended.returncode == 0, str(ended)
    for out in ended.out:
        assert out.splitlines() == ["before True", "at the end ['MainThread']"], str(ended)


ABSENT = """
import torch, torch.distributed as dist, time
dist.init_process_group("mpi")
if dist.get_rank() == 0:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    receive = dist.irecv(torch.empty(3), 1)
else:
    time.sleep(3)
"""


def test_an_operation_that_does_not_end_keeps_no_rank(mpi_run):
    ended = mpi_run(ABSENT, 2, timeout=100)
    assert not ended.timed_out and "terminate called" not in ended.stderr, str(ended)


def test_a_call_within_an_operation_runs_at_once_while_the_lane_ends():
    lane, told, seen = Lane("lane", True), threading.Event(), []

    def inner():
        seen.append("inner")

    def outer():
        told.wait(10)
        lane.run(OperationWork("inner", []), inner, True)
        seen.append("outer")

    lane.run(OperationWork("outer", []), outer, False)
    thread = lane.stop()
    told.set()
    thread.join(10)
    assert seen == ["inner", "outer"] and not thread.is_alive()
    again = lane.run(OperationWork("again", []), lambda: seen.append("again"), False)
    assert again.wait() and seen[-1] == "again"
    lane.close()
