"""The directive `api`: a table of names and, below it, what their docstrings say.

Each line is a public name of mpistrat, as in `ms.NAME`, perhaps with options of autodoc behind it: `Variable inherited-members`.
`members=a,b` shows these alone, `no-members` none. A signature may follow a name, ` -- text` a
constant, which has no docstring. `MODULE.*` stands for the names of a module that are no other spellings and not at the top.
A name of something that an earlier line documents is another spelling, and refers to it.
"""

from __future__ import annotations

import enum
import inspect
import re
from operator import attrgetter
from typing import NamedTuple

from docutils import nodes
from docutils.statemachine import StringList
from listed import expanded
from public_names import PUBLIC, public_objects
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.util.docutils import SphinxDirective

import mpistrat

FIELD = type(NamedTuple("Pair", [("first", int)]).first)  # type: ignore[attr-defined]
LINE = re.compile(r"(?P<name>[\w.]+)(?P<signature>\(.*\))?(?P<options>(?: [\w=,-]+)*?)(?: -- (?P<text>.*))?")


def entry(name: str, signature: str, options: list[str], text: str) -> list[str]:
    """The lines of reStructuredText that document one name."""
    thing = attrgetter(name)(mpistrat)
    if text:
        return [f".. py:data:: mpistrat.{name}", f"   :value: {thing!r}", "", f"   {text}", ""]
    if not inspect.isclass(thing):
        return [f".. autofunction:: mpistrat.{name}{signature}", ""]
    if issubclass(thing, BaseException):
        return [f".. autoexception:: mpistrat.{name}", "   :show-inheritance:", ""]
    lines = [f".. autoclass:: mpistrat.{name}{signature}"]
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
        found = [LINE.fullmatch(line) for text in self.content for line in expanded(text.strip()) if line]
        if None in found:
            raise self.error("expected lines such as: NAME, NAME option, NAME(signature), NAME -- text")
        matches = [match for match in found if match]
        lines = [".. autosummary::", "   :nosignatures:", ""]
        firsts: dict[int, str] = {}
        entries: list[str] = []
        for match in matches:
            name, text = match["name"], match["text"] or ""
            first = name if text else firsts.setdefault(id(attrgetter(name)(mpistrat)), name)
            if first != name:
                text = f"Another spelling of :py:obj:`mpistrat.{first}`."
                entries += [f".. py:data:: mpistrat.{name}", "", f"   {text}", ""]
                continue
            entries += entry(name, match["signature"] or "", match["options"].split(), text)
            if not text:
                lines.append(f"   ~mpistrat.{name}")
        found_nodes = parse(self, [*lines, "", *entries])
        name_modules(found_nodes)
        return found_nodes


def name_modules(found: list[nodes.Node]) -> None:
    """Write `torch.distribute` in the table of names, rather than `distribute`: functions of several modules share names."""
    for row in (row for node in found for row in node.findall(nodes.row)):
        link = next(row.children[0].findall(pending_xref), None)
        target = link["reftarget"].removeprefix("mpistrat.") if link else ""
        if link and "." in target and not target.rpartition(".")[2][0].isupper():
            for text in link.findall(nodes.Text):
                text.parent.replace(text, nodes.Text(target))
                break


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


def skip_aliases(app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object) -> bool | None:
    """Leave out TensorFlow's other spellings of methods, which names.md has, and the fields of named tuples."""
    if inspect.isroutine(thing):
        return True if getattr(thing, "__name__", name) != name else None
    return True if isinstance(thing, FIELD) else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-skip-member", skip_aliases)
    next(kind for kind in PyObject.doc_field_types if kind.name == "variable").label = "Attributes"
    app.add_directive("api", Api)
    app.add_directive("other-names", OtherNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
