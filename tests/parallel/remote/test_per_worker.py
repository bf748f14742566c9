"""What each worker of a coordinator has for itself: variables, and tables that are sent once."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ContextError
from mpistrat.lookup import KeyValueTensorInitializer, StaticHashTable
from tests.harness.coordinators import coordinated, coordinator


@pytest.mark.ranks(3, 4)
def test_a_function_writes_its_workers_copy_and_read_all_has_each():
    strategy = ms.ParameterServerStrategy()
    with strategy.scope():
        early = ms.Variable([0.0, 0.0], name="early", per_worker_variable=True)
    with coordinated(strategy) as c:
        if not c.is_chief:
            return
        with strategy.scope():
            late = ms.Variable(lambda: np.full(2, 3), name="late", per_worker_variable=True)

        def work(amount):
            early.assign_add([amount, 0.0])
            strategy.run(lambda: late.assign_sub([1, 0]))
            return ms.coordinator.get_current_worker_index()

        values = [c.schedule(work, (float(i),)) for i in range(30)]
        c.join()
        who = c.fetch(values)
        sums = [sum(i for i, worker in enumerate(who) if worker == w) for w in range(c.num_workers)]
        assert [copy.tolist() for copy in early.read_all()] == [[total, 0.0] for total in sums]
        assert [copy.tolist() for copy in late.read_all()] == [[3 - who.count(w), 3] for w in range(c.num_workers)]
        assert early.numpy().tolist() == [0, 0]  # the chief's own
        c.schedule(early.read_all)
        with pytest.raises(ContextError, match="scheduled function"):
            c.join()


def tables():
    return StaticHashTable(KeyValueTensorInitializer(["a", "b", "c"], [1, 2, 3]), -1, name="letters")


@pytest.mark.ranks(2, 3, 4)
def test_a_table_is_sent_to_each_worker_once_and_freed_with_the_chiefs():
    table = tables()
    with coordinator() as c:
        if not c.is_chief:
            return
        own = tables()  # beside one that the program of every rank made
        registry = c._cluster.registry
        for known in (table, own):
            look = lambda keys, t=known: (t.lookup(keys), id(t))  # noqa: E731
            first = c.fetch([c.schedule(look, (["c", "x"],), worker=w) for w in range(c.num_workers)])
            again = c.fetch([c.schedule(look, ([["a"], ["b"]],), worker=w) for w in range(c.num_workers)])
            assert [found.tolist() for found, _ in first] == [[3, -1]] * c.num_workers
            assert [found.tolist() for found, _ in again] == [[[1], [2]]] * c.num_workers
            assert [one for _, one in first] == [one for _, one in again]  # the same object
        del own, known, look
        c.join()
        counts = [c.schedule(lambda h: len(h.resources), (registry,), worker=0).get() for _ in range(2)]
        assert counts[-1] == 1


@pytest.mark.ranks(2, 3)
def test_a_table_in_an_argument_in_what_is_made_on_workers_and_in_a_result():
    with coordinator() as c:
        if not c.is_chief:
            return
        table = tables()
        makers = c.create_per_worker_resource(lambda: table.lookup(["b", "c"]).tolist())
        assert c.fetch(makers) == ([2, 3],) * c.num_workers
        assert c.schedule(lambda t: int(t["a"]), (table,)).get() == 1
        back = c.schedule(lambda: table).get()
        assert back.lookup("c") == 3
        c.cancel()
        assert (
            c.fetch([c.schedule(lambda: table.size(), worker=w) for w in range(c.num_workers)]) == [3] * c.num_workers
        )
