"""The pages for those who come from elsewhere: every name of ours on them exists, and none of tf.distribute's is missing."""

import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpistrat as ms
from tests.harness.house_rules import FRAMEWORKS

HERE = Path(__file__).parent
PAGES = HERE.parents[2] / "docs"
TENSORFLOW = (HERE / "data" / "tf_distribute.txt").read_text().split()
CODE = re.compile(r"`([^`]+)`")
BESIDE = "Names outside tf.distribute"


def look_up(name):
    """What a dotted name that begins with ms. stands for."""
    return functools.reduce(getattr, name.split(".")[1:], ms)


def sections():
    """For each table of names: its title, what stands before the names there and here, and its rows."""
    page = (PAGES / "migrating" / "tf_distribute.md").read_text().split("\n## Every name\n")[1].split("\n## ")[0]
    for part in re.split(r"\n#{3,4} ", page)[1:]:
        title, _, text = part.partition("\n")
        there, _, here = title.partition(" → ")
        rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
        if rows:
            yield title, "" if title == BESIDE else there.removeprefix("tf.distribute").lstrip("."), here, rows


def in_full(prefix, name):
    """A name of tf.distribute in full; in the table of a class another class's member is named with its class."""
    if "." in name and prefix.rpartition(".")[2][:1].isupper():
        prefix = prefix.rpartition(".")[0]
    return f"{prefix}.{name}".lstrip(".")


def rows():
    for title, there, here, table in sections():
        for cells in table:
            theirs, ours = CODE.findall(cells[0]), CODE.findall(cells[1])
            if cells[1].strip() == "same":
                ours = [f"{here}.{name}" for name in theirs]
            else:
                assert ours or cells[1].strip() == "no", cells
                ours = [name if name.startswith("ms.") else f"{here}.{name}" for name in ours]
                if len(ours) == 1 < len(theirs):
                    ours += members(ours[0], theirs)
            yield title, [in_full(there, name) for name in theirs], ours


def members(group, theirs):
    """Our names of the members of a class or module that stands alone in its cell."""
    last = f"{group.rpartition('.')[2]}."
    of_modules = [name.split(last)[1] for name in theirs if last in name]
    of_classes = [name.split(".")[-1] for name in theirs if last not in name and re.search(r"\b[A-Z]\w*\.\w+$", name)]
    return [f"{group}.{name}" for name in of_modules + of_classes]


def test_the_table_has_every_name_once():
    named = [name for title, theirs, _ in rows() if title != BESIDE for name in theirs]
    assert sorted(named) == sorted(TENSORFLOW)


@pytest.mark.parametrize(("title", "ours"), [(title, ours) for title, _, ours in rows() if ours])
def test_names_of_ours_exist(title, ours):
    for name in ours:
        look_up(name)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_the_list_is_tensorflow_s():
    command = [sys.executable, HERE / "data" / "tf_distribute.py"]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.split()
    assert found == TENSORFLOW


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_names_beside_tf_distribute_are_tensorflow_s():
    names = [name for title, theirs, _ in rows() if title == BESIDE for name in theirs]
    look = (
        "import functools, sys, tensorflow; [functools.reduce(getattr, n.split('.'), tensorflow) for n in sys.argv[1:]]"
    )
    subprocess.run([sys.executable, "-c", look, *names], check=True, capture_output=True, timeout=120)


def is_of_a_strategy(name):
    attributes = ms.ParameterServerStrategy.__doc__.split("Attributes:")[1]
    return hasattr(ms.ParameterServerStrategy, name) or re.search(rf"\b{name}\b.*:", attributes)


@pytest.mark.parametrize("page", sorted(path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md")))
def test_names_on_every_page_exist(page):
    """`ms.…` and `strategy.…` in running text; programs are run elsewhere."""
    text = re.sub(r"^```.*?^```$", "", (PAGES / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in CODE.findall(text):
        for name in re.findall(r"(?<![\w.])ms(?:\.[A-Za-z_]\w*)+", code):
            framework = name.split(".")[1]
            if framework not in FRAMEWORKS or importlib.util.find_spec(framework):
                look_up(name)
        for name in re.findall(r"(?<![\w.])strategy\.(?!py\b)(\w+)", code):
            assert is_of_a_strategy(name), f"strategy.{name}"
