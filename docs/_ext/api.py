"""The directive `api`: a table of names and, below it, what their docstrings say.

Each line is a public name of mpistrat, as in `ms.NAME`, perhaps with options of autodoc behind it: `Variable inherited-members`.
`members=a,b` shows these alone, `no-members` none.
"""

from __future__ import annotations

import enum
import inspect
from operator import attrgetter

from docutils import nodes
from docutils.statemachine import StringList
from public_names import PUBLIC, public_objects
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import mpistrat


def entry(name: str, options: list[str]) -> list[str]:
    """The lines of reStructuredText that document one name."""
    thing = attrgetter(name)(mpistrat)
    if not inspect.isclass(thing):
        return [f".. auto{'function' if inspect.isroutine(thing) else 'data'}:: mpistrat.{name}", ""]
    if issubclass(thing, BaseException):
        return [f".. autoexception:: mpistrat.{name}", "   :show-inheritance:", ""]
    lines = [f".. autoclass:: mpistrat.{name}"]
    if issubclass(thing, enum.Enum):
        options = ["members", "undoc-members", "member-order=bysource"]
    elif "no-members" in options:
        options = []
    elif not any(option.startswith("members") for option in options):
        options = ["members", *options]
    for option in options:
        key, _, value = option.partition("=")
        lines.append(f"   :{key}: {value}".rstrip())
    if any(f"{base.__module__}.{base.__qualname__}" in PUBLIC for base in thing.__bases__):
        lines.append("   :show-inheritance:")
    return [*lines, ""]


class Api(SphinxDirective):
    """Documents the names of its content."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        words = [line.split() for line in self.content if line.strip()]
        lines = [".. autosummary::", "   :nosignatures:", ""]
        lines += [f"   ~mpistrat.{name}" for name, *_ in words]
        lines.append("")
        for name, *options in words:
            lines += entry(name, options)
        return parse(self, lines)


class OtherNames(SphinxDirective):
    """A table of the public names that are another spelling of a name."""

    def run(self) -> list[nodes.Node]:
        first: dict[int, str] = {}
        rows = [".. list-table::", "   :header-rows: 1", "", "   * - name", "     - is"]
        for name, thing in public_objects():
            if inspect.ismodule(thing) or isinstance(thing, (int, str)):
                continue
            real = first.setdefault(id(thing), name)
            if real != name:
                rows += [f"   * - ``{name}``", f"     - :py:obj:`{real}`"]
        return parse(self, rows)


def parse(directive: SphinxDirective, lines: list[str]) -> list[nodes.Node]:
    """The nodes of lines of reStructuredText."""
    holder = nodes.Element()
    directive.state.nested_parse(StringList(lines, directive.get_source_info()[0]), directive.content_offset, holder)
    return holder.children


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("api", Api)
    app.add_directive("other-names", OtherNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
