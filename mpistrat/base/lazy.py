"""Packages that load a module when one of its names is first used (PEP 562).

Each rank of a job opens each module that it loads, so a module that a program does not use must cost nothing. The imports of such
a package are written for type checkers and readers, and not executed:

    if TYPE_CHECKING:
        from .callbacks import Callback, EarlyStopping
        from .metric import Mean
    else:
        __getattr__, __dir__ = lazy(__name__)

`lazy` reads them from the source, as SPEC 1 of scientific Python does from a stub. A name equal to its module's, such as
`survive` in `survive.py`, must be imported eagerly, outside: Python sets the module under that name in the package on import.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["lazy", "load_cloudpickle", "load_optional"]


def lazy(
    package: str, moved: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    Args:
        package: its name.
        moved: names that moved to a module of it, with the module; using one is a DeprecationWarning.
    """
    module = sys.modules[package]

    @functools.cache
    def homes() -> dict[str, tuple[str, str | None]]:
        return _homes(package)

    def home_of(name: str) -> tuple[str, str | None] | None:
        if name.startswith("_"):  # Python and its tools look up such names
            return None
        part = f"{package}.{name}"
        return homes().get(name) or ((part, None) if importlib.util.find_spec(part) else None)

    def get(name: str) -> Any:
        if name in moved:
            text = f"{package}.{name} is {package}.{moved[name]}.{name} now"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(importlib.import_module(f"{package}.{moved[name]}"), name)
        home = home_of(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        found = importlib.import_module(home[0])
        value = found if home[1] is None else getattr(found, home[1])
        setattr(module, name, value)  # cached for the next access
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *module.__all__})

    return get, names


def _homes(package: str) -> dict[str, tuple[str, str | None]]:
    """Return the module and original name (None for a module itself) of each name that a package imports for type checkers."""
    spec = sys.modules[package].__spec__
    source = getattr(spec and spec.loader, "get_source", lambda _: None)(package)
    if source is None:
        raise ImportError(
            f"{package}: its __init__.py is needed to find its names, but only compiled files are installed"
        )
    homes: dict[str, tuple[str, str | None]] = {}
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            for node in block.body:
                assert isinstance(node, ast.ImportFrom) and node.level
                words = package.split(".")
                parent = ".".join([*words[: len(words) - node.level + 1], *filter(None, [node.module])])
                for alias in node.names:
                    home = (parent, alias.name) if node.module else (f"{parent}.{alias.name}", None)
                    homes[alias.asname or alias.name] = home
    return homes


def load_cloudpickle(function: str = "ClusterCoordinator") -> Any:
    """Return the module cloudpickle, which a function needs.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import cloudpickle
    except ImportError as error:
        from .errors import MissingDependencyError, explain

        remedy = "Install it on every node: pip install 'mpistrat[coordinator]'"
        expected, got = "the package cloudpickle, which sends functions to the workers", f"{error}"
        raise MissingDependencyError(explain(function, "", expected=expected, got=got, remedy=remedy)) from error
    return cloudpickle


def load_optional(module: str, function: str, expected: str, remedy: str) -> Any:
    """Return a module that not every installation has.

    Args:
        module: its name.
        function: the function that needs it, for errors.
        expected: the package, and its use.
        remedy: how to install it.

    Raises:
        MissingDependencyError: it is not installed.

    Example:
        >>> load_optional("math", "f", "math, which has logarithms", "pip install math").log(1.0)
        0.0
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        from .errors import MissingDependencyError, explain

        raise MissingDependencyError(explain(function, "", expected=expected, got=error, remedy=remedy)) from error
