"""Memory that the ranks of a node share."""

import gc
import mmap
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from mpistrat.comm import shared_memory
from mpistrat.errors import SharedMemoryError

pytestmark = pytest.mark.ranks(1, 2, 4)


def test_everybody_sees_what_each_rank_wrote(group):
    node = group.node
    block = node.allocate([1000 * (r + 1) for r in range(node.size)], "test")
    assert [segment.nbytes for segment in block.segments] == [1000 * (r + 1) for r in range(node.size)]
    assert not any(segment.any() for segment in block.segments)
    group.barrier()
    block.segments[node.rank][:] = node.rank + 1
    group.barrier()
    assert [int(segment.astype(int).sum()) for segment in block.segments] == [
        1000 * (r + 1) * (r + 1) for r in range(node.size)
    ]
    group.barrier()


def test_segments_are_page_aligned_and_may_be_empty(group):
    node = group.node
    block = node.allocate([100 if r == 0 else 0 for r in range(node.size)], "test")
    assert [segment.nbytes for segment in block.segments] == [100] + [0] * (node.size - 1)
    if node.shared:
        assert block.segments[0].ctypes.data % 4096 == 0


def test_locate(group):
    node = group.node
    first = node.allocate([4096] * node.size, "first")
    second = node.allocate([800] * node.size, "second")
    view = second.segments[-1].view(np.float64)[3:10]
    assert node.locate(view) == (second, node.size - 1, 24)
    assert node.locate(view.reshape(7, 1)[2:, :]) == (second, node.size - 1, 40)
    assert node.locate(first.segments[0]) == (first, 0, 0)
    assert node.locate(np.zeros(3)) is None
    group.close()
    assert node.locate(view) is None


def test_populate(group):
    node = group.node
    block = node.allocate([1 << 20] * node.size, "test")
    block.segments[node.rank][5000] = 7
    assert block.populate(node.rank, 100, 1 << 20)
    assert block.populate(node.rank, 8, 8)
    assert block.segments[node.rank][5000] == 7


def test_views_outlive_the_group(group):
    node = group.node
    block = node.allocate([4096] * node.size, "test")
    mine = block.segments[node.rank][8:16] if group.topology.rank == 0 else None
    group.close()
    assert block.closed
    if mine is not None:
        mine[:] = 3
        assert mine.tolist() == [3] * 8


def test_memory_is_freed_when_nobody_looks(make_group):
    """1 GiB is made, touched a little and freed forty times: more than the address space limit that is set here."""
    group = make_group()
    if not group.node.shared:
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (8 << 30), limits[1]))
    try:
        for _ in range(40):
            block = group.node.allocate([1 << 28] * group.node.size, "test")
            block.segments[group.node.rank][:10] = 1
            block.close()
            del block
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        gc.collect()


def test_too_small_is_an_error_on_every_rank(make_group, monkeypatch):
    """One rank's node says it has 3 MiB free: nobody gets memory, and everybody is told."""
    from mpistrat.comm import shared_memory

    group = make_group()
    if not group.node.shared:
        return
    if group.topology.rank == 0:
        monkeypatch.setattr(shared_memory, "free_space", lambda: 3 << 20)
    with pytest.raises(
        SharedMemoryError, match=r"too small for the variables: .*4\.\d MiB are needed, 3\.0 MiB are free"
    ):
        group.node.allocate([2 << 20] * 2 + [0] * (group.node.size - 2), "the variables")
    group.barrier()


def test_a_rank_that_cannot_populate_is_an_error_on_every_rank(make_group):
    group = make_group()
    if not group.node.shared:
        return
    group.node.agree_populated(True, "the variables")
    with pytest.raises(SharedMemoryError, match=r"node of rank 1 is too small for the variables.*--shm-size"):
        group.node.agree_populated(group.topology.rank != 1, "the variables")
    group.barrier()


@pytest.mark.parametrize("who", [0, -1])
def test_memory_that_a_rank_cannot_map_is_an_error_on_every_rank(group, monkeypatch, who):
    def refuse(*args):
        raise OSError(12, "Cannot allocate memory")

    rank = range(group.topology.size)[who]
    if group.topology.rank == rank and group.node.shared:
        monkeypatch.setattr(shared_memory, "map_file" if rank else "_make", refuse)
    if not group.node.shared:
        return
    with pytest.raises(
        SharedMemoryError, match=f"no memory can be shared for the variables on the node of rank {rank}: .*df /dev/shm"
    ):
        group.node.allocate([1000] * group.node.size, "the variables")
    monkeypatch.undo()
    assert group.node.allocate([1000] * group.node.size, "the variables").segments[0].nbytes == 1000
    group.barrier()


LIMITS = {
    "RLIMIT_NOFILE": (lambda: len(os.listdir("/proc/self/fd")), r"may have \d+ files open \(ulimit -n\)"),
    "RLIMIT_AS": (lambda: _mapped() + (1 << 20), r"of addresses \(ulimit -v\), and needs"),
    "RLIMIT_FSIZE": (lambda: 1 << 20, r"write files of 1\.0 MiB \(ulimit -f\)"),
}


def _mapped():
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_that_a_rank_meets_is_named_on_every_rank(group, name):
    allowed, text = LIMITS[name]
    rank, node = group.topology.size - 1 if name == "RLIMIT_AS" else 0, group.node
    if not node.shared:
        return
    limits = resource.getrlimit(getattr(resource, name))
    if group.topology.rank == rank:
        resource.setrlimit(getattr(resource, name), (allowed() - 1, limits[1]))
    try:
        with pytest.raises(SharedMemoryError, match=f"variables on the node of rank {rank}: .*{text}") as raised:
            node.allocate([8 << 20] * node.size, "the variables")
    finally:
        resource.setrlimit(getattr(resource, name), limits)
    assert "df /dev/shm" not in str(raised.value)
    group.barrier()


def _maps():
    """The maps of this process in /dev/shm; an earlier test may have left some, after an error on purpose."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/mpistrat-" in line}


def test_it_has_no_name_and_is_nobody_elses(group):
    node = group.node
    before = _maps()
    block = node.allocate([4096] * node.size, "test")
    made = _maps() - before
    assert all(line.endswith("(deleted)") for line in made)
    assert len(made) == node.shared
    block.close()


def test_a_file_that_others_may_read_is_not_taken(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"0" * 4096)
    path.chmod(0o604)
    with pytest.raises(PermissionError, match="not a regular file of this user alone"):
        shared_memory.map_file(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError):
        shared_memory.map_file(link)
