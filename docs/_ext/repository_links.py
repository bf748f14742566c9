"""Links to files of the repository, which the built pages do not have, lead to what there is of them.

A page that a reader of the repository opens links to `../CONTRIBUTING.md` and `../benchmarks/run.py`. Built, the first is a
page of its own, the second the name of the file; with the repository's address in MPISTRAT_REPOSITORY a link to it.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from sphinx.application import Sphinx

REPOSITORY = os.environ.get("MPISTRAT_REPOSITORY", "")  # such as https://host/group/mpistrat/blob/main
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def rewrite(app: Sphinx, page: str, text: list[str]) -> None:
    """Rewrite the links of a page that lead out of docs/."""
    folder = posixpath.join("docs", posixpath.dirname(page))

    def replace(match: re.Match[str]) -> str:
        words, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return match[0]
        if path in PAGES:
            return f"[{words}]({posixpath.relpath('docs/' + PAGES[path], folder)}{anchor or ''})"
        if not (Path(app.srcdir).parent / path).exists():
            return match[0]  # Sphinx warns
        if REPOSITORY:
            return f"[{words}]({REPOSITORY.rstrip('/')}/{path}{anchor or ''})"
        return f"`{path}`" if words.strip("/") in path else f"{words} (`{path}`)"

    text[0] = LINK.sub(replace, text[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
