"""Leave out the columns of tables in which no row has a word."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx


def leave_out(app: Sphinx, doctree: nodes.document) -> None:
    """Remove each column whose cells below the head are all empty, from every table of a page."""
    for group in doctree.findall(nodes.tgroup):
        bodies = [row for body in group.findall(nodes.tbody) for row in body.children]
        rows = list(group.findall(nodes.row))
        columns = [child for child in group.children if isinstance(child, nodes.colspec)]
        if any(len(row.children) != len(columns) for row in rows):  # cells that span columns
            continue
        for number in reversed(range(len(columns))):
            if not any(row.children[number].astext().strip() for row in bodies):
                for row in rows:
                    del row.children[number]
                group.remove(columns[number])
                group["cols"] -= 1


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", leave_out)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
