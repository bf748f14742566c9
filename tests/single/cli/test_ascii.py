"""A terminal without UTF-8: commands, datasets and errors are printed in ASCII, without a UnicodeEncodeError."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mpistrat

PACKAGE = Path(mpistrat.__file__).parent
# Commands print through one stream, which writes ASCII where it must. The others have that stream's table, or write files.
WRITES_UTF8 = ("cli", "bench", "doctor", "base/text.py", "data/nodes/node.py", "timeline/trace.py", "train/monitor.py")

HELP = """
import sys
from mpistrat.cli.command import Group
from mpistrat.cli.main import ROOT, main
import importlib

def texts(group, words):
    yield words
    for name, where in group.commands.items():
        module, _, attribute = where.partition(":")
        command = getattr(importlib.import_module(f"mpistrat.cli.{module}"), attribute)
        yield from texts(command, [*words, name]) if isinstance(command, Group) else [[*words, name]]

for words in texts(ROOT, []):
    try:
        main([*words, "--help"])
    except SystemExit as end:
        assert not end.code, words
"""
OBJECTS = r"""
import numpy as np
import mpistrat as ms

data = ms.data.from_arrays(np.arange(6)).batch(2)
print(data)
print(ms.data.zip((data, ms.data.from_arrays(np.arange(6)).batch(2))))
print(ms.get_strategy().distribute_dataset(data), ms.get_strategy())
for act in (lambda: ms.optimizers.SGD(0.1, momentum=-1), lambda: ms.get_strategy().broadcast_object(root=3)):
    try:
        act()
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
@pytest.mark.parametrize("program", [HELP, OBJECTS], ids=["help", "objects"])
def test_what_is_printed_without_utf8(program, encoding):
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    text = done.stdout.decode(encoding)
    if program == HELP:
        assert text.count("usage: mpistrat") > 10 and "[ARGUMENT ...]" in text
    else:
        assert (
            "\n`- batch(2, drop_remainder=False)" in text and "momentum: expected a number from 0 to 1, got -1" in text
        )


def test_errors_and_objects_are_written_in_ascii():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(WRITES_UTF8):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
            texts = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}  # docstrings
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and id(node) not in texts and not str(node.value).isascii():
                    found.append(f"{name}:{node.lineno}: {node.value!r}")
    assert not found, "\n".join(found)
