"""Packages that give names from their modules, and load a module when a name of it is first asked for (PEP 562).

Each rank of a job opens each module that it loads, so what a program does not use must cost it nothing. The imports of such a
package stand where type checkers and readers look for them, and are not run:

    if TYPE_CHECKING:
        from .callbacks import Callback, EarlyStopping
        from .metric import Mean
    else:
        __getattr__, __dir__ = lazy(__name__)

`lazy` reads them there, as SPEC 1 of scientific Python does from a stub. A name that its own module has, such as `survive` in
`survive.py`, must be imported at once, outside: Python puts the module under that name into the package when it is loaded.
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

__all__ = ["lazy", "load_cloudpickle"]


def lazy(
    package: str, moved: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    Args:
        package: its name.
        moved: names that a module of it has now, each with the module; to use one is a DeprecationWarning.
    """
    module = sys.modules[package]

    @functools.cache
    def homes() -> dict[str, tuple[str, str | None]]:
        return _homes(package)

    def home_of(name: str) -> tuple[str, str | None] | None:
        if name.startswith("_"):  # what Python and its tools ask modules for
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
        setattr(module, name, value)  # the next time it is simply there
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *module.__all__})

    return get, names


def _homes(package: str) -> dict[str, tuple[str, str | None]]:
    """Return of each name that a package imports for type checkers the module, and the name there; None for a module itself."""
    spec = sys.modules[package].__spec__
    source = getattr(spec and spec.loader, "get_source", lambda _: None)(package)
    if source is None:
        raise ImportError(
            f"{package}: expected its __init__.py, which says where its names are, got compiled files only"
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
        expected, got = "the package cloudpickle, which carries functions to the workers", "none"
        raise MissingDependencyError(explain(function, "", expected=expected, got=got, remedy=remedy)) from error
    return cloudpickle
