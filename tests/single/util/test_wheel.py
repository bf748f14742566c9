"""The wheel: with the compiled loops it is for one platform, without them for any."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from launcher import ROOT

LOOPS = "mpistrat/base/loops"
BUILD = "from setuptools import build_meta; build_meta.build_wheel({folder!r})"
MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_loops", NULL, -1, NULL};
PyMODINIT_FUNC PyInit__loops(void) { return PyModule_Create(&module); }
"""


def build(folder: Path, compiler: str) -> tuple[list[str], list[str], str]:
    """Build a small copy of the package; return the words of the wheel's tag, its files, and what was printed."""
    source = folder / "source"
    (source / LOOPS).mkdir(parents=True)
    (source / LOOPS / "module.c").write_text(MODULE)
    for name in (
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "mpistrat/__init__.py",
        "mpistrat/base/version.py",
    ):
        shutil.copy(ROOT / name, source / name)
    for name in ("mpistrat/base", LOOPS):
        shutil.copy(ROOT / name / "__init__.py", source / name)
    words = [sys.executable, "-c", BUILD.format(folder=str(folder))]
    env = {**os.environ, "CC": compiler}
    done = subprocess.run(words, cwd=source, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done
    [wheel] = folder.glob("*.whl")
    return wheel.stem.split("-")[2:], zipfile.ZipFile(wheel).namelist(), done.stdout + done.stderr


def test_a_wheel_without_the_loops_is_for_any_platform(tmp_path):
    tag, files, text = build(tmp_path, "/bin/false")
    assert tag == ["py3", "none", "any"]
    assert not [name for name in files if name.endswith(".so")]
    assert "the compiled loops could not be built" in text


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs a C compiler")
@pytest.mark.skipif(not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="needs Python's headers")
def test_a_wheel_with_the_loops_is_for_one_platform(tmp_path):
    tag, files, text = build(tmp_path, "gcc")
    assert tag[2] == sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert tag[:2] == ["cp311", "abi3"]
    assert [name for name in files if name.startswith(f"{LOOPS}/_loops.") and name.endswith(".so")]
    assert "could not be built" not in text
