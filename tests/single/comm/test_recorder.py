"""The flight recorder: a ring of the last events in memory that another process can read."""

import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

from mpistrat.comm import recorder as recorder_module
from mpistrat.comm.monitor import exit_report_process, rank_monitor
from mpistrat.comm.recorder import GROUPS, KINDS, Recorder, Ring


@pytest.fixture
def recorder():
    made = Recorder()
    made.open(8)
    yield made
    if made.descriptor is not None:
        os.close(made.descriptor)


def test_events_come_back_in_their_order(recorder):
    first, second = recorder.name("c", "all_reduce 'w'", 3), recorder.name("u", "früh")
    before = time.perf_counter_ns()
    outer = recorder.begin(first, 41)
    inner = recorder.begin(second)
    recorder.waited += 700
    recorder.end(inner)
    recorder.waited += 300
    ring = recorder.ring()
    assert ring.end[0] == 0, "it lasts"
    recorder.end(outer)
    ring = recorder.ring()
    assert [ring.names[name] for name in ring.name] == [("c", "all_reduce 'w'"), ("u", "früh")]
    assert ring.group.tolist() == [3, 0]
    assert ring.number.tolist() == [41, 0] and ring.waited.tolist() == [1000, 700]
    assert before <= ring.begin[0] <= ring.begin[1] <= ring.end[1] <= ring.end[0] <= time.perf_counter_ns()
    newest, oldest = recorder.last(5)
    assert (newest.text, oldest.text, oldest.group, oldest.number, oldest.waited) == (
        "früh",
        "all_reduce 'w'",
        3,
        41,
        1000,
    )
    assert KINDS[oldest.kind] == "collective"


def test_events_know_their_threads(recorder):
    """Also one that gets the identifier of a thread that has ended."""
    name = recorder.name("u", "work")

    def work():
        recorder.end(recorder.begin(name))

    recorder.end(recorder.begin(name))
    for number in range(2):
        thread = threading.Thread(target=work, name=f"reader {number}")
        thread.start()
        thread.join()
    recorder.end(recorder.begin(name))
    ring = recorder.ring()
    assert [recorder.threads[number] for number in ring.thread] == ["MainThread", "reader 0", "reader 1", "MainThread"]
    for _ in range(8):  # the ring is full, and begins anew
        recorder.end(recorder.begin(name))
    assert recorder.ring().thread.tolist() == 8 * [0]
    assert Ring(bytes(recorder._memory)).thread.tolist() == 8 * [0], "as another process reads it"


def test_very_many_threads_share_the_last_name(recorder):
    name = recorder.name("u", "work")
    for _ in range(300):
        thread = threading.Thread(target=lambda: recorder.end(recorder.begin(name)))
        thread.start()
        thread.join()
    assert recorder.ring().thread.tolist() == 8 * [255] and len(recorder.threads) == 256


def test_numbers_are_kept_with_their_times(recorder, monkeypatch):
    before = time.perf_counter_ns()
    for value in range(20):
        recorder.count("rows", value)
    counts = recorder.counts()
    times, values = zip(*counts["rows"], strict=True)
    assert values == tuple(range(13, 20)) and before <= times[0] and list(times) == sorted(times)
    assert len(counts["memory"]) == 1, "the memory is sampled seldom"
    monkeypatch.setattr(recorder_module, "_SAMPLED_NS", 0)
    recorder.count("rows", 1)
    assert [value > 10**6 for _, value in recorder.counts()["memory"]] == [True, True]
    made = Recorder()
    made.count("rows", 1)
    assert not made.counts().get("rows"), "before it is opened"


def test_the_last_ones_are_kept(recorder):
    for number in range(20):
        with recorder.span("u", "step", number):
            pass
    assert recorder.ring().number.tolist() == list(range(12, 20))
    assert [event.number for event in recorder.last(3)] == [19, 18, 17]
    assert [event.number for event in recorder.last(100)] == list(range(19, 11, -1))


def test_an_event_that_an_exception_leaves_has_ended(recorder):
    with pytest.raises(KeyError), recorder.span("u", "step"):
        raise KeyError
    assert recorder.ring().end[0] != 0


def test_before_it_is_opened_the_last_event_is_known_and_names_keep_their_numbers():
    recorder = Recorder()
    name = recorder.name("u", "early")
    recorder.end(recorder.begin(name))
    assert [event.text for event in recorder.last(9)] == ["early"]
    recorder.open(4)
    assert recorder.name("u", "early") == name and len(recorder.ring()) == 0
    recorder.end(recorder.begin(name))
    assert recorder.history().startswith("early (")
    os.close(recorder.descriptor)


def test_names_of_very_many_variables_leave_room_for_others(recorder):
    names = [recorder.name("c", f"Variable 'layer_{number}/kernel'", 1) for number in range(10_000)]
    assert 800 < len(set(names)) < 1500 and names[-1] == names[-2] != 0
    recorder.end(recorder.begin(names[-1]))
    recorder.end(recorder.begin(recorder.name("c", "apply_gradients 'late'", 1)))
    ring = recorder.ring()
    assert [ring.names[name][1] for name in ring.name] == ["Variable", "apply_gradients"]


def test_groups_share_a_name_and_are_told_apart(recorder):
    """All 4,095 that have a number, in what the memory holds once."""
    recorder.open(8)
    names = [recorder.name("c", "all_reduce 'w'", group) for group in range(1, GROUPS)]
    assert len(set(names)) == GROUPS - 1
    for group in (1, 255, 256, 257, 300, GROUPS - 1):
        recorder.end(recorder.begin(names[group - 1], 1 << 30))
    ring = recorder.ring()
    assert ring.names == [("o", "other"), ("c", "all_reduce 'w'")]
    assert ring.group.tolist() == [1, 255, 256, 257, 300, GROUPS - 1]
    assert ring.number.tolist() == [1 << 30] * 6 and ring.name.tolist() == [1] * 6
    assert [event.group for event in recorder.last(2)] == [GROUPS - 1, 300]


def test_numbers_that_are_too_large_begin_anew(recorder):
    recorder.end(recorder.begin(recorder.name("c", "barrier", GROUPS - 1), (5 << 37) + 9))
    event = recorder.last(1)[0]
    assert (event.number, event.group, event.text) == (9, GROUPS - 1, "barrier")


def test_groups_get_numbers_that_no_other_has(monkeypatch):
    """Not those that live; of the others the one that has been free the longest."""
    monkeypatch.setattr(rank_monitor, "_monitors", weakref.WeakSet())
    monkeypatch.setattr(rank_monitor, "_groups", itertools.count(1))

    monkeypatch.setattr(rank_monitor, "GROUPS", 320)

    def groups(count):
        return [rank_monitor.RankMonitor(0, 2, 60.0, 10.0) for _ in range(count)]

    living = groups(300)
    assert [monitor.group for monitor in living] == list(range(1, 301))
    assert [groups(1)[0].group for _ in range(20)] == [*range(301, 320), 301], "each is closed at once"
    assert groups(1)[0].group == 302
    del living[7]
    others = groups(20)
    assert sorted(monitor.group for monitor in (*living, *others)) == list(range(1, 320))
    assert 0 <= groups(1)[0].group < 320, "there is none left"


def test_more_names_than_fit_are_other(recorder):
    names = [recorder.name("u", f"{number:05}" + "x" * 150) for number in range(1000)]
    assert names[-1] == 0 and 300 < len(set(names)) < 1000
    assert recorder.name("u", "00000" + "x" * 150) == names[0] != 0
    recorder.end(recorder.begin(names[-1]))
    ring = recorder.ring()
    assert ring.names[ring.name[0]] == ("o", "other")


def test_what_is_no_recorder_is_refused():
    with pytest.raises(ValueError, match="not the memory of a recorder"):
        Ring(bytes(70000))


def test_the_process_that_reports_deaths_reads_it(recorder):
    for number in range(3):
        recorder.end(recorder.begin(recorder.name("r", "train_step"), number))
    recorder.begin(recorder.name("c", "all_reduce", 300), 7)
    text = exit_report_process.last_events(recorder.descriptor, time.time() + 2, 3)
    assert text.startswith("in all_reduce #7 for 2") and text.count("train_step") == 2


def test_a_forked_child_leaves_its_parents_memory_alone():
    program = """
        import os, mpistrat
        from mpistrat.comm.recorder import RECORDER
        RECORDER.open(16)
        RECORDER.end(RECORDER.begin(RECORDER.name("u", "parent")))
        child = os.fork()
        if not child:
            RECORDER.end(RECORDER.begin(RECORDER.name("u", "child")))
            os._exit(len(RECORDER.ring()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        ring = RECORDER.ring()
        assert [ring.names[name][1] for name in ring.name] == ["parent"], ring.names
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
