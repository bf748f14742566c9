"""The examples of the docstrings give what they say."""

import doctest
import importlib.util
import pkgutil
import signal

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.house_rules import FRAMEWORKS

# A framework's package is imported where it is installed. Horovod's calls need PyTorch.
LIBRARIES = {name: "torch" if name == "horovod" else name for name in FRAMEWORKS}
LEFT_OUT = tuple(f"mpistrat.{name}" for name, library in LIBRARIES.items() if importlib.util.find_spec(library) is None)
MODULES = [m.name for m in pkgutil.walk_packages(ms.__path__, "mpistrat.", onerror=lambda name: None)]
MODULES = ["mpistrat", *(name for name in MODULES if not name.startswith(LEFT_OUT))]
EXAMPLES = [
    example
    for module in map(importlib.import_module, MODULES)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs={"ms": ms, "np": np})
    if example.examples
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_docstring(example):
    said, before = [], signal.getsignal(signal.SIGTERM)
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert results.failed == 0, "".join(said)
    assert signal.getsignal(signal.SIGTERM) == before, "close the strategy that was asked to stop"


def test_examples_are_found():
    assert len(EXAMPLES) > 50
