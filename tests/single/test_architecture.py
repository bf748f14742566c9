"""The rules of the house that can be read off the code: floors, late imports, docstrings."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpistrat as ms
from tests.harness.house_rules import (
    COUNTS,
    RULES,
    circles,
    exceptions,
    forget,
    found,
    imported_by_text,
    limits,
    nodes,
    scoped,
    tree,
)
from tests.harness.walks import walks
from tests.launch.launcher import ROOT

PACKAGE = ROOT / "mpistrat"
FILES = sorted(PACKAGE.rglob("*.py"))
FLOORS_PICTURE = ROOT / "docs" / "images" / "floors.svg"

# The floor of each folder. A file beside the folders has a floor below, or is a front door, which only re-exports.
FLOORS = {
    "base": 0, "cluster": 1, "batch_jobs": 1, "comm": 2, "arena": 3, "data": 3, "timeline": 3, "cross_device": 4, "variables": 5,
    "optimizers": 6, "step": 7, "state": 7, "strategy": 8, "remote": 9, "torch": 9, "jax": 9, "parameter_server": 10,
    "launcher": 10, "keras": 10, "train": 11, "bench": 11, "horovod": 11, "shadow": 11,
    "estimator": 12, "doctor": 12, "cli": 13, "examples": 13,
}  # fmt: skip
FILE_FLOORS = {"lookup": 1, "strategies": 10.5}  # strategies.py knows every strategy

# Where a library beyond NumPy may be imported at all. A pickle could run a stranger's code.
ALLOWED = {
    "mpi4py": {"base", "cluster", "comm", "arena", "cross_device", "data", "variables", "launcher", "timeline", "remote",
               "parameter_server", "optimizers", "state", "strategy", "torch", "bench", "doctor", "estimator", "cli", "horovod",
               "examples"},
    "h5py": {"data", "state", "bench", "doctor", "cli", "examples"},
    "cupy": {"base", "comm", "arena", "cross_device"},
    "jinja2": {"batch_jobs"},
    "matplotlib": {"bench", "cli"},
    "tensorboardX": {"train"},
    "zmq": {"remote"},
    "torch": {"torch", "keras", "horovod", "doctor"}, "torchmetrics": {"torch"},
    "jax": {"jax", "keras", "doctor"}, "optax": {"jax"},
    "keras": {"keras"}, "tensorflow": {"keras"},
    # only for functions that a program sends to its own ranks, and their results
    "cloudpickle": {"base", "launcher"},
    "pyarrow": {"data"},
    "pickle": set(), "marshal": set(), "shelve": set(), "dill": set(),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _no_trees_afterwards() -> Iterator[None]:
    """Millions of nodes slow each garbage collection of the tests that follow."""
    yield
    forget()


def folder_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def where(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def imports(path: Path) -> list[tuple[int, tuple[str, ...]]]:
    """The line and the full name, as words, of everything a file imports, wherever in the file it does."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    package = ("mpistrat", *path.relative_to(PACKAGE).parts[:-1])
    for node in nodes(path):
        if text := imported_by_text(node):
            yield node.lineno, tuple(text.split("."))
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield node.lineno, (*base, alias.name)


@functools.cache
def front_doors() -> frozenset[str]:
    """The files beside the folders that hold nothing but imports, __all__, the version and the lazy __getattr__."""

    def plain(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return all(isinstance(target, ast.Name) for target in node.targets)
        named = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        return named or isinstance(node, (ast.Import, ast.ImportFrom, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.If))

    doors = set()
    for path in PACKAGE.glob("*.py"):
        body = tree(path).body
        above = any(name[0] == "mpistrat" and len(name) > 1 and name[1] in FLOORS for _, name in imports(path))
        if path.stem in ("__init__", "__main__") or (above and all(map(plain, body))):
            doors.add(path.stem)
    return frozenset(doors)


def upward_imports(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """What a file imports from its own floor's other folders, or from a higher floor."""
    folder = folder_of(path)
    if not folder and path.stem in front_doors():
        return
    floor = FLOORS.get(folder, FILE_FLOORS.get(path.stem, 0))
    for line, name in imports(path):
        if name[0] != "mpistrat" or name[1:2] == (folder,):
            continue
        target = name[1] if len(name) > 1 else "__init__"
        above = FLOORS.get(target, FILE_FLOORS.get(target))
        if above >= floor if above is not None else target in front_doors() and floor < 13:
            yield line, name


def test_every_folder_has_a_floor():
    homeless = {folder_of(path) for path in FILES} - {"", *FLOORS}
    assert not homeless, "give it a floor in FLOORS and in docs/architecture.md"


def test_the_picture_of_the_floors_has_every_folder_on_its_floor():
    shown = {}
    for floor, boxes in re.findall(r'<g id="floor(\d+)">(.*?)</g>', FLOORS_PICTURE.read_text(), re.DOTALL):
        for name in re.findall(r'class="package"[^>]*>(\w+)</text>', boxes):
            shown[name] = int(floor)
    there = {folder_of(path) for path in FILES} - {""}
    assert shown == {name: floor for name, floor in FLOORS.items() if name in there}, FLOORS_PICTURE


def test_a_file_imports_only_its_own_folder_and_lower_floors():
    wrong = [f"{where(path)}:{line} imports {'.'.join(name)}" for path in FILES for line, name in upward_imports(path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "importlib.import_module('mpistrat.strategy.synchronous')",
        "import_module('mpistrat.strategy.synchronous')",
        "__import__('mpistrat.strategy.synchronous')",
        "importlib.import_module(f'mpistrat.strategy.{name}')",
        "pkgutil.resolve_name('mpistrat.strategy:Strategy')",
        "runpy.run_module('mpistrat.strategy.synchronous')",
    ],
)
def test_an_import_by_text_counts(line: str):
    found = [text for node in ast.walk(ast.parse(line)) if (text := imported_by_text(node))]
    assert [text.split(".")[:2] for text in found] == [["mpistrat", "strategy"]]


def test_libraries_are_imported_only_where_they_belong():
    wrong = [
        f"{where(path)}:{line} imports {name[0]}"
        for path in FILES
        for line, name in imports(path)
        if folder_of(path) not in ALLOWED.get(name[0], {folder_of(path)})
    ]
    assert not wrong, "\n".join(wrong)


def python(program: str) -> str:
    reply = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert reply.returncode == 0, reply.stderr
    return reply.stdout


def test_importing_the_package_starts_no_mpi_and_loads_no_large_library():
    late = [
        "mpi4py.MPI",
        "h5py",
        "cupy",
        "cloudpickle",
        "matplotlib",
        "tensorboardX",
        "torch",
        "jax",
        "keras",
        "tensorflow",
    ]
    found = python(f"import sys, mpistrat; print([name for name in {late} if name in sys.modules])")
    assert found.strip() == "[]"


def test_the_package_imports_without_any_optional_library():
    absent = [
        "cupy",
        "cloudpickle",
        "matplotlib",
        "ml_dtypes",
        "xxhash",
        "pyarrow",
        "torch",
        "jax",
        "keras",
        "tensorflow",
    ]
    python(
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "import mpistrat as ms\n"
        "for name in ms.__all__: getattr(ms, name)"
    )


def test_the_version_is_said_once():
    assert ms.__version__ == "0.1.0"
    assert 'dynamic = ["version", ' in (ROOT / "pyproject.toml").read_text()


def test_python_is_started_by_path_alone():
    """`python -m` and `python -c` import from the working directory first: see `base/programs.py`."""
    users_own = {
        "mpistrat/cli/run.py",
        "mpistrat/cli/torchrun.py",
        "mpistrat/batch_jobs/render.py",
    }  # the program that the user names, as plain Python
    wrong = []
    for path in FILES:
        for node in nodes(path):
            words = node.elts if isinstance(node, (ast.List, ast.Tuple)) else []
            starts = any(
                (isinstance(word, ast.Constant) and word.value in ("-m", "-c", "-P", "-I"))
                or (isinstance(word, ast.Attribute) and ast.unparse(word) == "sys.executable")
                for word in words
            )
            if starts and where(path) not in users_own | {"mpistrat/base/programs.py"}:
                wrong.append(f"{where(path)}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def enters_a_collective(function: ast.FunctionDef) -> bool:
    """Whether the function itself, not one inside it, runs a collective of a ProcessGroup: `with group.collective(...)`."""
    return any(
        isinstance(item.context_expr, ast.Call) and getattr(item.context_expr.func, "attr", "") == "collective"
        for node in within(function)
        if isinstance(node, ast.With)
        for item in node.items
    )


def within(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions inside it."""
    open_nodes: list[ast.AST] = list(function.body)
    while open_nodes:
        node = open_nodes.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            open_nodes += ast.iter_child_nodes(node)


def test_what_is_collective_says_so():
    silent = [
        f"{where(path)}:{node.lineno} {node.name}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and enters_a_collective(node)
        if "ollective" not in (text := ast.get_docstring(node) or "") and (text or node.name[0] != "_")
    ]
    assert not silent, "their docstrings say 'Collective.': " + ", ".join(silent)


def test_what_is_not_collective_says_nothing_of_it():
    tagged = [where(path) for path in FILES if re.search(r"\bNot collective\b", path.read_text())]
    assert not tagged, "only collective calls are tagged"


@pytest.mark.parametrize("rule", RULES)
def test_there_are_only_known_exceptions(rule):
    known, there = exceptions()[rule], found(rule)
    assert not there - known, (
        f"{rule}: mend {dict(there - known)} of {sorted(circles()) if 'circle' in rule else 'these'}"
    )
    assert not known - there, (
        f"{rule}: `python -m tests.harness.house_rules` takes {dict(known - there)} out, as is due"
    )


@pytest.mark.parametrize("name", COUNTS)
def test_no_count_grows(name):
    found, limit = COUNTS[name](), limits()[name]
    assert found <= limit, (
        f"{name}: {found} are more than {limit}; take code away, or, for a new feature, raise the limit in house_rules.json"
    )


def test_files_that_the_architecture_names_are_there():
    pages = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "decisions").rglob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    named = {word for words in re.findall(r"`([^`\n]+)`", text) for word in words.split() if word.endswith(".py")}
    there = {where(path) for folder in ("mpistrat", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    there |= {path.name for path in ROOT.glob("*.py")}
    missing = [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in there)]
    assert len(named) > 80 and not missing, missing


def test_the_walks_lead_through_the_code():
    found = walks()
    assert len(found) == 11
    for title, (count, hops) in found.items():
        assert [hop.number for hop in hops] == list(range(1, count + 1)), f"{title}: count the hops anew"
        for hop in hops:
            defined = {".".join(scope.names) for _, scope in scoped(PACKAGE / hop.file)}
            assert hop.name in defined, f"docs/walks.md: {hop.file} has no {hop.name}"
