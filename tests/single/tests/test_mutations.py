"""`python -m tests.mutations` finds each kind of place, leaves out the one that the switch names, and has current reasons."""

import ast
import types

import pytest

from tests import mutations

PROGRAM = """
from .arrays import on_device_of, synchronize
from ..horovod.torch import synchronize as of_horovod

class Step:
    def run(self, stream, event, array):
        stream.wait_event(event)
        kept = stream.record()
        with self.lock, cupy.cuda.Device(1):
            log.append("inside")
        with on_device_of(array) as device:
            pass
        with stream:
            synchronize(array)
        with open("x") as file:
            file.record
        self.synchronize()
        of_horovod(1)
        return kept

    def synchronize(self):
        cupy.cuda.get_current_stream().synchronize()
        cupy.cuda.get_current_stream().synchronize()
"""
FOUND = [
    "Step.run: stream.wait_event(event)",
    "Step.run: kept = stream.record()",
    "Step.run: with cupy.cuda.Device(1)",
    "Step.run: with on_device_of(array)",
    "Step.run: with stream",
    "Step.run: synchronize(array)",
    "Step.synchronize: cupy.cuda.get_current_stream().synchronize()",
    "Step.synchronize: cupy.cuda.get_current_stream().synchronize() #2",
]


def test_each_kind_of_place_is_found():
    module = ast.parse(PROGRAM)
    one = mutations.Instrument("comm/gpu.py", module)
    one.visit(module)
    assert [place.name for place in one.places] == FOUND


class Noted:
    """Streams, events and contexts that note what happens to them."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __getattr__(self, what):
        def call(*args):
            self.log.append(f"{self.name}.{what}")
            return Noted(self.log, f"{self.name}.{what}()")

        return call

    def __enter__(self):
        self.log.append(f"enter {self.name}")

    def __exit__(self, *exc_info):
        pass


CODE = """
def run(stream, event, array):
    stream.wait_event(event)
    with Device(0), cuda.Device(1):
        cuda.work(array)
    with stream:
        pass
"""
ALL = ["stream.wait_event", "cuda.Device", "enter cuda.Device()", "cuda.work", "enter stream"]


@pytest.mark.parametrize(("left_out", "missing"), [(-1, []), (0, ALL[:1]), (1, ALL[1:3]), (2, ALL[4:])])
def test_one_place_is_left_out(left_out, missing, monkeypatch):
    module, log, reached = ast.parse(CODE), [], []
    module = mutations.Instrument("comm/gpu.py", module).visit(module)
    switch = types.SimpleNamespace(off=lambda number: reached.append(number) or number == left_out)
    monkeypatch.setitem(mutations.sys.modules, mutations.SWITCH, switch)
    names = {"cuda": Noted(log, "cuda"), "Device": lambda number: Noted([], "another")}
    exec(compile(ast.fix_missing_locations(module), "code", "exec"), names)
    names["run"](Noted(log, "stream"), None, None)
    assert log == [each for each in ALL if each not in missing] and reached == [0, 1, 2]


def test_the_package_has_places_and_stays_a_program():
    places, texts = mutations.instrumented(mutations.ROOT / "mpistrat")
    assert len(places) == len({place[:2] for place in places}) > 50
    for file, text in texts.items():
        compile(text, file, "exec")


def test_reasons_belong_to_places():
    """A place that was changed or mended needs another reason, or none."""
    places, _ = mutations.instrumented(mutations.ROOT / "mpistrat")
    assert set(mutations.explained()) <= {f"{place.file}: {place.name}" for place in places}
