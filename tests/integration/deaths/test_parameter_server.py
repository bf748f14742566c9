"""What becomes of the others when a worker or a server stops, leaves, fails or dies."""

import re

import pytest

from tests.harness.transports import TRANSPORTS

SETUP = """
import os, signal, subprocess, sys, time
import numpy as np
from mpistrat.base import loops
from tests.harness.transports import adding, parameter_servers, run

def done(*workers):
    return all(os.path.exists(f"{FOLDER}/{worker}") for worker in workers)

def stop_until_done(*workers):
    '''Stop this process until these workers have told that they are done, or for 20 s.'''
    there = " && ".join(f"[ -e {FOLDER}/{worker} ]" for worker in workers)
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"for i in $(seq 200); do sleep 0.1; {there} && break; done; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)

def ranks_and_servers(**settings):
    return parameter_servers(TRANSPORT, [((1000,), np.float32), ((500_000,), np.float32)], **settings)
"""

# Worker 1 is stopped where it hurts most: in the middle of a read, and with a large push on its way. It goes on when the others
# are done, or after 20 s.
STOPPED = """
def stop(*_):
    stop_until_done("0", "2")

def work(worker, transports):
    link, out = transports[0], np.zeros(1000, np.float32)
    if worker == 1:
        link.push(1, np.ones(500_000, np.float32))
        if TRANSPORT == "messages":
            comm = link._comm
            link._comm = type("Stopping", (), {n: getattr(comm, n) for n in ("Irecv", "Recv", "Iprobe", "Isend")})
            link._comm.Isend = staticmethod(lambda *a: (comm.Isend(*a), stop())[0])
        else:
            loops.read_version = lambda *a: -1  # a read in C could not be stopped at a place: it is tried again in Python
            slab = link._slab(link.pair.addresses[0])
            get = slab.get
            slab.get = lambda *a: (get(*a), stop(), setattr(slab, "get", get))
    for _ in range(1 if worker == 1 else 100):
        link.push(0, np.ones(1000, np.float32))
        link.read(0, out)
        if worker == 1 and TRANSPORT == "messages":
            link._comm = comm
    link.flush()
    open(f"{FOLDER}/{worker}", "w")
    return done("0", "2")

with ranks_and_servers(chunk_bytes=1 << 16) as ps:
    results = run(ps, work)
    if ps.server is not None:
        assert (ps.server.array(0) == 201).all(), ps.server.array(0)
        assert (ps.server.array(1) == 1).all()
    else:
        print("done", results[0])
"""

# Worker 1 is stopped, or dies, with the first pieces of a large read. The others write that variable and read it meanwhile.
IN_A_READ = """
def interrupted(link):
    look = link._pieces.look
    def look_once():
        moved = look()
        if moved:
            link._pieces.look = look
            HAPPENS
        return moved
    link._pieces.look = look_once

def stop():
    stop_until_done("0", "2")

def work(worker, transports):
    link, out = transports[0], np.zeros(500_000, np.float32)
    if worker == 1:
        interrupted(link)
    others_done = False
    for _ in range(1 if worker == 1 else 10):
        version = link.read(1, out)
        others_done = done("0", "2")
        assert (out == version).all(), (version, out.min(), out.max())
        link.push(1, np.ones(500_000, np.float32))
        link.flush()
    open(f"{FOLDER}/{worker}", "w")
    return others_done, version

with ranks_and_servers(chunk_bytes=1 << 16) as ps:
    results = run(ps, work)
    if ps.server is not None:
        assert (ps.server.array(1) == 21).all(), ps.server.array(1)
    else:
        print(*results[0])
"""

STAY = """
with ranks_and_servers(abort_after=ABORT) as ps:
    rank = ps.group.topology.rank
    if ps.server is not None:
        SERVER
        ps.server.start(adding(ps.server)[0])
        ps.server.wait()
    else:
        link = ps.transports[0]
        link.push(0, np.ones(1000, np.float32))
        link.flush()
        print("ready", flush=True)
        if rank == 1:
            WORKER
        while True:
            link.push(0, np.ones(1000, np.float32))
            link.flush()
"""


def program(transport, text, **parts):
    folder = parts.pop("FOLDER", "")
    for name, part in parts.items():
        text = text.replace(name, part)
    return f"TRANSPORT, FOLDER = {transport!r}, {folder!r}" + SETUP + text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_worker_does_not_stop_the_others(mpi_run, tmp_path, transport):
    result = mpi_run(program(transport, STOPPED, FOLDER=str(tmp_path)), 4, timeout=60)
    assert result.returncode == 0, result
    assert result.out[1].split()[-1] == "True", result  # the others were done when it went on


def test_a_version_is_sent_as_it_was_to_a_worker_that_stops(mpi_run, tmp_path):
    result = mpi_run(program("messages", IN_A_READ, HAPPENS="stop()", FOLDER=str(tmp_path)), 4, timeout=60)
    assert result.returncode == 0, result
    assert result.out[1].split()[0] == "True", result  # the others were done when it went on
    versions = [int(result.out[rank].split()[1]) for rank in (0, 1, 2)]
    assert versions[1] < max(versions), versions  # others have written since


def test_a_worker_that_dies_in_a_read_ends_the_job(mpi_run):
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    result = mpi_run(program("messages", IN_A_READ, HAPPENS=kill), 4, timeout=40)
    assert result.returncode not in (0, None), result


ENDS = {
    "a worker leaves": ({"WORKER": "sys.exit(0)"}, r"worker 1 (rank 1) left the program without signing off"),
    "a worker fails": ({"WORKER": "raise ValueError('mine')"}, "ValueError: mine"),
    "a handler fails": ({"SERVER": "ps.server.writing = None"}, "rank 3 of 4: the job ends on this exception"),
    "a server leaves": ({"SERVER": "sys.exit(0)"}, "rank 3 left the program"),
    "a server sleeps": ({"SERVER": "time.sleep(60)"}, "waited 3 s"),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("end", ENDS)
def test_ends(mpi_run, transport, end):
    parts, text = ENDS[end]
    parts = {"WORKER": "pass", "SERVER": "pass", "ABORT": "3.0" if "sleeps" in end else "30.0", **parts}
    result = mpi_run(program(transport, STAY, **parts), 4, timeout=40)
    assert result.returncode not in (0, None), result
    assert text in result.stderr, result


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rank", [1, 3], ids=["worker", "server"])
def test_a_killed_rank_ends_the_job(mpi_run, transport, rank):
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    server = f"import threading; threading.Timer(1.0, lambda: {kill}).start()"
    parts = {"WORKER": kill if rank == 1 else "pass", "SERVER": server if rank == 3 else "pass", "ABORT": "30.0"}
    result = mpi_run(program(transport, STAY, **parts), 4, timeout=40)
    assert result.returncode not in (0, None), result


# the thread of a server

PROGRAM = """
import threading
context = ranks_and_servers()
ps = context.__enter__()
if ps.server is not None:
    add, seen = adding(ps.server)
    ps.server.start(HANDLER)
    SERVER
else:
    link, out = ps.transports[0], np.zeros(1000, np.float32)
    for number in range(1, 31):
        link.push(0, np.ones(1000, np.float32))
        link.flush()
        assert link.read(0, out) >= number
    WORKER
print("done", flush=True)
END
"""
WHOLE = "assert (ps.server.array(0) == 90).all(), ps.server.array(0)"


def whole(transport, **parts):
    parts = {"HANDLER": "add", "SERVER": "pass", "WORKER": "pass", "END": "pass", **parts}
    return program(transport, PROGRAM, **parts)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_in_the_thread_ends_the_job_whatever_the_program_does(mpi_run, transport):
    """The server's main thread sleeps, and the workers wait for it."""
    handler = "lambda push: add(push) or 1 // (push.number - 20)"
    result = mpi_run(whole(transport, HANDLER=handler, SERVER="time.sleep(60)"), 4, timeout=30)
    assert result.returncode not in (0, None), result
    assert "rank 3 of 4: the job ends on this exception in mpistrat-server-0" in result.stderr, result
    assert "in <lambda>" in result.stderr, result
    says = re.findall(r"rank (\d) of 4: the job ends because of rank 3: ZeroDivisionError", result.stderr)
    assert says == ["0"], result  # the first rank of the node
    assert result.seconds < 20


GOOD_ENDS = {"by itself": "pass", "by sys.exit": "sys.exit(0)"}


@pytest.mark.parametrize(
    ("transport", "end"), [(transport, "by itself") for transport in TRANSPORTS] + [("messages", "by sys.exit")]
)
def test_a_program_may_end_without_closing(mpi_run, transport, end):
    """Workers sign off from their pass and end; the server waits until all have gone, and ends."""
    text = whole(transport, WORKER="link.leave()", SERVER=f"ps.server.wait(None); {WHOLE}", END=GOOD_ENDS[end])
    result = mpi_run(text, 4, timeout=40)
    assert result.returncode == 0, result
    assert all("done" in result.out[rank] for rank in range(4)), result
    assert not result.stderr.strip(), result


def test_an_exception_in_the_servers_program_ends_the_job(mpi_run):
    text = whole("shared_window", WORKER="time.sleep(60)", SERVER="time.sleep(1); raise ValueError('mine')")
    result = mpi_run(text, 4, timeout=30)
    assert result.returncode not in (0, None), result
    assert "ValueError: mine" in result.stderr, result


@pytest.mark.parametrize("transport", ["shared_window", "messages"])
def test_a_worker_that_ends_early_holds_nobody_up(mpi_run, transport):
    """It signs off from a pass and ends its program; the others go on, pass after pass."""
    worker = """link.leave()
    for _ in range(0 if link.pair.worker == 1 else 3):
        link.push(0, np.ones(1000, np.float32))
        link.leave()"""
    server = "ps.server.wait(4); assert (ps.server.array(0) == 96).all(), ps.server.array(0)"
    result = mpi_run(whole(transport, WORKER=worker, SERVER=server), 4, timeout=40)
    assert result.returncode == 0, result
    assert "done" in result.out[3], result


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_threads_a_server_serves_while_it_waits(mpi_run, transport):
    text = "import mpi4py; mpi4py.rc.thread_level = 'serialized'\n" + whole(
        transport,
        WORKER="link.leave()",
        SERVER=f"assert threading.active_count() == 1; ps.server.wait(); {WHOLE}",
        END="next(context.gen, None)",
    )
    result = mpi_run(text, 4, timeout=40)
    assert result.returncode == 0, result
    assert all("done" in result.out[rank] for rank in range(4)), result


def test_a_slow_handler_is_waited_for_no_longer_than_that(mpi_run):
    text = whole("messages", HANDLER="lambda push: time.sleep(60)", SERVER="ps.server.wait()")
    result = mpi_run(text.replace("ranks_and_servers()", "ranks_and_servers(abort_after=3.0)"), 4, timeout=30)
    assert result.returncode not in (0, None), result
    assert "waited 3 s" in result.stderr, result
