"""Let long names in tables, titles and signatures break where a reader would: behind a dot or an underscore, before a capital."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

PLACE = re.compile(r"(?<=[._/(=,])(?=\w)|(?<=[a-z0-9])(?=[A-Z][a-z])")


def allow_breaks(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Put <wbr> into the literals of all cells, into titles and signatures; it is not copied with the text."""
    if app.builder.format != "html":
        return
    holders = [literal for cell in doctree.findall(nodes.entry) for literal in cell.findall(nodes.literal)]
    holders += [
        node for kind in (nodes.title, addnodes.desc_addname, addnodes.desc_name) for node in doctree.findall(kind)
    ]
    for holder in holders:
        for text in list(holder.findall(nodes.Text)):
            first, *others = PLACE.split(text.astext())
            pieces: list[nodes.Node] = [nodes.Text(first)]
            for other in others:
                pieces += [nodes.raw("", "<wbr>", format="html"), nodes.Text(other)]
            if others:
                text.parent.replace(text, pieces)
    for parameters in doctree.findall(addnodes.desc_parameterlist):
        if parameters.children:
            parameters.children[0].insert(0, nodes.raw("", "<wbr>", format="html"))  # behind the bracket


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", allow_breaks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
