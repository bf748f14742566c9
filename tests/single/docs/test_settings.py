"""The tables of environment variables in the guide and in base/environment.py list the same ones, with the same defaults."""

import re

from mpistrat.base import environment
from tests.launch.launcher import ROOT


def rows(text: str) -> dict[str, str]:
    """The default of each variable of a table."""
    found = {}
    for names, default in re.findall(r"^\| (`?MPISTRAT_.*?) \| *(.*?) *\|", text, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"MPISTRAT_\w+", names), default.strip("`"))
    return found


def test_the_guide_lists_every_setting():
    guide = (ROOT / "docs" / "guide.md").read_text().partition("## Settings")[2].partition("\n## ")[0]
    mine, its = rows(environment.__doc__ or ""), rows(guide)
    assert len(mine) > 15
    assert its.keys() == mine.keys()
    assert {name for name in mine if its[name] != mine[name]} <= {
        "MPISTRAT_GENERATION"
    }  # shares the row of MPISTRAT_JOB
