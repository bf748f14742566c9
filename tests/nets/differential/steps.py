"""Take steps with the package, by a dataset or by rows that the case draws, and compare after each."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

import mpistrat as ms
from tests.nets.differential.comparing import allowed_part, compare_state, compare_weights, own_worlds
from tests.nets.differential.drawing import choose
from tests.nets.differential.expected import advance
from tests.nets.differential.layouts import RANK, SIZE, WORLD
from tests.nets.differential.reference import BFLOAT16, ROUNDING

if TYPE_CHECKING:
    from tests.nets.differential.run import Run


def run_segment(run: Run, segment: int) -> None:
    """Take the steps of a segment, and compare everything after it. Collective."""
    case, spec = run.case, run.spec
    rng = np.random.default_rng([case.seed, case.number, SIZE, segment])
    names = [name for name in case.variables if name in run.made]
    data = case.data[segment]
    if spec["mode"] == "stale0" and data == "shuffled":
        data = "dataset"
    run.tag(f"data={data}")
    if data == "own":
        plans = [draw_plan(run, rng, names) for _ in range(int(rng.integers(1, 6)))]
        if run.is_server:
            run.strategy.serve()
        else:
            for plan in plans:
                if run.problem:
                    break
                count = len(run.replica_ranks)
                sizes = rng.integers(0, 5, count)
                if not sizes.sum():
                    sizes[0] = 1
                parts = [rng.integers(0, case.rows, n) for n in sizes]
                if spec["mode"] == "stale0" and any(
                    not sum(len(p) for p in of_worker(run, parts, w)) for w in range(spec["workers"])
                ):
                    parts = [np.array([i % case.rows]) for i in range(count)]
                attempt(run, plan, parts, None)
            if spec["kind"] == "ParameterServer":
                run.strategy.leave()
    else:
        batch = int(rng.integers(1, case.rows + 3))
        batch = max(batch, -(-case.rows // 5))
        rows = np.arange(case.rows)
        if spec["mode"] == "stale0":
            batch = int(rng.integers(1, 4))
            rows = rows[: len(rows) // (batch * spec["workers"]) * batch * spec["workers"]]
            rows = rows[: 4 * batch * spec["workers"]]
        plans = [draw_plan(run, rng, names) for _ in range(60)]
        if len(rows):
            dataset = ms.data.from_arrays((rows, case.u[rows]))
            dataset = dataset.shuffle(seed=int(rng.integers(99))) if data == "shuffled" else dataset
            handed, seen = run.strategy.distribute_dataset(dataset.batch(batch)), []
            for number, args in enumerate(handed):
                seen.append(attempt(run, plans[number], None, args))
            if run.works and not run.problem and spec["mode"] != "stale0":
                flat = np.concatenate([np.concatenate(parts) for parts in seen]) if seen else np.zeros(0)
                if not np.array_equal(np.sort(flat), rows) or (data == "dataset" and not np.array_equal(flat, rows)):
                    run.note(f"rows of an epoch: {flat}")
    run.agree()
    run.strategy.barrier()
    if run.spec["kind"] == "ParameterServer":  # servers have taken no steps
        state = WORLD.bcast(run.reference_state() if RANK == 0 else None)
        if run.is_server:
            run.load_reference(state)
    compare_state(run, names)
    run.agree()


def attempt(run: Run, plan: dict[str, Any], parts: Any, args: Any) -> list[np.ndarray]:
    """Take a step. An error is kept for the end of the segment, so that servers get there, too."""
    if run.problem:
        return []
    try:
        return take_step(run, plan, parts, args)
    except Exception as error:
        run.problem = f"{type(error).__name__}: {error}\n" + "".join(traceback.format_exc().splitlines(True)[-14:])
        return []


def of_worker(run: Run, parts: list[Any], worker: int) -> list[Any]:
    """Return the parts of a worker's replicas."""
    return [part for part, rank in zip(parts, run.replica_ranks, strict=True) if rank == worker]


def draw_plan(run: Run, rng: np.random.Generator, names: list[str]) -> dict[str, Any]:
    """Draw a step: variables without gradients, the order in which sums are started, and whether a number overflows."""
    case, absent = run.case, set()
    if case.absent:
        absent = {name for name in names if rng.random() < 0.3}
        if absent:
            run.tag("None gradients")
    used = [
        i for i in range(len(run.specs)) if any(case.variables[n]["optimizer"] == i and n not in absent for n in names)
    ]
    if len(used) > 1 and rng.random() < 0.3:
        used = used[:1]
    order = [str(n) for n in rng.permutation(names)]
    bad = (int(rng.integers(100)), choose(rng, np.inf, np.nan)) if case.overflow and rng.random() < 0.35 else None
    return {
        "absent": absent,
        "used": used,
        "begun": order[: int(rng.integers(0, len(order) + 1))] if case.begin else [],
        "bad": bad,
    }


def take_step(run: Run, plan: dict[str, Any], parts: Any, args: Any) -> list[np.ndarray]:
    """Take one step, and compare. Returns the rows of each replica."""
    case, spec, strategy, variables = run.case, run.spec, run.strategy, run.case.variables
    names = [name for name in case.variables if name in run.made]
    stale, first = spec["mode"] == "stale0", run.replica_ranks.index(RANK - RANK % spec["model"])
    count, workers = len(run.replica_ranks), spec["workers"] if spec["mode"] == "stale0" else 1
    offset = first if spec["mode"] == "stale0" else 0
    total = None if parts is None else sum(map(len, of_worker(run, parts, RANK) if stale else parts))
    seen, run.dense = {}, set(names)
    scales = [float(o.scale_loss(1.0)) for o in run.optimizers]
    chosen = {i: [n for n in names if variables[n]["optimizer"] == i and n not in plan["absent"]] for i in plan["used"]}
    bad = None
    if plan["bad"] is not None:
        able = [
            n
            for i in plan["used"]
            for n in chosen[i]
            if run.specs[i]["scaled"] or run.specs[i]["common"].get("check_numerics")
        ]
        able = [n for n in able if variables[n]["table"] is None and run.case.variables[n]["start"].size]
        if able:
            bad = able[plan["bad"][0] % len(able)]
            run.tag("overflow")

    def replica_step(ids=None, u=None):
        ctx = ms.get_replica_context()
        me = ctx.replica_id_in_sync_group + offset
        ids = np.asarray(parts[me] if ids is None else ids)
        seen[me] = ids.copy()
        u = case.u[ids] if u is None else np.asarray(u)
        size = total if total is not None else ms.global_batch_size()
        weight, losses, gradients = 1 / (max(size, 1) * workers), np.zeros(len(ids)), {}
        for name in names:
            handle, variable = run.made[name], variables[name]
            where = handle.part.slices if spec["kind"] == "Mesh" and handle.part is not None else ...
            p, q = variable["p"][where], variable["q"][where]
            factor = weight * scales[variable["optimizer"]]
            if variable["table"] is not None:
                rows = case.ids[ids] % len(variable["start"])
                found = (
                    np.asarray(handle.embedding_lookup(rows.reshape(-1)))
                    .astype(np.float64)
                    .reshape(*rows.shape, handle.shape[1])
                )
                error = found - u[:, None, None] * p[rows] - q[rows]
                losses += (error**2).mean(axis=(1, 2)) / 2 if len(ids) else 0
                values = (factor * error).reshape(-1, error.shape[-1]).astype(handle.dtype)
                gradients[name] = ms.IndexedSlices(values, rows.reshape(-1), handle.shape)
                continue
            w = np.asarray(handle).astype(np.float64)
            sums = np.array([((w - q) ** 2).sum(), ((w - q) * p).sum(), (p * p).sum()])
            if variable["layout"] is not None and spec["model"] > 1:
                sums = ctx.mesh.all_reduce("SUM", sums, mesh_axis="model")
            if variable["start"].size:
                losses += (sums[0] - 2 * u * sums[1] + u**2 * sums[2]) / variable["start"].size / 2
            gradients[name] = factor * (len(ids) * (w - q) - u.sum() * p)
            if name == bad and me == plan["bad"][0] % count:
                gradients[name] = np.array(gradients[name])
                gradients[name].reshape(-1)[-1] = plan["bad"][1]
        for name, c in case.counters.items():
            amount = np.full(c["shape"], len(ids) + me + 1, c["dtype"])
            run.counters[name].assign_add(amount)
        for i in plan["used"]:
            apply_gradients(run, ctx, i, chosen[i], gradients, plan)
        return ms.nn.compute_average_loss(
            losses, global_batch_size=size if parts is not None or case.explicit else None
        )

    failed = False
    try:
        result = strategy.run(replica_step, args=() if args is None else args)
    except FloatingPointError:
        failed, result = True, None
    everyone = {}
    for some in run.comm.allgather({} if spec["model"] > 1 and RANK % spec["model"] else seen):
        everyone |= some
    parts = [everyone[i] for i in range(count)]
    weights = []
    for i in range(count):
        group = of_worker(run, parts, run.replica_ranks[i]) if stale else parts
        weights.append(1 / (max(sum(map(len, group)), 1) * workers))
    losses = advance(run, plan, chosen, parts, weights, bad, failed, names)
    for name, c in case.counters.items():
        amounts = [len(parts[i]) + i + 1 for i in range(count)]
        grouped = (
            [[a for a, r in zip(amounts, run.replica_ranks, strict=True) if r == w] for w in range(workers)]
            if stale
            else [amounts]
        )
        for amounts in grouped:
            run.counts[name] += {
                "SUM": sum(amounts),
                "MEAN": sum(amounts) / len(amounts),
                "ONLY_FIRST_REPLICA": amounts[0],
            }[c["kind"]]
    if not failed:
        loss = float(strategy.reduce("SUM", result, axis=None))
        expected = [
            sum(each[i] for i in range(count) if not stale or run.replica_ranks[i] == RANK) * workers for each in losses
        ]
        margin = 10 * max(abs(e - expected[0]) for e in expected) + 1e-9 * abs(expected[0]) + 1e-12
        margin += 1e-2 * abs(expected[0]) * run.coded
        if not abs(loss - expected[0]) <= margin + rough_loss(run, abs(expected[0])):
            run.note(f"loss: {loss!r}, expected {expected[0]!r}")
    compare_weights(run, names)
    return parts


def rough_loss(run: Run, loss: float) -> float:
    """Return how far a loss, half a mean of squares, may be away by the rounding of its weights.

    Errors of weights change it by a part of itself, and near its minimum by their product with the root of the mean of squares.
    """
    weights = own_worlds(run)[0].weights
    rounding = sum(
        ROUNDING[run.case.variables[name]["dtype"]] * abs(weights[name]).max(initial=0.0) for name in run.made
    )
    return loss * max(allowed_part(run, name) for name in run.made) + np.sqrt(2 * loss) * rounding


def apply_gradients(
    run: Run, ctx: Any, index: int, chosen: list[str], gradients: dict[str, Any], plan: dict[str, Any]
) -> None:
    """Hand the gradients of one optimizer over, in one of several ways."""
    case, optimizer, pairs, last = run.case, run.optimizers[index], [], []
    for name in [n for n in run.made if case.variables[n]["optimizer"] == index]:
        handle, how = run.made[name], case.delivery[name]
        if name not in chosen:
            pairs.append((None, handle))
            continue
        g = gradients[name]
        sharded = isinstance(handle, ms.ShardedVariable)
        begun = name in plan["begun"] and not sharded
        if isinstance(g, ms.IndexedSlices) and not begun and not case.manual:
            run.dense.discard(name)
            run.tag("IndexedSlices")
            pairs.append((g, handle))
            continue
        g = g.to_dense() if isinstance(g, ms.IndexedSlices) else g
        if case.manual:
            g = ctx.all_reduce("SUM", np.asarray(g).astype(handle.dtype))
            run.tag("summed by hand")
        if begun or (how == "grad" and not sharded):
            handle.grad[...] = g
            pairs.append((handle.grad, handle))
            last += [name] * begun
        elif how == "float64" and handle.dtype != BFLOAT16:
            pairs.append((np.asarray(g, np.float64), handle))
        elif how == "strided" and np.ndim(g):
            wide = np.zeros((*np.shape(g), 2), handle.dtype)
            wide[..., 1] = g
            pairs.append((wide[..., 1], handle))
        else:
            pairs.append((np.asarray(g).astype(handle.dtype), handle))
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    last.sort(key=plan["begun"].index)
    while last:
        run.tag("begin")
        some, last = last[:2], last[2:]
        inner.begin([run.made[name] for name in some])
    if case.manual and not hasattr(optimizer, "inner_optimizer"):
        optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)
    elif case.manual:
        shares = [(None if g is None else np.asarray(g) / len(run.replica_ranks), v) for g, v in pairs]
        optimizer.apply_gradients([(None if g is None else g.astype(v.dtype), v) for g, v in shares])
    else:
        optimizer.apply_gradients(pairs)
