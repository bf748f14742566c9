"""The thread of a server, on one process: waiting, stopping, errors."""

import threading

import pytest

from mpistrat.base import waiting
from mpistrat.base.waiting import wait_until
from mpistrat.parameter_server.report import ServerStats
from mpistrat.parameter_server.server import server
from mpistrat.parameter_server.server.server import _LAST_SENDS, _LOOK, Rounds, Service
from tests.harness.clock import Clock


class Counting(Rounds):
    """Has something to do in every round until `last`; then `error` is raised, if there is one."""

    def __init__(self, last=10, error=None):
        self.count, self.last, self.error, self.checks, self.sending, self.rests = 0, last, error, 0, 0, 0

    def poll(self):
        if self.count == self.last:
            self.sending = max(self.sending - 1, 0)
            if self.error is not None:
                raise self.error
            return False
        self.count += 1
        return True

    def rest(self):
        self.rests += 1
        return False

    def busy(self):
        return bool(self.sending)

    def check(self):
        self.checks += 1
        if self.checks == 2:
            raise ValueError("nobody comes")


@pytest.fixture
def service():
    """`service(rounds)` starts one in a thread, `service(rounds, False)` one without; they are stopped at the end."""
    made = []

    def make(rounds, threads=True, stats=None):
        made.append(Service(rounds, 1e-3, threads, stats or ServerStats(1)))
        made[-1].start("service")
        return made[-1]

    yield make
    for each in made:
        each.stop()
        assert each._thread is None or not each._thread.is_alive()


@pytest.mark.parametrize("threads", [True, False])
def test_wait_returns_when_it_is_done(service, threads):
    rounds = Counting(1000)
    made = service(rounds, threads)
    made.wait(lambda: rounds.count == 1000)
    assert rounds.count == 1000
    rounds.last = 2000
    made.wait(lambda: rounds.count == 2000)
    assert not made.waiting


@pytest.mark.parametrize("threads", [True, False])
def test_wait_raises_what_a_round_or_a_check_raises(service, threads):
    made = service(rounds := Counting(10**9), threads)

    def fail():
        """Called once somebody waits."""
        rounds.error, rounds.last, rounds.count = KeyError("mine"), 0, 0
        return False

    with pytest.raises(KeyError, match="mine"):
        made.wait(fail)
    with pytest.raises(ValueError, match="nobody comes"):
        service(Counting(), threads).wait(lambda: False)


def test_an_error_while_nobody_waits_is_an_uncaught_exception_of_the_thread(service, monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append((args.thread.name, args.exc_value)))
    error = KeyError("mine")
    made = service(Counting(3, error))
    made._thread.join(5)
    assert seen == [("service", error)]
    with pytest.raises(KeyError, match="mine"):
        made.wait(lambda: True)


class Saturated(Rounds):
    """Always has something to do, for a hundredth of the time between two looks at the rest."""

    def __init__(self, clock, fails=False):
        self.polls = self.rests = 0
        self.clock, self.fails = clock, fails

    def poll(self):
        self.polls += 1
        self.clock.sleep(_LOOK / 100)
        return True

    def rest(self):
        self.rests += 1
        return False

    def busy(self):
        return False

    def check(self):
        if self.fails:
            raise ValueError("nobody comes")


@pytest.mark.parametrize("threads", [True, False])
def test_a_server_that_always_has_something_to_do_looks_at_the_rest_too(service, threads, monkeypatch):
    clock, ended = Clock(), threading.Event()
    clock.replace_time(monkeypatch, server)

    def run():
        rounds = Saturated(clock)
        made = service(rounds, threads)
        made.wait(lambda: rounds.rests >= 3)  # notices of leave, retries
        made.stop()
        assert rounds.polls / 110 <= rounds.rests <= rounds.polls / 90
        with pytest.raises(ValueError, match="nobody comes"):
            service(Saturated(clock, fails=True), threads).wait(lambda: False)
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert ended.wait(30)


def test_stop_lets_what_is_on_its_way_arrive(service, monkeypatch):
    clock = Clock()
    clock.replace_time(monkeypatch, waiting)
    monkeypatch.setattr(waiting, "sleep", lambda seconds: None)

    class Sending(Counting):
        def busy(self):
            clock.sleep(0.1)
            return super().busy()

    rounds = Sending()
    rounds.sending = 10**9  # before the thread starts, which counts them down
    made = service(rounds)
    start = clock.now
    made.stop()
    assert not made._thread.is_alive()
    assert clock.now - start == pytest.approx(_LAST_SENDS, abs=0.2)  # not for ever
    rounds = Sending()
    rounds.sending = 20
    made = service(rounds)
    made.stop()
    assert rounds.sending == 0
    made.start("again")
    assert not made._thread.is_alive()


def test_idle_time_is_counted(service, monkeypatch):
    clock, rounds, stats = Clock(), Counting(1), ServerStats(1)
    clock.replace_time(monkeypatch, server)

    def look_twice():
        """Wait until it has looked, found nothing, and rested."""
        before = rounds.rests
        assert wait_until(lambda: rounds.rests >= before + 2, 30)

    service(rounds, stats=stats)
    look_twice()
    clock.sleep(0.2)
    assert stats.idle == 0
    for last, seconds in (2, 0.2), (3, 5.2):
        rounds.last = last
        look_twice()
        assert stats.idle == pytest.approx(seconds)
        clock.sleep(5)
