"""What docstrings say about being collective: a badge beside each call, and a table of all calls."""

from __future__ import annotations

import enum
import inspect
import re
from typing import Any, ClassVar

from api import parse
from docutils import nodes
from docutils.parsers.rst import directives, roles
from public_names import public_objects
from signatures import FRONTS, SENTENCE, first_paragraph, signatures
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def badge(match: re.Match[str]) -> str:
    text = re.sub(r"[`\\]", "", "Collective" + match[1])
    return f":collective:`{text}`"


def add_badge(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Turn the sentence about being collective, in the first paragraph, into a badge."""
    paragraph, end = first_paragraph(lines)
    marked = SENTENCE.sub(badge, paragraph)
    if marked != paragraph:
        lines[:end] = [marked]


class CollectiveCalls(SphinxDirective):
    """A table of the public calls that are collective, in the words of their docstrings: of some classes, or of all but some."""

    optional_arguments = 99
    option_spec: ClassVar = {"except": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        rows = [".. list-table::", "   :header-rows: 1", "", "   * - call", "     - collective"]
        seen = set()
        without = self.options.get("except", "").split()
        for name, thing in calls():
            holder = name.removeprefix("mpistrat.").rpartition(".")[0]
            if holder in without or (self.arguments and holder not in self.arguments):
                continue
            match = SENTENCE.search(first_paragraph((inspect.getdoc(thing) or "").splitlines())[0])
            home = getattr(thing, "__qualname__", name)
            if match is None or (home, thing) in seen:
                continue
            seen.add((home, thing))
            words = match[1].strip(" ,;:") or "yes"
            rows += [f"   * - :py:obj:`{name.removeprefix('mpistrat.')} <{name}>`", f"     - {words}"]
        return parse(self, rows)


class CollectiveSignatures(SphinxDirective):
    """A table of the signatures of all collectives, by the object that makes them."""

    def run(self) -> list[nodes.Node]:
        rows = [".. list-table::", "   :header-rows: 1", "   :widths: 70 30", "", "   * - call", "     - made"]
        for name, signature in signatures().items():
            made = FRONTS[name.partition(".")[0]].replace("`", "``")
            rows += [f"   * - ``{name}{signature}``", f"     - {made}"]
        return parse(self, rows)


def calls() -> list[tuple[str, Any]]:
    """Every public function, class and method, each once, under the name of the class that defines it."""
    found: list[tuple[str, Any]] = []
    for name, thing in public_objects():
        if getattr(thing, "__name__", "") != name.rpartition(".")[2]:
            continue  # another spelling
        if inspect.isroutine(thing):
            found.append((name, thing))
        elif inspect.isclass(thing) and not issubclass(thing, (enum.Enum, BaseException)):
            members = vars(thing).items()
            found += [(f"{name}.{key}", value) for key, value in members if key[0] != "_" and inspect.isroutine(value)]
    return found


def setup(app: Sphinx) -> dict[str, bool]:
    look = {"class": ["badge", "collective"]}
    roles.register_local_role("collective", roles.CustomRole("collective", roles.generic_custom_role, look))
    app.add_directive("collective-calls", CollectiveCalls)
    app.add_directive("collective-signatures", CollectiveSignatures)
    app.connect("autodoc-process-docstring", add_badge)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
