"""What becomes of the others when a worker or a server stops, leaves, fails or dies."""

import pytest
from transports_stand import TRANSPORTS

SETUP = """
import os, signal, subprocess, sys, time
import numpy as np
from transports_stand import adding, parameter_servers, run

def ranks_and_servers(**settings):
    return parameter_servers(TRANSPORT, [((1000,), np.float32), ((500_000,), np.float32)], **settings)
"""

# Worker 1 is stopped where it hurts most: in the middle of a read, and with a large push on its way.
STOPPED = """
def stop(*_):
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)

def work(worker, transports):
    link, out = transports[0], np.zeros(1000, np.float32)
    if worker == 1:
        link.push(1, 1, np.ones(500_000, np.float32))
        if TRANSPORT == "messages":
            comm = link._comm
            link._comm = type("Stopping", (), {n: getattr(comm, n) for n in ("Irecv", "Recv", "Iprobe", "Isend")})
            link._comm.Isend = staticmethod(lambda *a: (comm.Isend(*a), stop())[0])
        else:
            slab = link._slab(link.pair.places[0])
            get = slab.get
            slab.get = lambda *a: (get(*a), stop(), setattr(slab, "get", get))
    start = time.monotonic()
    for _ in range(1 if worker == 1 else 100):
        link.push(0, link.pushed + 1, np.ones(1000, np.float32))
        link.read(0, out)
        if worker == 1 and TRANSPORT == "messages":
            link._comm = comm
    link.flush()
    return time.monotonic() - start

with ranks_and_servers(chunk_bytes=1 << 16) as ps:
    results = run(ps, work)
    if ps.server is not None:
        assert (ps.server.array(0) == 201).all(), ps.server.array(0)
        assert (ps.server.array(1) == 1).all()
    else:
        print("seconds", results[0])
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
        link.push(0, 1, np.ones(1000, np.float32))
        link.flush()
        print("ready", flush=True)
        if rank == 1:
            WORKER
        while True:
            link.push(0, link.pushed + 1, np.ones(1000, np.float32))
            link.flush()
"""


def program(transport, text, **parts):
    for name, part in parts.items():
        text = text.replace(name, part)
    return f"TRANSPORT = {transport!r}" + SETUP + text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_worker_does_not_stop_the_others(mpi_run, transport):
    result = mpi_run(program(transport, STOPPED), 4, timeout=60)
    assert result.returncode == 0, result
    seconds = [float(result.out[rank].split()[-1]) for rank in (0, 1, 2)]
    assert seconds[1] > 3.5, seconds  # it was stopped
    assert max(seconds[0], seconds[2]) < 3, seconds


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
