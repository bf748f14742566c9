"""What `mpistrat bench` measures by, and how it tells what it found. The figures are the test's own."""

import json

import numpy as np
import pytest

from mpistrat.bench import measure
from mpistrat.bench.measure import median_rate, medians, pair, spread
from mpistrat.bench.plot import draw
from mpistrat.bench.result import Result, Setting, caption, layout
from mpistrat.cli import bench
from mpistrat.cli.main import main

ABOUT = {
    "mpi": "Open MPI v5.0.11, package: Open MPI", "ranks": 4, "nodes": 1, "cpu": "A CPU", "cores": 8, "memory_gib": 64,
    "versions": {"mpistrat": "0.1.0", "torch": None}, "date": "2026-01-01",
}  # fmt: skip
TIMES = Result("Sums", "seconds", "size", {"4 KB": {"a": 0.001, "b": 0.004}, "1 MB": {"a": 2.0, "b": 1.0}})


class Clock:
    """Time that passes only where something is done; an operation takes the next of its seconds, at last the last."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def operation(self, *seconds):
        remaining = list(seconds)

        def run():
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", clock.perf_counter)
    return clock


@pytest.fixture
def comm():
    from mpi4py import MPI

    return MPI.COMM_SELF


def test_a_figure_is_the_median_of_warm_repetitions(comm, clock):
    # the first time, and then cold and warm by turns: warm ones take 1, 9 and 2
    a = clock.operation(50, 40, 1, 40, 9, 40, 2)
    assert pair(comm, {"a": a, "b": clock.operation(3)}, repetitions=3, seconds=1e9) == {"a": 2.0, "b": 3.0}


def test_three_rounds_are_made_and_no_more_after_the_time(comm, clock):
    count = 0

    def ten_seconds():
        nonlocal count
        count += 1
        clock.now += 10

    pair(comm, {"a": ten_seconds}, repetitions=100, seconds=1.0)
    assert count == 1 + 2 * 3
    count = 0
    pair(comm, {"a": ten_seconds}, repetitions=100, seconds=100.0)
    assert count == 1 + 2 * 5


@pytest.mark.parametrize("everyone", [True, False])
def test_a_spread_is_the_median_and_quartiles_of_all_but_the_first(comm, clock, everyone):
    writes = []
    operation = clock.operation(50, 1, 2, 3, 4, 5)
    found = spread(comm, operation, 0.0, before=lambda: writes.append(clock.now), everyone=everyone)
    assert found == (3.0, 1.5, 4.5)
    assert writes == [0, 50, 51, 53, 56, 60]
    # as long as there is time: a second each, of which the first does not count
    assert spread(comm, clock.operation(1), 9.5, everyone=everyone) == (1.0, 1.0, 1.0)
    assert spread(comm, None, 0.0, everyone=False) == (0.0, 0.0, 0.0)


def test_a_rate_counts_what_was_finished(comm, clock):
    assert median_rate(comm, clock.operation(0.5), clock.operation(1.0), rounds=3, seconds=1.0) == 1.0  # 2 in 2 s
    assert median_rate(comm, clock.operation(0.25), rounds=1, seconds=1.0) == 4.0


def test_medians_over_runs():
    assert medians([{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 4.0}, {"a": 2.0, "b": 9.0}]) == {"a": 2.0, "b": 5.0}


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("seconds", 2.5, "2.5 s"), ("seconds", 0.0025, "2.5 ms"), ("seconds", 2.5e-6, "2.5 µs"),
        ("per second", 12345.6, "12,346/s"), ("per second", 1.25, "1.2/s"),
        ("bytes per second", 2.345e9, "2.35 GB/s"), ("bytes per second", 5e6, "5.0 MB/s"),
    ],
)  # fmt: skip
def test_values_have_units(unit, value, text):
    assert Result("", unit, "", {"case": {"a": value}}).rows() == [["case", text]]


def test_what_is_compared_and_what_is_not_there():
    result = Result("", "seconds", "n", {"x": {"a": 2.0, "b": 4.0}, "y": {"a": 1.0, "b": 0.5, "c": 1.0}}, ("a", "b"))
    assert result.header() == ["n", "a", "b", "c", "speed-up"]
    assert result.rows() == [["x", "2.0 s", "4.0 s", "–", "2.00 ×"], ["y", "1.0 s", "500.0 ms", "1.0 s", "0.50 ×"]]


def test_cases_that_are_too_large_are_left_out():
    sizes = {"1 MB": 1 << 18, "2 MB": 1 << 19}
    times = {"1 MB": 7.5, "2 MB": 15.0}

    def measured(memory: float, factor: float = 1.0, quick: bool = False):
        setting = Setting(None, quick, "", memory)
        return setting.by_size(sizes, 2, 1, lambda count: {"a": factor * count / (1 << 18) * 7.5})

    both = {label: {"a": seconds} for label, seconds in times.items()}
    assert measured(2 * 4 * (1 << 19)) == (both, "")
    assert measured(2 * 4 * (1 << 19) - 1) == ({"1 MB": {"a": 7.5}}, "2 MB and more left out: too much memory.")
    assert measured(1e9, 1.01)[1] == "2 MB and more left out: too slow here."
    assert measured(1e9, 0.1, quick=True) == ({"1 MB": {"a": 0.75}}, "")


def test_where_it_was_measured():
    assert layout(ABOUT) == "Open MPI 5.0.11, 4 ranks, one host"
    assert caption([ABOUT, {**ABOUT, "versions": {"torch": "2.0"}}]) == (
        "A CPU, 8 cores, 64 GiB · mpistrat 0.1.0, torch 2.0 · 2026-01-01"
    )


def test_a_plot_of_every_kind(tmp_path):
    pytest.importorskip("matplotlib")
    rates = Result("Rates", "per second", "what", {"read": {"x": 1.0, "y": 1e6}, "push, 4 KB": {"y": 3.0}})
    draw(tmp_path / "plot.png", {"times": TIMES, "rates": rates, "input": rates}, ABOUT)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A benchmark that takes no time and one that is left out; the current folder is `tmp_path`."""
    rows = Result("Rows", "bytes per second", "storage", {"contiguous": {"mpistrat": 1e9}}, note="word " * 40)
    found = {"step": lambda setting: rows, "window": lambda setting: "it wants ranks"}
    monkeypatch.setattr("mpistrat.bench.suite.BENCHMARKS", found)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *words, status=0):
    found = main(["bench", *words])
    out, err = capsys.readouterr()
    assert found == status, out + err
    return out, err


def test_tables_json_and_plot(quick, capsys):
    pytest.importorskip("matplotlib")
    out, err = run(capsys, "--only", "step", "--only", "window", "--json", "found.json", "--plot", "here.png")
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[:3] == ["Rows (0 s)", "storage      mpistrat", "contiguous  1.00 GB/s"]
    assert "window: left out: it wants ranks" in lines
    assert any(line.endswith("1 rank, one host") for line in lines)
    assert max(map(len, lines)) < 80
    assert err == "plot: here.png\n"
    document = json.loads((quick / "found.json").read_text())
    assert document["benchmarks"]["step"]["values"] == {"contiguous": {"mpistrat": 1e9}}
    assert document["left_out"] == {"window": "it wants ranks"}
    assert {"cpu", "cores", "mpi", "versions", "ranks"} <= document["machine"].keys()
    assert document["machine"]["versions"]["numpy"] == np.__version__


def test_json_to_stdout_is_all_there_is(quick, capsys):
    out, err = run(capsys, "--only", "step", "--json", "-", "--no-plot")
    assert json.loads(out)["quick"] is False
    assert err == ""


def test_without_matplotlib_the_extra_is_named(quick, capsys, monkeypatch):
    def draw(*_):
        raise ImportError

    monkeypatch.setattr(bench, "draw", draw)
    _, err = run(capsys, "--only", "step")
    assert err == "no plot: matplotlib is not installed: pip install 'mpistrat[plot]'\n"


def test_a_plot_that_cannot_be_written_is_a_problem(quick, capsys):
    pytest.importorskip("matplotlib")
    _, err = run(capsys, "--only", "step", "--plot", "missing/here.png", status=1)
    assert err.startswith("error: --plot: missing/here.png: expected a file in a folder that exists")
    _, err = run(capsys, "--only", "step", "--plot", "here.doc", status=2)
    assert "got .doc" in err
