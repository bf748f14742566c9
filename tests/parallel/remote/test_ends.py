"""Ranks that leave, on either side: nobody waits for ever, and nothing is lost silently."""

import pytest

START = """
import sys, os, time
import mpistrat as ms
from tests.harness.coordinators import BareStrategy
strategy = BareStrategy(warn_after=5.0, abort_after=30.0)
c = ms.coordinator.ClusterCoordinator(strategy)

def nap(seconds, value=None):
    time.sleep(seconds)
    return value

def serve():
    try:
        c.serve()
    except KeyboardInterrupt:  # Ctrl-C in a function: this worker leaves the program
        pass

"""


def test_the_chief_ends_without_closing(mpi_run):
    program = """
if c.is_chief:
    print(c.fetch([c.schedule(nap, (0.01, i)) for i in range(4)]))
else:
    c.serve()
    print("served")
"""
    result = mpi_run(START + program, 3, timeout=40)
    assert result.returncode == 0, result.stderr
    assert "[0, 1, 2, 3]" in result.out[0]
    assert "served" in result.out[1] and "served" in result.out[2]


def test_an_exception_on_the_chief_ends_the_job(mpi_run):
    program = """
with c:
    if c.is_chief:
        c.schedule(nap, (0.01,))
        raise ValueError("the chief gives up")
"""
    result = mpi_run(START + program, 3, timeout=40)
    assert result.returncode != 0
    assert "the chief gives up" in result.stderr
    assert result.seconds < 20


def test_an_error_of_a_function_that_nobody_catches_shows_where_it_was(mpi_run):
    program = """
def broken():
    return 1 / 0

with c:
    if c.is_chief:
        c.schedule(broken)
        c.join()
"""
    result = mpi_run(START + program, 3, timeout=40)
    assert result.returncode != 0
    assert "in broken" in result.err[0]
    assert "worker 0 (rank 1)" in result.err[0]


def test_a_worker_that_leaves_has_its_functions_run_by_others(mpi_run):
    program = """
def leave_on_worker_0(value):
    if ms.coordinator.get_current_worker_index() == 0:
        raise KeyboardInterrupt
    return value

if c.is_chief:
    print(c.fetch([c.schedule(leave_on_worker_0, (i,)) for i in range(6)]))
    only = c.schedule(nap, (0, 1), worker=0)
    try:
        c.join()
    except ms.errors.PeerExitError as error:
        print("told:", error)
    print(c.schedule(nap, (0, "on")).get())
    print(c.executor().submit(nap, 0, "too").result())
else:
    serve()
"""
    result = mpi_run(START + program, 3, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "[0, 1, 2, 3, 4, 5]" in result.out[0]
    assert "told: nap cannot be run: worker 0 (rank 1) left the program" in result.out[0]
    assert "on\ntoo" in result.out[0]
    assert "worker 0 (rank 1) left the program" in result.err[0]


def test_without_any_worker_left_the_chief_is_told(mpi_run):
    program = """
def leave():
    raise KeyboardInterrupt

if c.is_chief:
    values = [c.schedule(leave) for _ in range(5)]
    try:
        c.join()
    except ms.errors.PeerExitError as error:
        print("told:", error)
    try:
        c.schedule(nap, (0,))
    except ms.errors.PeerExitError as error:
        print("again:", error)
    print({v.status.name for v in values})
else:
    serve()
"""
    result = mpi_run(START + program, 3, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "told: leave cannot be run" in result.out[0]
    assert "again:" in result.out[0]
    assert "{'ABORTED'}" in result.out[0]


def test_a_worker_that_is_killed_ends_the_job(mpi_run):
    program = """
with c:
    if c.is_chief:
        c.schedule(os._exit, (7,))
        c.join()
"""
    result = mpi_run(START + program, 3, timeout=60)
    assert result.returncode != 0
    assert result.seconds < 30


def test_a_worker_that_never_serves_is_named(mpi_run):
    program = """
strategy.extended.process_group.environment.__dict__["abort_after"] = 1.0
if c.is_chief:
    c.schedule(nap, (0.01,), worker=1)
    try:
        c.join()
    except ms.errors.CollectiveTimeoutError as error:
        print("told:", error)
elif strategy.topology.rank == 1:
    c.serve()
else:
    time.sleep(4)
"""
    result = mpi_run(START + program, 3, timeout=60)
    assert "told: nap cannot be run: worker 1 (rank 2) does not serve after 1 s" in result.out[0]


@pytest.mark.parametrize("level", ["serialized"])
def test_without_threads_of_mpi_the_chief_drives_by_itself(mpi_run, level):
    program = f"""
import mpi4py
mpi4py.rc.thread_level = {level!r}
{START}
with c:
    if c.is_chief:
        values = [c.schedule(nap, (0.01, i)) for i in range(20)]
        print(sum(v.status.name == "READY" for v in values) < 20)
        c.join()
        print(c.fetch(values) == list(range(20)), c.done())
        try:
            c.executor()
        except ms.errors.ContextError as error:
            print(error)
"""
    result = mpi_run(program, 3, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.out[0].splitlines()[:2] == ["True", "True True"]
    assert "THREAD_MULTIPLE" in result.out[0]


def test_a_chief_that_serves_clients_ends_with_its_last_worker(mpi_run):
    program = """
class Door:
    def poll(self, seconds):
        time.sleep(seconds)
        return []

if c.is_chief:
    from mpistrat.remote.service import serve
    try:
        serve(c, Door())
    except ms.errors.PeerExitError as error:
        print("told:", error)
"""
    result = mpi_run(START + program, 3, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "told: ClusterCoordinator: all workers have left the program" in result.out[0]
