"""`mpistrat doctor --job`: the judgement of an item, a launcher that starts nothing, the JSON file and the page."""

from __future__ import annotations

import html
import json
import re
import sys

import pytest

from mpistrat.cli.main import main
from mpistrat.doctor.job.items import ITEMS, TOTAL_SECONDS
from mpistrat.doctor.job.page import page
from mpistrat.doctor.job.steps import ItemReport, judge

ITEM = ITEMS[1]
ABOUT = {"mpistrat": "0", "date": "today", "launcher": ["srun"], "seconds": 540, "variables": {"UCX_TLS": "rc,<x>"}}
BEGUN = [{"rank": rank, "size": 4, "host": f"n{rank // 2}", "part": "start of MPI"} for rank in range(4)]


def reached(part, *ranks):
    return [{"rank": rank, "part": part} for rank in ranks]


def done(*ranks):
    return [{"rank": rank, "done": 1.0} for rank in ranks]


@pytest.mark.parametrize(
    ("records", "status", "ending", "what"),
    [
        ([*BEGUN, *done(0, 1, 2, 3)], 0, "passed", ""),
        ([], 1, "failed", "no rank started: the launcher ended with status 1"),
        ([], None, "hung", "no rank started: the launcher did not end in time"),
        ([*BEGUN, *({"rank": rank, "skipped": "no torch"} for rank in range(4))], 0, "skipped", "no torch"),
        ([*BEGUN, {"rank": 2, "wrong": "sum: expected 3, got 4"}, *done(0, 1, 2, 3)], 0, "failed",
         "wrong values on ranks 2. rank 2 on n1: sum: expected 3, got 4"),
        ([*BEGUN, {"rank": 3, "failed": "OSError: no room"}], 1, "failed", "rank 3 on n1: OSError: no room"),
        ([*BEGUN, *reached("sum", 0, 1, 2), {"rank": 0, "stuck": "a.py:7"}, {"rank": 1, "stuck": "a.py:7"},
          {"rank": 2, "stuck": ""}], 1, "hung",
         "time over: ranks 0-1 at sum, in a.py:7; rank 2 on n1 at sum; rank 3 on n1 at start of MPI, without a report"),
        ([*BEGUN, *reached("sum", 0, 1, 2, 3), *done(0, 1, 2)], 139, "failed",
         "the launcher ended with status 139: rank 3 on n1 at sum"),
        ([*BEGUN[:3], *done(0, 1, 2)], 1, "failed", "the launcher ended with status 1: never started: ranks 3"),
        ([*BEGUN, *done(0, 1, 2, 3)], 11, "failed", "all ranks ended, but the launcher with status 11: in MPI_Finalize"),
        ([*BEGUN, {"finding": {"name": "versions", "status": "problem", "what": "different", "remedy": ""}}, *done(0, 1, 2, 3)],
         0, "failed", "versions: different"),
    ],
)  # fmt: skip
def test_judgement(records, status, ending, what):
    report = judge(ITEM, records, status, "")
    assert (report.status, report.what) == (ending, what)


def test_what_the_kill_of_the_item_did_is_no_failure():
    """The other ranks of the first start fail, too: they wait for the killed one."""
    item = next(item for item in ITEMS if item.restarts)
    first = [*BEGUN, {"rank": 0, "failed": "Exception: Other MPI error"}]
    assert judge(item, [*first, *BEGUN, *done(0, 1, 2, 3)], 0, "").status == "passed"
    assert (
        judge(item, [*first, *BEGUN, {"rank": 2, "failed": "OSError: no room"}], 1, "").what
        == "rank 2 on n1: OSError: no room"
    )
    assert judge(item, first, 1, "").what == "rank 0 on n0: Exception: Other MPI error"


def test_a_killed_rank_is_named():
    output = (
        "mpistrat: rank 1 of 4 (worker 1) on n0, process 7, was ended by SIGSEGV at 16:21: a crash in compiled code\n"
    )
    report = judge(ITEM, [*BEGUN, *reached("sum", 0, 1, 2, 3)], 11, output)
    expected = "rank 1 of 4 (worker 1) on n0, process 7, was ended by SIGSEGV: all 4 ranks at sum"
    assert (report.status, report.what) == ("failed", expected)


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """A run of the command in a folder, by a launcher that is a program of Python; its status, document and page."""
    monkeypatch.setenv("PBS_JOBID", "1234.server")

    def run(launcher, seconds=20):
        words = [
            "doctor",
            "--folder",
            str(tmp_path),
            "--time-limit",
            str(seconds),
            "--job",
            sys.executable,
            "-c",
            launcher,
        ]
        status = main(words)
        files = sorted(path.name for path in tmp_path.iterdir())
        assert files == ["mpistrat-check-1234.html", "mpistrat-check-1234.json"]
        document = json.loads((tmp_path / files[1]).read_text())
        return status, document, (tmp_path / files[0]).read_text(), capsys.readouterr().out

    return run


def test_a_launcher_that_fails(check):
    """Each item is tried and reported, and nothing is left in the folder."""
    status, document, text, out = check("import sys; sys.exit('srun: error: <no> such partition')")
    assert status == 1 and not document["passed"]
    assert [item["name"] for item in document["items"]] == [item.name for item in ITEMS]
    assert {item["status"] for item in document["items"]} == {"failed"}
    assert "srun: error: <no> such partition" in document["items"][0]["output"]
    assert "srun: error: &lt;no&gt; such partition" in text and "<no>" not in text
    assert "Check of a cluster: MPI did not start" in text
    says = "no rank started: the launcher ended with status 1: srun: error: <no> such partition"
    assert out.count(says) == len(ITEMS) - 1
    assert "and were started again 2 times: given up" in " ".join(out.split())  # the item "restart"


def test_a_launcher_that_hangs(check):
    """The step is ended at its limit, and what no time is left for is not run."""
    status, document, _, _ = check("import time; time.sleep(1000)", seconds=2)
    assert status == 1
    assert document["items"][0]["status"] == "hung"
    assert document["items"][-1]["status"] == "not run"
    assert document["items"][-1]["what"] == "no time was left for it"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--job"], "--job: expected the words that start the job's ranks, as srun --mpi=pmix, got none"),
        (
            ["--json", "--job", "srun"],
            "--job: expected it without --ranks, --clean, --json and --need, got one of them",
        ),
        (["--folder", "a"], "--folder: expected --job with it, got none"),
        (["--folder", "no/such", "--job", "srun"], "--folder: expected a folder that is there, got no/such"),
        (["--time-limit", "0", "--job", "srun"], "--time-limit: expected seconds, more than 0, got 0.0"),
    ],
)
def test_wrong_use(capsys, words, says):
    assert main(["doctor", *words]) in (1, 2)
    assert says in capsys.readouterr().err


def test_a_rank_is_no_batch_script(capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "0")
    assert main(["doctor", "--job", "srun"]) == 2
    assert (
        "--job: expected one process, in the batch script, got one of 4 that a launcher started"
        in capsys.readouterr().err
    )


def test_the_time_limits_fit_a_job_of_ten_minutes():
    assert TOTAL_SECONDS == 540


def test_the_page_has_all_numbers():
    start = ItemReport("start", "MPI starts", "passed", seconds=3.2, nodes=[_node("n0"), _node("n1")], facts=_facts())
    sums = ItemReport("collectives", "Sums are right", "failed", what="wrong values on ranks 3", output="a line\n")
    sums.numbers = [["sum 8 B", "mpistrat", 2e-6, "seconds"], ["sum 8 B", "MPI", 1e-6, "seconds"]]
    files = ItemReport("files", "Files are written", "passed", numbers=[["shards", "write", 2.5e9, "bytes per second"]])
    text = page(ABOUT, [start, sums, files])
    plain = html.unescape(re.sub(r"<[^>]+>", " ", text))
    assert "Check of a cluster: 8 ranks on 2 nodes, MPICH 5" in plain
    assert "1 failed, 2 passed" in plain and "wrong values on ranks 3" in plain
    assert re.search(r"sum 8 B\s+2.0 µs\s+1.0 µs\s+2.00", plain) and re.search(r"shards\s+2.5 GB/s", plain)
    assert "n0, n1" in plain and "mlx5_0 InfiniBand" in plain and "tag(rc_mlx5/mlx5_0:1)" in plain and "lustre" in plain
    assert "UCX_TLS" in plain and "rc,<x>" in plain and "<x>" not in text


def _node(host):
    cards = {"cards": ["mlx5_0 InfiniBand"], "libraries": ["libucp.so.0"], "devices": ["/dev/infiniband/uverbs0"]}
    return {"host": host, "node_cores": 8, "threads": 2, "node_gpus": 0, "ranks": 4, **cards}


def _facts():
    machine = {
        "cpu": "a CPU",
        "cores": 8,
        "memory_gib": 64,
        "system": "Linux",
        "python": "3.12",
        "versions": {"numpy": "2"},
    }
    return {
        "ranks": 8, "vendor": "MPICH 5", "mpi": "MPICH Version: 5\nmore", "thread_level": "MULTIPLE", "machine": machine,
        "file_systems": {"the folder of the check": "lustre"}, "transports": ["inter-node cfg#1 tag(rc_mlx5/mlx5_0:1)"],
    }  # fmt: skip
