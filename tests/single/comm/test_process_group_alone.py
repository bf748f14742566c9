"""A group of one process, and what of the process group needs no ranks."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mpistrat.base.agree import fingerprint
from mpistrat.comm.call import describe
from mpistrat.comm.monitor import abort
from mpistrat.comm.monitor.rank_monitor import user_line
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.errors import ClosedError


def test_single_starts_no_mpi():
    program = """
import sys
from mpistrat.comm.process_group import ProcessGroup
group = ProcessGroup.single()
group.barrier()
with group.collective("all_reduce", "w", "float32", (3,)):
    pass
block = group.node.allocate([100], "test")
block.populate(0, 0, 100)
group.node.barrier()
group.close()
sys.exit("mpi4py.MPI" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_collectives_alone_do_nothing():
    group = ProcessGroup.single()
    array = np.arange(3.0)
    group.broadcast(array)
    assert array.tolist() == [0, 1, 2]
    assert group.all_gather_int([4, 5]).tolist() == [[4, 5]]
    assert group.all_gather_text("me") == ["me"]
    assert (group.agree(7), group.agree(-3, "max")) == (7, -3)
    assert (group.num_nodes, group.slices, group.slice_index, group.inter) == (1, 1, 0, None)
    assert group.replicas_of_node == [1]


def test_memory_alone():
    node = ProcessGroup.single().node
    block = node.allocate([64], "test")
    assert len(block.segments) == 1 and not block.segments[0].any()
    assert node.locate(block.segments[0][8:]) == (block, 0, 8)
    assert [room.nbytes for room in node.staging()] == [1 << 20]


def test_closed_alone():
    group = ProcessGroup.single()
    group.close()
    with pytest.raises(ClosedError, match="barrier"):
        group.barrier()


def test_a_call_is_made_once():
    group = ProcessGroup.single()
    call = group.collective("reduce", "w", np.dtype("f4"), (2, 3), detail=("SUM", 1))
    assert call is group.collective("reduce", "w", np.dtype("f4"), (2, 3), detail=("SUM", 1))
    assert call.text == "reduce 'w' float32 (2, 3) ('SUM', 1)"
    assert call.tag == fingerprint(call.text) > 0


def test_calls_do_not_pile_up():
    group = ProcessGroup.single()
    for number in range(10_000):
        group.collective("assign", "w", detail=number)
    assert len(group._calls) <= 4096


def test_fingerprint_is_the_same_in_every_process():
    """blake2b of 8 bytes, read as little-endian and halved; from the definition, computed apart."""
    program = "import hashlib; print(int.from_bytes(hashlib.blake2b(b'reduce', digest_size=8).digest(), 'little') // 2)"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert fingerprint("reduce") == int(other.stdout)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("barrier",), "barrier"),
        (("assign", "it's"), 'assign "it\'s"'),
        (("gather", "g", "bfloat16", ()), "gather 'g' bfloat16 ()"),
        (("gather", "", np.dtype(">i2"), np.array([2, 3])), "gather >i2 (2, 3)"),
        (("gather", "", None, None, "axis 0"), "gather axis 0"),
    ],
)
def test_describe(arguments, text):
    assert describe(*arguments) == text


def test_place_in_another_thread():
    here = threading.Event()

    def wait():
        here.set()
        threading.Event().wait(5)  # this line

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    here.wait(5)
    time.sleep(0.05)
    line = wait.__code__.co_firstlineno + 2
    assert user_line(thread.ident) == f"test_process_group_alone.py:{line}"
    assert user_line(-1) == "an unknown line"


def test_one_rank_keeps_pythons_hooks():
    before = sys.excepthook, threading.excepthook
    abort.install(0, 1)
    assert (sys.excepthook, threading.excepthook) == before
