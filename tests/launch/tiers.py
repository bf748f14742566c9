"""Which tests run: `--tier check`, `test`, `change` or `all`. docs/developing.md describes each.

A run without `--tier` runs all that it was asked for. What a tier leaves out is told in the last line of the run.
"""

from __future__ import annotations

import importlib.util
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.launch.durations import PAGE, Table
from tests.launch.pairwise import Combination, cover, one_of_each, order
from tests.launch.touched import distances

QUICK_EXAMPLES = 30  # of Hypothesis, in every tier but `all`
SLOWEST = {"check": 1.0, "test": 2.5, "change": 8.0}  # seconds: what takes longer is left to the next tier
ONCE = 0.3  # seconds: of a test on ranks that takes longer one item is taken, whichever
PAGES = "test_docs.py"  # each of its pages is a program of its own
WORDS = {  # of each kind: how the last line calls what was left out
    "pure": "slow ones without ranks", "ranks": "of the full product", "program": "programs",
    "hosts": "over hosts", "slurm": "of SLURM", "gpu": "for a GPU",
}  # fmt: skip


@dataclass
class Choice:
    """The items of a tier, and how many of each kind were left out."""

    kept: list[pytest.Item]
    dropped: list[pytest.Item] = field(default_factory=list)
    words: str = ""


def add_options(group: Any) -> None:
    group.addoption(
        "--tier", choices=("check", "test", "change", "all"), default="all",
        help="check: pure tests; test: also a pairwise cover of those on ranks; "
        "change: what a change can break beyond `test`; all (default)",
    )  # fmt: skip
    group.addoption("--longest", type=float, metavar="SECONDS", help="leave out items that take longer")
    group.addoption("--chosen", action="store_true", help="what is named was chosen for the tier before")
    group.addoption(
        "--beside", action="store_true", help="run tests without ranks, and those of SLURM, in a second process"
    )
    group.addoption("--since", metavar="COMMIT", help="for --tier change: the commit that the change starts from")
    group.addoption("--budget", type=float, metavar="MINUTES", help="for --tier change: for what the change touches")


def kind(item: pytest.Item) -> str:
    """What an item needs: pure, ranks, program, hosts, slurm or gpu."""
    fixtures = getattr(item, "fixturenames", ())
    params = item.callspec.params if hasattr(item, "callspec") else {}
    layout = params.get("_layout")
    if item.get_closest_marker("gpu"):
        return "gpu"
    if "slurm" in fixtures:
        return "slurm"
    if "hosts" in fixtures or (layout and layout.hosts):
        return "hosts"
    if layout:
        return "ranks"
    return "program" if "mpi" in fixtures else "pure"


def choose(config: pytest.Config, items: list[pytest.Item]) -> Choice:
    """The items of the tier that the command line names, in their order."""
    tier = config.option.tier
    kinds = {item.nodeid: kind(item) for item in items}
    table = Table()
    seconds = {nodeid: table.expected(nodeid, name) for nodeid, name in kinds.items()}
    if tier == "all" or config.option.chosen:
        longest = config.option.longest or float("inf")
        dropped = [item for item in items if seconds[item.nodeid] > longest]
        kept = [item for item in items if seconds[item.nodeid] <= longest]
        return Choice(kept, dropped, f"left out: {len(dropped)} that take over {longest:g} s" if dropped else "")
    limit = config.option.longest or SLOWEST["check" if tier == "check" else "test"]
    quick = [item for item in items if seconds[item.nodeid] <= limit]
    chosen = {item.nodeid for item in quick if kinds[item.nodeid] == "pure"}
    if tier != "check":
        chosen |= _on_ranks(quick, kinds, seconds)
    ran, late = set(chosen), ""
    if tier == "change":
        chosen, missed = _change_tier(config, items, kinds, chosen, seconds)
        ran |= chosen
        late = f" ({missed:,} of these the change touches, beyond the budget)" if missed else ""
    kept = [item for item in items if item.nodeid in chosen]
    dropped = [item for item in items if item.nodeid not in chosen]
    counts = Counter(kinds[item.nodeid] for item in items if item.nodeid not in ran)
    words = ", ".join(f"{counts[name]:,} {text}" for name, text in WORDS.items() if counts[name]) or "nothing"
    also = " by make test and here" if tier == "change" else ""
    return Choice(kept, dropped, f"left out{also}: {words}{late}; {QUICK_EXAMPLES} examples of Hypothesis")


def _on_ranks(items: list[pytest.Item], kinds: dict[str, str], seconds: dict[str, float]) -> set[str]:
    chosen = {nodeid for nodeid, name in kinds.items() if name == "gpu" and _gpu()}
    ranks = [item for item in items if kinds[item.nodeid] == "ranks"]
    slow = {item.nodeid for item in ranks if seconds[item.nodeid] > ONCE}
    chosen |= cover(_combination(item) for item in ranks if item.nodeid not in slow)
    chosen |= one_of_each((_function(item), item.nodeid) for item in ranks if item.nodeid in slow)
    programs = [item for item in items if kinds[item.nodeid] == "program"]
    return chosen | one_of_each((_program(item), item.nodeid) for item in programs)


def _change_tier(
    config: pytest.Config, items: list[pytest.Item], kinds: dict[str, str], tested: set[str], seconds: dict[str, float]
) -> tuple[set[str], int]:
    """Beyond what `test` runs: hosts and SLURM once each, and slow pages; then, as long as time is left, what is nearest to
    the change: first one item of each function of which `test` runs none.
    """
    quick = [item for item in items if seconds[item.nodeid] <= SLOWEST["change"]]
    elsewhere = [item for item in quick if kinds[item.nodeid] in ("hosts", "slurm")]
    chosen = one_of_each((_function(item), item.nodeid) for item in elsewhere)
    chosen |= {item.nodeid for item in items if PAGE in item.nodeid} - tested
    further = kinds.keys() - chosen - tested
    distance = distances(Path(config.rootpath), config.option.since, {item.path for item in items})
    touched = [
        item
        for item in quick
        if item.path in distance and item.nodeid in further and (kinds[item.nodeid] != "gpu" or _gpu())
    ]
    known = {_function(item) for item in items if item.nodeid in tested}
    new = one_of_each((_function(item), item.nodeid) for item in touched if _function(item) not in known)
    ranked = [(item.nodeid not in new, distance[item.path], order(item.nodeid), item.nodeid) for item in touched]
    left, missed = 60 * (config.option.budget or float("inf")), 0
    for *_, nodeid in sorted(ranked):
        left -= seconds[nodeid]
        if left >= 0:
            chosen.add(nodeid)
        else:
            missed += 1
    return chosen, missed


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _program(item: pytest.Item) -> str:
    """What one program is taken of: each test of how a job ends (`mpi_run`), each page, each other file."""
    if item.path.name == PAGES:
        return item.callspec.params["page"].path
    of_class = item.nodeid.rpartition("::")[
        0
    ]  # those of a class look at one program; of a function of a file: the file
    return _function(item) if "mpi_run" in item.fixturenames and item.cls is None else of_class


def _combination(item: pytest.Item) -> Combination:
    params = item.callspec.params
    layout = params["_layout"]
    words = item.callspec.id.replace(str(layout), "")
    values = tuple((name, _called(value, words)) for name, value in params.items() if name != "_layout")
    return Combination(item.nodeid, _function(item), layout.mpi, layout.ranks, values)


def _called(value: Any, words: str) -> str:
    """A name for the value of a parameter, the same in each test of a file where the value says who it is."""
    name = repr(value) if isinstance(value, (str, int, float, tuple, type(None))) else getattr(value, "__name__", "")
    return words if name in ("", "<lambda>") or " at 0x" in name else name


def _gpu() -> bool:
    return importlib.util.find_spec("cupy") is not None


def cap_examples(item: pytest.Item) -> None:
    """Where a test says how many examples of Hypothesis it wants, take no more than QUICK_EXAMPLES."""
    function = getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))
    wanted = getattr(function, "_hypothesis_internal_use_settings", None)  # what @settings leaves there
    if wanted is not None and wanted.max_examples > QUICK_EXAMPLES:
        from hypothesis import settings

        function._hypothesis_internal_use_settings = settings(wanted, max_examples=QUICK_EXAMPLES)


def share(items: list[pytest.Item]) -> set[str]:
    """The node ids that a second process takes, so that both take as long: whole files, first those of SLURM, which mostly waits,
    and those with programs last.
    """
    table, seconds, of_file = Table(), {}, defaultdict(list)
    for item in items:
        seconds[item.nodeid] = table.expected(item.nodeid, kind(item))
        of_file[item.path].append(item)
    kinds = {path: {kind(item) for item in group} for path, group in of_file.items()}
    left, taken = sum(seconds.values()) / 2, set()
    able = [path for path in kinds if kinds[path] <= {"pure", "program", "slurm"}]
    for path in sorted(able, key=lambda path: ("slurm" not in kinds[path], len(kinds[path]))):
        if left > 0:
            taken |= {item.nodeid for item in of_file[path]}
            left -= sum(seconds[item.nodeid] for item in of_file[path])
    return taken
