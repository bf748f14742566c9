"""Tiers: what `--tier` chooses, and what the last line of the run says about the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launch import tiers
from tests.launch.launcher import ROOT
from tests.launch.tiers import QUICK_EXAMPLES, cap_examples

FILE = """
import pytest
from hypothesis import given, settings, strategies as st

CALLS = []

@settings(max_examples=200)
@given(st.integers())
def test_many_examples(value):
    CALLS.append(value)

def test_how_many():
    assert len(CALLS) == {examples}

@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("rule", ["sgd", "adam", "adagrad"])
def test_on_ranks(rule):
    pass

@pytest.mark.parametrize("how", ["raises", "leaves"])
def test_ends(mpi_run, how):
    pass

def test_hosts(hosts):
    pass
"""


@pytest.fixture
def collect(tmp_path: Path):
    """The items of FILE that a pytest of its own collects, or passes, and its last line."""

    def run(*words: str, examples: int = 200) -> tuple[list[str], str]:
        (tmp_path / "test_it.py").write_text(FILE.format(examples=examples))
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-p", "tests.launch.launcher_plugin", "-q", *words, "test_it.py"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        reply = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
        lines = reply.stdout.splitlines()
        named = [line.removeprefix("PASSED ").split("::") for line in lines]
        return [name[1] for name in named if name[0] == "test_it.py"], lines[-1]

    return run


def test_without_a_tier_everything_runs(collect):
    items, last = collect("--collect-only")
    assert len(items) == 2 + 6 + 2 + 1
    assert "left out" not in last


def test_check_runs_what_needs_no_mpi(collect):
    items, last = collect("--collect-only", "--tier", "check")
    assert items == ["test_many_examples", "test_how_many"]
    assert "left out: 6 of the full product, 2 programs, 1 over hosts; 30 examples of Hypothesis" in last
    assert "make test-all" in last


def test_test_runs_a_cover_and_one_program(collect):
    items, last = collect("--collect-only", "--tier", "test")
    assert sum(item.startswith("test_ends") for item in items) == 1
    ranks = [item for item in items if item.startswith("test_on_ranks")]
    assert len(ranks) == 6  # one MPI: each value on each number of ranks is the product
    assert "left out: 1 programs, 1 over hosts" in last


@pytest.mark.parametrize(("tier", "examples"), [("check", QUICK_EXAMPLES), ("test", QUICK_EXAMPLES), ("all", 200)])
def test_how_many_examples_run(collect, tier, examples):
    passed, _ = collect("-rA", "-k", "many", "--tier", tier, examples=examples)
    assert passed == ["test_many_examples", "test_how_many"]


def test_what_test_leaves_out_as_slow_is_of_the_change(monkeypatch):
    """With time for one test of seven seconds: one of the function of which `test` runs no other."""
    seconds = {
        "quick": 1.0,
        "mixed[quick]": 1.0,
        "mixed[slow]": 7.0,
        "slow[1]": 7.0,
        "slow[2]": 7.0,
        "slower": 100.0,
    }

    class Item:
        fixturenames, path = (), Path("test_it.py")

        def __init__(self, nodeid):
            self.nodeid = nodeid

        def get_closest_marker(self, name):
            return None

    class Config:
        rootpath = Path()

    def chosen(tier, budget, longest=None):
        Config.option = SimpleNamespace(tier=tier, chosen=False, budget=budget, since=None, longest=longest)
        return {item.nodeid for item in tiers.choose(Config, [Item(name) for name in seconds]).kept}

    monkeypatch.setattr(tiers.Table, "expected", lambda self, nodeid, kind: seconds[nodeid])
    monkeypatch.setattr(tiers, "distances", lambda *_: {Item.path: 1})
    assert chosen("test", None) == {"quick", "mixed[quick]"}
    assert chosen("change", None) == {"mixed[slow]", "slow[1]", "slow[2]"}
    assert chosen("change", 10 / 60) in ({"slow[1]"}, {"slow[2]"})
    assert chosen("all", None) == seconds.keys()
    most = sorted(seconds.values())[-2]
    assert chosen("all", None, most) == {name for name, each in seconds.items() if each <= most} != seconds.keys()


def test_a_small_number_of_examples_stays():
    @settings(max_examples=5)
    @given(st.integers())
    def few(value): ...

    class Item:
        obj = few

    cap_examples(Item())
    assert few._hypothesis_internal_use_settings.max_examples == 5
