"""Events between stretches of steps: other settings, files, other strategies, writes."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

import numpy as np

import mpistrat as ms
from tests.nets.differential.comparing import compare_weights, value_of
from tests.nets.differential.drawing import choose, draw_rate
from tests.nets.differential.expected import outer_step
from tests.nets.differential.layouts import RANK, SIZE
from tests.nets.differential.reference import dtype_of, rounded
from tests.nets.differential.rules import made_rate
from tests.nets.differential.steps import run_segment

if TYPE_CHECKING:
    from tests.nets.differential.run import Run


def happen(run: Run, segment: int, event: str) -> None:
    """Do what happens after a segment, with the package and in the reference. Collective."""
    case, strategy = run.case, run.strategy
    rng = np.random.default_rng([case.seed, case.number, SIZE, segment, 7])
    run.tag(f"event={event}")
    if case.settings[segment]:
        change_settings(run, rng)
    names = [name for name in case.variables if name in run.made]
    if run.spec["more"].get("local_steps"):
        strategy.outer_step()
        for i in range(len(run.specs)):
            if len(run.worlds) > 1 and next(iter(run.worlds.values()))[0].optimizers[i].anchors:
                outer_step(run, i)
    worlds = [world for some in run.worlds.values() for world in some]
    if event == "rate":
        for spec, optimizer in zip(run.specs, run.optimizers, strict=True):
            spec["rate"] = draw_rate(rng, spec["rule"])
            optimizer.learning_rate = made_rate(spec["rate"])
    elif event == "decay":
        for spec, optimizer in zip(run.specs, run.optimizers, strict=True):
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            spec["common"]["weight_decay"] = inner.weight_decay = 0.15
    elif event == "iterations":
        for i, optimizer in enumerate(run.optimizers):
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if not run.specs[i]["scaled"] and run.spec["kind"] != "ParameterServer":
                inner.iterations = number = (
                    5 if run.specs[i]["rule"] == "Ftrl" else int(choose(rng, 5, 2000))
                )  # Ftrl divides by the rate
                for world in worlds:
                    world.optimizers[i].calls = number * (
                        run.specs[i]["common"].get("gradient_accumulation_steps") or 1
                    )
    elif event == "owner":  # from now on another optimizer updates it
        variable = case.variables[str(choose(rng, *names))]
        variable["optimizer"] = (variable["optimizer"] + 1) % len(run.specs)
    elif event == "state":
        states = [getattr(o, "inner_optimizer", o).get_state() for o in run.optimizers]
        plain = [i for i, spec in enumerate(run.specs) if not spec["scaled"]]
        with strategy.scope():
            for i in plain:
                run.optimizers[i] = run.make_optimizer(run.specs[i], i)
                run.optimizers[i].set_state(states[i])
                for some in run.worlds.values():  # what it gave are the first node's slots, without the outer momentum
                    for world, first in zip(some, run.worlds[0], strict=True):
                        world.optimizers[i].slots = copy.deepcopy(first.optimizers[i].slots)
                        world.optimizers[i].outer, world.optimizers[i].firsts = {}, {}
    elif event in ("assign", "scatter"):
        name = str(choose(rng, *names))
        variable, handle = case.variables[name], run.made[name]
        new = rng.normal(size=variable["shape"]).astype(dtype_of(variable["dtype"]))
        rows = rng.integers(0, variable["shape"][0], 3) if variable["shape"] and variable["start"].size else None
        split = variable["layout"] is not None and run.spec["kind"] == "Mesh"
        if event == "scatter" and rows is not None and not split and not run.coded:
            some, how = new[rows], choose(rng, "scatter_add", "scatter_sub", "scatter_max", "scatter_min")
            if writes(run):
                getattr(handle, how)(ms.IndexedSlices(some, rows, variable["shape"]))
            at = {
                "scatter_add": np.add,
                "scatter_sub": np.subtract,
                "scatter_max": np.maximum,
                "scatter_min": np.minimum,
            }[how]
            for world in worlds:
                w = world.weights[name].copy()
                at.at(w, rows, some.astype(np.float64))
                world.weights[name] = rounded(w, variable["dtype"])
        else:
            if writes(run):
                handle.assign(
                    new[handle.part.slices] if run.spec["kind"] == "Mesh" and handle.part is not None else new
                )
            for world in worlds:
                world.weights[name] = new.astype(np.float64)
        if run.spec["kind"] == "ParameterServer" and run.works:
            strategy.flush()
        strategy.barrier()
    elif event == "new":
        run.make_variables(segment + 1)
    elif event == "validate":
        validate(run, names)
    elif event == "again":  # back to a file, after another segment
        path = os.path.join(run.folder, f"{run.case.number}-{segment}.h5")
        kept, saving = copy.deepcopy(run.reference_state()), None
        if rng.integers(2):
            strategy.save(path, {"segment": segment})
        else:  # written during training
            saving = strategy.begin_save(path, {"segment": segment})
            run.tag("begin_save")
        run_segment(run, segment)
        if saving is not None:
            saving.wait()
        if run.spec["more"].get("local_steps"):
            strategy.outer_step()
            for i in range(len(run.specs)):
                if len(run.worlds) > 1 and next(iter(run.worlds.values()))[0].optimizers[i].anchors:
                    outer_step(run, i)
        disturb_settings(run)
        if strategy.restore(path) != {"segment": segment}:
            run.note("extra of a file")
        run.load_reference(kept)
        strategy.barrier()
    elif event == "switch":
        switch(run, segment)
    if event in ("assign", "scatter", "again", "switch", "new"):
        compare_weights(run, [name for name in case.variables if name in run.made], f"weights after {event}")
    run.agree()
    run.strategy.barrier()


# By how much settings change that a program may change between steps; the results stay in their ranges.
FACTORS = {
    "momentum": 0.8, "beta_1": 0.9, "beta_2": 0.95, "epsilon": 2.0, "rho": 0.9, "weight_decay": 0.5, "clipnorm": 0.5,
    "clipvalue": 0.5, "global_clipnorm": 0.5, "ema_momentum": 0.9, "loss_scale_factor": 2.0,
}  # fmt: skip


def change_settings(run: Run, rng: np.random.Generator) -> None:
    """Change two settings of each optimizer. Momentum and beta_1 of Nadam stay: its product of momenta is of all steps."""
    for spec, optimizer in zip(run.specs, run.optimizers, strict=True):
        settings = {name: part for part in ("args", "common") for name in spec[part] if name in FACTORS}
        names = [name for name, part in settings.items() if spec[part][name]]
        names = [name for name in names if not (spec["rule"] == "Nadam" and name == "beta_1")]
        for name in rng.permutation(names)[:2]:
            value = spec[settings[name]][str(name)] * FACTORS[name]
            spec[settings[name]][str(name)] = value
            setattr(getattr(optimizer, "inner_optimizer", optimizer), str(name), value)
            run.tag(f"set: {name}")


def disturb_settings(run: Run) -> None:
    """Give optimizers another rate and decay, which a file that is restored takes back."""
    for spec, optimizer in zip(run.specs, run.optimizers, strict=True):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if isinstance(spec["rate"], float):
            inner.learning_rate = spec["rate"] * 3
        inner.weight_decay = 0.77


def writes(run: Run) -> bool:
    """Return whether this rank takes part in a write outside of steps."""
    return run.spec["kind"] != "ParameterServer" or (run.works and (RANK == 0 or run.spec["mode"] == "group"))


def switch(run: Run, segment: int) -> None:
    """Save, close, and continue under another strategy from the file."""
    path = os.path.join(run.folder, f"{run.case.number}-{segment}.h5")
    run.strategy.save(path)
    before = run.worlds
    run.close()
    run.open(run.case.later[segment])
    run.tag("restored")
    run.made, run.optimizers = {}, []
    old = list(before.values())
    local = bool(run.spec["more"].get("local_steps")) and len(run.nodes()) > 1
    run.worlds = {
        node: copy.deepcopy(old[node % len(old)], {id(run.case): run.case} | {id(s): s for s in run.specs})
        for node in run.nodes()
    }
    for some in run.worlds.values():
        for world in some:
            for optimizer in world.optimizers:
                optimizer.outer = optimizer.outer if local else {}
                optimizer.firsts = {}
    run.make_variables(segment)
    run.strategy.restore(path)
    run.strategy.barrier()


def validate(run: Run, names: list[str]) -> None:
    """Read the weights in a pass without updates, and compare their sum over the replicas in sync."""
    if run.is_server:
        run.strategy.serve()
        return

    def replica_step():
        values = [
            np.asarray(run.made[n]).astype(np.float64).sum() for n in names if run.case.variables[n]["layout"] is None
        ]
        return ms.nn.compute_average_loss(np.array(values), global_batch_size=10)

    found = float(run.strategy.reduce("SUM", run.strategy.run(replica_step), axis=None))
    values = [np.asarray(value_of(run, n)).astype(np.float64) for n in names if run.case.variables[n]["layout"] is None]
    expected = sum(float(value.sum()) for value in values) / 10 * run.strategy.num_replicas_in_sync
    if not abs(found - expected) <= 1e-9 * sum(float(abs(value).sum()) for value in values) + 1e-12:
        run.note(f"validation: {found}, expected {expected}")
    if run.spec["kind"] == "ParameterServer":
        run.strategy.leave()


def finish(run: Run) -> None:
    """Make averages the weights at the end."""
    names = [name for name in run.case.variables if name in run.made]
    if run.spec["more"].get("local_steps"):
        run.strategy.outer_step()
        return
    for i, optimizer in enumerate(run.optimizers):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        mine = [n for n in names if run.case.variables[n]["optimizer"] == i]
        if inner.use_ema and mine:
            run.tag("finalize")
            inner.finalize_variable_values([run.made[n] for n in mine])
            for world in run.worlds[0]:
                for n in mine:
                    if n in world.optimizers[i].slots:
                        world.weights[n] = rounded(
                            world.optimizers[i].slots[n]["average"], run.case.variables[n]["dtype"]
                        )
    compare_weights(run, names, "final weights")
