import json

import pytest

from mpistrat.cross_device.chooser import Chooser

RULES = [
    {"device": "cpu", "nodes": "one", "below": 100, "algorithm": "MPI", "why": "small"},
    {"device": "cpu", "nodes": "one", "below": None, "algorithm": "HIERARCHICAL", "why": "large"},
    {"device": "cpu", "nodes": "several", "below": None, "algorithm": "MPI"},
    {"device": "gpu", "nodes": "one", "below": None, "algorithm": "NCCL"},
    {"device": "gpu", "nodes": "several", "below": None, "algorithm": "NCCL"},
]


def test_the_border_belongs_to_the_next_rule():
    chooser = Chooser({"rules": RULES})
    assert [chooser.choose("cpu", "one", n).algorithm for n in (0, 99, 100, 1 << 40)] == [
        "MPI",
        "MPI",
        "HIERARCHICAL",
        "HIERARCHICAL",
    ]
    assert chooser.choose("gpu", "several", 5).algorithm == "NCCL"


def test_the_table_that_ships_covers_every_case():
    chooser = Chooser()
    for device in ("cpu", "gpu"):
        for nodes in ("one", "several"):
            for nbytes in (0, 8, 1 << 16, 1 << 34):
                assert chooser.choose(device, nodes, nbytes).why


def test_it_prints_which_and_why():
    text = str(Chooser({"rules": RULES, "measured": "yesterday"}))
    for word in ("yesterday", "< 100", "any more", "HIERARCHICAL", "small", "NCCL"):
        assert word in text


def test_a_file(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"rules": RULES}))
    assert Chooser(path).choose("cpu", "one", 5).algorithm == "MPI"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"table\.json"):
        Chooser(path)
    with pytest.raises(FileNotFoundError):
        Chooser(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ([], "a list named rules"),
        ({"rules": RULES[1:4]}, "rules for gpu, several"),
        ({"rules": RULES[:1] + RULES[2:]}, "last one null"),
        ({"rules": [{**RULES[0], "algorithm": "RING"}, *RULES[1:]]}, "rule 0.*RING"),
        ({"rules": [{**RULES[0], "below": -1}, *RULES[1:]]}, "below"),
        ({"rules": [{"device": "cpu"}, *RULES[1:]]}, "device, nodes, below"),
        ({"rules": [RULES[1], RULES[0], *RULES[2:]]}, "ascending"),
    ],
)
def test_wrong_tables(table, text):
    with pytest.raises(ValueError, match=text):
        Chooser({"rules": table} if isinstance(table, list) and table else table or {})
