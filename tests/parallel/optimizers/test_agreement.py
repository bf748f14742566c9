"""What ranks must agree on in an optimizer: differences are found, by the next comparison at the latest."""

import numpy as np
import pytest


class Stairs:
    """A schedule of the user's own, made one by `_differ`."""

    def __init__(self, height):
        self.height = height

    def __call__(self, step):
        return self.height * step


def _differ(ms, what, odd, v):
    """An optimizer that differs on one rank in what cannot be seen from its name and rate alone."""
    if what == "iterations":
        optimizer = ms.optimizers.Adam(0.25)
        optimizer.iterations = 3 if odd else 2
    elif what == "schedule":
        own = type("Stairs", (Stairs, ms.optimizers.schedules.LearningRateSchedule), {})
        optimizer = ms.optimizers.SGD(own(0.5 if odd else 0.25))
    else:
        optimizer = ms.optimizers.AdamW(0.25)
        if odd:
            optimizer.exclude_from_weight_decay([v])
    return optimizer


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", ["iterations", "schedule", "decay"])
def test_numbers_that_change_with_the_steps_are_compared(what):
    from mpi4py import MPI

    import mpistrat as ms

    with ms.MirroredStrategy() as strategy:
        with strategy.scope():
            v = ms.Variable(np.zeros(5), name="v")
        optimizer = _differ(ms, what, MPI.COMM_WORLD.rank == 1, v)
        text = {"iterations": "counted from 3", "schedule": "height=0.5", "decay": "apply_gradients of v by AdamW"}[
            what
        ]
        with pytest.raises(ms.errors.CollectiveMismatchError, match=text):
            strategy.run(lambda: optimizer.apply_gradients([(v.grad, v)]))


@pytest.mark.ranks(2)
def test_iterations_set_between_steps_on_one_rank_are_found():
    from mpi4py import MPI

    import mpistrat as ms

    with ms.MirroredStrategy() as strategy:
        with strategy.scope():
            v = ms.Variable(np.zeros(5), name="v")
        optimizer = ms.optimizers.Adam(0.25)

        def step():
            return optimizer.apply_gradients([(v.grad, v)])

        assert [strategy.run(step) for _ in range(2)] == [1, 2]
        optimizer.iterations = 10
        assert strategy.run(step) == 11
        if MPI.COMM_WORLD.rank == 1:
            optimizer.iterations = 5
        with pytest.raises(ms.errors.CollectiveMismatchError, match="counted from 5"):
            strategy.run(step)


def _hidden(ms, what, odd, strategy):
    """A variable and an optimizer, one of which differs on one rank in what no argument shows."""
    schedule = type("Own", (ms.optimizers.schedules.LearningRateSchedule,), {"__call__": lambda s, step: s._heights[0]})
    rule = type("Rule", (ms.optimizers.Optimizer,), {"update": _scaled_update})
    with strategy.scope():
        clip = (lambda x: np.clip(x, -0.5 * odd, 1)) if what == "constraint" else None
        v = ms.Variable(np.zeros(300), name="v", constraint=clip)
        optimizer = ms.optimizers.SGD(0.5, momentum=0.5)
        if what == "schedule":
            own = schedule()
            own._heights = [0.25 if odd else 0.5]
            optimizer = ms.optimizers.SGD(own)
        elif what == "rule":
            optimizer = rule(0.5)
            optimizer._k = 3.0 if odd else 2.0
        elif what == "twins":
            other = ms.optimizers.SGD(0.5, momentum=0.5)
            optimizer = other if odd else optimizer
    return v, optimizer


def _scaled_update(self, gradient, weights, slots, step, rate, scratch):
    weights -= self._k * gradient


HIDDEN = {
    "schedule": r"step 1 at rate 0\.25",
    "rule": r"_k=3\.0",
    "twins": r"the scope's optimizer 1",
    "momentum": r"momentum=0\.75",
    "iterations": r"step 1 at rate",
    "slots": r"slots set #",
    "global_clipnorm": r"global_clipnorm=1\.0",
    "unaggregated": r"gradients #",
    "constraint": r"constraint 'v'",
}


def _change(what, optimizer, v):
    if what == "momentum":
        optimizer.momentum = 0.75
    elif what == "iterations":
        optimizer.iterations = 0
    elif what == "slots":
        optimizer.set_slots(v, {"momentum": np.ones(300)})
    elif what == "global_clipnorm":
        optimizer.global_clipnorm = 1.0


@pytest.mark.ranks(2, 3)
def test_differences_that_no_argument_shows_are_found_on_one_node():
    from mpi4py import MPI

    import mpistrat as ms

    odd = MPI.COMM_WORLD.rank == 1
    for what, text in HIDDEN.items():
        with ms.MirroredStrategy() as strategy:
            v, optimizer = _hidden(ms, what, odd, strategy)
            gradient = np.full(300, 2.0 if odd and what == "unaggregated" else 1.0)

            def step(optimizer=optimizer, v=v, gradient=gradient, aggregate=what != "unaggregated"):
                optimizer.apply_gradients([(gradient, v)], experimental_aggregate_gradients=aggregate)

            with pytest.raises(ms.errors.CollectiveMismatchError, match=rf"rank 1: .*{text}"):
                for number in range(3):
                    if number == 1 and odd:
                        _change(what, optimizer, v)
                    strategy.run(step)


@pytest.mark.ranks(2, 3)
def test_differences_between_nodes_are_found_by_the_next_comparison(monkeypatch):
    """Each rank counts as a node here. What changes other numbers only is found by the checksum of the weights."""
    from mpi4py import MPI

    import mpistrat as ms

    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "4")
    odd = MPI.COMM_WORLD.rank == 1
    for what, text in {**HIDDEN, "memory": r"expected the same weights on all nodes.*rank 1: v #"}.items():
        if what in ("momentum", "slots", "global_clipnorm"):  # another text on one node: the watchdog ends the job
            continue
        with ms.MultiWorkerMirroredStrategy() as strategy:
            v, optimizer = _hidden(ms, what, odd, strategy)
            gradient = np.full(300, 2.0 if odd and what == "unaggregated" else 1.0)

            def step(optimizer=optimizer, v=v, gradient=gradient, aggregate=what != "unaggregated"):
                optimizer.apply_gradients([(gradient, v)], experimental_aggregate_gradients=aggregate)

            taken = 0
            with pytest.raises(ms.errors.CollectiveMismatchError, match=rf"rank 1: .*{text}|{text}"):
                for taken in range(9):
                    if taken == 1 and odd:
                        optimizer._core.started -= what == "iterations"  # as a number that is set to what it was
                        if what == "memory":
                            v.arena.values[v.offset + 7] += 1.0  # as a bit that flips
                    strategy.run(step)
            assert taken <= 5


CLIPPED_ON_ONE_RANK = """
import numpy as np, mpistrat as ms
with ms.MultiWorkerMirroredStrategy() as strategy:
    with strategy.scope():
        v, optimizer = ms.Variable(np.zeros(300), name="v"), ms.optimizers.SGD(0.5)
    for number in range(4):
        if number == 2 and strategy.rank == 1:
            optimizer.global_clipnorm = 1.0
        strategy.run(lambda: optimizer.apply_gradients([(v.grad, v)]))
"""


def test_another_way_through_a_step_between_nodes_is_told_before_the_time_limit(mpi_run):
    result = mpi_run(CLIPPED_ON_ONE_RANK, 2, timeout=40, env={"MPISTRAT_SHARED_MEMORY": "0"})
    assert result.returncode != 0
    assert "CollectiveMismatchError" in result.stderr
    assert "global_clipnorm=1.0" in result.stderr


EXCHANGED = """
import numpy as np, mpistrat as ms
with ms.MultiWorkerMirroredStrategy() as strategy:
    for number in range(20):
        for dtype in ("f4", "i4") if number < 19 or strategy.rank else ("i4", "f4"):
            strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(3, dtype)))
"""


def test_an_exchanged_order_ends_the_job_before_the_time_limit(mpi_run):
    """Both calls are known, and have messages of the same length: none is taken for the other."""
    result = mpi_run(EXCHANGED, 2, timeout=40, env={"MPISTRAT_SHARED_MEMORY": "0"})
    assert result.returncode != 0
    assert "CollectiveMismatchError" in result.stderr
    assert "int32 (3,)" in result.stderr
    assert "float32 (3,)" in result.stderr


@pytest.mark.ranks(2)
def test_what_may_differ_from_rank_to_rank_is_not_compared():
    from mpi4py import MPI

    import mpistrat as ms

    class Counting(ms.optimizers.Optimizer):
        def __init__(self):
            super().__init__(1.0)
            self.__blocks = MPI.COMM_WORLD.rank
            self._seen = 0

        def update(self, gradient, weights, slots, step, rate, scratch):
            self.__blocks += 1
            self._seen += 1 + MPI.COMM_WORLD.rank  # compared as it was at the first step
            weights -= gradient

    with ms.MirroredStrategy() as strategy:
        with strategy.scope():
            v = ms.Variable(np.zeros(300), name="v")
            optimizer = Counting()
        for _ in range(3):
            strategy.run(lambda: optimizer.apply_gradients([(v.grad, v)]))
            optimizer.learning_rate = 0.5
        assert optimizer.iterations == 3


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("wrong", ["no gradient on one rank", "another rate on one rank", "another rule on one rank"])
def test_ranks_that_differ_are_told(wrong):
    from mpi4py import MPI

    import mpistrat as ms

    odd = MPI.COMM_WORLD.rank == 1
    with ms.MirroredStrategy() as strategy:
        with strategy.scope():
            v, w = ms.Variable(np.zeros(5), name="v"), ms.Variable(np.zeros(5), name="w")
        rule = ms.optimizers.SGD if odd and wrong.startswith("another rule") else ms.optimizers.Adam
        optimizer = rule(0.5 if odd and wrong.startswith("another rate") else 0.25)
        absent = odd and wrong.startswith("no gradient")

        def step():
            optimizer.apply_gradients([(v.grad, v), (None if absent else w.grad, w)])

        shown = {"no": "of v, not w", "another rate": "learning_rate=0.5", "another rule": "SGD"}
        text = next(value for key, value in shown.items() if wrong.startswith(key))
        with pytest.raises(ms.errors.CollectiveMismatchError, match=rf"rank 1: apply_gradients.*{text}") as told:
            strategy.run(step)
        assert wrong.startswith("another rule") or "beta_1" not in str(told.value)  # what is alike is not shown
        assert optimizer.iterations == 0
        assert not v.numpy().any()


LATE = """
import sys, time
import numpy as np, mpistrat as ms

class Late(ms.optimizers.Optimizer):
    def update(self, gradient, weights, slots, step, rate, scratch):
        if step == 3 and strategy.rank == 1:
            if sys.argv[1] == "raises":
                raise ZeroDivisionError("in the middle")
            time.sleep(60)
        weights -= rate * gradient

strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    w, optimizer = ms.Variable(np.zeros(2_000_000, np.float32), name="w"), Late(0.5)
for _ in range(4):
    strategy.run(lambda: optimizer.apply_gradients([(w.grad, w)]))
assert not w.arena.sharded, "not reached"
"""


@pytest.mark.parametrize("how", ["raises", "sleeps"])
def test_a_peer_that_does_not_come(how, mpi_run):
    env = {"MPISTRAT_SHARED_MEMORY": "0", "MPISTRAT_ABORT_AFTER": "4"}
    result = mpi_run(["-c", LATE, how], 2, timeout=40, env=env)
    assert result.returncode != 0 and "not reached" not in result.stderr
    expected = "ZeroDivisionError: in the middle" if how == "raises" else "apply_gradients"
    assert expected in result.stderr
