"""Decisions: each page is short, out of the search index, without programs, and in the index of decisions."""

from __future__ import annotations

import re

import pytest

from tests.launch.launcher import ROOT

FOLDER = ROOT / "docs" / "decisions"
PAGES = {path.relative_to(FOLDER).as_posix(): path.read_text() for path in sorted(FOLDER.glob("*/*.md"))}
HEAD = "---\norphan: true\nnosearch: true\n---\n\n# "
INDEX = (FOLDER / "index.md").read_text()


def test_the_index_has_every_decision_once():
    listed = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\)$", INDEX, re.MULTILINE)
    titles = {page: text.removeprefix(HEAD).split("\n", 1)[0] for page, text in PAGES.items()}
    assert len(listed) > 300
    assert sorted((page, title) for title, page in listed) == sorted(titles.items())


@pytest.mark.parametrize("room", sorted({page.split("/")[0] for page in PAGES}))
def test_decisions_are_short(room):
    for page, text in PAGES.items():
        if page.startswith(f"{room}/"):
            assert text.startswith(HEAD), f"{page}: begin with {HEAD!r}"
            words = len(text.removeprefix(HEAD).split())
            assert words <= 200, f"{page}: {words} words are more than 200"
            assert "```" not in text, f"{page}: programs of decisions are not run; write them in another page"
