"""Where a type's home module is written, link to its public name: mpistrat.strategy.strategy.Strategy is mpistrat.Strategy."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import mpistrat


def public_objects() -> Iterator[tuple[str, Any]]:
    """The full name and the object of everything in `mpistrat.__all__`, then of what the modules in it list."""
    listed = {name: getattr(mpistrat, name) for name in mpistrat.__all__}
    modules = {name: thing for name, thing in listed.items() if isinstance(thing, types.ModuleType)}
    modules |= {name: vars(mpistrat)[name] for name in ("torch", "jax", "keras")}  # conf.py has imported them
    yield from ((f"mpistrat.{name}", thing) for name, thing in listed.items() if name not in modules)
    for name, module in modules.items():
        yield f"mpistrat.{name}", module
        yield from ((f"mpistrat.{name}.{inner}", getattr(module, inner)) for inner in getattr(module, "__all__", ()))


PUBLIC = {
    f"{thing.__module__}.{thing.__qualname__}": name
    for name, thing in reversed(list(public_objects()))  # the first name of several wins
    if inspect.isclass(thing) or inspect.isroutine(thing)
}
NAMES = {name for name, _ in public_objects()}


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement) -> nodes.Node | None:
    """Resolve a name of a home module, or one that begins with `ms.`; types that are not public stay plain text."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    public = "mpistrat." + target[3:] if target.startswith("ms.") else PUBLIC.get(target)
    if content.astext() == target:
        short = target.rpartition(".")[2]
        content = (
            nodes.Text(short)
            if isinstance(content, nodes.Text)
            else type(content)("", short, classes=content["classes"])
        )
    if public is None and target.startswith("mpistrat.") and target not in NAMES:
        return content
    if public is None or public == target:
        return None
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, content)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
