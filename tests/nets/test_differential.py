"""A share of the differential net in every run of the tests: `make nightly` runs the rest."""

from __future__ import annotations

import pytest

CASES = 5  # of an item: about a second


@pytest.fixture
def layouts(monkeypatch):
    """Cases change where strategies see nodes."""
    from mpistrat.cluster.topology import Topology

    monkeypatch.setattr(Topology, "create", Topology.create)
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "1")


def check(first):
    from tests.nets.differential.cases import run_cases

    found = [record for record in run_cases(1, first, first + CASES) if "result" in record]
    wrong = [
        f"{record['number']}: {record['detail']}\n{record['config']}" for record in found if record["result"] != "equal"
    ]
    assert len(found) == CASES
    assert not wrong, "\n".join(wrong)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", range(0, 40, CASES))
def test_random_options_on_two_ranks_have_the_numbers_of_the_reference(first, layouts):
    check(first)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("first", range(0, 20, CASES))
def test_random_options_on_three_ranks_have_the_numbers_of_the_reference(first, layouts):
    check(first)


@pytest.mark.ranks(2)
def test_a_wrong_rule_is_found(layouts, monkeypatch):
    """With a reference whose Adam does not correct its bias, cases with Adam differ, and no others."""
    from tests.nets.differential import rules
    from tests.nets.differential.cases import run_cases

    def uncorrected(w, g, s, t, lr, **settings):
        return rules.rule_adam(w, g, s, 10**9, lr, **settings)

    for name in ("Adam", "AdamW"):
        monkeypatch.setitem(rules.RULES, name, (uncorrected, rules.RULES[name][1]))
    found = [record for record in run_cases(1, 0, 10) if "result" in record]
    adam = {record["number"] for record in found if any(tag.endswith(("|Adam", "|AdamW")) for tag in record["tags"])}
    wrong = {record["number"] for record in found if record["result"] == "wrong"}
    assert wrong
    assert wrong <= adam  # of some the step is not taken, as gradients are still accumulated
