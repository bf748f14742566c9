"""The reference in docs/reference has every public name."""

import ast
import enum
import inspect
import re
import runpy
import types
from operator import attrgetter

import mpistrat as ms
from tests.harness.house_rules import FRAMEWORKS
from tests.launch.launcher import ROOT

WIDTH = 80  # columns of an example that show without wrapping
EXPANDED = runpy.run_path(str(ROOT / "docs" / "_ext" / "listed.py"))["expanded"]
BLOCK = re.compile(r"^\.\. api::\n\n((?: +.*\n)+)", re.MULTILINE)


def listed():
    """The names that the pages of the reference document, but for those of frameworks, which need not be installed."""
    return [name for name in documented() if name.split(".")[0] not in FRAMEWORKS]


def documented():
    """The names that the pages of the reference document."""
    texts = [path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))]
    lines = [line.strip() for text in texts for block in BLOCK.findall(text) for line in block.splitlines()]
    return [re.findall(r"[\w.]+", name)[0] for line in lines for name in EXPANDED(line)]


def public(module=ms, prefix=""):
    """Every public name and its object; the names of a module stand for it."""
    for name in module.__all__:
        thing = getattr(module, name)
        if isinstance(thing, types.ModuleType):
            yield from public(thing, f"{prefix}{name}.")
        elif not name.startswith("__"):
            yield prefix + name, thing


def test_every_public_name_is_in_the_reference_once():
    names = listed()
    assert len(names) > 100
    assert sorted(names) == sorted(set(names))
    shown = [attrgetter(name)(ms) for name in names]
    known = {id(thing) for thing in shown if not isinstance(thing, int)}  # other spellings of these have a table
    missing = [name for name, thing in public() if id(thing) not in known and name not in names]
    assert not missing, "list them in a page of docs/reference"


def test_every_public_name_of_a_framework_is_in_the_reference():
    public = []
    for framework in FRAMEWORKS:
        module = ast.parse((ROOT / "mpistrat" / framework / "__init__.py").read_text())
        values = [node.value for node in module.body if getattr(node, "targets", None) or hasattr(node, "annotation")]
        public += [f"{framework}.{name}" for name in ast.literal_eval(values[-1])]
    assert sorted(public) == sorted(set(documented()) - set(listed()))


def test_every_name_of_the_reference_has_a_docstring():
    things = {name: attrgetter(name)(ms) for name in listed()}
    silent = [name for name, thing in things.items() if not isinstance(thing, int) and not inspect.getdoc(thing)]
    assert not [name for name in silent if not isinstance(things[name], enum.EnumMeta)]


def docstrings(name):
    """The docstring of a public name, and of the public members that its class defines, each with its name."""
    thing = attrgetter(name)(ms)
    yield name, inspect.getdoc(thing) or ""
    for key, member in vars(thing).items() if inspect.isclass(thing) else ():
        if key[0] != "_":
            yield f"{name}.{key}", inspect.getdoc(member) or ""


def test_examples_show_without_wrapping():
    wide = []
    for name, text in (pair for listed_name in listed() for pair in docstrings(listed_name)):
        lines = [line.partition("# doctest:")[0].strip() for line in text.splitlines()]
        wide += [(name, line) for line in lines if line.startswith((">>>", "...")) and len(line) > WIDTH]
    assert not wide


def test_attributes_that_share_a_line_have_an_entry_each():
    one_each = runpy.run_path(str(ROOT / "docs" / "_ext" / "attributes.py"))["one_each"]
    assert one_each(["    rank, size: in the", "        group.", "    text: a, b: c."]) == [
        "    rank: in the",
        "        group.",
        "    size: in the",
        "        group.",
        "    text: a, b: c.",
    ]
