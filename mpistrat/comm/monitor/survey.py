"""Surveys: the positions of the ranks of all nodes, collected along a tree of nodes, for a rank that waits too long.

That rank requests a survey from a rank of the first node, through the nodes above its own in the tree. The first node queries
some nodes, each about a range of nodes. A queried rank divides the rest of its range in the same way, reads the board of its
node, and reports all at once, with equal positions merged. So a survey takes four messages per node, and at most seven per rank,
for any number of ranks; and a survey that passes a node covers all waits there.

Every query is acknowledged. If a rank does not answer, the next ranks of its node are queried, then the next node of its range. A
requesting rank without an answer skips the nodes above its own, one after another; at last it queries all nodes itself.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple, final

from ..mailbox import Mailbox
from .board import Board
from .rank_monitor import Answer, RankMonitor

__all__ = ["KINDS", "LEFT", "Nodes", "PATIENCE", "STAGGER", "Place", "Surveys", "height", "merge", "parts", "texts"]

STAGGER = 0.5  # seconds that a node waits for each one above it in the tree, because a survey may be coming
PATIENCE = 2.0  # seconds after which a rank requests a survey from another rank
FAN_OUT = 4  # nodes that one queries
_ANSWER = 1.0  # seconds that a rank has to answer
_TRIES = 3  # ranks of a node that are queried
_MOST = 64  # different positions in one report
_ASK, _HERE, _REPORT, _WANT, _RESULT = KINDS = 11, 12, 13, 14, 15

LEFT = Answer(0.0, -1, 0, 0.0, -1, 0, 0, 0.0, "has left the program", "", "", "")
_ELSEWHERE = LEFT._replace(what="elsewhere")


@final
@dataclass(frozen=True)
class Nodes:
    """The nodes of a group.

    Attributes:
        count: their number.
        ranks_of: returns the ranks of one.
        index: the number of this rank's.
    """

    count: int
    ranks_of: Callable[[int], Sequence[int]]
    index: int

    def after(self, number: int) -> Sequence[int]:
        """Return the ranks of the node `number` after this rank's, cyclically."""
        return self.ranks_of((self.index + number) % self.count)


class Place(NamedTuple):
    """Ranks at one position.

    Attributes:
        answer: of the first of them.
        seconds: how long the last and the first of them have been there.
        ranks: in ascending order.
    """

    answer: Answer
    seconds: tuple[float, float]
    ranks: list[int]


def merge(places: Iterable[Place]) -> list[Place]:
    """Return the positions with equal ones merged, in the order of their first ranks.

    If there are too many, the last ones are merged, except those of ranks that have left, which must stay distinct.
    """
    found: dict[tuple[Any, ...], list[Place]] = {}
    for place in places:
        found.setdefault(place.answer.key, []).append(place)
    merged = sorted(map(_join, found.values()), key=lambda place: place.ranks[0])
    if len(merged) <= _MOST:
        return merged
    merged.sort(key=lambda place: (place.answer.key != LEFT.key, place.ranks[0]))
    rest = _join(merged[_MOST - 1 :])
    return [*merged[: _MOST - 1], rest._replace(answer=_ELSEWHERE)]


def _join(places: list[Place]) -> Place:
    ranks = sorted({rank for place in places for rank in place.ranks})
    seconds = min(place.seconds[0] for place in places), max(place.seconds[1] for place in places)
    return Place(min(places, key=lambda place: place.ranks[0]).answer, seconds, ranks)


def texts(places: Iterable[Place]) -> dict[int, str]:
    """Return the position of each rank, in words."""
    found: dict[int, str] = {}
    for place in places:
        text = place.answer.text if len(place.ranks) == 1 else place.answer.words(place.seconds, "")
        found.update(dict.fromkeys(place.ranks, text))
    return found


def parts(low: int, high: int) -> list[tuple[int, int]]:
    """Divide a range into a few of nearly equal lengths.

    Example:
        >>> parts(1, 10), parts(1, 3), parts(1, 1)
        ([(1, 3), (3, 5), (5, 7), (7, 10)], [(1, 2), (2, 3)], [])
    """
    count = min(FAN_OUT, high - low)
    borders = [low + (high - low) * i // max(count, 1) for i in range(count + 1)]
    return list(itertools.pairwise(borders))


def height(nodes: int) -> int:
    """Return the most times that a message from one node to all is forwarded.

    Example:
        >>> height(1), height(5), height(6), height(21)
        (0, 1, 2, 2)
    """
    levels, reached = 0, 1
    while reached < nodes:
        levels, reached = levels + 1, reached * FAN_OUT + 1
    return levels


def _encode(places: Iterable[Place]) -> list[Any]:
    rows = []
    for place in places:
        runs: list[list[int]] = []
        for rank in place.ranks:
            if runs and runs[-1][1] == rank:
                runs[-1][1] = rank + 1
            else:
                runs.append([rank, rank + 1])
        rows.append([runs, place.seconds, place.answer[1:]])
    return rows


def _decode(rows: list[Any]) -> list[Place]:
    now = monotonic()
    return [
        Place(Answer._make((now, *answer)), tuple(seconds), [rank for run in runs for rank in range(*run)])
        for runs, seconds, answer in rows
    ]


class _Piece:
    """A range of nodes that another rank is queried about."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.tries, self.sent = 0, 0.0
        self.heard = self.done = False


class _Survey:
    """A rank's work for one survey: it queries its own node, the first of a range, and others about the rest.

    Attributes:
        asker, token: the rank that gets the report, and the number of its survey.
        wanted: instead of these, the rank for which this one makes the survey.
        low: the number of this rank's node, counted from the node that makes the survey.
    """

    def __init__(self, low: int, high: int, about: int, since: float, seconds: float) -> None:
        self.asker, self.token, self.wanted = -1, 0, -1
        self.low, self.about, self.since, self.deadline = low, about, since, monotonic() + seconds
        self.places: list[Place] = []
        self.pieces = [_Piece(*part) for part in parts(low + 1, high)]


@final
class Surveys:
    """The surveys of one group in which this rank takes part. Used by the watchdog; local.

    Args:
        monitor, mailbox, board: of this rank.
        nodes: of the group.
        has_left: returns True if a rank of the node has left the program.

    Attributes:
        result: of the survey that this rank requested, once it is complete.
    """

    def __init__(
        self,
        monitor: RankMonitor,
        mailbox: Mailbox,
        board: Board,
        nodes: Nodes,
        has_left: Callable[[int], bool],
    ) -> None:
        self._monitor, self._mailbox, self._board = monitor, mailbox, board
        self._nodes, self._has_left = nodes, has_left
        self._above: list[int] = []  # the nodes above this one, up to the first
        node = nodes.index
        while node:
            node = (node - 1) // FAN_OUT
            self._above.append(node)
        self._surveys: dict[int, _Survey] = {}
        self._token, self._passed_on = 0, 0.0
        self.result: list[Place] | None = None

    @property
    def depth(self) -> int:
        """The number of nodes above this one."""
        return len(self._above)

    def want(self, about: int, attempt: int) -> None:
        """Request a survey for this rank, about a collective, by number; each attempt uses a node further above."""
        self._board.claim()
        self.result = None
        if attempt < len(self._above):
            self._send(self._nodes.ranks_of(self._above[attempt])[0], _WANT, self._monitor.rank, about)
        else:
            self._make(self._monitor.rank, about)

    def receive(self, source: int, kind: int, data: bytearray) -> None:
        """Handle a message of one of KINDS."""
        words = json.loads(data)
        if kind == _WANT:
            self._pass_on(*words)
        elif kind == _ASK:
            token, low, high, about, seconds = words
            self._send(source, _HERE, token, low)
            survey = self._enter(low, high, about, seconds)
            survey.asker, survey.token = source, token
        elif kind == _RESULT:
            self.result = _decode(words[0])
        elif words[0] in self._surveys:
            survey = self._surveys[words[0]]
            for piece in survey.pieces:
                if piece.low == words[1] and not piece.done:
                    piece.heard, piece.done = True, kind == _REPORT
                    survey.places += _decode(words[2]) if piece.done else []

    def _pass_on(self, rank: int, about: int) -> None:
        """Make a survey for a rank of another node, or forward its request, unless one was made just now."""
        now = monotonic()
        if now - max(self._board.surveyed, self._passed_on) < _ANSWER:
            return
        self._passed_on = now
        if self._above:
            self._send(self._nodes.ranks_of(self._above[0])[0], _WANT, rank, about)
        else:
            self._make(rank, about)

    def _make(self, rank: int, about: int) -> None:
        """Query all nodes for a rank."""
        self._enter(0, self._nodes.count, about, _ANSWER * (_TRIES + 1 + height(self._nodes.count))).wanted = rank

    def _enter(self, low: int, high: int, about: int, seconds: float) -> _Survey:
        """Start to query a range of nodes, the first of which is this rank's."""
        self._board.note_survey()
        self._token += 1
        survey = self._surveys[self._token] = _Survey(low, high, about, self._board.ask(about), seconds)
        for piece in survey.pieces:
            self._ask(self._token, survey, piece)
        return survey

    def _ranks(self, survey: _Survey, piece: _Piece) -> Sequence[int]:
        """Return the ranks of the first node of a range."""
        return self._nodes.after(piece.low - survey.low)

    def _ask(self, token: int, survey: _Survey, piece: _Piece) -> None:
        piece.sent = monotonic()
        left = max(survey.deadline - piece.sent - _ANSWER, _ANSWER)
        rank = self._ranks(survey, piece)[piece.tries]
        self._send(rank, _ASK, token, piece.low, piece.high, survey.about, left)

    def look(self) -> None:
        """Make progress: query others in place of ranks that do not answer, and report complete surveys."""
        for token, survey in list(self._surveys.items()):
            now = monotonic()
            for piece in survey.pieces:
                if not piece.heard and not piece.done and now - piece.sent > _ANSWER:
                    self._ask_others(token, survey, piece)
            own, whole = self._read(survey)
            whole = (whole or now - survey.since > _ANSWER) and all(piece.done for piece in survey.pieces)
            if whole or now > survey.deadline:
                del self._surveys[token]
                self._report(survey, merge([*own, *survey.places]))

    def _report(self, survey: _Survey, places: list[Place]) -> None:
        if survey.wanted == self._monitor.rank:
            self.result = places
        elif survey.wanted >= 0:
            self._send(survey.wanted, _RESULT, _encode(places))
        else:
            self._send(survey.asker, _REPORT, survey.token, survey.low, _encode(places))

    def _ask_others(self, token: int, survey: _Survey, piece: _Piece) -> None:
        """Query the next rank of the node, or of the next node, in place of one that does not answer."""
        piece.tries += 1
        if piece.tries >= min(_TRIES, len(self._ranks(survey, piece))):
            piece.low, piece.tries = piece.low + 1, 0
        piece.done = piece.low >= piece.high
        if not piece.done:
            self._ask(token, survey, piece)

    def _read(self, survey: _Survey) -> tuple[list[Place], bool]:
        """Return the known positions of this node's ranks and of those that have left, and True if all have answered."""
        places = [Place(LEFT, (0.0, 0.0), [rank]) for rank in self._monitor.left]
        whole = True
        for index, rank in enumerate(self._nodes.ranks_of(self._nodes.index)):
            answer = LEFT if self._has_left(index) else self._board.read(index, survey.since)
            if answer is None:
                whole = False
            else:
                places.append(Place(answer, (answer.seconds, answer.seconds), [rank]))
        return places, whole

    def _send(self, rank: int, kind: int, *words: Any) -> None:
        self._mailbox.send(json.dumps(words).encode(), rank, kind)
