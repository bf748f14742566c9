"""Collapse the groups of pages in the side bar, except that of the page itself."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

GROUP = re.compile(r'(<p class="caption".*?</p>)\s*(<ul.*?)(?=<p class="caption"|</div>|\Z)', re.DOTALL)


def collapse(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Put each group with its title into <details>, open where it has the page. On the start page the first is open."""

    def details(match: re.Match[str]) -> str:
        title, pages = match.groups()
        is_open = "current-page" in pages or (page == app.config.root_doc and ">Start<" in title)
        title = title.replace("<p ", "<span ").replace("</p>", "</span>")  # a summary has no paragraphs
        return f"<details{' open' * is_open}><summary>{title}</summary>{pages}</details>"

    if tree := context.get("furo_navigation_tree"):
        context["furo_navigation_tree"] = GROUP.sub(details, tree)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", collapse, priority=900)  # after the theme, which makes the tree
    return {"parallel_read_safe": True, "parallel_write_safe": True}
