"""The drivers of the suites that others wrote: jobs of tests on ranks, and the lists of their results."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import unittest

import pytest

from tests.peers import jobs
from tests.peers.__main__ import REPOSITORIES, fetched, unpack
from tests.peers.suites import SUITES

# A job of two ranks, each a process. The test "dies" ends rank 1; "differs" fails on rank 0 only; "slow", "hangs" and
# "holds" take too long, the last in a call that keeps the interpreter's lock.
JOB = """
import ctypes, json, subprocess, sys, time
if len(sys.argv) == 2:
    ranks = [subprocess.Popen([sys.executable, *sys.orig_argv[1:], rank]) for rank in "01"]
    sys.exit(max(rank.wait() for rank in ranks))
from pathlib import Path
from tests.peers import jobs
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
ranks = jobs.Ranks(folder, rank, 2)
for number, test in enumerate(json.loads((folder / "todo.json").read_text())):
    assert ranks.begin(number, str(rank)) == ["0", "1"]
    if test == "dies" and rank == 1:
        ranks.leave()
    if test == "slow" and rank == 1:
        time.sleep(2)
    if test == "hangs" and rank == 1:
        time.sleep(60)
    if test == "holds" and rank == 1:
        ctypes.PyDLL(None).sleep(60)
    ranks.end(number, "FAIL at rank 0" if test == "differs" and rank == 0 else "PASS")
"""


def test_a_job_follows_the_test_that_ended_a_rank_or_differs_between_ranks(tmp_path):
    tests = ["first", "dies", "differs", "last"]
    results = jobs.drive(tmp_path, tests, [sys.executable, "-c", JOB, str(tmp_path)])
    assert results["first"] == results["last"] == "PASS"
    assert results["dies"].startswith("FAIL") and "rank 1" in results["dies"]
    assert results["differs"] == "FAIL rank 0: FAIL at rank 0"


def test_a_job_ends_a_test_that_takes_too_long_which_gets_more_time_once(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "LIMIT", 1.0)
    results = jobs.drive(tmp_path, ["slow", "hangs", "holds", "last"], [sys.executable, "-c", JOB, str(tmp_path)])
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert results.pop("hangs").startswith("FAIL rank 1: HANG")
    assert results == {"slow": "PASS", "holds": "FAIL rank 1: FAIL ended", "last": "PASS"}


@pytest.mark.parametrize("module", ["__main__", "horovod", "suites", "torch_distributed"])
def test_folders_of_arguments_are_absolute(module, tmp_path, monkeypatch):
    """PyTorch takes the first folder of `file://a/b` for a host."""
    found, driver = [], importlib.import_module(f"tests.peers.{module}")
    words = {
        "__main__": ["--repositories", "b"],
        "horovod": ["--repository", "b", "--job", "test"],
        "suites": ["lightning", "--tests", "b", "--job", "mpistrat"],
        "torch_distributed": ["--job"],
    }

    monkeypatch.chdir(tmp_path)
    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self: found.append(parse(self)) or exit())
    monkeypatch.setattr(sys, "argv", ["it", "--output", "a", *words[module]])
    with pytest.raises(SystemExit):
        driver.main()
    names = vars(found[0])
    given = [names[name] for name in ("output", "repositories", "repository", "tests") if names.get(name)]
    assert given == [tmp_path / "a", *([tmp_path / "b"] if "b" in words[module] else [])]


def test_a_job_that_ends_before_its_tests_fails_each_of_them(tmp_path):
    results = jobs.drive(tmp_path, ["one", "two"], [sys.executable, "-c", "raise SystemExit(5)"])
    assert results == dict.fromkeys(["one", "two"], "FAIL the job ended with 5 before the test")


def test_no_folder_above_the_tests_of_others_configures_them(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_one.py").write_text("def test_one():\n    pass\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--no-such-option"\n')
    words = [*jobs.pytest_words(tests), str(tests)]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done


def test_results_that_differ_from_the_list_are_counted(tmp_path, capsys):
    path = tmp_path / "list.json"
    assert jobs.judge({"a": "PASS", "b": "FAIL why", "c": "SKIP"}, path, "key", write=True) == 0
    assert json.loads(path.read_text()) == {
        "key": {"PASS": ["a"], "FAIL": ["b"], "SKIP": ["c"], "CAUSE": {"b": "FAIL why"}}
    }
    assert jobs.judge({"a": "PASS", "b": "FAIL another", "c": "SKIP"}, path, "key", write=False) == 0
    assert jobs.judge({"a": "FAIL now", "b": "PASS"}, path, "key", write=False) == 3
    assert "a: expected PASS, got FAIL now" in capsys.readouterr().out
    assert jobs.judge({"a": "PASS"}, path, "key", write=False, whole=False) == 0


def test_a_test_that_passes_or_fails_by_chance_is_not_compared(tmp_path):
    path = tmp_path / "list.json"
    path.write_text(json.dumps({"key": {"PASS": ["a", "b"], "EITHER": {"b": "it measures time"}}}))
    assert jobs.judge({"a": "PASS", "b": "FAIL"}, path, "key", write=False) == 0
    assert jobs.judge({"a": "FAIL", "b": "FAIL"}, path, "key", write=False) == 1
    jobs.judge({"a": "PASS", "b": "PASS"}, path, "key", write=True)
    assert json.loads(path.read_text())["key"]["EITHER"] == {"b": "it measures time"}


def test_a_cause_that_a_person_wrote_is_kept(tmp_path):
    path = tmp_path / "list.json"
    path.write_text(json.dumps({"key": {"FAIL": ["b"], "CAUSE": {"b": "its own mistake"}}}))
    jobs.judge({"b": "FAIL another text"}, path, "key", write=True)
    assert json.loads(path.read_text())["key"]["CAUSE"] == {"b": "its own mistake"}


def test_a_repository_that_cannot_be_fetched_is_an_error_with_the_reason(tmp_path, monkeypatch):
    nowhere = tmp_path / "nowhere"
    monkeypatch.setitem(REPOSITORIES, "horovod", (f"file://{nowhere}", "main", "test"))
    with pytest.raises(OSError, match=r"nowhere cannot be fetched: .+"):
        fetched("horovod", tmp_path)
    assert not list(tmp_path.glob("horovod*"))


def test_a_repository_is_fetched_once(tmp_path, monkeypatch):
    source = tmp_path / "source"
    (source / "test").mkdir(parents=True)
    (source / "test" / "test_one.py").write_text("")
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setitem(REPOSITORIES, "horovod", (f"file://{source}", "main", "test"))
    path = fetched("horovod", tmp_path)
    assert (path / "test" / "test_one.py").exists()
    (path / "test" / "kept").touch()
    assert (fetched("horovod", tmp_path) / "test" / "kept").exists()


def test_only_the_tests_of_a_source_archive_are_unpacked(tmp_path):
    for name in (
        "suite-1.0/test/distributed/deep/test_one.py",
        "suite-1.0/setup.py",
        "suite-1.0/test/distributed_two.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    subprocess.run(["tar", "-C", str(tmp_path), "-czf", str(tmp_path / "suite.orig.tar.gz"), "suite-1.0"], check=True)
    part = tmp_path / "part"
    unpack(tmp_path / "suite.orig.tar.gz", "test/distributed", part)
    assert [str(path.relative_to(part)) for path in part.rglob("*.*")] == ["test/distributed/deep/test_one.py"]


def test_a_literal_of_a_gpu_becomes_one_of_a_cpu(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    gpu = r"""a = "cuda", 'cuda:0', f"cuda:{rank}", r"device\(type='cuda'", "nccl", "cpu:gloo,cuda:nccl" # cuda"""
    (tests / "test_one.py").write_text(gpu)
    copy = SUITES["torch"].parts.copied(tests, tmp_path / "output")
    cpu = r"""a = "cpu", 'cpu', "cpu", r"device\(type='cpu'", "gloo", "gloo" # cuda"""
    assert (copy / "test_one.py").read_text() == cpu


def test_a_process_that_a_suite_spawns_is_a_rank_of_the_job(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")
    import torch.distributed as dist

    monkeypatch.setattr(torch.multiprocessing, "spawn", None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend: ports.append(os.environ["MASTER_PORT"]))
    monkeypatch.setenv("MASTER_PORT", "1111")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ports, results = [], tmp_path / "results.json"

    def work(rank, path):
        os.environ["MASTER_PORT"] = "2222"  # each rank has found another port
        dist.init_process_group("gloo")
        path.write_text(f"rank {rank}")

    SUITES["transformers"].parts.prepare(jobs.Ranks(tmp_path, 0, 1))
    torch.multiprocessing.spawn(work, args=(results,), nprocs=1)
    assert ports == ["1111"] and results.read_text() == "rank 0"
    with pytest.raises(unittest.SkipTest, match="needs 2 ranks"):
        torch.multiprocessing.spawn(work, args=(results,), nprocs=2)
