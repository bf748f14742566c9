"""CuPy itself, without a GPU or a driver: it has every name that the package uses, and its compiler takes the kernels."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpistrat as ms
from mpistrat.comm import gpu
from mpistrat.optimizers import device_scale, kernels
from mpistrat.step import on_device

pytestmark = pytest.mark.ranks(1)

PACKAGE = Path(ms.__file__).parent
PAIRS = [  # of weights and gradients
    ("float32", "float32"),
    ("float64", "float64"),
    ("float16", "float16"),
    ("float16", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
]
ROOTS = {
    "import_cupy": "cupy",
    "array_module": "cupy",
    "require_nccl": "cupy.cuda.nccl",
}  # functions that return modules
# What functions return, of which attributes are used, too.
RETURNS = {
    "cupy.cuda.get_current_stream": "cupy.cuda.Stream.null",
    "cupy.cuda.Stream": "cupy.cuda.Stream.null",
    "cupy.cuda.ExternalStream": "cupy.cuda.Stream.null",
    "cupy.cuda.alloc": "cupy.cuda.MemoryPointer",
    **{
        f"cupy.{name}": "cupy.ndarray"
        for name in ("zeros", "empty", "full", "array", "asarray", "ascontiguousarray", "concatenate", "from_dlpack")
    },
}


@pytest.fixture(scope="module")
def cupy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no NCCL, no driver
        return pytest.importorskip("cupy")


class Uses:
    """What a file uses of CuPy: dotted names from the module on, and calls of them.

    A name that a function sets to something of CuPy is of CuPy everywhere in that function; so is an attribute of `self` in
    the file.
    """

    def __init__(self, path: Path) -> None:
        tree = ast.parse(path.read_text(), str(path))
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        own = [each for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef)) for each in node.body]
        self.scopes = [node for node in own if isinstance(node, functions)]
        self.of_self: dict[str, str] = {}
        self.known: list[dict[str, str]] = [{"cupy": "cupy"} for _ in self.scopes]
        before = -1
        while before < (
            before := len(self.of_self) + sum(map(len, self.known))
        ):  # until nothing follows from what is known
            for scope, known in zip(self.scopes, self.known, strict=True):
                for target, value in _assignments(scope):
                    if found := self.of(value, known):
                        name = _name(target)
                        (self.of_self if name.startswith("self.") else known).setdefault(name, found)
                for node in ast.walk(scope):
                    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cupy":
                        known.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})

    def of(self, node: ast.expr, known: dict[str, str]) -> str:
        """The dotted name of an expression, "" for what is not known to be of CuPy. `X()` is an object that X returns."""
        if isinstance(node, ast.IfExp):
            return self.of(node.body, known) or self.of(node.orelse, known)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ROOTS:
                return ROOTS[node.func.id]
            called = self.of(node.func, known)
            return called and f"{called}()"
        if found := known.get(_name(node)) or self.of_self.get(_name(node)):
            return found
        if isinstance(node, ast.Attribute):
            base = self.of(node.value, known)
            return base and f"{base}.{node.attr}"
        return ""

    def _nodes(self) -> Iterator[tuple[ast.AST, dict[str, str]]]:
        for scope, known in zip(self.scopes, self.known, strict=True):
            for node in ast.walk(scope):
                yield node, known

    def attributes(self) -> Iterator[tuple[str, int]]:
        """Names from the module on, and their lines."""
        for node, known in self._nodes():
            if isinstance(node, ast.Attribute) and (name := self.of(node, known)):
                yield name, node.lineno

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        for node, known in self._nodes():
            if isinstance(node, ast.Call) and (name := self.of(node.func, known)):
                yield name, node


def _assignments(scope: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=True)
                else:
                    yield target, node.value
        elif isinstance(node, (ast.NamedExpr, ast.AnnAssign)) and node.value is not None:
            yield node.target, node.value


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return f"self.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def resolved(cupy: Any, name: str) -> Any:
    """What a dotted name is; of what a call returns, its class or an object of it. None where that is not known.

    Raises:
        AttributeError: CuPy has no such name.
    """
    found, path = cupy, "cupy"
    for word in name.split(".")[1:]:
        plain = word.removesuffix("()")
        path += f".{plain}"
        if path == "cupy.cuda.nccl":
            importlib.import_module(path)
        found = getattr(found, plain)
        if word.endswith("()"):
            if path not in RETURNS and not inspect.isclass(found):
                return None
            found = resolved(cupy, RETURNS.get(path, path))
    return found


def has_nccl(cupy: Any) -> bool:
    from cupy.cuda import nccl

    return bool(nccl.available)


def used(cupy: Any) -> list[tuple[Path, Uses]]:
    words = re.compile("|".join(ROOTS) + "|import cupy|from cupy")
    return [(path, Uses(path)) for path in sorted(PACKAGE.rglob("*.py")) if words.search(path.read_text())]


def test_it_has_every_name_that_the_package_uses(cupy) -> None:
    missing, names = [], set()
    for path, uses in used(cupy):
        for name, line in uses.attributes():
            if name.startswith("cupy.cuda.nccl.") and not has_nccl(cupy):
                continue
            names.add(name)
            try:
                resolved(cupy, name)
            except AttributeError:
                missing.append(f"{path.relative_to(PACKAGE)}:{line}: {name}")
    assert not missing
    if has_nccl(cupy):
        constants = [*gpu._DATATYPES.values(), "NCCL_BFLOAT16"]
        assert not [name for name in constants if not hasattr(importlib.import_module("cupy.cuda.nccl"), name)]
    seen = {"cupy.RawKernel", "cupy.cuda.Device().use", "cupy.cuda.runtime.getDeviceCount", "cupy.zeros", "cupy.copyto"}
    assert seen <= names, "the walk over the package finds what it is known to use"


def signature_of(function: Any) -> inspect.Signature | None:
    """The signature of a function, or the one that its documentation begins with, as Cython writes it; None without either."""
    if isinstance(function, type(None)) or type(function).__name__ == "ufunc":
        return None
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        pass
    first = (function.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    found = re.match(r"\w+(?:\.\w+)*\((?P<given>[^()]*)\)", first)
    if found is None:
        return None
    parameters = []
    for each in filter(None, (word.strip() for word in found["given"].split(","))):
        name, _, default = each.partition("=")
        if (name := name.split()[-1]) == "self":
            continue
        if name.isidentifier():
            how = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter(name, how, default=default or inspect.Parameter.empty))
    return inspect.Signature(parameters)


def test_it_takes_every_call_that_the_package_makes(cupy) -> None:
    refused, checked = [], set()
    for path, uses in used(cupy):
        for name, call in uses.calls():
            if name.startswith("cupy.cuda.nccl.") and not has_nccl(cupy):
                continue
            signature = signature_of(resolved(cupy, name))
            starred = any(isinstance(each, ast.Starred) for each in call.args) or any(not k.arg for k in call.keywords)
            if signature is None or starred:
                continue
            given = [None] * len(call.args)
            if "()." in name and "self" in signature.parameters:
                given.append(None)
            checked.add(name)
            try:
                signature.bind(*given, **{keyword.arg: None for keyword in call.keywords})
            except TypeError as error:
                refused.append(f"{path.relative_to(PACKAGE)}:{call.lineno}: {name}{signature}: {error}")
    assert not refused
    seen = {"cupy.cuda.Device", "cupy.cuda.Stream", "cupy.zeros", "cupy.cuda.Event().record", "cupy.cuda.UnownedMemory"}
    assert seen <= checked, "the walk over the package finds what it is known to call"


def test_a_name_or_an_argument_that_it_lacks_is_found(cupy, tmp_path) -> None:
    """The walk itself, on a few lines."""
    path = tmp_path / "file.py"
    path.write_text(
        "def f():\n    xp = array_module(a)\n    stream = xp.cuda.get_current_stream()\n    stream.wait(1)\n"
    )
    uses = Uses(path)
    assert [name for name, _ in uses.attributes() if name.endswith("wait")] == ["cupy.cuda.get_current_stream().wait"]
    with pytest.raises(AttributeError):
        resolved(cupy, "cupy.cuda.get_current_stream().wait")
    with pytest.raises(TypeError, match="odd"):
        signature_of(cupy.zeros).bind(None, odd=None)
    assert signature_of(cupy.cuda.Device).bind(0)
    with pytest.raises(TypeError):
        signature_of(cupy.cuda.Device).bind(0, 1)


def compiled(nvrtc: Any, code: str, architecture: int) -> str:
    """PTX, with the options that CuPy adds."""
    program = nvrtc.createProgram(code, "kernels.cu", (), ())
    options = (*kernels.OPTIONS, "-ftz=true", "--device-as-default-execution-space", f"-arch=compute_{architecture}")
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    return str(nvrtc.getPTX(program).decode())


@pytest.mark.parametrize("architecture", [70, 80, 90, 100])
@pytest.mark.parametrize("weights, gradients", PAIRS)
def test_its_compiler_takes_every_kernel(cupy, weights, gradients, architecture) -> None:
    """Without a fused multiplication and addition, which would give other bits."""
    from cupy.cuda import nvrtc

    try:
        version = nvrtc.getVersion()
    except RuntimeError as error:
        pytest.skip(f"no NVRTC: {error}. pip install nvidia-cuda-nvrtc-cu12")
    if (architecture == 70 and version >= (13, 0)) or (architecture == 100 and version < (12, 8)):
        pytest.skip(f"NVRTC {version} has no sm_{architecture}")
    assert cupy.RawKernel(kernels.source("adam", weights, gradients), "update", kernels.OPTIONS).name == "update"
    sources = [
        f"namespace of_{rule} {{\n{kernels.source(rule, weights, gradients, rule)}}}" for rule in kernels._BODIES
    ]
    ptx = compiled(nvrtc, "\n".join(sources), architecture)
    found = dict(re.findall(r"\.entry (\w+)\((.*?)\n}\n", ptx, re.DOTALL))
    assert set(found) == set(kernels._BODIES)
    assert [rule for rule, text in found.items() if "fma." in text and rule != "ftrl"] == []  # which takes a power
    assert ".local" not in ptx  # segments are read where the launch put them
    ptx = compiled(nvrtc, kernels.source("adam", weights, gradients, stored=True), architecture)
    assert ptx.count(".entry") == 2 and "fma." not in ptx and ".local" not in ptx
    if weights in ("float32", "float64"):
        ptx = compiled(nvrtc, device_scale.source(weights), architecture)
        assert ptx.count(".entry") == 2 and "fma." not in ptx
        ptx = compiled(nvrtc, kernels.squares_source(weights), architecture)
        assert ".entry lanes" in ptx and ".entry halves" in ptx and "fma." not in ptx
        ptx = compiled(nvrtc, on_device.source(weights), architecture)
        assert ptx.count(".entry") == 5 and "fma." not in ptx
