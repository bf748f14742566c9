"""Random options over two isolated hosts of two ranks, next to the reference: a share of what `make nightly` runs."""

from __future__ import annotations

import pytest

FIRST, LAST = 0, 6


@pytest.mark.hosts(2, ranks_per_host=2)
def test_random_options_have_the_numbers_of_the_reference(monkeypatch):
    from mpistrat.cluster.topology import Topology
    from tests.nets.differential import drawing, layouts
    from tests.nets.differential.cases import run_cases

    monkeypatch.setattr(Topology, "create", Topology.create)
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "1")
    monkeypatch.setattr(layouts, "HOSTS", 2)
    monkeypatch.setattr(drawing, "HOSTS", 2)
    found = [record for record in run_cases(1, FIRST, LAST) if "result" in record]
    wrong = [
        f"{record['number']}: {record['detail']}\n{record['config']}" for record in found if record["result"] != "equal"
    ]
    assert len(found) == LAST - FIRST
    assert not wrong, "\n".join(wrong)
