"""Rules and counts of the package's structure, read from its code.

Rules find circles of imports, uses of others' private attributes, parameters that no call passes, definitions without uses,
and class names with two meanings. Counts are sizes: arrows between rooms, public members, files, lines. `house_rules.json`
has the exceptions of each rule and the limit of each count; `tests/single/test_architecture.py` compares the code with both.
They only shrink: `python -m tests.harness.house_rules` removes the exceptions that are no longer needed and lowers the
limits to today's counts. With `--feature` it also raises limits, and prints by how much, for the text of the commit. With
`--options` it only prints the lines that name an option outside its files. Names are compared, not types, so a definition with
the name of a used one counts as used.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import io
import json
import pkgutil
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mpistrat"
KNOWN = Path(__file__).with_suffix(".json")
CALLED_BY_PYTHON = {"find_spec"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
OWN = ("self", "cls", "mcs")
HANDLE = (
    "_core"  # what users do not see of a class, in one object: other packages use its public members, and nothing else
)


# What packages that import a framework override of its classes.
FRAMEWORKS = {
    "torch": {"train", "forward", "backward", "setup_context", "generate_vmap_rule", "state_dict",
              "load_state_dict", "zero_grad", "step", "add_param_group",
              "strict", "assign", "set_to_none", "closure",
              # of a process group, its work, and of "mpi"
              "allgather", "alltoall", "allreduce", "allreduce_coalesced", "allgather_coalesced", "recv_anysource", "opts",
              "timeout", "tag", "_start_coalescing", "_end_coalescing", "_device_types", "_set_group_name", "_set_group_desc",
              "group_desc", "get_group_store", "_set_sequence_number_for_group", "_get_sequence_number_for_group", "_has_hooks",
              "_wait_for_pending_works", "is_success", "create_mpi", "make_mpi", "_shutdown_backend",
              "_maybe_attach_flight_recorder", "group_name", "supports_tensor_alloc"},
    "horovod": {"forward", "backward", "compress", "decompress", "skip_synchronize", "set_backward_passes_per_step", "step",
                "zero_grad", "load_state_dict", "skip_sync", "record_batch", "register_reset_callbacks"},
    "jax": set(),
    "keras": {"compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "save", "save_weights", "export",
              "make_train_function", "make_test_function", "force", "get_metrics_result", "_symbolic_build",
              "_get_metrics_result_or_logs", "apply", "stateless_apply", "on_train_begin", "on_train_batch_end",
              "on_epoch_begin", "on_epoch_end", "logs", "batch", "epoch", "num_batches", "batch_size",
              "get_numpy_iterator", "get_jax_iterator", "get_torch_dataloader", "get_tf_dataset"},
}  # fmt: skip


@functools.cache
def source(path: Path) -> str:
    return path.read_text()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(source(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


def forget() -> None:
    """Give back the memory of all trees."""
    source.cache_clear()
    tree.cache_clear()
    nodes.cache_clear()


@functools.cache
def files(folder: Path = PACKAGE) -> tuple[Path, ...]:
    return tuple(sorted(folder.rglob("*.py")))


@functools.cache
def module_of(path: Path) -> str:
    words = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def package_of(path: Path) -> str:
    return module_of(path).partition(".")[0]


# ---- circles


@functools.cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in files()}


IMPORTERS = {"import_module", "__import__", "run_module", "resolve_name"}


def imported_by_text(node: ast.AST) -> str | None:
    """The module that a call such as `import_module("mpistrat.a.b")` names, with as much of it as the text says."""
    if not (isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS):
        return None
    text = node.args[0] if node.args else None
    text = text.values[0] if isinstance(text, ast.JoinedStr) and text.values else text
    if not (isinstance(text, ast.Constant) and isinstance(text.value, str)):
        return None
    name = text.value.replace(":", ".").strip(".")
    return name if name.split(".")[0] == "mpistrat" else None


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a file imports, also late, for types or by text. A name of a front door leads to its home."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found = set()
    for node in nodes(path):
        if text := imported_by_text(node):
            found.add(text.partition(".")[2])
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {".".join(words[1:]) for words in names if words[0] == "mpistrat"}
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "mpistrat"):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            words = (node.module or "").split(".") if node.module else []
            stem = ".".join(filter(None, [*base, *(words if node.level else words[1:])]))
            found |= {home(stem, alias.name) for alias in node.names}
    return frozenset(name for name in found if name in modules())


def home(module: str, name: str) -> str:
    """The module that defines what `from module import name` gives."""
    inner = f"{module}.{name}".strip(".")
    if inner in modules():
        return inner
    path = modules().get(module)
    if path is None or path.name != "__init__.py":
        return module
    for node in nodes(path):  # those of a lazy package stand under `if TYPE_CHECKING:`
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            base = module.split(".")[: len(module.split(".")) - node.level + 1] if node.level and module else []
            words = (node.module or "").split(".") if node.level else (node.module or "").split(".")[1:]
            return home(".".join(filter(None, [*base, *words])), original)
    return module


def circles() -> Iterator[str]:
    """Every module that reaches itself by imports; front doors apart, which are followed through."""
    graph = {name: imported(path) for name, path in modules().items() if path.name != "__init__.py"}
    for name in graph:
        seen: set[str] = set()
        front = set(graph[name])
        while front:
            seen |= front
            front = set().union(*(graph.get(other, ()) for other in front)) - seen
        if name in seen:
            yield name


# ---- private attributes


@dataclass
class Scope:
    """Where a node stands: the names of the classes and functions around it, and the innermost class."""

    names: tuple[str, ...] = ()
    classes: tuple[ast.ClassDef, ...] = ()


@functools.cache
def scoped(path: Path) -> tuple[tuple[ast.AST, Scope], ...]:
    """Every node of a file and where it stands; a class or function stands in itself."""
    found: list[tuple[ast.AST, Scope]] = []
    left: list[tuple[ast.AST, Scope]] = [(tree(path), Scope())]
    while left:
        node, scope = left.pop()
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.ClassDef):
                inner = Scope((*scope.names, child.name), (*scope.classes, child))
            elif isinstance(child, FUNCTIONS):
                inner = Scope((*scope.names, child.name), scope.classes)
            found.append((child, inner))
            left.append((child, inner))
    return tuple(found)


def is_private(name: str) -> bool:
    of_named_tuples = ("_asdict", "_fields", "_make", "_replace")
    return name.startswith("_") and not name.startswith("__") and name not in (*of_named_tuples, HANDLE)


@functools.cache
def own_attributes(of: ast.ClassDef) -> frozenset[str]:
    """The private attributes that a class has of its own: methods, class variables, slots, what is set through self."""
    found = set()
    for node in ast.walk(of):
        if isinstance(node, FUNCTIONS):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OWN:
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def _stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


@functools.cache
def homes_of_attributes() -> dict[str, set[str]]:
    """Of each private attribute or function the packages where something has it of its own."""
    found = defaultdict(set)
    for path in files():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                for name in own_attributes(node):
                    found[name].add(package_of(path))
            elif isinstance(node, FUNCTIONS):
                found[node.name].add(package_of(path))
            elif _stored(node) and getattr(node.value, "id", "") in OWN:
                found[node.attr].add(package_of(path))
    return found


def strange_accesses(path: Path) -> Iterator[tuple[ast.expr, str, bool, Scope]]:
    """Each access to a private attribute of another object: of what, its name, whether it is written."""
    for node, scope in scoped(path):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            mine = isinstance(node.value, ast.Name) and node.value.id in OWN
            upper = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") in ("super", "type")
            if not (mine or upper):
                yield node.value, node.attr, not isinstance(node.ctx, ast.Load), scope
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "getattr",
            "setattr",
            "delattr",
            "hasattr",
        ):
            thing, name = [*node.args, None, None][:2]
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and getattr(thing, "id", "") not in OWN:
                yield thing, name.value, node.func.id in ("setattr", "delattr"), scope


def private_writes() -> Iterator[str]:
    """Who writes a private attribute of an object of another class."""
    for path in files():
        for thing, name, written, scope in strange_accesses(path):
            if written and not any(name in own_attributes(one) for one in scope.classes):
                yield f"{'.'.join(scope.names)}: {ast.unparse(thing)}.{name}"


def private_reads() -> Iterator[str]:
    """Who reads a private attribute that only things of other packages have."""
    for path in files():
        for thing, name, written, scope in strange_accesses(path):
            homes = homes_of_attributes().get(name, set())
            if not written and homes and package_of(path) not in homes:
                yield f"{'.'.join(scope.names)}: {ast.unparse(thing)}.{name}"


# ---- what is defined, and what is used


@functools.cache
def public() -> frozenset[str]:
    """Every word of the names that a program reaches from `mpistrat`: functions, classes, and what these have, also inherited."""
    import enum
    import inspect
    import types

    import mpistrat

    found: set[str] = set()

    def visit(module: types.ModuleType) -> None:
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            found.add(name)
            if isinstance(thing, types.ModuleType):
                visit(thing)
            elif inspect.isclass(thing):
                found.update(word for word in dir(thing) if not word.startswith("_") or issubclass(thing, enum.Enum))

    visit(mpistrat)
    fronts = [PACKAGE / framework / "__init__.py" for framework in FRAMEWORKS]  # which need not be installed
    for front in [*fronts, *(PACKAGE / "horovod" / "torch").glob("[a-z_]*.py")]:
        body = [
            node
            for node in tree(front).body
            if not isinstance(node, ast.Assign) or ast.unparse(node).startswith("__all__")
        ]
        found.update(name for node in body if isinstance(node, ast.Assign) for name in ast.literal_eval(node.value))
    return frozenset(found)


@dataclass
class Uses:
    """Which names a set of files uses, and with which arguments each name is called."""

    names: set[str] = field(default_factory=set)
    referred: set[str] = field(
        default_factory=set
    )  # used other than by a call, or with arguments that cannot be counted
    keywords: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    positions: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, nodes: Iterable[ast.AST]) -> None:
        called, listed, texts = set(), set(), set()
        for node in nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                texts.add(id(node.value))  # a docstring
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("__all__", "__slots__"):
                listed |= set(map(id, ast.walk(node.value)))
            elif isinstance(node, ast.Call):
                called.add(id(node.func))
                self._call(node)
        for node in nodes:
            if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
                name = node.id if isinstance(node, ast.Name) else node.attr
                self.names.add(name)
                if id(node) not in called:
                    self.referred.add(name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (texts | listed):
                if not re.search(r"\s", node.value) or "\n" in node.value or "import" in node.value:  # no sentence
                    self.names |= set(re.findall(r"\w+", node.value))
            elif isinstance(node, ast.AugAssign):
                self.names.add(getattr(node.target, "id", getattr(node.target, "attr", "")))
            elif isinstance(node, ast.alias) and node.asname:
                self.names.add(node.name)
            elif isinstance(node, ast.keyword) and node.arg:
                self.names.add(node.arg)  # a field of a dataclass

    def _call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        args, keywords = node.args, node.keywords
        if name == "partial" and args:
            name, args = getattr(args[0], "id", getattr(args[0], "attr", "")), args[1:]
        if any(isinstance(arg, ast.Starred) for arg in args) or any(word.arg is None for word in keywords):
            self.referred.add(name)
        self.keywords[name] |= {word.arg for word in keywords if word.arg}
        self.positions[name] = max(self.positions[name], len(args))


@functools.cache
def uses(*, tests: bool) -> Uses:
    """What the package, its documentation and its benchmarks use; with `tests` those too."""
    found = Uses()
    for folder in (PACKAGE, ROOT / "benchmarks", *([ROOT / "tests"] if tests else [])):
        for path in files(folder):
            found.add(nodes(path))
    texts = [*ROOT.glob("*.toml"), *PACKAGE.rglob("*.jinja"), *(ROOT / "docs" / "_ext").glob("*.py")]
    for path in texts:
        found.names |= set(re.findall(r"\w+", path.read_text()))
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            try:
                found.add(list(ast.walk(ast.parse(block))))
            except SyntaxError:
                found.names |= set(re.findall(r"\w+", block))
    return found


@functools.cache
def definitions() -> dict[str, str]:
    """Each name that is defined in the package, and in which module, last."""
    found = {}
    for path in files():
        for node, scope in scoped(path):
            names: list[str] = []
            if isinstance(node, FUNCTIONS):
                overrides = any(
                    getattr(one, "attr", getattr(one, "id", "")) in ("override",) for one in node.decorator_list
                )
                names = [] if overrides or "<locals>" in scope.names else [".".join(scope.names)]
            elif isinstance(node, ast.ClassDef):
                names = [".".join(scope.names)]
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not scope.names:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            elif _stored(node) and scope.classes:
                mine = isinstance(node.value, ast.Name) and node.value.id in OWN
                names = [".".join([*scope.names[:-1], node.attr])] if mine else []
            found.update(dict.fromkeys(names, module_of(path)))
    return found


def is_magic(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


@functools.cache
def of_libraries() -> frozenset[str]:
    """Methods that a class of ours has because a class of a library, which it extends, calls them."""
    import importlib
    import inspect
    import pkgutil

    import mpistrat

    found: set[str] = set()
    for info in pkgutil.walk_packages(mpistrat.__path__, "mpistrat.", onerror=lambda name: None):
        if info.name.endswith("__main__") or info.name.split(".")[1] in FRAMEWORKS:
            continue
        for thing in vars(importlib.import_module(info.name)).values():
            if inspect.isclass(thing) and thing.__module__.startswith("mpistrat"):
                for base in thing.__mro__[1:]:
                    if not base.__module__.startswith("mpistrat"):
                        found.update(vars(base))
    return frozenset(found).union(*FRAMEWORKS.values())


def unused(*, tests: bool) -> Iterator[str]:
    """Definitions whose name nothing uses: with `tests`, not even the tests do."""
    known = uses(tests=tests).names | public() | of_libraries() | {"_"}
    for name, module in definitions().items():
        last = name.rpartition(".")[2]
        if last not in known and not is_magic(last):
            yield f"{module}: {name}"


def unpassed() -> Iterator[str]:
    """Parameters with a default, of functions that are not public, that no call passes."""
    calls = uses(tests=True)
    known = public() | calls.referred | of_libraries() | CALLED_BY_PYTHON
    heirs = subclasses()
    for path in files():
        for node, scope in scoped(path):
            if not isinstance(node, FUNCTIONS):
                continue
            name, in_class = node.name, bool(scope.classes) and scope.names[-2:-1] == (scope.classes[-1].name,)
            if name == "__init__" and in_class:
                of = scope.classes[-1]
                itself = {"cls"} if any(getattr(one, "id", "") == "cls" for one in ast.walk(of)) else set()
                callers = {of.name, *itself, *heirs[of.name], *(["__init__"] if heirs[of.name] else [])}
                if scope.classes[-1].name in public():
                    continue
            elif name in known or is_magic(name):
                continue
            else:
                callers = {name}
            static = any(getattr(one, "id", "") == "staticmethod" for one in node.decorator_list)
            yield from _unpassed(node, ".".join(scope.names), callers, 1 if in_class and not static else 0, calls)


def _unpassed(node: ast.FunctionDef, name: str, callers: set[str], bound: int, calls: Uses) -> Iterator[str]:
    positional = [*node.args.posonlyargs, *node.args.args]
    first = len(positional) - len(node.args.defaults)
    given = {arg.arg: index - bound for index, arg in enumerate(positional) if index >= max(first, bound)}
    given |= {
        arg.arg: 10**6
        for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if default is not None
    }
    for parameter, index in given.items():
        if not any(parameter in calls.keywords[caller] or calls.positions[caller] > index for caller in callers):
            yield f"{name}({parameter})"


def subclasses() -> dict[str, set[str]]:
    below: dict[str, set[str]] = defaultdict(set)
    for path in [*files(), *files(ROOT / "tests")]:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    below[getattr(base, "id", getattr(base, "attr", ""))].add(node.name)
    whole: dict[str, set[str]] = defaultdict(set)
    for name in list(below):
        front = set(below[name])
        while front - whole[name]:
            whole[name] |= front
            front = set().union(*(below.get(one, set()) for one in front))
    return whole


# ---- names and sizes


def shared_class_names() -> Iterator[str]:
    """Yield a class name once for each file after the first that defines it."""
    homes: dict[str, set[Path]] = defaultdict(set)
    for path in files():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(path)
    for name, paths in homes.items():
        yield from [name] * (len(paths) - 1)


def arrows() -> set[tuple[str, str]]:
    """Return the pairs of rooms of which a file of the first imports one of the second.

    A room is a folder of the package, or a file next to these folders. Late, typing and string imports count.
    """
    found = {(package_of(path), name.partition(".")[0]) for path in files() for name in imported(path)}
    return {(one, other) for one, other in found if one != other}


def members(name: str) -> int:
    """Return the number of public members of a class of the package."""
    return len([word for word in dir(pkgutil.resolve_name(f"mpistrat.{name}")) if word[0] != "_"])


@functools.cache
def code_lines(path: Path) -> frozenset[int]:
    """Return the numbers of a file's lines without blank lines, comments and docstrings."""
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source(path)).readline):
        if token.type not in silent:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, node.end_lineno + 1))
    return frozenset(found)


def signature_lines(path: Path) -> int:
    """Return the number of code lines from each `def` to the line before the body."""
    found: set[int] = set()
    for node in nodes(path):
        if isinstance(node, FUNCTIONS):
            first = min([node.body[0].lineno, *(each.lineno for each in getattr(node.body[0], "decorator_list", []))])
            found.update(range(node.lineno, max(first, node.lineno + 1)))
    return len(found & code_lines(path))


# ---- options


@dataclass(frozen=True)
class Option:
    """An option of a training step, and how code that names it is recognized.

    Attributes:
        words: names, attributes, parameters and keywords that mean the option, each with the files in which it has this meaning.
            "a.b" is the attribute `b` of an expression that ends in `a`. Leading underscores do not count.
        types: parameters and fields annotated with them mean the option, too.
        files: those that own the option.
    """

    words: dict[str, str]
    types: str
    files: str


OPTIONS = {
    "parameter servers": Option(
        {"placement.store": "*", "served": "keras/* shadow/*", "has_workers": "*"},
        "",
        "parameter_server/* remote/* keras/served.py",
    ),
    "local steps": Option(
        {"local_steps": "*", "nodes_differ": "*", "outer": "optimizers/*", "placement.apart": "*"},
        "LocalSteps",
        "step/outer.py optimizers/node_slots.py base/options.py",
    ),
    "fewer bytes": Option(
        dict.fromkeys(
            ["wire", "wires", "wire_of", "unsent", "forget_unsent", "residual", "WIRE_RESIDUAL", "residual_receiver"],
            "arena/* cross_device/* optimizers/* state/* step/* strategy/* variables/*",
        ),
        "Wire Unsent",
        "arena/wire.py arena/encoded.py step/fewer_bytes.py cross_device/fewer_bytes.py",
    ),
    "sharded gradients": Option(
        {"placement.buckets": "*", "handed_over": "*", "own_gradients": "*", "own_gradients_of": "*",
         "sharded_gradients": "*"},
        "BucketSums OwnGradients",
        "arena/buckets.py variables/own_gradients.py step/handed_over.py",
    ),
    "mesh": Option(
        {"grid": "keras/* state/* step/* strategy/* torch/* variables/*",
         **dict.fromkeys(["variable.part", "v.part", "what.part", "self.part", "description.part", "where.part"],
                         "jax/* optimizers/* state/* step/[!o]* torch/module.py variables/*"),
         "divided": "torch/module.py step/arena_step.py"},
        "Grid Part",
        "arena/layout.py step/mesh.py strategy/mesh.py strategy/mesh_strategy.py strategy/axes.py",
    ),
    "early sums": Option(
        {"core.begun": "*", "extended.begun": "*", "begun": "step/[!o]* strategy/*", "early": "arena/* cross_device/* step/*"},
        "EarlySums Begun",
        # sharded gradients are early sums of all gradients
        "optimizers/begun.py arena/early.py step/early_start.py step/early_on_gpu.py arena/buckets.py step/handed_over.py"
        " torch/overlap.py",
    ),
}  # fmt: skip


def _within(path: Path, globs: str) -> bool:
    return any(fnmatch.fnmatch(str(path.relative_to(PACKAGE)), glob) for glob in globs.split())


def _last_name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", "")).strip("_")


def _named(node: ast.AST) -> tuple[set[str], int]:
    """Return the words that a node names, and their line."""
    if isinstance(node, ast.Attribute):
        name = node.attr.strip("_")
        return {name, f"{_last_name(node.value)}.{name}"}, node.end_lineno
    if isinstance(node, (ast.Name, ast.arg, ast.keyword, ast.Constant, *FUNCTIONS)):
        name = next((getattr(node, key) for key in ("id", "arg", "name", "value") if hasattr(node, key)), None)
        return ({name.strip("_")} if isinstance(name, str) else set()), node.lineno
    return set(), 0


def _aliases(path: Path, words: set[str], types: set[str]) -> set[tuple[tuple[str, ...], str]]:
    """Return the scope and name of variables that are assigned an option's attribute or its test, or have one of its types."""
    found = set()
    for node, scope in scoped(path):
        pairs = []
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            typed = node.annotation is not None and {*re.findall(r"\w+", ast.unparse(node.annotation))} & types
            if typed:
                found.add(
                    (scope.names, (node.arg if isinstance(node, ast.arg) else _last_name(node.target)).strip("_"))
                )
        elif isinstance(node, ast.NamedExpr):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs += list(zip(target.elts, node.value.elts, strict=False)) if both else [(target, node.value)]
        for target, value in pairs:
            value = value.left if isinstance(value, ast.Compare) else value
            if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and _named(value)[0] & words:
                found.add((scope.names, target.id))
    return found


def option_lines() -> Iterator[tuple[str, str, int]]:
    """Yield each line of code that names an option outside the option's files: the option, the file and the line's number."""
    for title, option in OPTIONS.items():
        for path in files():
            words = {word for word, globs in option.words.items() if _within(path, globs)}
            types = set(option.types.split())
            if _within(path, option.files) or not any(
                word.rpartition(".")[2] in source(path) for word in words | types
            ):
                continue
            aliases = _aliases(path, words, types)
            lines = set()
            for node, scope in scoped(path):
                names, line = _named(node)
                if names & words or any(name in names and scope.names[: len(of)] == of for of, name in aliases):
                    lines.add(line)
            yield from ((title, str(path.relative_to(PACKAGE)), line) for line in sorted(lines & code_lines(path)))


FRONTS = (
    "cross_device/collectives.py", "cross_device/ops.py", "strategy/axes.py", "strategy/collectives.py", "strategy/mesh.py",
    "strategy/process_set.py",
)  # fmt: skip
COUNTS: dict[str, Callable[[], int]] = {
    "arrows between rooms": lambda: len(arrows()),
    "public members of Optimizer": lambda: members("optimizers.Optimizer"),
    "public members of Strategy": lambda: members("Strategy"),
    "public members of Variable": lambda: members("Variable"),
    "public members of a data node": lambda: members("data.nodes.node.Node"),
    "code lines of the fronts of collectives": lambda: sum(len(code_lines(PACKAGE / name)) for name in FRONTS),
    "files": lambda: len(files()),
    "code lines": lambda: sum(len(code_lines(path)) for path in files()),
    "signature lines": lambda: sum(map(signature_lines, files())),
    "option lines outside their files": lambda: len([*option_lines()]),
}
RULES: dict[str, Callable[[], Iterator[str]]] = {
    "modules in a circle of imports": lambda: (name.partition(".")[0] for name in circles()),
    "writes of another object's private attribute": private_writes,
    "reads of another package's private attribute": private_reads,
    "parameters that nobody passes": unpassed,
    "definitions that nobody uses": lambda: unused(tests=True),
    "class names of more than one file": shared_class_names,
    "definitions that only tests use": lambda: iter(sorted({*unused(tests=False)} - {*unused(tests=True)})),
}


COUNTED = (
    "modules in a circle of imports",
    "class names of more than one file",
)  # of other rules each finding counts once


def exceptions() -> dict[str, Counter[str]]:
    """Return of each rule how often each exception is allowed; of circles the number of modules of each package."""
    return {rule: Counter(known) for rule, known in json.loads(KNOWN.read_text())["exceptions"].items()}


def limits() -> dict[str, int]:
    """Return the largest number that each count may have."""
    return json.loads(KNOWN.read_text())["limits"]


def found(rule: str) -> Counter[str]:
    """Return the findings of a rule in the package."""
    return Counter(RULES[rule]() if rule in COUNTED else {*RULES[rule]()})


def print_options() -> None:
    """Print the option lines by option and file."""
    by_file = Counter((title, name) for title, name, _ in option_lines())
    for title in OPTIONS:
        print(f"{title}: {sum(count for (of, _), count in by_file.items() if of == title)}")
        for (of, name), count in by_file.most_common():
            if of == title:
                print(f"  {count:3} {name}")
    print(f"together: {by_file.total()}")


if __name__ == "__main__":
    if "--options" in sys.argv:
        sys.exit(print_options())
    left = {rule: dict(sorted((known & found(rule)).items())) for rule, known in exceptions().items()}
    counts = {name: COUNTS[name]() for name in limits()}
    for name in [name for name, limit in limits().items() if counts[name] > limit]:
        if "--feature" in sys.argv:
            print(f"{name}: {counts[name] - limits()[name]} more, {counts[name]} in all")
        else:
            counts[name] = limits()[name]
    KNOWN.write_text(json.dumps({"exceptions": left, "limits": counts}, indent=1, ensure_ascii=False) + "\n")
