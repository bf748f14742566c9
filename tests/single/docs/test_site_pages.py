"""Each site profile has a page of ten commands, made from the profile; those of `mpistrat job` write valid scripts."""

import runpy
import shlex
import subprocess

import pytest

from mpistrat.__main__ import main
from mpistrat.batch_jobs import SCHEDULERS, read_site, site_names
from tests.launch.launcher import ROOT

MADE = runpy.run_path(str(ROOT / "docs" / "_ext" / "site_pages.py"))
LONGEST = 76  # columns of code that show without wrapping


def test_each_site_has_a_page():
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "sites").glob("*.md")}
    assert sorted(pages) == site_names()
    for name, text in pages.items():
        assert MADE["MARK"].findall(text) == [name]
        assert len(MADE["NOTE"].findall(text)) == 1, "the built page has no such sentence"


def test_each_batch_system_shows_its_queue_and_log():
    assert set(MADE["QUEUE"]) == set(MADE["LOG"]) == set(SCHEDULERS)


@pytest.mark.parametrize("name", site_names())
def test_the_ten_commands(name, tmp_path, monkeypatch, capsys):
    text = MADE["page"](name)
    console = text.split("```console\n")[1].split("```")[0]
    assert max(map(len, console.splitlines())) <= LONGEST
    commands = console.replace("\\\n", "").removeprefix("$ ").strip().split("\n$ ")
    assert len(commands) == len(MADE["commands"](read_site(name))) == 10
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    submit = SCHEDULERS[read_site(name).scheduler].by.removesuffix("FILE")
    for number in (4, 6):
        program, *arguments = shlex.split(commands[number])
        assert (program, main(arguments)) == ("mpistrat", 0)
        script = arguments[arguments.index("-o") + 1]
        assert commands[number + 1] == submit + script
        assert f"submit it with: {commands[number + 1]}" in capsys.readouterr().out
        subprocess.run(["bash", "-n", script], check=True)
    assert ("Nothing was tried at this site" in text) == (name != "generic")


@pytest.mark.parametrize("name", site_names())
def test_the_settings_are_those_of_the_profile(name):
    site, text = read_site(name), MADE["page"](name)
    for setting, reason in site.reasons.items():
        assert f"| `{setting}` | " in text
        assert reason in text
