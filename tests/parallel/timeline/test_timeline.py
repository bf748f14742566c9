"""The timeline: traces of all ranks on one clock, and who makes others wait, as planted."""

import gzip
import itertools
import json
import mmap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm.monitor import rank_monitor
from mpistrat.comm.recorder import GROUPS, RECORDER
from mpistrat.timeline import stragglers
from tests.harness.files import wait_for_the_others


def train(strategy, steps=20, slow=None):
    """Train; in each step one rank is `slow`: it sleeps 10 ms when all others wait for it. Return for how long."""
    with strategy.scope():
        w = ms.Variable(np.zeros(100), name="w")
        optimizer = ms.optimizers.SGD(0.1)

    naps = []

    def train_step(x):
        with ms.timeline.span("gradient"):
            gradient = np.full(100, x.sum())
        if strategy.rank == slow:
            wait_for_the_others(strategy)
            begun = time.perf_counter()
            time.sleep(0.01)
            naps.append(time.perf_counter() - begun)
        optimizer.apply_gradients([(gradient, w)])

    data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(8.0 * steps)).batch(8))
    for batch in data:
        strategy.run(train_step, args=(batch,))
    return naps


def window(monkeypatch, work):
    """Do some work; return what it returns and the seconds that it took, which are for `times` those until now."""
    begun = time.perf_counter_ns()
    result = work()
    end = time.perf_counter_ns()
    monkeypatch.setattr(stragglers, "perf_counter_ns", lambda: end)
    return result, (end - begun) / 1e9


@pytest.fixture(params=[False, True])
def many_groups(request, monkeypatch):
    """Whether the program has made more groups than the recorder numbers apart."""
    if request.param:
        monkeypatch.setattr(rank_monitor, "_groups", itertools.count(3 * GROUPS - 1))


def read(path):
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    check_format(events)
    return events


def check_format(events):
    """Check the fields that the description of the Trace Event Format demands, and that arrows connect slices."""
    names = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
    slices, named, flows = {}, {}, {}
    for event in events:
        place = event["pid"], event["tid"]
        assert all(type(number) is int for number in place) and isinstance(event["name"], str)
        if event["ph"] == "M":
            kind = str if (field := names.get(event["name"], "sort_index")) == "name" else int
            assert list(event["args"]) == [field] and isinstance(event["args"][field], kind)
            named.setdefault(event["name"], {})[place] = event["args"][field]
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["cat"]
            slices.setdefault(place, []).append(event)
        elif event["ph"] == "C":
            assert event["args"] and all(type(value) is int and value >= 0 for value in event["args"].values())
        else:
            assert event["ph"] in "sf" and (event.get("bp") == "e") == (event["ph"] == "f")
            flows.setdefault((event["id"], event["cat"], event["name"]), []).append(event)
    assert set(named["thread_name"]) >= set(slices), "each thread has a name"
    assert len({tid for _, tid in named["thread_name"]}) == len(named["thread_name"]), (
        "Perfetto knows threads by tid alone"
    )
    for start, finish in flows.values():
        assert (start["ph"], finish["ph"]) == ("s", "f") and start["ts"] < finish["ts"]
        assert start["pid"] != finish["pid"]
        ends = []
        for one in (start, finish):  # the innermost slice at that time is a collective of all ranks
            among = slices[one["pid"], one["tid"]]
            around = [each for each in among if each["ts"] <= one["ts"] <= each["ts"] + each["dur"]]
            ends.append(max(around, key=lambda each: each["ts"]))
        assert ends[0]["args"]["number"] == ends[1]["args"]["number"] and ends[0]["name"] == ends[1]["name"]
        assert ends[0]["args"]["group"] == ends[1]["args"]["group"] == 0 and ends[0]["ts"] >= ends[1]["ts"]


@pytest.mark.ranks(1, 2, 3)
def test_a_trace_has_the_steps_of_all_ranks(mpi_tmp_path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        train(strategy)
        path = ms.timeline.save(mpi_tmp_path / "trace.json.gz", strategy)
        strategy.barrier()
        events = read(path)
        about = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert sorted(about) == list(range(strategy.size)) and about[0].startswith("rank 0 on ")
        for rank in range(strategy.size):
            mine = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
            steps = [event for event in mine if event["name"].endswith("train_step")][-20:]
            assert len(steps) == 20 and {event["cat"] for event in steps} == {"run"}
            batches = [event["args"]["number"] for event in mine if event["cat"] == "input"]
            assert batches[-21:] == [*range(20), 20]
            updates = [event for event in mine if event["name"].startswith("apply_gradients")][-20:]
            spans = [event for event in mine if event["name"] == "gradient"][-20:]
            assert len(updates) == (20 if strategy.size > 1 else 0)
            for inner in (spans, updates):
                for step, event in zip(steps, inner, strict=bool(inner)):
                    assert step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1e-3
            assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in mine)


@pytest.mark.ranks(2, 3)
def test_ranks_meet_in_a_collective_on_one_clock(mpi_tmp_path, many_groups):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        train(strategy)
        path = ms.timeline.save(mpi_tmp_path / "trace.json.gz", strategy)
        strategy.barrier()
        meetings = {}
        for event in read(path):
            if event.get("name", "").startswith("apply_gradients") and event["args"]["group"] == 0:
                meetings.setdefault(event["args"]["number"], []).append((event["ts"], event["ts"] + event["dur"]))
        assert len(meetings) >= 20
        for times in list(meetings.values())[-20:]:
            assert max(begin for begin, _ in times) <= min(end for _, end in times), (
                "nobody leaves before all have come"
            )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", [256, 300, GROUPS - 1])
def test_groups_of_a_program_that_makes_many_are_told_apart(mpi_tmp_path, monkeypatch, more):
    """Also where their numbers begin anew: not with those of groups that live."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        own = strategy.extended.process_group.monitor.group
        sets = [strategy.process_set([0, 1])]
        monkeypatch.setattr(rank_monitor, "_groups", itertools.count(own + more))
        sets += [strategy.process_set([0, 1]) for _ in range(3)]
        for number, some in enumerate(sets):
            some.barrier(name=f"of {number} {more:4}")
        strategy.barrier(name=f"of all {more:4}")
        path = ms.timeline.save(mpi_tmp_path / "trace.json.gz", strategy)
        strategy.barrier()
        found = {}
        for event in read(path):
            if "barrier" in event["name"] and event["name"].endswith(f"{more:4}'"):
                found.setdefault(event["name"].split()[-2], set()).add(event["args"]["group"])
        assert found["all"] == {0} and len(found) == 5
        assert len(set.union(*found.values())) == 5 and all(len(groups) == 1 for groups in found.values()), found


@pytest.mark.ranks(2, 3)
def test_arrows_lead_from_the_rank_that_came_last(mpi_tmp_path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        train(strategy, slow=1)
        path = ms.timeline.save(mpi_tmp_path / "trace.json.gz", strategy)
        strategy.barrier()
        events = read(path)
        finish = {event["id"]: event for event in events if event["ph"] == "f"}
        slices = [event for event in events if event["ph"] == "X" and event["name"].startswith("apply_gradients")]
        waits = {}
        for event in (event for event in events if event["ph"] == "s"):
            from_it = [each for each in slices if each["pid"] == event["pid"] and each["ts"] == event["ts"]]
            for each in from_it:
                waits.setdefault(each["args"]["number"], []).append((event["pid"], finish[event["id"]]["pid"]))
        others = [rank for rank in range(strategy.size) if rank != 1]
        for number in sorted(waits)[-20:]:
            assert sorted(waits[number]) == [(1, rank) for rank in others]


@pytest.mark.ranks(1, 2)
def test_counters_and_threads(mpi_tmp_path):
    def read_rows():
        with ms.timeline.span("in the reader"):
            time.sleep(0.02)

    with ms.MultiWorkerMirroredStrategy() as strategy:
        train(strategy)
        for _ in strategy.distribute_dataset(ms.data.from_arrays(np.arange(12.0)).batch(8)):  # 8 rows, and 4
            pass
        reader = threading.Thread(target=read_rows, name="reader")
        with ms.timeline.span("in the program"):
            reader.start()
            time.sleep(0.01)
        reader.join()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        path = ms.timeline.save(mpi_tmp_path / "trace.json.gz", strategy)
        strategy.barrier()
        events = [event for event in read(path) if event["pid"] == strategy.rank]
        threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        where = {event["name"]: threads[event["tid"]] for event in events if event["ph"] == "X"}
        assert where["in the program"] == where["gradient"] == "MainThread" and where["in the reader"] == "reader"

        def counter(name, unit):
            return [
                (event["ts"], event["args"][unit]) for event in events if (event["ph"], event["name"]) == ("C", name)
            ]

        rows = counter("rows", "per second")[-22:]
        mine = [(end - begin) / 1e6 * rate for (begin, rate), (end, _) in itertools.pairwise(rows)]
        assert mine == pytest.approx(21 * [8 / strategy.size], rel=0.01) and rows[-1][1] == 0
        moved = [value for _, value in counter("moved", "bytes")]
        steps = [after - before for before, after in itertools.pairwise(moved)].count(100 * 8)
        assert steps >= 20 if strategy.size > 1 else not moved
        assert moved == sorted(moved)
        memory = counter("memory", "bytes")[-1][1]
        assert 0.2 * resident < memory < 5 * resident


@pytest.mark.ranks(3)
def test_some_ranks_only(mpi_tmp_path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        train(strategy)
        path = ms.timeline.save(mpi_tmp_path / "trace.json.gz", strategy, ranks=[0, 2])
        strategy.barrier()
        assert {event["pid"] for event in read(path)} == {0, 2}
        with pytest.raises(ValueError, match=r"timeline.save: ranks: expected ranks below 3, got 3"):
            ms.timeline.save(path, strategy, ranks=[3])


@pytest.mark.ranks(2, 3)
def test_a_slow_rank_is_named(many_groups, monkeypatch):
    """All that is compared was measured in this run: a rank that a busy machine stops is slow, too."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        naps, seconds = window(monkeypatch, lambda: train(strategy, slow=1))
        found = ms.timeline.times(strategy, seconds)
        naps, seconds = strategy.all_gather_object((naps, seconds))[1]
        assert [one.rank for one in found] == list(range(strategy.size))
        slow, others = found[1], [one for one in found if one.rank != 1]
        assert slow.last >= 19 and slow.compared >= 19, found  # the last collective is not compared
        assert slow.cost >= 0.99 * (sum(naps) - max(naps)) * len(others) > 0.18, found
        assert all(one.last <= one.compared - 19 for one in others), found
        assert slow.compute * slow.seconds >= 0.99 * sum(naps), found
        assert all(one.waiting * one.seconds >= 0.99 * sum(naps) for one in others), found
        assert all(sum(one[3:8]) <= 1.01 for one in found), found  # the shares
        assert 0.99 * sum(naps) <= slow.seconds <= 1.01 * seconds and slow.steps == 20, (found, seconds)
        assert len(set(strategy.all_gather_object(repr(found)))) == 1


@pytest.mark.ranks(1)
def test_an_error_of_the_input_ends_its_time(monkeypatch):
    def fail(x):
        if x == 5:
            raise ArithmeticError("no such row")
        return x

    with ms.MultiWorkerMirroredStrategy() as strategy:
        data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(8.0)).map(fail).batch(8))
        with pytest.raises(ArithmeticError):
            next(iter(data))
        _, seconds = window(monkeypatch, lambda: (time.sleep(0.05), strategy.barrier()))
        (found,) = ms.timeline.times(strategy, seconds)
        assert found.input == 0, found


@pytest.mark.ranks(1, 2)
def test_saves_have_their_share(mpi_tmp_path, monkeypatch):
    """All of it, from its begin to its end."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.Variable(np.zeros(1000), name="w")
        _, seconds = window(monkeypatch, lambda: strategy.save(mpi_tmp_path / "w.h5"))
        ring = RECORDER.ring()
        monkeypatch.setattr(stragglers, "perf_counter_ns", lambda: int(ring.end.max()))
        found = ms.timeline.times(strategy, seconds)
        assert all(one.saving > 0.99 and one.communication < 0.01 for one in found), found
