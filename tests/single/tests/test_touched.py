"""Which tests a change can break, on a small package with tests of its own."""

import subprocess
from pathlib import Path

import pytest

from tests.launch import touched as module
from tests.launch.touched import distances

FILES = {
    "mpistrat/low.py": "X = 1",
    "mpistrat/middle.py": "from mpistrat.low import X",
    "mpistrat/late.py": "def f():\n    from .middle import X",
    "mpistrat/alone.py": "",
    "tests/models/helper.py": "from mpistrat.late import f",
    "tests/test_low.py": "import mpistrat.low",
    "tests/test_late.py": "from mpistrat.late import f",
    "tests/test_helped.py": "from tests.models.helper import f",
    "tests/test_program.py": "PROGRAM = 'import mpistrat.middle'",
    "tests/test_alone.py": "import mpistrat.alone",
    "tests/test_counted.py": 'run(HERE / "counted.py")',
    "tests/counted.py": "import mpistrat.other",
    "mpistrat/other.py": "",
}


@pytest.fixture
def touched(tmp_path: Path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(*changed: str) -> dict[str, int]:
        monkeypatch.setattr("tests.launch.touched._changed", lambda *_: {tmp_path / name for name in changed})
        found = distances(tmp_path, "HEAD", tmp_path.glob("tests/test_*.py"))
        return {path.stem.removeprefix("test_"): steps for path, steps in found.items()}

    return run


def test_what_imports_it_counts_by_distance(touched):
    assert touched("mpistrat/low.py") == {"low": 1, "program": 2, "late": 3, "helped": 3}
    assert touched("mpistrat/late.py") == {"late": 1, "helped": 1}
    assert touched("mpistrat/alone.py") == {"alone": 1}


def test_tests_and_their_helpers_count(touched):
    assert touched("tests/test_alone.py") == {"alone": 0}
    assert touched("tests/models/helper.py") == {"helped": 1}
    assert touched("tests/counted.py") == {"counted": 1}
    assert touched("mpistrat/other.py") == {"counted": 1}


def test_without_a_change_there_is_none(touched):
    assert touched() == {}


def test_what_is_written_in_c_counts_as_the_module_that_loads_it(tmp_path: Path):
    for command in (["init", "-q"], ["add", "."]):
        (tmp_path / "loops.c").write_text("")
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert module._changed(tmp_path, None) == {tmp_path / "mpistrat/base/loops/__init__.py"}
