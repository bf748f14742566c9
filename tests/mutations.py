"""Leave out each wait, event, current GPU and stream of the code for GPUs, one at a time, and see whether a test notices.

    python -m tests.mutations                       # all; results are in build/mutations.jsonl, and are not repeated
    python -m tests.mutations --only comm/gpu.py    # one file of the package; --list shows what is left out
    python -m tests.mutations --summary FILE.json   # also write the table as JSON

The package, its tests and its check are copied to a temporary folder. In the copy each place asks a switch whether it is left
out. A unit is an item of `benchmarks/gpu/check.py` or a file of tests, on the strict stand-in for CuPy. Each unit first runs with
nothing left out, which shows the places that it reaches. Then each of these that is not yet found is left out in turn. Units on
one rank are forked from a process that has imported everything.

A place that no unit notices must be in `tests/mutations.json` with the reason. The exit status is the number of those that are
not (at most 100).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
EXPLAINED = Path(__file__).with_suffix(".json")
CALLS = {"wait_event", "wait_stream", "synchronize", "record", "record_stream", "use", "set_device"}
FUNCTIONS = {"use_device", "synchronize", "on_device_of"}  # of the package itself
GPU_NAMES = {"use_device": "devices", "synchronize": "arrays", "on_device_of": "arrays"}
SWITCH = "_mutant"
_NOTICED, _FINE = 3, 0  # exit statuses of a unit

# Groups and items of the check, the GPUs that they see, and files of tests, with pytest's -k. The last have two ranks.
CHECK = (
    ("ranks.several_replicas_on_a_rank", 2),
    ("feed", 1),
    ("ops", 1),
    ("arrays", 1),
    ("vars", 1),
    ("torch", 1),
    ("jax", 1),
)
FILES = (
    ("tests/single/comm/test_device_copy.py", ""),
    ("tests/single/data/test_device_prefetch.py", ""),
    ("tests/single/cross_device/test_current_gpu.py", ""),
    ("tests/parallel/cross_device/test_other_gpus.py", ""),
    ("tests/parallel/optimizers/test_current_gpus.py", ""),
    ("tests/parallel/optimizers/test_gpu_steps.py", "bits_of_the_cpu or replicas_with"),
    ("tests/parallel/optimizers/test_loss_scale_on_gpus.py", "momentum or rows or changes"),
)
PAIRS = (
    ("tests/parallel/optimizers/test_gpu_steps.py", "bits_of_the_cpu"),
    ("tests/parallel/optimizers/test_begin_on_gpus.py", ""),
    ("tests/parallel/frameworks/test_horovod_gpus.py", ""),
    ("tests/parallel/frameworks/test_torch_backend_gpus.py", ""),
)


class Place(NamedTuple):
    """A piece of code that can be left out: its file in the package, and its function and text, which make its name."""

    file: str
    name: str
    line: int


class Instrument(ast.NodeTransformer):
    """Make each place of a module ask the switch. `first` is the number of its first place."""

    def __init__(self, file: str, module: ast.Module, first: int = 0) -> None:
        self.file, self.first = file, first
        self.places: list[Place] = []
        self._inside: list[str] = []
        self._ours = {
            alias.name
            for node in ast.walk(module)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            if GPU_NAMES.get(alias.name) == node.module.rpartition(".")[2]
        }
        self._ours |= {name for name, home in GPU_NAMES.items() if file in (f"comm/{home}.py", f"base/{home}.py")}

    def _within(self, node: Any) -> Any:
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()
        return node

    visit_FunctionDef = visit_ClassDef = visit_AsyncFunctionDef = _within

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if self._is_call(node.value):
            return ast.copy_location(ast.Expr(self._unless(node.value, node)), node)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """An event that is recorded and kept becomes one that never was, which nothing waits for."""
        call = node.value
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in ("record", "record_event")
        ):
            library = "torch" if call.func.attr == "record_event" else "cupy"
            event = ast.parse(f"__import__({library!r}).cuda.Event()", mode="eval").body
            node.value = ast.IfExp(self._off(node), event, call)
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        for item in node.items:
            if self._is_context(item.context_expr):
                nothing = ast.parse("__import__('contextlib').nullcontext()", mode="eval").body
                item.context_expr = ast.IfExp(self._off(item.context_expr, "with "), nothing, item.context_expr)
        return self.generic_visit(node)

    def _is_call(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Call):
            return False
        function = node.func
        if isinstance(function, ast.Name):
            return function.id in self._ours
        own = (
            isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self"
        )
        if not isinstance(function, ast.Attribute) or function.attr not in CALLS or own:
            return False
        return len(node.args) < 2  # else it is a logger's `record`

    def _is_context(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                return function.id in self._ours or function.id == "in_order"
            return isinstance(function, ast.Attribute) and function.attr in ("Device", "stream")
        last = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        return last in ("stream", "_stream")

    def _unless(self, value: ast.expr, node: ast.AST) -> ast.expr:
        return ast.BoolOp(ast.Or(), [self._off(node), value])

    def _off(self, node: ast.AST, before: str = "") -> ast.expr:
        name = f"{'.'.join(self._inside)}: {before}{ast.unparse(node)}"
        same = sum(place.name.partition(" #")[0] == name for place in self.places)
        number = self.first + len(self.places)
        self.places.append(Place(self.file, f"{name} #{same + 1}" if same else name, node.lineno))  # type: ignore[attr-defined]
        return ast.parse(f"__import__({SWITCH!r}).off({number})", mode="eval").body


def instrumented(package: Path) -> tuple[list[Place], dict[str, str]]:
    """Return the places of a package in order, and the new text of each file that has some."""
    places: list[Place] = []
    texts: dict[str, str] = {}
    for path in sorted(package.rglob("*.py")):
        text, file = path.read_text(), str(path.relative_to(package))
        if not any(word in text for word in (*CALLS, *FUNCTIONS, "Device(")):
            continue
        module = ast.parse(text)
        one = Instrument(file, module, len(places))
        module = one.visit(module)
        if one.places:
            texts[file] = ast.unparse(ast.fix_missing_locations(module))
            places += one.places
    return places, texts


_SWITCH_CODE = f'''"""The switch: which place is left out, and which were reached."""

import atexit
import os

left_out = int(os.environ.get("{SWITCH}", "-1"))
reached = set()


def off(number):
    reached.add(number)
    return number == left_out


def note():
    if "{SWITCH}_reached" in os.environ:
        with open(os.path.join(os.environ["{SWITCH}_reached"], str(os.getpid())), "w") as file:
            file.write(" ".join(map(str, sorted(reached))))


atexit.register(note)
'''


def copy_of(root: Path, folder: Path) -> list[Place]:
    """Make a copy of the project with switches in a folder, and return the places."""
    junk = shutil.ignore_patterns("__pycache__")
    for name in ("mpistrat", "tests", "benchmarks/gpu"):
        shutil.copytree(root / name, folder / name, ignore=junk)
    for name in ("pyproject.toml", "_mpistrat_torch.py"):
        shutil.copy(root / name, folder / name)
    places, texts = instrumented(folder / "mpistrat")
    for file, text in texts.items():
        (folder / "mpistrat" / file).write_text(text)
    (folder / f"{SWITCH}.py").write_text(_SWITCH_CODE)
    return places


# A unit, in a process of its own


def run_unit(name: str) -> None:
    """Run a unit in this process, and leave with its status."""
    kind, what, more = name.split("|")
    os.environ["FAKE_GPUS"] = more if kind == "check" else "2"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    status = _NOTICED
    try:
        status = _check_item(what) if kind == "check" else _test_file(what, more)
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    importlib.import_module(SWITCH).note()
    os._exit(status)


def _check() -> Any:
    """Return benchmarks/gpu/check.py of the copy, as a module."""
    if "gpu_check" not in sys.modules:
        spec = importlib.util.spec_from_file_location("gpu_check", Path("benchmarks/gpu/check.py"))
        assert spec is not None and spec.loader is not None
        sys.modules["gpu_check"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["gpu_check"]


def _check_item(name: str) -> int:
    import honest_cupy  # as the check's own processes import it

    honest_cupy.install()
    check = _check()
    with contextlib.suppress(check.Skip):
        check.ITEMS[name][3]()
    told, _ = honest_cupy.report()
    for text in told:
        print(text)
    return _NOTICED if told else _FINE


def _test_file(path: str, words: str) -> int:
    import pytest

    class Markers:
        """The markers of the project, without its launcher: this process is the rank."""

        def pytest_configure(self, config: pytest.Config) -> None:
            for marker in ("ranks", "gpu", "tier", "timeout", "serial"):
                config.addinivalue_line("markers", f"{marker}: as in the project")

    own = ["-x", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:pytest_mpi", "-c", os.devnull, "--rootdir=."]
    code = pytest.main(
        [*own, "--import-mode=importlib", "-m", "not gpu", path, *(["-k", words] if words else [])], [Markers()]
    )
    return _FINE if code in (0, 5) else _NOTICED


# The driver, in the copy


@dataclass(frozen=True)
class Unit:
    """An item of the check, or a file of tests, and on how many ranks it runs."""

    name: str
    ranks: int

    def __str__(self) -> str:
        kind, what, more = self.name.split("|")
        if kind == "check":
            return what
        return f"{what}{f' -k {more!r}' if more else ''} on {self.ranks} rank{'s' if self.ranks > 1 else ''}"


class Driver:
    """Run units with places left out, in a copy, which is the current folder."""

    def __init__(self, limit: float, mpiexec: str) -> None:
        self._limit, self._mpiexec = limit, shlex.split(mpiexec)

    def run(self, unit: Unit, left_out: int = -1) -> tuple[str, set[int]]:
        """Return "fine", "noticed" or "time limit", and the places that were reached."""
        with tempfile.TemporaryDirectory() as reached, open(os.devnull if left_out >= 0 else "unit.log", "w") as out:
            variables = {SWITCH: str(left_out), f"{SWITCH}_reached": reached}
            pid = self._fork(unit, variables, out) if unit.ranks == 1 else self._start(unit, variables, out)
            status, end = None, time.monotonic() + self._limit
            while status is None and time.monotonic() < end:
                done, code = os.waitpid(pid, os.WNOHANG)
                status = os.waitstatus_to_exitcode(code) if done else None
                time.sleep(0 if done else 0.02)
            if status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            seen = {int(word) for file in Path(reached).iterdir() for word in file.read_text().split()}
        return ("time limit" if status is None else "fine" if status == _FINE else "noticed"), seen

    def _fork(self, unit: Unit, variables: dict[str, str], out: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            os.environ.update(variables)
            switch = importlib.import_module(SWITCH)
            switch.left_out = int(variables[SWITCH])
            switch.reached.clear()
            run_unit(unit.name)
        finally:
            os._exit(_NOTICED)

    def _start(self, unit: Unit, variables: dict[str, str], out: Any) -> int:
        command = [*self._mpiexec, "-n", str(unit.ranks), sys.executable, "-m", "tests.mutations", "--unit", unit.name]
        environment = {**os.environ, **variables, "MPISTRAT_ABORT_AFTER": "30"}
        return subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True).pid


def units(frameworks: bool) -> list[Unit]:
    """Return the units, cheap ones first."""
    check, found = _check(), []
    files = [(path, words, 1) for path, words in FILES] + [(path, words, 2) for path, words in PAIRS]
    found = [Unit(f"tests|{path}|{words}", ranks) for path, words, ranks in files if Path(path).exists()]
    for wanted, gpus in CHECK:
        names = [name for name, (group, *_) in check.ITEMS.items() if wanted in (group, name)]
        found += [Unit(f"check|{name}|{gpus}", 1) for name in names]
    slow = lambda unit: unit.name.startswith(("check|torch.", "check|jax.")) or "frameworks" in unit.name  # noqa: E731
    return sorted((unit for unit in found if frameworks or not slow(unit)), key=lambda unit: (slow(unit), unit.ranks))


def _prepare() -> None:
    """Import what units need, once."""
    folders = ("tests/models", "benchmarks/gpu")  # from which the check imports
    sys.path[:0] = [os.getcwd(), *(str(Path(folder).resolve()) for folder in folders)]
    importlib.invalidate_caches()
    importlib.import_module(SWITCH)
    for name in (
        "numpy",
        "mpi4py",
        "mpistrat",
        "pytest",
        "honest_cupy",
        "torch",
        "mpistrat.torch",
        "mpistrat.optimizers",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def examine(args: argparse.Namespace, places: list[Place], results: Results) -> None:
    """Try what has no result yet. The current folder is the copy."""
    _prepare()
    driver = Driver(args.seconds, args.mpiexec)
    left = {n for n, place in enumerate(places) if not args.only or place.file == args.only}
    left = {n for n in left if results.state(places[n]) is None}
    reached: set[int] = set()
    for unit in units(importlib.util.find_spec("torch") is not None):
        if not left:
            return
        start = time.monotonic()
        how, seen = driver.run(unit)
        print(
            f"{time.monotonic() - start:6.1f} s  {how:10} reaches {len(seen & left):2} of {len(left)}  {unit}",
            flush=True,
        )
        if how != "fine":
            print(f"left out, as it fails by itself: {Path('unit.log').read_text()[-600:]}")
            continue
        reached |= seen
        for number in sorted(seen & left):
            how, _ = driver.run(unit, number)
            if how != "fine":
                left.discard(number)
                place, by = places[number], f"{unit}{' (time limit)' if how == 'time limit' else ''}"
                results.add(place, "found", by)
                print(f"found  {place.file}:{place.line} {place.name}", flush=True)
    for number in sorted(left):
        results.add(places[number], "survived" if number in reached else "not reached", "")


# Results


class Results:
    """What became of each place, in a file of lines of JSON. A change of a place's file makes its results void."""

    def __init__(self, path: Path, package: Path) -> None:
        self._path = path
        self._digests = {
            str(file.relative_to(package)): hashlib.sha256(file.read_bytes()).hexdigest()[:12]
            for file in package.rglob("*.py")
        }
        lines = path.read_text().splitlines() if path.exists() else []
        self._found = {(each["file"], each["name"], each["digest"]): each for each in map(json.loads, lines)}

    def _key(self, place: Place) -> tuple[str, str, str]:
        return place.file, place.name, self._digests[place.file]

    def state(self, place: Place) -> str | None:
        found = self._found.get(self._key(place))
        return None if found is None else found["state"]

    def add(self, place: Place, state: str, by: str) -> None:
        file, name, digest = self._key(place)
        self._found[file, name, digest] = row = {"file": file, "name": name, "digest": digest, "state": state, "by": by}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a") as out:
            out.write(json.dumps(row) + "\n")

    def rows(self, places: list[Place]) -> Iterator[tuple[Place, dict[str, str]]]:
        for place in places:
            yield place, self._found.get(self._key(place), {"state": "not tried", "by": ""})


def explained() -> dict[str, str]:
    """Return the reasons why nothing notices a place, by its file and name."""
    return dict(json.loads(EXPLAINED.read_text()))


def show(places: list[Place], results: Results, summary: Path | None) -> int:
    """Print the table, and return how many survivors have no reason."""
    reasons, table, survivors = explained(), {}, []
    for place, row in results.rows(places):
        counts = table.setdefault(place.file, {"places": 0, "found": 0, "explained": 0, "survived": 0, "not tried": 0})
        counts["places"] += 1
        state = row["state"]
        if state in ("survived", "not reached"):
            state = "explained" if f"{place.file}: {place.name}" in reasons else "survived"
            survivors.append({"place": f"{place.file}: {place.name}", "state": row["state"]})
        counts[state] += 1
    titles = ("places", "found", "explained", "survived", "not tried")
    total = {title: sum(counts[title] for counts in table.values()) for title in titles}
    print(f"\n{'':40}" + "".join(f"{title:>11}" for title in titles))
    for file, counts in [*sorted(table.items()), ("all", total)]:
        print(f"{file:40}" + "".join(f"{counts[title]:>11}" for title in titles))
    open_ones = [each for each in survivors if each["place"] not in reasons]
    for each in open_ones:
        print(f"{each['state']}, without a reason in {EXPLAINED.name}: {each['place']}")
    if summary is not None:
        rows = [{"file": place.file, "place": place.name, **_brief(row)} for place, row in results.rows(places)]
        summary.write_text(json.dumps({"total": total, "files": table, "places": rows}, indent=1) + "\n")
    return len(open_ones)


def _brief(row: dict[str, str]) -> dict[str, str]:
    return {key: row[key] for key in ("state", "by") if row[key]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Leave out each wait, event, current GPU and stream of the GPU code.")
    parser.add_argument("--only", metavar="FILE", default="", help="a file of the package, such as comm/gpu.py")
    parser.add_argument("--list", action="store_true", help="print the places, and try nothing")
    parser.add_argument(
        "--seconds", type=float, default=120, help="limit of a try, which counts as noticed (default: 120)"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutations.jsonl")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write the table as JSON")
    parser.add_argument("--mpiexec", default=os.environ.get("MPIEXEC", str(Path(sys.executable).with_name("mpiexec"))))
    parser.add_argument("--unit", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.unit:
        _prepare()
        run_unit(args.unit)
    places, _ = instrumented(ROOT / "mpistrat")
    results = Results(args.results.resolve(), ROOT / "mpistrat")
    chosen = [place for place in places if not args.only or place.file == args.only]
    if args.list:
        for place in chosen:
            print(f"{place.file}:{place.line} {place.name}")
        return 0
    os.environ |= {"GPU_CHECK_FAKE": "tests/models/honest_cupy.py", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    summary = None if args.summary is None else args.summary.resolve()
    if any(results.state(place) is None for place in chosen):
        with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
            copy_of(ROOT, Path(folder))
            os.environ["PYTHONPATH"] = folder
            os.chdir(folder)
            for name in [name for name in sys.modules if name.partition(".")[0] == "mpistrat"]:
                del sys.modules[name]
            try:
                examine(args, places, results)
            except KeyboardInterrupt:
                print("interrupted: the next run goes on here")
            finally:
                os.chdir(ROOT)
    return min(100, show(chosen, results, summary))


if __name__ == "__main__":
    sys.exit(main())
