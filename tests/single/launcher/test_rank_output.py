"""Files of what ranks print, in a folder to which others may write."""

import os
import subprocess

import pytest

from mpistrat.base.programs import isolated
from mpistrat.launcher import rank_output


def run(folder, words):
    command = isolated(rank_output.__file__, "RANK", "0", str(folder), *words)
    return subprocess.run(command, env={"RANK": "3"}, capture_output=True, text=True, timeout=30)


def test_a_file_is_written_anew(tmp_path):
    (tmp_path / "rank-3.txt").write_text("of an earlier run, which printed more")
    assert run(tmp_path, ["/bin/echo", "here"]).returncode == 0
    assert (tmp_path / "rank-3.txt").read_text() == "here\n"


@pytest.mark.parametrize("reads", [False, True])
def test_a_pipe_is_not_waited_for(tmp_path, reads):
    os.mkfifo(tmp_path / "rank-3.txt")
    reader = os.open(tmp_path / "rank-3.txt", os.O_RDONLY | os.O_NONBLOCK) if reads else -1
    reply = run(tmp_path, ["/bin/echo", "here"])
    assert reply.returncode == 1 and reply.stderr.startswith("mpistrat run: --log-dir: rank 3: "), reply
    if reads:
        os.close(reader)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "rank-3.txt").symlink_to(tmp_path / "mine")
    assert run(tmp_path, ["/bin/echo", "here"]).returncode == 1
    assert (tmp_path / "mine").read_text() == "precious"
