"""Frames of threads: found without a collection of garbage, which Python 3.11 may not survive there."""

import gc
import itertools
import subprocess
import sys
import threading

import pytest

from mpistrat.base.frames import frame_of, frames, stacks

# The garbage of each round is collected where one object more is made than the round before allows: in one of them, where frames
# are. Its finalizer gives way to the thread that starts threads.
PROGRAM = """
import gc, os, threading, time
from mpistrat.base.frames import frames

class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0.002)

def start_threads():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

threading.Thread(target=start_threads, daemon=True).start()
for number in range(100):
    gc.disable()
    gc.collect()
    Cycle()
    gc.set_threshold(1 + number % 10)
    gc.enable()
    frames()
print("done", flush=True)
os._exit(0)
"""


def test_a_finalizer_that_gives_way_stops_nothing():
    reply = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30)
    assert reply.stdout == "done\n", reply.stderr


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_as_before(collects):
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        assert frames()[threading.get_ident()].f_code.co_name == "frames"
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def test_a_thread_s_own_frame_is_its_caller_s():
    frame = frame_of(threading.get_ident())
    assert frame is not None and frame.f_code.co_name == "test_a_thread_s_own_frame_is_its_caller_s"
    assert frame_of(-1) is None


def test_stacks_are_of_one_moment() -> None:
    """Threads call `first` and `second` in turns, deep, and none is shown below the line that calls the other."""
    over = threading.Event()

    def first(depth: int) -> None:
        if depth:
            first(depth - 1)

    def second(depth: int) -> None:
        if depth:
            second(depth - 1)

    def run() -> None:
        while not over.is_set():
            first(100)
            second(100)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        found = [stacks()[thread.ident or 0] for _ in range(500) for thread in threads]
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert threading.get_ident() not in stacks()
    called = 0
    for stack in found:
        names = [entry.split("in ", 1)[1].splitlines() for entry in stack if f'"{__file__}"' in entry]
        for (_, line), (name, *_) in itertools.pairwise(pair for pair in names if len(pair) > 1):
            called += name in ("first", "second")
            assert name not in ("first", "second") or line.strip().startswith(f"{name}("), stack
    assert called > 0
