"""`mpistrat doctor --job` over two hosts of two ranks: all that a healthy cluster passes, and a faulty MPI that is found."""

from __future__ import annotations

import html
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.cluster.launchers import loaded_library
from mpistrat.doctor.job.steps import ItemReport
from tests.launch.launcher import ROOT

HERE = Path(__file__).parent
RUN_ITEM = """
import dataclasses, json, sys
from pathlib import Path
from mpistrat.doctor.job.items import ITEMS
from mpistrat.doctor.job.steps import run_item
item = next(item for item in ITEMS if item.name == "collectives")
print(json.dumps(dataclasses.asdict(run_item(item, sys.argv[3:], Path(sys.argv[1]), float(sys.argv[2])))))
"""


@pytest.fixture
def check(mpi, hosts, tmp_path):
    """The command in the place of a batch script, on "head"; its status, document and page."""

    def run() -> tuple[int, dict, str]:
        head = hosts.enter("head", tmp_path)
        launcher = hosts.mpiexec(mpi, 4)[len(head) :]
        command = [*head, mpi.python, "-m", "mpistrat", "doctor", "--job", *launcher]
        done = subprocess.run(command, capture_output=True, text=True, timeout=580)
        found = sorted(path.name for path in tmp_path.iterdir())
        assert [Path(name).suffix for name in found] == [".html", ".json"], done.stdout + done.stderr
        document = json.loads((tmp_path / found[1]).read_text())
        print(done.stdout, done.stderr)
        return done.returncode, document, (tmp_path / found[0]).read_text()

    return run


@pytest.mark.timeout(600)
def test_two_healthy_hosts_pass(check):
    status, document, text = check()
    items = {item["name"]: item for item in document["items"]}
    endings = {name: item["status"] for name, item in items.items() if name != "torch"}
    assert status == 0 and set(endings.values()) == {"passed"}, endings
    assert items["torch"]["status"] in ("passed", "skipped")
    start = items["start"]
    assert [(node["host"], node["ranks"]) for node in start["nodes"]] == [("h1", 2), ("h2", 2)]
    assert start["facts"]["transports"] and start["facts"]["file_systems"]["/dev/shm"] == "tmpfs"
    rows = {row for row, *_ in items["collectives"]["numbers"]}
    assert {"all_reduce 8 B", "broadcast 1 MB", "barrier"} <= rows
    assert {"on a node 8 B", "between nodes 8 B"} <= {row for row, *_ in items["windows"]["numbers"]}
    steps = {row: value for row, _, value, _ in items["restart"]["numbers"]}
    assert 0 < steps["the snapshot"] <= steps["the kill"] == 50
    assert all(value > 0 for *_, value, _ in items["files"]["numbers"])
    plain = html.unescape(re.sub(r"<[^>]+>", " ", text))
    assert "4 ranks on 2 nodes" in plain and "h1, h2" in plain


@pytest.fixture
def faulty(mpi, tmp_path):
    """The item "collectives" on two ranks of an MPI with a fault on rank 1."""
    if sys.platform != "linux" or shutil.which("gcc") is None or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("needs Linux and gcc, and passes arguments on in registers")
    library = tmp_path / "fault_mpi.so"
    large = [] if "Open MPI" in mpi.vendor else ["-DLARGE_COUNTS"]
    words = ["gcc", "-shared", "-fPIC", "-O1", *large, "-o", library, HERE / "fault_mpi.c", "-ldl"]
    subprocess.run(words, check=True, timeout=60)

    def run(fault: str, seconds: float):
        settings = [f"LD_PRELOAD={library}", f"MPI_LIBRARY={loaded_library(mpi.python).path}", f"FAULT={fault}"]
        words = [str(tmp_path), str(seconds), *mpi.command(2), "env", *settings]
        done = subprocess.run(
            [mpi.python, "-c", RUN_ITEM, *words], cwd=ROOT, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr
        return ItemReport(**json.loads(done.stdout))

    return run


@pytest.mark.timeout(200)
def test_a_wrong_bit_is_found(faulty):
    report = faulty("wrong", 100)
    assert report.status == "failed"
    says = r"wrong values on ranks 1\. rank 1 on \S+: all_to_all 8 B, MPI: expected 2\.0 at element 0, got 2\.015625 \(1 of 2 "
    assert re.match(says, report.what), report


@pytest.mark.timeout(200)
def test_a_hang_is_found_and_ended(faulty):
    report = faulty("hang", 30)
    assert report.status == "hung"
    says = r"time over: all 2 ranks at all_to_all 8 B, in mpistrat/doctor/job/collectives\.py:\d+"
    assert re.fullmatch(says, report.what), report
    assert report.seconds < 60


@pytest.mark.timeout(200)
def test_a_crash_is_found(faulty):
    report = faulty("crash", 60)
    assert report.status == "failed"
    # The launcher may end the exit report, which names the rank, before it prints.
    how = r"(rank 1 of 2 .* was ended by SIGSEGV|the launcher ended with status \d+)"
    says = how + r": (all 2 ranks|rank 1 on \S+) at all_to_all 8 B"
    assert re.fullmatch(says, report.what), report
