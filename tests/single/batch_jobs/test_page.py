"""The tables of docs/job_scripts.md say what the package has."""

import dataclasses
import re

import pytest

from mpistrat.batch_jobs import SCHEDULERS, SiteProfile, site_names
from tests.launch.launcher import ROOT

TEXT = (ROOT / "docs/job_scripts.md").read_text()


def first_cells(title):
    """The names in the first cells of the rows of a section's tables, table by table."""
    part = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", part, re.MULTILINE)
    return [re.findall(r"`([^`]+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:])) for table in tables]


def test_the_sites_and_their_settings():
    sites, settings = first_cells("Your site")
    assert sorted(sites) == site_names()
    assert settings == [field.name for field in dataclasses.fields(SiteProfile)]


@pytest.mark.parametrize(
    ("row", "name"), [("--array", "array"), ("--preemptible", "preemption"), ("--memory", "memory"), ("--mail", "mail")]
)
def test_what_each_batch_system_takes(row, name):
    cells = next(line for line in TEXT.splitlines() if line.startswith(f"| `{row}`")).split("|")[2:-1]
    takes = ["yes" in cell for cell in cells]
    assert takes == [name in scheduler.takes for scheduler in SCHEDULERS.values()]


def test_what_starts_the_ranks():
    cells = next(line for line in TEXT.splitlines() if "(`--launcher`)" in line).split("|")[2:-1]
    assert [re.findall(r"`(\w+)`", cell) for cell in cells] == [list(each.launchers) for each in SCHEDULERS.values()]
