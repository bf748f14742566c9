"""Files that the user or the environment names: a pipe is not waited for, and a device not read for ever."""

import os

import pytest

import mpistrat as ms
from mpistrat.batch_jobs import read_site
from mpistrat.cli.main import main
from mpistrat.cross_device import auto
from mpistrat.data.shards.files import manifest_path
from mpistrat.data.shards.manifest import read_manifest


def manifest(path):
    link = manifest_path(path.with_name("rows-*.h5"))
    link.symlink_to(path)
    read_manifest(link)


def monitor(path):
    with ms.OneDeviceStrategy() as strategy:
        ms.train.Monitor(path.with_name("run"), strategy, plan=path)


READERS = {"chooser": auto.Chooser, "site": lambda path: read_site(str(path)), "manifest": manifest, "monitor": monitor}
COMMANDS = {
    "plan": ["plan", "--parameters", "1e6", "--compute", "0.1", "--like"],
    "shards": ["shards", "write", "set"],
}


@pytest.fixture(params=["pipe", "device"])
def endless(request, tmp_path):
    path = tmp_path / "endless.csv"
    if request.param == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("what", READERS)
def test_a_file_that_is_none(what, endless):
    with pytest.raises((OSError, ValueError), match="not a regular file"):
        READERS[what](endless)


@pytest.mark.parametrize("what", COMMANDS)
def test_a_file_that_is_none_for_a_command(what, endless, capsys, monkeypatch):
    monkeypatch.chdir(endless.parent)
    assert main([*COMMANDS[what], str(endless)]) in (1, 2)
    assert "not a regular file" in (said := capsys.readouterr().err) or "got a pipe, a device" in said


def test_the_variable_is_named(endless):
    with pytest.raises(OSError, match="environment: MPISTRAT_CHOOSER: expected .* is not a regular file"):
        auto._named(str(endless))
    with pytest.raises(FileNotFoundError, match="environment: MPISTRAT_CHOOSER"):
        auto._named("/none")
