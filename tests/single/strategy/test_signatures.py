"""The signatures of all collectives. The reference page collective.md shows the same table, read from the code."""

import re
import runpy

import numpy as np
import pytest

from mpistrat.cross_device.collectives import Collectives
from mpistrat.strategy.old_calls import formerly
from tests.launch.launcher import ROOT

PAGE = runpy.run_path(str(ROOT / "docs" / "_ext" / "signatures.py"))  # what the page shows
#: By front and method. TensorFlow's own are positional; of the others only the operation and the value are.
SIGNATURES = {
    "Strategy.reduce": "(reduce_op, value, axis=None, options=None)",
    "Strategy.gather": "(value, axis, options=None)",
    "Strategy.all_reduce_async": "(reduce_op, value)",
    "Strategy.broadcast_async": "(value, *, root=0)",
    "Strategy.broadcast_object": "(obj=None, *, root=0)",
    "Strategy.all_gather_object": "(obj=None)",
    "Strategy.barrier": "(timeout=None, name=None)",
    "StrategyExtended.reduce_to": "(reduce_op, value, destinations, options=None)",
    "StrategyExtended.batch_reduce_to": "(reduce_op, value_destination_pairs, options=None)",
    "StrategyExtended.broadcast_to": "(tensor, destinations=None)",
    "ReplicaContext.all_reduce": "(reduce_op, value, options=None)",
    "ReplicaContext.all_gather": "(value, axis=0, options=None)",
    "ReplicaContext.reduce_scatter": "(reduce_op, value, *, axis=0, options=None)",
    "ReplicaContext.all_to_all": "(value, *, splits=None, axis=0)",
    "ReplicaContext.broadcast": "(value, *, root=0)",
    "ProcessSet.all_reduce": "(reduce_op, value, options=None)",
    "ProcessSet.all_gather": "(value, axis=0, options=None)",
    "ProcessSet.reduce_scatter": "(reduce_op, value, *, axis=0, options=None)",
    "ProcessSet.all_to_all": "(value, *, splits=None, axis=0)",
    "ProcessSet.broadcast": "(value, *, root=0)",
    "ProcessSet.all_reduce_async": "(reduce_op, value)",
    "ProcessSet.broadcast_async": "(value, *, root=0)",
    "ProcessSet.broadcast_object": "(obj=None, *, root=0)",
    "ProcessSet.all_gather_object": "(obj=None)",
    "ProcessSet.barrier": "(timeout=None, name=None)",
    "Mesh.all_reduce": "(reduce_op, value, *, mesh_axis)",
    "Mesh.all_reduce_backward": "(gradient, *, mesh_axis)",
    "Mesh.replicate": "(value, *, mesh_axis)",
    "Mesh.replicate_backward": "(gradient, *, mesh_axis)",
    "Mesh.all_gather": "(value, *, axis=0, mesh_axis)",
    "Mesh.all_gather_backward": "(gradient, *, axis=0, mesh_axis)",
    "Mesh.reduce_scatter": "(reduce_op, value, *, axis=0, mesh_axis)",
    "Mesh.reduce_scatter_backward": "(gradient, *, axis=0, mesh_axis)",
    "Mesh.shard": "(value, *, axis=0, mesh_axis)",
    "Mesh.shard_backward": "(gradient, *, axis=0, mesh_axis)",
    "Mesh.reshard": "(value, *, old, new, mesh_axis)",
    "Mesh.reshard_backward": "(gradient, *, old, new, mesh_axis)",
    "Mesh.broadcast": "(value, *, root=0, mesh_axis)",
    "Mesh.broadcast_in_replica": "(value, *, root=0)",
}


def test_of_every_front():
    assert PAGE["signatures"]() == SIGNATURES


def test_words():
    for name, signature in SIGNATURES.items():
        parameters = [p.strip().partition("=")[::2] for p in signature[1:-1].split(",")]
        names = [parameter for parameter, _ in parameters]
        assert ("reduce_op" in names) <= (names[0] == "reduce_op"), name
        assert ("root" in names) <= (("root", "0") in parameters), name
        assert ("mesh_axis" in names) <= (name.startswith("Mesh.")), name


def test_the_class_behind_the_fronts_takes_the_same():
    for name, method in vars(Collectives).items():
        signature = SIGNATURES.get(f"Mesh.{name}" if name == "reshard" else f"ProcessSet.{name}")
        if signature and not name.startswith("_"):
            ours = re.sub(r"\*|mesh_axis", "", signature).strip("()").split(",")
            assert {p.strip() for p in ours if p.strip()} <= {
                p.strip() for p in PAGE["shown"](method)[1:-1].split(",")
            }, name


class Called:
    @formerly(x="value", axis="mesh_axis", dim="axis")
    def collective(self, reduce_op, value, *, axis=0, mesh_axis):
        """Doc."""
        return reduce_op, value, axis, mesh_axis

    @formerly()
    def broadcast(self, value, *, root=0):
        return value, root


def test_old_calls_warn_and_work():
    it = Called()
    assert it.collective("MAX", 1, axis=2, mesh_axis="m") == (
        "MAX",
        1,
        2,
        "m",
    )  # no warning, which would be an error here
    assert it.broadcast(1) == (1, 0) and it.broadcast(1, root=2) == (1, 2)
    assert it.collective.__doc__ == "Doc."
    for old in (
        lambda: it.collective(1, "m", 2),
        lambda: it.collective(1, axis="m", dim=2),
        lambda: it.collective(x=1, axis="m", dim=2),
        lambda: it.collective(1, "m", dim=2),
    ):
        with pytest.warns(DeprecationWarning, match=r"write Called\.collective\(reduce_op, value, axis=, mesh_axis=\)"):
            assert old() == ("SUM", 1, 2, "m")
    with pytest.warns(DeprecationWarning, match="write Called.broadcast"):
        assert it.broadcast(1, 2) == (1, 2)
    for wrong in (
        lambda: it.collective("SUM", np.zeros(2)),
        lambda: it.collective(1, "m", 2, 3, 4),
        lambda: it.collective("SUM", 1, axis=0),
        lambda: it.broadcast(1, 2, 3),
    ):
        with pytest.raises(TypeError, match=r"collective\(\)|broadcast\(\)"):
            wrong()
