"""Compare the weights, slots, counters and settings of the package with those of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.nets.differential.layouts import RANK, nodes_of
from tests.nets.differential.reference import PART, ROUNDING, World
from tests.nets.differential.rules import rate_at

if TYPE_CHECKING:
    from tests.nets.differential.run import Run


def own_worlds(run: Run) -> list[World]:
    """Return the worlds of this rank's node."""
    node = nodes_of(run.spec["layout"])[RANK]
    return run.worlds[node if len(run.worlds) > 1 else 0]


def compare(run: Run, what: str, found: Any, expected: list[Any], part: float) -> None:
    """Note if numbers differ by more than rounding may make."""
    run.bits.update(np.asarray(found).tobytes())
    if run.problem:
        return
    found = np.asarray(found).astype(np.float64)
    exact, *others = [np.asarray(e, np.float64) for e in expected]
    if found.shape != exact.shape:
        run.note(f"{what}: shape {found.shape}, expected {exact.shape}")
        return
    if not exact.size:
        return
    margin = 10 * np.maximum(abs(others[0] - exact), abs(others[1] - exact))
    margin = margin + part * (abs(exact) + min(1.0, abs(exact).max()) + 0.05)
    wrong = ~(abs(found - exact) <= margin)
    if wrong.any():
        at = tuple(int(i[0]) for i in np.nonzero(wrong)) if found.ndim else ()
        text = f"{what} at {at}: {found[at]!r}, expected {exact[at]!r} within {margin[at]:.2g}"
        run.note(f"{text}; {wrong.sum()} of {wrong.size} differ")


def allowed_part(run: Run, name: str) -> float:
    """Return the relative error that a variable may have: norms over all variables mix dtypes, a variance cancels digits."""
    variable = run.case.variables[name]
    spec = run.specs[variable["optimizer"]]
    own = PART[variable["dtype"]] * (4 if spec["args"].get("centered") else 1)
    if not spec["common"].get("global_clipnorm"):
        return own
    others = [v["dtype"] for v in run.case.variables.values() if v["optimizer"] == variable["optimizer"]]
    return max(own, *(ROUNDING[dtype] / 4 for dtype in others))


def value_of(run: Run, name: str) -> np.ndarray:
    """Return a variable's value, whole."""
    handle = run.made[name]
    if run.spec["kind"] == "Mesh":
        return handle.gathered()
    return np.asarray(handle.numpy()) if hasattr(handle, "numpy") else np.asarray(handle)


def compare_weights(run: Run, names: list[str], what: str = "weights") -> None:
    """Compare the weights with those of this node's worlds."""
    if run.is_server:
        return
    for name in names:
        found, variable = value_of(run, name), run.case.variables[name]
        dtype = variable["dtype"]
        worlds = [w.weights[name] for w in own_worlds(run)]
        if run.coded and dtype == "float32":  # a weight lacks the rounding of its last change
            change = abs(worlds[0] - run.before.get(name, worlds[0]))
            slack = np.maximum(0.004, change / 128)
            apart = np.max([abs(world - worlds[0]) for world in worlds], axis=0)
            if name in run.apart:  # a gradient that changes its sign brings the worlds together, not what is found
                slack = np.maximum(slack, run.apart[name])
            run.apart[name] = apart
            found = worlds[0] + np.clip(abs(found - worlds[0]) - slack, 0, None) * np.sign(found - worlds[0])
        compare(run, f"{what} of {name} ({dtype})", found, worlds, allowed_part(run, name))


def compare_state(run: Run, names: list[str]) -> None:
    """Compare weights, slots, counters, rates and numbers of steps after a segment. Collective."""
    compare_weights(run, names, "weights after the segment")
    if any(getattr(getattr(v, "arena", None), "sharded", False) for v in run.made.values()):
        run.tag("slots divided over nodes")
    for i, optimizer in enumerate(run.optimizers):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        worlds = run.worlds[0]
        references = [w.optimizers[i] for w in worlds]
        for name in names:
            if run.case.variables[name]["optimizer"] != i or not run.case.variables[name]["start"].size:
                continue
            found = inner.slots(run.made[name])
            expected = [r.slots.get(name, {}) for r in references]
            found.pop("wire_residual", None)
            if run.coded:
                continue
            if expected[0] and set(found) != set(expected[0]) and run.case.variables[name]["start"].size:
                run.note(f"slots of {name}: {sorted(found)}, expected {sorted(expected[0])}")
            for slot in expected[0]:
                if slot in found:
                    part = allowed_part(run, name)
                    if (
                        slot == "linear"
                    ):  # Ftrl divides a difference of roots, of which only the rounding is left, by the rate
                        part /= min(1.0, rate_at(run.specs[i]["rate"], references[0].calls))
                    compare(run, f"slot {slot} of {name}", found[slot], [e[slot] for e in expected], part)
        if run.works and inner.iterations != references[0].iterations():
            run.note(f"iterations: {inner.iterations}, expected {references[0].iterations()}")
        if run.works:
            rate = rate_at(run.specs[i]["rate"], references[0].calls)
            if not abs(inner.learning_rate - rate) <= 1e-12 * rate:
                run.note(f"learning_rate: {inner.learning_rate}, expected {rate}")
        if run.specs[i]["scaled"] and float(optimizer.dynamic_scale) != references[0].scale:
            run.note(f"dynamic_scale: {float(optimizer.dynamic_scale)}, expected {references[0].scale}")
    for name, c in run.case.counters.items():
        if run.is_server:
            continue
        run.tag(f"{'ON_READ' if c['on_read'] else 'ON_WRITE'} {c['kind']}")
        found = np.asarray(run.counters[name].numpy(), np.float64)
