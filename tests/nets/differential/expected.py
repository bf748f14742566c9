"""Take the reference's step in all of its worlds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import mpistrat as ms
from tests.nets.differential.layouts import RANK, SIZE, nodes_of
from tests.nets.differential.reference import ROUNDING, constrained, rounded

if TYPE_CHECKING:
    from tests.nets.differential.run import Run


def codec_now(run: Run) -> float:
    """Return the relative error of numbers that travel between nodes, 0 where they travel as they are."""
    wire = run.spec["options"].get("wire")
    nodes = len(set(nodes_of(run.spec["layout"])))
    sizes = sum(v["start"].size for n, v in run.case.variables.items() if v["dtype"] == "float32" and n in run.made)
    if wire is None or nodes == 1 or sizes * 4 < 200_000:
        return 0.0
    run.coded = True
    return {"bfloat16": 1 / 128, "int8": 1 / 64}[wire]


def advance(
    run: Run, plan: dict[str, Any], chosen: dict[int, list[str]], parts: list[np.ndarray], weights: list[float],
    bad: str | None, failed: bool, names: list[str],
) -> list[list[float]]:  # fmt: skip
    """Take the step in all worlds; returns each replica's part of the loss, for each of the three."""
    case, spec, count = run.case, run.spec, len(parts)
    node_of = nodes_of(spec["layout"]) if len(run.worlds) > 1 else [0] * SIZE
    losses, stop = [[0.0] * count for _ in range(3)], False
    for i in range(count):
        for k, world in enumerate(run.worlds[node_of[run.replica_ranks[i]]]):
            losses[k][i] = float(world.loss(parts[i], names).sum()) * weights[i]
    for worlds in run.worlds.values():
        for world in worlds:
            world.before = dict(world.weights)
    run.before = run.worlds[node_of[RANK]][0].before
    servers, codec = spec["kind"] == "ParameterServer", codec_now(run)
    expected_failure = False
    for index in plan["used"]:
        if stop or not chosen[index]:
            continue
        hurt = bad in chosen[index]
        for node, worlds in run.worlds.items():
            mine = [i for i in range(count) if node_of[run.replica_ranks[i]] == node]
            local = count / len(mine) if len(run.worlds) > 1 else 1.0
            for world in worlds:
                optimizer = world.optimizers[index]
                if hurt:
                    if run.specs[index]["scaled"]:
                        optimizer.scale = max(optimizer.scale / 2, 2.0**-126)
                        optimizer.changed_at = optimizer.calls
                    continue
                groups = (
                    [[i for i in mine if run.replica_ranks[i] == w] for w in range(spec["workers"])]
                    if spec["mode"] == "stale0"
                    else [mine]
                )
                sums, rows = {}, {}
                scale = optimizer.spec["common"].get("loss_scale_factor") or 1.0
                for group in groups:
                    own = {}
                    for name in chosen[index]:
                        variable, g, size = case.variables[name], 0.0, 0.0
                        for i in group:
                            one, extent = world.gradient(variable, parts[i], weights[i] * local)
                            g, size = g + one, size + extent
                        rough = ROUNDING[variable["dtype"]] * size
                        if codec and np.size(size):
                            rough = rough + codec * (np.max(size) if spec["options"]["wire"] == "int8" else size)
                        g = np.asarray(g)
                        own[name] = (
                            g + world.sign * rough * np.where(g < 0, -1.0, 1.0)
                        ) * scale  # along g: norms change, too
                    if servers:
                        shards = {
                            n: [s.shape[0] for s in run.made[n].variables]
                            if isinstance(run.made[n], ms.ShardedVariable)
                            else None
                            for n in own
                        }
                        own = optimizer.clip_norms(own, shards)
                    for name, g in own.items():
                        sums[name] = sums.get(name, 0.0) + g
                if servers:
                    for name in chosen[index]:
                        if case.variables[name]["table"] is not None and name not in run.dense:
                            ids = np.concatenate(parts).astype(int)
                            rows[name] = np.unique(case.ids[ids] % len(case.variables[name]["start"]))
                every = optimizer.spec["common"].get("gradient_accumulation_steps") or 1
                updates = (optimizer.calls + 1) % every == 0
                overwritten = optimizer.spec["common"].get("ema_overwrite_frequency")
                if len(run.worlds) > 1 and (updates or overwritten):
                    if not optimizer.anchors:
                        optimizer.updates = 0
                    for name in [*sums, *(optimizer.known(case, world.weights) if overwritten else ())]:
                        optimizer.anchors.setdefault(name, world.weights[name].copy())
                optimizer.step(case, world.weights, sums, rows, clipped=servers)
                optimizer.updates += updates
                if (
                    run.specs[index]["scaled"]
                    and optimizer.calls - optimizer.changed_at >= run.specs[index]["scaled"]["dynamic_growth_steps"]
                ):
                    optimizer.scale = min(optimizer.scale * 2, 2.0**127)
                    optimizer.changed_at = optimizer.calls
        if hurt and not run.specs[index]["scaled"]:
            expected_failure = stop = True
        if not hurt and len(run.worlds) > 1:
            some = next(iter(run.worlds.values()))[0].optimizers[index]
            if some.anchors and some.updates >= spec["more"]["local_steps"][0]:
                outer_step(run, index)
    if failed != expected_failure:
        run.note(f"FloatingPointError: {failed}, expected {expected_failure}")
    return losses


def outer_step(run: Run, index: int) -> None:
    """Take the outer step of an optimizer of local steps: DiLoCo's, weighted by the replicas of the nodes."""
    _, rate, momentum = run.spec["more"]["local_steps"]
    node_of = nodes_of(run.spec["layout"])
    replicas = {node: sum(node_of[rank] == node for rank in run.replica_ranks) for node in run.worlds}
    for k in range(3):
        worlds = {node: worlds[k] for node, worlds in run.worlds.items()}
        for name in list(worlds[0].optimizers[index].anchors):
            mean = sum(replicas[n] * w.weights[name] for n, w in worlds.items()) / sum(replicas.values())
            for world in worlds.values():
                optimizer, variable = world.optimizers[index], run.case.variables[name]
                anchor = optimizer.anchors.pop(name)
                change = anchor - mean
                velocity = momentum * optimizer.outer.get(name, 0.0) + change
                optimizer.outer[name] = velocity
                new = rounded(anchor - rate * (change + momentum * velocity), variable["dtype"])
                world.weights[name] = constrained(new) if variable["constraint"] else new
