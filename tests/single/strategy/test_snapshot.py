"""A snapshot in memory: whatever moment ranks die at, the newest whole one is the state after some step."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpistrat.comm import job_files
from mpistrat.comm.monitor import leftovers
from mpistrat.state.list import Form, Slice
from mpistrat.state.snapshot import SnapshotFile

KEY, RUN = "0123456789abcdef", "/scratch/run"
RANKS, SIZE = 2, 6


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "FOLDER", tmp_path)
    return tmp_path


def made(generation=0, serial=1, first=0):
    path = job_files.path_of(KEY, RUN, generation, serial, first)
    return SnapshotFile.make(path, {"variables/w": Form((SIZE,), "float64")}, RANKS, 4096)


def part(rank, step):
    low, high = rank * SIZE // RANKS, (rank + 1) * SIZE // RANKS
    return Slice("variables/w", low, np.full(high - low, float(step)))


def operations(file, rank, number, step, buffers=2):
    """What a rank does for a snapshot, in its order."""
    buffer = number % buffers
    first, second = part(rank, step), part(rank, step)
    yield lambda: file.begin(buffer, rank)
    yield lambda: file.write(buffer, [first._replace(array=first.array[:1])])
    yield lambda: file.write(buffer, [second._replace(start=second.start + 1, array=second.array[1:])])
    if rank == 0:
        yield lambda: file.write_notes(buffer, b'{"extra": {"step": %d}, "optimizers": []}' % step)
    yield lambda: file.end(buffer, rank, step)


def states(buffers=2, words_first=False):
    """Take three snapshots, and stop after each possible number of operations of each rank; yield what is read then."""
    for last in range(3):
        lengths = [len(list(operations(made(9), rank, 0, 1))) for rank in range(RANKS)]
        job_files.path_of(KEY, RUN, 9, 1, 0).unlink()
        for stops in np.ndindex(*(length + 1 for length in lengths)):
            file = made()
            for number in range(last + 1):
                for rank in range(RANKS):
                    todo = list(operations(file, rank, number, 10 * (number + 1), buffers))
                    todo = [todo[-1], *todo[1:-1]] if words_first else todo
                    for operation in todo[: stops[rank]] if number == last else todo:
                        operation()
            again = SnapshotFile(file.path)
            try:
                step = again.newest()
            except ValueError:  # no notes
                step = -1
            yield (
                last,
                stops == tuple(lengths),
                step,
                step > 0 and again.read_array("variables/w", Form((SIZE,), "float64")),
                again,
            )
            file.path.unlink()


def test_what_is_whole_is_the_state_of_its_step():
    seen = set()
    for last, complete, step, array, file in states():
        assert step == 10 * (last + complete)
        if step:
            assert array.tolist() == [step] * SIZE
            assert file.extra() == {"step": step}
        seen.add(step)
    assert seen == {0, 10, 20, 30}


@pytest.mark.parametrize("mistake", [{"buffers": 1}, {"words_first": True}])
def test_mistakes_would_be_seen(mistake):
    assert any(
        step != 10 * (last + complete) or (step > 0 and array.tolist() != [step] * SIZE)
        for last, complete, step, array, _ in states(**mistake)
    )


def test_files_are_this_users_alone_and_complete():
    file = made()
    about = os.stat(file.path)
    assert stat.S_IMODE(about.st_mode) == 0o600
    assert about.st_blocks * 512 >= about.st_size  # the memory is there
    file.path.chmod(0o640)
    with pytest.raises(PermissionError, match="not a regular file of this user alone"):
        SnapshotFile(file.path)


def test_older_ones_are_removed_and_others_stay(folder):
    old, replaced, other, new = made(0), made(1, 1), made(1, 1, first=2), made(1, 2)
    (new.path.parent / "sffffffff.g0.1.r0.part").touch()
    job_files.remove_older(KEY, new.path)
    assert set(job_files.paths(KEY)) == {other.path, new.path}
    assert not old.path.exists() and not replaced.path.exists()
    assert len(list(new.path.parent.iterdir())) == 3
    assert [job_files.generation_of(path) for path in job_files.paths(KEY)] == [1, 1]


def test_what_nobody_supervises_is_swept_after_some_minutes(folder):
    held = job_files.lock(KEY)
    file = made()
    old = 1e9
    for path in folder.rglob("*"):
        os.utime(path, (old, old))
    assert job_files.sweep() == []  # it is locked
    os.close(held)
    os.utime(file.path)
    assert job_files.sweep() == []  # it is young
    os.utime(file.path, (old, old))
    assert job_files.sweep() == []  # a rank has it open
    del file
    assert job_files.sweep(KEY) == []  # it is the own one
    assert job_files.sweep() == [KEY]
    assert list(folder.iterdir()) == []


def test_a_requeued_job_takes_back_the_memory_of_its_earlier_starts_at_once(folder, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    first, beside = job_files.new_key(), job_files.new_key()
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    another = job_files.new_key()
    for key in (first, beside, another):
        SnapshotFile.make(job_files.path_of(key, RUN, 0, 1, 0), {"variables/w": Form((SIZE,), "float64")}, 1, 100)
    assert len({first, beside, another}) == 3
    assert job_files.sweep(beside) == []  # a second command of the same start may use it
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    held = SnapshotFile(job_files.paths(beside)[0])
    assert job_files.sweep(job_files.new_key()) == [first]  # the other one's rank lives
    del held
    assert job_files.sweep(job_files.new_key()) == [beside]
    assert job_files.paths(another)


def test_a_disk_that_is_full_leaves_nothing(folder, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        made()
    assert not any(path.is_file() for path in folder.rglob("*"))


def test_a_node_without_the_supervisor_remembers_its_generation(folder):
    """Its ranks may have gone on without those of the supervisor's node, which then tells a number that they have had."""
    assert job_files.least_generation(KEY, 2) == 2
    job_files.state(KEY)[job_files.GENERATION] = 3
    assert [job_files.least_generation(KEY, told) for told in (2, 3, 4, 5)] == [4, 4, 4, 5]
    job_files.remove(KEY)
    os.close(job_files.lock(KEY))
    job_files.state(KEY)[job_files.GENERATION] = 3
    assert job_files.least_generation(KEY, 2) == 2  # the supervisor has read it


def test_a_run_does_not_see_another_one(folder):
    for run, step in (("/scratch/fold-0", 7), ("/scratch/fold-1", 3)):
        file = SnapshotFile.make(
            job_files.path_of(KEY, run, 0, 1, 0), {"variables/w": Form((SIZE,), "float64")}, 1, 4096
        )
        file.write_notes(0, b'{"extra": null, "optimizers": []}')
        file.end(0, 0, step)
    found = {run: [SnapshotFile(path).newest() for path in job_files.paths(KEY, run)]
             for run in ("/scratch/fold-0", "/scratch/fold-1", "/scratch/fold-2")}  # fmt: skip
    assert list(found.values()) == [[7], [3], []]
    job_files.remove_older(KEY, job_files.path_of(KEY, "/scratch/fold-0", 1, 1, 0))
    assert [len(job_files.paths(KEY, run)) for run in found] == [0, 1, 0]


def link_to_a_folder(path):
    path.with_name("elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("plant", [os.mkfifo, Path.touch, lambda path: path.mkdir(mode=0o777), link_to_a_folder])
def test_a_name_that_is_taken_is_skipped(folder, plant):
    """In /dev/shm another user may take any name; such a folder is none of this user's."""
    taken = job_files.mark(KEY, "lock").parent
    umask = os.umask(0)
    try:
        plant(taken)
    finally:
        os.umask(umask)
    assert job_files.sweep() == [] and not job_files.supervisors() and not job_files.paths(KEY)
    held = job_files.lock(KEY)
    file = made()
    assert file.path.parent == job_files.mark(KEY, "lock").parent != taken
    assert job_files.supervisors() == {os.getpid(): KEY} and job_files.paths(KEY) == [file.path]
    job_files.state(KEY)[job_files.ENDED] = 2
    leftovers.set_word(KEY, job_files.GENERATION, 3)
    assert [job_files.state(KEY)[word] for word in (job_files.ENDED, job_files.GENERATION)] == [2, 3]
    assert not taken.is_dir() or not any(taken.iterdir())
    job_files.remove(KEY)
    assert not file.path.parent.exists() and os.path.lexists(taken)
    os.close(held)


@pytest.mark.parametrize("plant", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_neither_opened_nor_waited_for(plant):
    held = job_files.lock(KEY)
    for what in ("s00000000.g0.1.r0", "modules", "size"):
        plant(job_files.mark(KEY, what))
    with pytest.raises(OSError):
        SnapshotFile(job_files.mark(KEY, "s00000000.g0.1.r0"))
    with pytest.raises(OSError):
        job_files.imported(KEY)
    with pytest.raises(OSError):
        job_files.asked_size(KEY)
    os.close(held)
    assert job_files.unsupervised() == [KEY]


def test_a_child_of_a_rank_is_no_rank():
    code = "from mpistrat.base.environment import Environment; print(repr(Environment.read().job))"
    child = f"import subprocess, sys, mpistrat; {code}; sys.exit(subprocess.run([sys.executable, '-c', {code!r}]).returncode)"
    reply = subprocess.run(
        [sys.executable, "-c", child],
        env={**os.environ, "MPISTRAT_JOB": KEY},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(reply.stdout.split()) == ["''", repr(KEY)], reply.stderr
