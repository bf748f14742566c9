"""The cover of a test's combinations: every pair of interest is there, with few items, and always the same ones."""

import itertools
import subprocess
import sys
from collections import Counter

import pytest

from tests.launch.launcher import ROOT
from tests.launch.pairwise import Combination, cover, one_of_each

MPIS, RANKS = ("mpich", "openmpi"), (1, 2, 3, 4)


def product(function, ranks=RANKS, **parameters):
    found = []
    for mpi, n, *values in itertools.product(MPIS, ranks, *parameters.values()):
        named = tuple(zip(parameters, map(repr, values), strict=True))
        nodeid = f"{function}[{mpi}-np{n}-{'-'.join(map(str, values))}]"
        found.append(Combination(nodeid, function, mpi, n, named))
    return found


def picked(combinations):
    chosen = cover(combinations)
    return [one for one in combinations if one.nodeid in chosen]


def pairs(combinations):
    """All (function, MPI), (function, ranks) and (function, value), and each file's (value, ranks)."""
    seen = set()
    for one in combinations:
        seen |= {(one.function, one.mpi), (one.function, one.ranks)}
        seen |= {(one.function, value) for value in one.values}
        seen |= {("t.py", value, one.ranks) for value in one.values}
    return seen


CASES = {
    "no parameter": product("t.py::one"),
    "two ranks only": product("t.py::one", ranks=(2,), rule=["sgd", "adam", "adagrad"]),
    "two parameters": product("t.py::one", rule=["sgd", "adam"], dtype=["f4", "f8", "f2"]),
    "one family in several functions": [
        one for name in "abcdefghij" for one in product(f"t.py::{name}", algorithm=["mpi", "flat", "auto", "one"])
    ],
    "not a product": [
        one
        for one in product("t.py::one", rule=["sgd", "adam"], dtype=["f4", "f8"])
        if one.ranks > 1 or one.values[0][1] == "'sgd'"
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_every_pair_is_seen(case):
    assert pairs(picked(CASES[case])) == pairs(CASES[case])


def test_a_cover_is_small():
    assert len(picked(CASES["no parameter"])) == 4  # of 8: each number of ranks once, the MPIs in turns
    assert len(picked(CASES["two ranks only"])) == 3  # of 6
    assert len(picked(CASES["two parameters"])) <= 14  # of 48; 3 dtypes on 4 numbers of ranks are 12
    assert len(picked(CASES["one family in several functions"])) <= 56  # of 320: 4 a function, 16 in the file, at most


def test_two_and_three_ranks_are_preferred():
    counts = Counter(one.ranks for one in picked(product("t.py::one", value=range(40), ranks=(2, 4))))
    alone = Counter(one.ranks for one in picked(product("t.py::one", value=["x"] * 1)))
    assert counts == {2: 40, 4: 40}  # no choice: each value on each number of ranks
    assert alone == {1: 1, 2: 1, 3: 1, 4: 1}
    free = picked([one for name in "abcdefgh" for one in product(f"t.py::{name}", value=range(6))])
    counts = Counter(one.ranks for one in free)
    assert counts[2] + counts[3] > counts[1] + counts[4]


def test_both_mpis_take_turns():
    many = picked([one for number in range(100) for one in product(f"t.py::f{number}", ranks=(2,), value=range(3))])
    counts = Counter(one.mpi for one in many)
    assert len(many) == 300
    assert min(counts.values()) > 100


def test_another_test_changes_no_choice():
    """In another file none at all; in the same file none that the function needs for itself."""
    mine = product("t.py::one", rule=["sgd", "adam"], dtype=["f4", "f8", "f2"])
    assert cover(mine) == cover(mine + product("u.py::two", rule=["sgd"])) & {one.nodeid for one in mine}
    plain = product("t.py::plain")
    assert cover(plain) == cover(plain + mine) & {one.nodeid for one in plain}


def test_the_order_of_the_combinations_does_not_matter():
    for case in CASES.values():
        assert cover(case) == cover(case[::-1])


def test_every_process_chooses_the_same():
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.single.tests import test_pairwise\n"
        "for case in test_pairwise.CASES.values(): print(sorted(test_pairwise.cover(case)))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONHASHSEED": seed}, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert "np4" in texts.pop()


def test_one_of_each_takes_one():
    found = one_of_each([("a", "a[1]"), ("a", "a[2]"), ("b", "b[1]")])
    assert len(found) == 2
    assert "b[1]" in found
