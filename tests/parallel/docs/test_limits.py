"""The table of docs/limits.md says which options of MultiWorkerMirroredStrategy exclude each other."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.harness.process_groups import set_layout
from tests.parallel.docs.test_docs import cells

TITLE = "Options of MultiWorkerMirroredStrategy"


def options() -> dict[str, dict[str, Any]]:
    """The arguments of each option, by its name in the table."""
    import mpistrat as ms

    def sent(**settings: str) -> dict[str, Any]:
        return {"communication_options": ms.CommunicationOptions(**settings)}

    return {
        "`sharded_slots=False`": {"sharded_slots": False},
        "`sharded_slots=True`": {"sharded_slots": True},
        "`sharded_gradients`": {"sharded_gradients": True},
        "`local_steps`": {"local_steps": 2},
        "`replicas`": {"replicas": 2},
        '`wire="bfloat16"`': sent(wire="bfloat16"),
        '`wire="int8"`': sent(wire="int8"),
        "algorithm MPI": sent(implementation="MPI"),
    }


def shown() -> dict[frozenset[str], str]:
    """What the table says of each pair of options."""
    header, _, *rows = cells("docs/limits.md", TITLE)
    return {
        frozenset((row[0], name)): cell for row in rows for name, cell in zip(header[1:], row[1:], strict=True) if cell
    }


def refuses(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether a strategy with both options, or its first step, raises an error. Collective."""
    import mpistrat as ms

    try:
        with ms.MultiWorkerMirroredStrategy(**first, **second) as strategy:
            with strategy.scope():
                v = ms.Variable(np.zeros(100_000, np.float32))
                optimizer = ms.optimizers.SGD(0.1)
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(100_000, np.float32), v)]))
    except ValueError:
        return True
    return False


def compare(refused: set[str]) -> None:
    """Make each pair of options, which must be refused where the table has one of these words."""
    arguments, table = options(), shown()
    assert set().union(*table) == arguments.keys()
    for (a, first), (b, second) in itertools.combinations(arguments.items(), 2):
        cell = table.get(frozenset((a, b)))
        if cell is not None:
            assert refuses(first, second) == (cell in refused), f"{a} and {b}"


@pytest.mark.ranks(1)
def test_options_on_one_node():
    compare({"error"})


@pytest.mark.ranks(2)
def test_options_on_two_nodes(monkeypatch):
    set_layout("private", monkeypatch)
    compare({"error", "nodes"})
