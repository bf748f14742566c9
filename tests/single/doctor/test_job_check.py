"""`mpistrat doctor --job`: the judgement of an item, a launcher that starts nothing, the JSON file and the page."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from mpistrat.cli.main import main
from mpistrat.cluster.topology import Topology
from mpistrat.doctor.job import check as check_module
from mpistrat.doctor.job import steps, windows
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


def fake_items(monkeypatch, end=lambda item: None):
    """Have each item pass at once, after a call of `end`, which may cut the check off there."""

    def run_item(item, launcher, folder, seconds):
        end(item)
        return ItemReport(item.name, item.proves, "passed")

    monkeypatch.setattr(check_module, "run_item", run_item)
    monkeypatch.setenv("PBS_JOBID", "77.server")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_check_that_is_cut_off_has_not_passed(tmp_path, monkeypatch):
    """Items to which it did not come are listed as not run."""

    def end(item):
        if item is ITEMS[2]:
            raise KeyboardInterrupt

    fake_items(monkeypatch, end)
    with pytest.raises(KeyboardInterrupt):
        check_module.check_job(["srun"], tmp_path, 540, lambda report: None)
    assert names(tmp_path) == ["mpistrat-check-77.html", "mpistrat-check-77.json"]
    document = json.loads((tmp_path / "mpistrat-check-77.json").read_text())
    assert not document["passed"]
    assert [item["name"] for item in document["items"]] == [item.name for item in ITEMS]
    assert [item["status"] for item in document["items"]] == ["passed"] * 2 + ["not run"] * (len(ITEMS) - 2)
    says = "the check has not ended: it is still running, or was cut off"
    assert document["items"][-1]["what"] == says
    text = (tmp_path / "mpistrat-check-77.html").read_text()
    assert f"{len(ITEMS) - 2} not run, 2 passed" in text and says in text


def test_a_check_has_passed_with_a_report_of_every_item():
    reports = [ItemReport(item.name, item.proves, "passed") for item in ITEMS]
    assert check_module.passed(reports)
    assert not check_module.passed(reports[:-1]) and not check_module.passed([])


def test_checks_of_one_job_have_files_of_their_own(tmp_path, monkeypatch):
    """A second check in a job, and a requeued job that finds the folder of its first run."""
    fake_items(monkeypatch)
    paths = [check_module.check_job(["srun"], tmp_path, 540, lambda report: None)[1:] for _ in range(2)]
    assert [path.name for pair in paths for path in pair] == [
        "mpistrat-check-77.json", "mpistrat-check-77.html", "mpistrat-check-77-2.json", "mpistrat-check-77-2.html",
    ]  # fmt: skip
    (tmp_path / "mpistrat-check-77-3.files").mkdir()  # of a run that was killed
    document = check_module.check_job(["srun"], tmp_path, 540, lambda report: None)[1]
    assert document == tmp_path / "mpistrat-check-77-4.json"
    assert [name for name in names(tmp_path) if name.endswith(".files")] == ["mpistrat-check-77-3.files"]
    assert len(names(tmp_path)) == 7


@pytest.mark.parametrize("node_of", [(0, 0, 1), (0, 1, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1, 1, 2)])
def test_no_two_ranks_write_into_one_rank_s_window(monkeypatch, node_of):
    """Also where nodes have different numbers of ranks; and each writes to another node, if that is possible."""
    window, targets = FakeWindow(len(node_of)), []
    monkeypatch.setattr(windows.RemoteWindow, "allocate", lambda comm, room, what: window)
    monkeypatch.setattr(windows, "pair", lambda *args, **options: {})
    for rank in range(len(node_of)):
        comm = SimpleNamespace(rank=rank, size=len(node_of), Barrier=lambda: None)
        trial = Mock(topology=Topology(rank, node_of, [1] * len(node_of), ["cpu:0"], comm=comm), comm=comm)
        window.targets = set()
        windows.run(trial)
        targets += window.targets
    assert sorted(targets) == list(range(len(node_of)))
    if 2 * max(map(node_of.count, node_of)) <= len(node_of):
        assert all(node_of[target] != node for target, node in zip(targets, node_of, strict=True))


class FakeWindow:
    def __init__(self, size):
        self.total = size * (size + 1) // 2

    def put(self, rank, pieces):
        self.targets.add(rank)

    def get(self, rank, offset, out):
        self.targets.add(rank)

    def fetch_and_add(self, rank, offset, value):
        return 0

    def get_word(self, rank, offset):
        return self.total

    def close(self):
        pass


def test_sigterm_ends_the_launcher_and_removes_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PBS_JOBID", "77.server")
    noted = tmp_path / "process"
    folder = tmp_path / "results"
    folder.mkdir()
    launcher = ["sh", "-c", f"echo $$ > {noted}.new; mv {noted}.new {noted}; exec sleep 60"]
    command = [sys.executable, "-m", "mpistrat", "doctor", "--folder", str(folder), "--job", *launcher]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert comes(noted.exists) and names(folder) == ["mpistrat-check-77.files"]
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, "")
    assert comes(lambda: ended(int(noted.read_text())))
    assert names(folder) == []


def test_the_handler_of_sigterm_is_there_during_the_check_only(tmp_path, monkeypatch):
    before, during = signal.getsignal(signal.SIGTERM), []
    fake_items(monkeypatch, lambda item: during.append(signal.getsignal(signal.SIGTERM)))
    check_module.check_job(["srun"], tmp_path, 540, lambda report: None)
    assert before not in during and signal.getsignal(signal.SIGTERM) == before
    thread = threading.Thread(target=check_module.check_job, args=(["srun"], tmp_path, 540, lambda report: None))
    thread.start()  # other threads may not set it
    thread.join()
    assert (tmp_path / "mpistrat-check-77-2.json").exists()


@pytest.mark.parametrize(
    ("end", "status", "what"),
    [
        ('printf \'\\036{"rank": 0, "done": 1.0}\\n\'', "passed", ""),
        ("exec sleep 60", "hung", "time over: rank 0 on n0 at sum"),
    ],
)
def test_a_process_that_keeps_the_output_open_takes_no_report_along(tmp_path, monkeypatch, end, status, what):
    """The step's own end counts, and what it has written by then is read."""
    monkeypatch.setattr(steps, "_GRACE", 0)
    noted = tmp_path / "process"
    begun = '\\036{"rank": 0, "size": 1, "host": "n0"}\\n\\036{"rank": 0, "part": "sum"}\\n'
    launcher = ["sh", "-c", f"setsid sleep 60 & echo $! > {noted}; printf '{begun}'; {end}"]
    start = time.monotonic()
    try:
        report = steps.run_item(ITEM, launcher, tmp_path, 2)
        assert not ended(int(noted.read_text()))
    finally:
        os.kill(int(noted.read_text()), signal.SIGKILL)
    assert (report.status, report.what) == (status, what)
    assert time.monotonic() - start < 14


def ended(process):
    """Return whether a process is there no more, or waits only for its parent to take note."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def comes(condition, seconds=30):
    """Wait for a condition, and return whether it came."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()
