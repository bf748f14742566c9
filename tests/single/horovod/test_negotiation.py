"""Negotiation of Horovod's calls between ranks in one process: what is decided, in which order, and what travels."""

import random

import pytest

from mpistrat.horovod.negotiation import Coordinator, RankCalls, left_in

SETS = {0: [0, 1, 2], 1: [0, 2]}


def form(kind="allreduce", shape=(3,), op="Sum", **more):
    return {"kind": kind, "dtypes": ["float32"], "shapes": [list(shape)], "op": op, "pre": 1.0, "post": 1.0, **more}


ALLREDUCE = form()


class World:
    """Ranks that ask, and their coordinator."""

    def __init__(self, warn_after=0.0, limit=1e9):
        self.warnings = []
        self.coordinator = Coordinator(3, SETS.get, warn_after, limit, self.warnings.append)
        self.ranks = [RankCalls() for _ in range(3)]
        self.bytes = 0

    def ask(self, rank, *names, number=0, leaves=None, form=None, **forms):
        calls = [((number, name), forms.get(name, form or ALLREDUCE)) for name in names]
        data = self.ranks[rank].message(calls, leaves)
        self.bytes += len(data)
        self.coordinator.take(rank, data)

    def decide(self):
        """Return the names and errors that each rank sees."""
        decision = self.coordinator.decide()
        if decision is None:
            return None
        data, ranks = decision
        self.bytes += len(data) * len(ranks)
        self.data = data
        found = [[(one.key[1], one.error) for one in rank.decisions(data)] for rank in self.ranks]
        return {rank: found[rank] for rank in sorted(ranks)}


def on_all(found):
    return dict.fromkeys(range(3), found)


def names(decided):
    return {rank: [name for name, _ in found] for rank, found in decided.items()}


def test_a_call_runs_when_all_ranks_have_made_it_in_any_order():
    world = World()
    world.ask(0, "a", "b")
    world.ask(1, "b")
    assert world.decide() is None
    world.ask(2, "b", "a")
    assert names(world.decide()) == on_all(["b"])
    world.ask(1, "a")
    assert names(world.decide()) == on_all(["a"])


def test_devices_are_compared():
    world = World()
    for rank in range(3):
        world.ask(rank, "a", form=form(device="cpu" if rank == 1 else "gpu"))
    error = "a: the ranks call allreduce with different devices: ranks 0, 2: gpu; rank 1: cpu"
    assert world.decide() == on_all([("a", error)])


def test_known_names_travel_as_bits():
    world = World()
    many = [f"tensor.{number}" for number in range(200)]
    for rank in range(3):
        world.ask(rank, *many)
    assert names(world.decide())[2] == many
    first, world.bytes = world.bytes, 0
    for rank in range(3):
        world.ask(rank, *reversed(many))
    assert names(world.decide())[1] == many
    assert world.bytes == 6 * (4 + 200 // 8)
    assert first > 100 * world.bytes


def test_a_call_that_changes_travels_as_text_again():
    world = World()
    for shape in ((3,), (3,), (5,), (5,)):
        for rank in range(3):
            world.ask(rank, "a", form=form(shape=shape))
        assert names(world.decide()) == on_all(["a"])
        assert world.ranks[1].decisions(world.data)[0].form["shapes"] == [list(shape)]


def test_unnamed_calls_leave_nothing_behind():
    world = World()
    for number in range(100):
        for rank in range(3):
            shape = (3 + number % 2 * rank,)  # every second call fails
            world.ask(rank, f"noname.{number}", form=form(shape=shape, once=True))
        world.decide()
    kept = {**vars(world.coordinator), **vars(world.ranks[1])}
    sizes = {name: len(value) for name, value in kept.items() if isinstance(value, (dict, set, list)) and value}
    assert sizes == {"_last": 3, "_latest": 3}  # of each rank
    assert world.coordinator._last == [{}, {}, {}]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (form(shape=(4,)), "different shapes: ranks 0, 2: [[3]]; rank 1: [[4]]"),
        (form(op="Max"), "different op: ranks 0, 2: Sum; rank 1: Max"),
        ({**form(), "dtypes": ["int64"]}, "different dtypes: ranks 0, 2: ['float32']; rank 1: ['int64']"),
        (form("broadcast"), "different operations: ranks 0, 2: allreduce; rank 1: broadcast"),
    ],
)
def test_calls_that_differ_name_the_tensor_and_the_ranks(wrong, text):
    world = World()
    for again in range(2):
        for rank in range(3):
            world.ask(rank, "grad", form=wrong if rank == 1 else form())
        for found in world.decide().values():
            ((name, error),) = found
            assert name == "grad" and error.startswith("grad: ") and text in error, again
    for rank in range(3):
        world.ask(rank, "grad")
    assert set(map(tuple, world.decide().values())) == {(("grad", ""),)}


def test_rows_of_a_gather_may_differ_and_are_those_of_the_ranks():
    world = World()
    for first in (1, 1, 4):
        for rank in range(3):
            world.ask(rank, "x", form=form("allgather", shape=(first + rank, 2)))
        world.decide()
        assert world.ranks[0].decisions(world.data)[0].form["rows"] == [[[first + rank, 2]] for rank in range(3)]
    for rank in range(3):
        world.ask(rank, "x", form=form("allgather", shape=(1, 2 + rank)))
    assert "different shapes" in world.decide()[0][0][1]


def test_ranks_that_joined_are_not_waited_for_and_joins_end_last():
    world, join = World(), {"kind": "join", "once": True}
    world.ask(1, "join", form=join)
    world.ask(0, "a")
    assert world.decide() is None
    world.ask(2, "a", "join", join=join)
    assert names(world.decide()) == on_all(["a"])
    world.ask(0, "a", "join", join=join)
    assert names(world.decide()) == on_all(["a", "join"])
    assert world.ranks[1].decisions(world.data)[-1].form["last"] == 0
    for rank in range(3):  # rank 1 knows the number of "a", and has never asked for it
        world.ask(rank, "a")
    assert names(world.decide()) == on_all(["a"])


def test_a_gather_after_a_join_fails():
    world = World()
    world.ask(1, "join", form={"kind": "join", "once": True})
    for rank in (0, 2):
        world.ask(rank, "x", form=form("allgather"))
    assert world.decide()[0] == [
        ("x", "x: allgather cannot run after rank 1 called join; only allreduce and barrier can")
    ]


def test_a_process_set_waits_for_its_ranks_alone():
    world = World()
    world.ask(2, "a", number=1)
    world.ask(1, "a")
    assert world.decide() is None
    world.ask(0, "a", number=1)
    assert sorted(world.decide()) == [0, 2]


def test_a_stall_is_reported_once_with_the_ranks_and_fails_in_the_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("mpistrat.horovod.negotiation.time.monotonic", lambda: now[0])
    world = World(warn_after=10.0, limit=60.0)
    world.ask(0, "grad")
    world.ask(2, "grad")
    for now[0] in (5.0, 11.0, 12.0):
        world.coordinator.look_for_stalls()
    assert world.warnings == ["grad: ranks 0, 2 waited 11 s for rank 1"]
    assert world.decide() is None
    now[0] = 61.0
    world.coordinator.look_for_stalls()
    ((name, error),) = world.decide()[2]
    assert name == "grad" and error.startswith("grad: ranks 0, 2 waited 61 s for rank 1, which did not call it")


def test_a_stall_of_calls_that_ranks_repeat_counts_from_the_first_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("mpistrat.horovod.negotiation.time.monotonic", lambda: now[0])
    world = World(warn_after=10.0, limit=60.0)
    for now[0] in (0.0, 1.0, 2.0):
        for rank in range(3):
            world.ask(rank, "grad")
        assert names(world.decide()) == on_all(["grad"])
    now[0] = 3.0
    world.ask(2, "grad")
    now[0] = 4.0
    world.ask(1, "grad")
    now[0] = 14.0
    world.coordinator.look_for_stalls()
    assert world.warnings == ["grad: ranks 1, 2 waited 11 s for rank 0"]
    world.ask(0, "grad")
    assert names(world.decide()) == on_all(["grad"])


def test_a_shape_that_stays_different_stays_an_error():
    """Also where each rank repeats its own call, so that all send the same bits."""
    world = World()
    for shape in [(3,)] * 3 + [(4,)] * 3 + [(3,)] * 3:
        for rank in range(3):
            world.ask(rank, "grad", form=form(shape=shape if rank == 1 else (3,)))
        error = (
            ""
            if shape == (3,)
            else "grad: the ranks call allreduce with different shapes: ranks 0, 2: [[3]]; rank 1: [[4]]"
        )
        assert world.decide() == on_all([("grad", error)])


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_run_when_all_ranks_have_made_them(seed):
    """Steps that repeat, steps of which ranks make other parts first, new shapes, and calls of a process set."""
    rng, world = random.Random(seed), World()
    asked = {(0, name): {} for name in "abcd"} | {(1, "a"): {}}  # the shape that each rank has asked for
    shapes = dict.fromkeys(asked, (3,))
    for _ in range(150):
        if rng.random() < 0.1:
            shapes[rng.choice(list(asked))] = (rng.randrange(1, 5),)
        keys = [(0, name) for name in ("abcd" if rng.random() < 0.5 else rng.sample("abcd", rng.randrange(1, 4)))]
        keys += [(1, "a")] * (rng.random() < 0.2)
        parts = [keys] if rng.random() < 0.6 else [keys[:1], keys[1:]]
        for part in parts:
            for rank in rng.sample(range(3), 3):
                own = [key for key in part if rank in SETS[key[0]] and rank not in asked[key]]
                for key in own:
                    asked[key][rank] = list(shapes[key])
                data = world.ranks[rank].message([(key, form(shape=shapes[key])) for key in own], None)
                world.coordinator.take(rank, data)
                if rng.random() < 0.7:
                    check_decision(world, asked)
        check_decision(world, asked)


def check_decision(world, asked):
    """Check a decision against the calls that ranks have asked for, and forget those that run."""
    ready = {key: calls for key, calls in asked.items() if len(calls) == len(SETS[key[0]])}
    decision = world.coordinator.decide()
    assert (decision is None) == (not ready)
    if decision is None:
        return
    data, ranks = decision
    assert ranks == {rank for key in ready for rank in SETS[key[0]]}
    for rank in ranks:
        found = {one.key: one for one in world.ranks[rank].decisions(data)}
        mine = {key for key in ready if rank in SETS[key[0]]}
        assert mine <= found.keys() <= ready.keys()
        for key in mine:
            alike = len({str(shape) for shape in ready[key].values()}) == 1
            assert bool(found[key].error) == (not alike)
            assert not alike or found[key].form["shapes"] == [next(iter(ready[key].values()))]
    for key in ready:
        asked[key].clear()


def test_a_join_may_wait_for_long(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("mpistrat.horovod.negotiation.time.monotonic", lambda: now[0])
    world = World(warn_after=10.0, limit=60.0)
    world.ask(0, "join", form={"kind": "join", "once": True})
    now[0] = 1e4
    world.coordinator.look_for_stalls()
    assert world.warnings == [] and world.decide() is None


@pytest.mark.parametrize("why", ["", "ValueError: broken"])
def test_a_rank_that_leaves_ends_all(why):
    world = World()
    world.ask(1, leaves=why)
    decision = world.coordinator.decide()
    assert decision is not None and decision[1] == {0, 1, 2} and left_in(decision[0]) == (1, why)
