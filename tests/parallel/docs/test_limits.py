"""The table of docs/limits.md says which options of MultiWorkerMirroredStrategy exclude each other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

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
    """Return whether a strategy with both options raises an error on one rank."""
    import mpistrat as ms

    try:
        ms.MultiWorkerMirroredStrategy(**first, **second).close()
    except ValueError:
        return True
    return False


@pytest.mark.ranks(1)
def test_options_that_exclude_each_other():
    arguments, table = options(), shown()
    told = set().union(*table)
    assert told == arguments.keys()
    for (a, first), (b, second) in itertools.combinations(arguments.items(), 2):
        if frozenset((a, b)) in table:
            assert refuses(first, second) == (table[frozenset((a, b))] == "error"), f"{a} and {b}"
