"""Surveys of many nodes in one process: a clock and messages of the test's own, and ranks that do not answer."""

from __future__ import annotations

from collections import Counter

import pytest

from mpistrat.comm.call import Call
from mpistrat.comm.monitor import board, rank_monitor, survey
from mpistrat.comm.monitor.board import BOARD_BYTES, Board
from mpistrat.comm.monitor.rank_monitor import Answer, RankMonitor, lines
from mpistrat.comm.monitor.survey import Nodes, Place, Surveys, merge, parts, texts

POLL = 0.1


class Job:
    """Ranks of some nodes, each with as many; `silent` ones do nothing, and are not heard."""

    def __init__(self, nodes, per_node, monkeypatch, silent=(), gone=()):
        self.now, self.silent, self.gone = 100.0, {*silent}, {*gone}
        self.sent, self.letters = Counter(), []
        for module in (survey, board, rank_monitor):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)
        size, call = nodes * per_node, Call("reduce", 600.0)
        self.ranks = []
        for node in range(nodes):
            pages = [memoryview(bytearray(BOARD_BYTES)) for _ in range(per_node)]
            for index in range(per_node):
                rank = node * per_node + index
                monitor = RankMonitor(rank, size, 600.0, 10.0)
                monitor.number, monitor.current = 3, (self.now - 10.0, call, 3)
                own = Board(pages, index, lambda: None)
                ranks_of = self.ranks_of(per_node)
                left = self.has_left(node * per_node)
                surveys = Surveys(monitor, Post(self, rank), own, Nodes(nodes, ranks_of, node), left)
                self.ranks.append((monitor, own, surveys))

    @staticmethod
    def ranks_of(per_node):
        return lambda node: range(node * per_node, (node + 1) * per_node)

    def has_left(self, first):
        return lambda index: first + index in self.gone

    def run(self, wanted, seconds=30.0):
        """Let time pass until a rank has what it wanted; return the places."""
        until = self.now + seconds
        while self.ranks[wanted][2].result is None:
            self.now += POLL
            assert self.now < until, "no survey came"
            letters, self.letters = self.letters, []
            for source, rank, kind, data in letters:
                if rank not in self.silent | self.gone:
                    self.ranks[rank][2].receive(source, kind, bytearray(data))
            for rank, (monitor, own, surveys) in enumerate(self.ranks):
                if rank not in self.silent | self.gone:
                    own.write(monitor.answer)
                    surveys.look()
        return self.ranks[wanted][2].result


class Post:
    """The mailbox of a rank."""

    def __init__(self, job, rank):
        self.job, self.rank = job, rank

    def send(self, data, rank, kind):
        self.job.sent[self.rank] += 1
        self.job.letters.append((self.rank, rank, kind, data))


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (2, 2), (30, 1), (300, 2)])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_all_ranks_are_found_with_few_messages(monkeypatch, nodes, per_node, last):
    job = Job(nodes, per_node, monkeypatch)
    size = nodes * per_node
    wanted = size - 1 if last else 0
    start = job.now
    job.ranks[wanted][2].want(3, 0)
    places = job.run(wanted)
    assert [place.ranks for place in places] == [list(range(size))]
    assert places[0].answer.about == 3 and places[0].answer.number == 3
    # a question, that it came, and the answer of each node but one; the way up, and the result
    assert sum(job.sent.values()) <= 3 * (nodes - 1) + job.ranks[wanted][2].depth + 1
    assert max(job.sent.values(), default=0) <= 4 + 3
    assert job.now - start < 2.5


def test_in_place_of_a_leader_that_does_not_answer_the_next_rank_does(monkeypatch):
    silent = [2, 8, 9]  # of nodes of two ranks: a first one, and a whole node
    job = Job(20, 2, monkeypatch, silent)
    job.ranks[0][2].want(3, 0)
    found = texts(job.run(0))
    assert sorted(set(range(40)) - found.keys()) == silent


def test_a_dead_node_does_not_silence_those_behind_it(monkeypatch):
    silent = [node for node in range(1, 40) if node % 5 == 1]
    job = Job(40, 1, monkeypatch, silent)
    job.ranks[0][2].want(3, 0)
    found = texts(job.run(0))
    assert sorted(set(range(40)) - found.keys()) == silent


def test_a_rank_below_dead_nodes_asks_further_above_and_then_itself(monkeypatch):
    job = Job(30, 1, monkeypatch, silent=[0, 1, 6])
    wanted = next(rank for rank in range(29, 6, -1) if job.ranks[rank][2].depth == 3)
    for attempt in range(job.ranks[wanted][2].depth + 1):
        job.ranks[wanted][2].want(3, attempt)
    found = texts(job.run(wanted))
    assert sorted(set(range(30)) - found.keys()) == [0, 1, 6]


def test_many_that_want_one_get_one(monkeypatch):
    """The ranks of all other nodes want a survey at once: the first node makes one, and hears of few."""
    job = Job(64, 1, monkeypatch)
    for rank in range(1, 64):
        job.ranks[rank][2].want(3, 0)
    job.now += POLL
    job.run(next(source for source, rank, _, _ in job.letters if rank == 0))
    assert max(job.sent.values()) <= 4 + 3 + 4
    assert sum(own.surveyed > 0 for _, own, _ in job.ranks) == 64


def test_ranks_that_left_are_told_from_those_that_do_not_answer(monkeypatch):
    job = Job(2, 3, monkeypatch, silent=[5], gone=[4])
    job.ranks[0][2].want(3, 0)
    found = texts(job.run(0))
    assert found[4] == "has left the program" and 5 not in found


def answer(**more):
    return Answer(0.0, 3, 1, 2.0, -1, 0, 0, 0.0, "in reduce #3", "train.py:5", "save (3 ms)", "")._replace(**more)


def test_equal_places_are_one_line():
    where = [Place(answer(seconds=1.0 + rank), (1.0 + rank, 1.0 + rank), [rank]) for rank in range(3)]
    where.append(Place(answer(number=-1, what="not in a collective, after #2"), (0.0, 0.0), [7]))
    words = lines(texts(merge(where)) | {8: "does not answer"})
    assert words.splitlines()[1:] == [
        "  ranks 0-2 in reduce #3 for 1.0 to 3.0 s, at train.py:5",
        "  rank 7 not in a collective, after #2 for 2.0 s, at train.py:5; before that save (3 ms)",
        "  rank 8 does not answer",
    ]


def test_too_many_places_become_few():
    """What is sent must not grow with the ranks, wherever they are."""
    where = [Place(answer(at=f"train.py:{rank}"), (0.0, 0.0), [rank]) for rank in range(500)]
    few = merge(where)
    assert len(few) == 64 and few[-1].ranks == list(range(63, 500)) and few[-1].answer.what == "elsewhere"
    assert few[:63] == where[:63]


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 3), (1, 6), (5, 1000)])
def test_parts_cover_a_range_once(low, high):
    assert [i for first, last in parts(low, high) for i in range(first, last)] == list(range(low, high))
    assert len(parts(low, high)) <= 4


def test_an_answer_that_is_too_long_loses_words():
    whole = answer(what="in " + "é" * 600, error="x" * 5000)
    assert Answer.decode(whole.encode(10_000))[1:] == whole[1:]
    short = Answer.decode(whole.encode(BOARD_BYTES - 64))
    assert short[1:-4] == whole[1:-4] and whole.what.startswith(short.what) and short.what


def test_what_stands_on_a_board_is_fresh(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(board, "monotonic", lambda: now[0])
    pages = [memoryview(bytearray(BOARD_BYTES)) for _ in range(2)]
    first, second = (Board(pages, index, lambda: None) for index in range(2))
    second.write(lambda about: pytest.fail("nobody asks"))
    since = first.ask(7)
    assert first.read(1, since) is None
    now[0] += POLL
    second.write(lambda about: answer(about=about))
    assert first.read(1, since).about == 7 and first.read(0, since) is None
    now[0] += POLL
    since = first.ask(8)
    assert first.read(1, since) is None
