"""What a rank calls of MPI does not grow with the number of ranks, nor with that of nodes: counted where the calls are made.

Nodes are simulated: MPICH's cliques say which ranks share memory, and Open MPI's ranks are one node each. Of the
ranks of a layout the one that calls most counts. What grows, and why, stands in GROWS: nothing else may.
"""

import json
import platform
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PHASES = (
    "strategy",
    "variables",
    "first step",
    "steps",
    "clipped steps",
    "wide steps",
    "dataset",
    "epoch",
    "save",
    "restore",
    "restore, sent",
    "long wait",
    "request to stop",
    "end by an error",
    "leave",
)
GROWS = {  # by phase and function: bytes of a rank for each rank; or more messages where there are twice as many nodes
    ("strategy", "Allgather"): 160,  # where ranks and devices are, and the launcher's ranks, which every rank must know
    ("first step", "Allgather"): 16,  # forms of a value, when they are new
    ("epoch", "Allgather"): 16,
    # Of 32 steps, each way, in up to four rounds, to two nodes more of four than of two.
    ("wide steps", "Isend"): 32 * 2 * 4 * 2,
    ("save", "Allgather"): 96,  # who writes, in how many pieces
    ("restore", "Allgather"): 64,  # texts of rank 0, which others do not have
    ("restore, sent", "Allgather"): 64,
    ("long wait", "Isend"): 1,  # a survey goes along a tree of nodes, at most four below one
    ("request to stop", "Isend"): 3,  # rank 0 sends it to two ranks of at most four nodes, each of which forwards it
    ("end by an error", "Isend"): 3,  # the reason, in the same way
    ("leave", "Isend"): 1,  # one more where there are twice as many nodes, if the program does not close its strategy
}
SLACK = 16  # bytes: of numbers in words
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs Linux and gcc"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="passes arguments on in registers"),
]


_counted = {}  # by MPI, ranks and nodes: a program runs once for all tests


@pytest.fixture
def count(mpi, mpi_run, preload, tmp_path):
    """Run the program; return for each phase calls and bytes of the rank that has most, by function and communicator."""

    def counted(ranks, nodes):
        key = mpi.name, ranks, nodes
        if key not in _counted:
            _counted[key] = run(ranks, nodes)
        return _counted[key]

    def run(ranks, nodes):
        folder = tmp_path / f"{ranks}-{nodes}"
        folder.mkdir()
        env = preload(nodes, ranks) | {"MPISTRAT_WARN_AFTER": "100"}
        result = mpi_run([str(HERE / "counted.py"), str(folder)], ranks, 120, env=env)
        assert result.returncode == 0, result
        told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        assert told[0]["nodes"] == (nodes if "MPICH" in mpi.vendor else 1)
        where = {1: "rank", ranks // nodes: "node", nodes: "nodes", ranks: "world"}
        found = {phase: defaultdict(lambda: (0, 0)) for phase in PHASES}
        for one in told:
            for phase in PHASES:
                for function, size, calls, nbytes in one["phases"][phase]:
                    most = found[phase][function, where[size]]
                    found[phase][function, where[size]] = max(most[0], calls), max(most[1], nbytes)
        return found

    return counted


def check(small, large, ranks, nodes):
    """Compare two layouts, of which the larger has so many times the ranks, and the nodes."""
    for phase in PHASES:
        assert small[phase].keys() == large[phase].keys(), phase
        for (function, where), (calls, nbytes) in small[phase].items():
            more = large[phase][function, where]
            what = f"{phase}: {function} of the {where}: {calls} calls, {nbytes} bytes; then {more[0]}, {more[1]}"
            grows = GROWS.get((phase, function))
            if grows is None or where == "node":
                assert more[0] <= calls, what
                assert more[1] <= (nbytes + SLACK) * (ranks if where == "node" else 1), what
            elif function == "Allgather":
                assert more[0] == calls, what
                assert more[1] <= nbytes * ranks and nbytes <= grows * calls * 8, what
            else:
                assert more[0] <= calls + grows * (nodes.bit_length() - 1) + 1, what


def test_calls_do_not_grow(mpi, count):
    if "MPICH" in mpi.vendor:
        small = count(6, 2)
        check(small, count(12, 2), 2, 1)
        check(small, count(12, 4), 2, 2)
    else:
        check(count(2, 2), count(4, 4), 2, 2)


@pytest.mark.parametrize(("fewer", "nodes"), [(2, 2), (4, 8)])
def test_calls_do_not_grow_up_to_sixteen_ranks(mpi, count, fewer, nodes):
    """Eight ranks and sixteen, of two nodes, and of four and eight."""
    if "MPICH" not in mpi.vendor:
        pytest.skip("its ranks are nodes of one rank, as many as cores have room for")
    check(count(8, fewer), count(16, nodes), 2, nodes // fewer)


STATE = 3 * 4 * (8 * 4096 + (1 << 20)) + 2 * 4 * 8 * 4096  # bytes: variables, two slots of one optimizer or two


def test_what_is_restored_reaches_a_rank_as_its_part(mpi, count):
    """No values are sent where all ranks see the file; else each of three ranks of a node gets a third of them, once."""
    if "MPICH" not in mpi.vendor:
        pytest.skip("one MPI is enough")
    found = count(6, 2)
    assert ("Bcast", "nodes") not in found["restore"]
    assert found["restore"]["Bcast", "world"][1] < 64 << 10
    assert sum(calls for calls, _ in found["restore"].values()) < 64
    assert STATE / 3 <= found["restore, sent"]["Bcast", "nodes"][1] <= STATE / 3 + (2 << 20)
    assert found["restore, sent"]["Bcast", "world"][1] < 64 << 10


def test_agreements_are_short(mpi, count):
    """Beside weights, gradients and files: half a kilobyte a collective of all ranks."""
    if "MPICH" not in mpi.vendor:
        pytest.skip("one MPI is enough")
    for phase, found in count(6, 2).items():
        for (function, where), (calls, nbytes) in found.items():
            if where == "world" and function in ("Allreduce", "Allgather"):
                assert nbytes <= 512 * calls, (phase, function, calls, nbytes)


def test_initial_values_reach_each_node_once(mpi, count):
    """Each of three ranks of a node gets a third of them, of eight variables of 16 KiB."""
    if "MPICH" not in mpi.vendor:
        pytest.skip("one MPI is enough")
    made = count(6, 2)["variables"]
    assert ("Bcast", "world") not in made
    assert 8 * 16384 / 3 <= made["Bcast", "nodes"][1] <= 8 * (16384 / 3 + 64)
