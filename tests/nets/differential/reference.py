"""The reference: one optimizer of one world of weights, in NumPy float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.nets.differential.rules import RULES, rate_at

try:
    import ml_dtypes

    BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
except ImportError:
    BFLOAT16 = None

# rounding of gradients, and the part of a number that is allowed besides, by dtype
ROUNDING = {"float64": 1e-15, "float32": 4e-7, "float16": 2e-3, "bfloat16": 1.6e-2}
PART = {"float64": 1e-10, "float32": 1e-5, "float16": 6e-3, "bfloat16": 5e-2}


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of a name, bfloat16 too."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


class Reference:
    """One optimizer of one world: Keras's steps with sums of gradients, in float64."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.calls, self.slots, self.firsts = spec, 0, {}, {}
        self.scale, self.changed_at = spec["scaled"]["initial_scale"] if spec["scaled"] else 1.0, 0
        self.anchors, self.updates, self.outer = {}, 0, {}  # of local steps
        self.seen: set[str] = set()

    def iterations(self) -> int:
        return self.calls // (self.spec["common"].get("gradient_accumulation_steps") or 1)

    def slots_of(self, name: str, w: np.ndarray) -> dict[str, np.ndarray]:
        """Return the slots of a variable, made at its first update."""
        if name not in self.slots:
            args, common = self.spec["args"], self.spec["common"]
            made = {slot: np.zeros_like(w) for slot in RULES[self.spec["rule"]][1](args)}
            if "accumulator" in made:
                made["accumulator"] += args.get("initial_accumulator_value", 0.1)
            if common.get("gradient_accumulation_steps"):
                made["gradient_accumulator"] = np.zeros_like(w)
            if common.get("use_ema"):
                made["average"] = self.firsts.get(name, w.copy())
            self.slots[name] = made
        return self.slots[name]

    def clip_norms(self, gradients: dict[str, np.ndarray], shards: dict[str, Any]) -> dict[str, np.ndarray]:
        """Clip by the norm of each variable (each shard, where it has some), and by the norm of all."""
        common = self.spec["common"]
        if common.get("clipnorm"):
            limit = common["clipnorm"]
            for name, g in gradients.items():
                out, low = g.copy(), 0
                for rows in shards.get(name) or [None]:  # a shard on a server counts as a variable
                    part = slice(None) if rows is None else slice(low, low + rows)
                    low += rows or 0
                    norm = np.linalg.norm(g[part] if rows is not None else g)
                    if norm > limit:
                        if rows is None:
                            out = g * (limit / norm)
                        else:
                            out[part] = g[part] * (limit / norm)
                gradients[name] = out
        if common.get("global_clipnorm"):
            norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
            if norm > common["global_clipnorm"]:
                gradients = {name: g * (common["global_clipnorm"] / norm) for name, g in gradients.items()}
        return gradients

    def step(
        self, case: Any, weights: dict[str, Any], gradients: dict[str, Any], rows: dict[str, Any], clipped: bool = False
    ) -> None:
        """Take a step by sums of gradients; of the variables in `rows` only these rows are updated."""
        spec, common = self.spec, self.spec["common"]
        every = common.get("gradient_accumulation_steps") or 1
        factor = 1 / (common.get("loss_scale_factor") or 1.0)
        rate, updates, t = rate_at(spec["rate"], self.calls), (self.calls + 1) % every == 0, self.iterations() + 1
        gradients = {name: g * factor for name, g in gradients.items()}
        # averages begin with the weights at the first step of any variable that lies beside
        for name in (name for name, gradient in gradients.items() if gradient.size):
            beside = [
                (n, v) for n, v in case.variables.items() if n in weights and v["born"] == case.variables[name]["born"]
            ]
            for n, v in beside:
                if v["dtype"] == case.variables[name]["dtype"]:
                    self.firsts.setdefault(n, weights[n].copy())
        for name in gradients:
            slots = self.slots_of(name, weights[name])
            if every > 1:
                if updates:
                    gradients[name] = (gradients[name] + slots["gradient_accumulator"]) / every
                    slots["gradient_accumulator"] = np.zeros_like(weights[name])
                else:
                    slots["gradient_accumulator"] = slots["gradient_accumulator"] + gradients[name]
        if updates and not clipped:
            gradients = self.clip_norms(gradients, {})
        for name, g in gradients.items():
            slots, w, variable = self.slots[name], weights[name], case.variables[name]
            if updates:
                if common.get("clipvalue"):
                    g = np.clip(g, -common["clipvalue"], common["clipvalue"])
                decay = 0.0 if variable["excluded"] else common.get("weight_decay") or 0.0
                chosen = rows.get(name)
                if chosen is None:
                    w = RULES[spec["rule"]][0](w - w * decay * rate, g, slots, t, rate, **spec["args"])
                elif len(chosen):
                    some = {slot: array[chosen] for slot, array in slots.items()}
                    part = w[chosen] - w[chosen] * decay * rate
                    w = w.copy()
                    w[chosen] = RULES[spec["rule"]][0](part, g[chosen], some, t, rate, **spec["args"])
                    for slot in slots:
                        slots[slot] = slots[slot].copy()
                        slots[slot][chosen] = some[slot]
            if common.get("use_ema"):
                kept = common["ema_momentum"] if t > 1 else 0.0
                slots["average"] = kept * slots["average"] + (1 - kept) * w
                often = common.get("ema_overwrite_frequency")
                if often and t % often == 0:
                    w = slots["average"].copy()
            w = rounded(w, variable["dtype"])
            weights[name] = rounded(constrained(w), variable["dtype"]) if variable["constraint"] else w
        if common.get("use_ema"):  # averages are of all variables that the optimizer knows
            for name in self.known(case, weights) - set(gradients):
                slots, kept = self.slots_of(name, weights[name]), common["ema_momentum"] if t > 1 else 0.0
                slots["average"] = kept * slots["average"] + (1 - kept) * weights[name]
                often = common.get("ema_overwrite_frequency")
                if often and t % often == 0:
                    weights[name] = rounded(slots["average"].copy(), case.variables[name]["dtype"])
        self.calls += 1

    def known(self, case: Any, weights: dict[str, Any]) -> set[str]:
        """Return the variables that the program has handed to the optimizer, with a gradient or without."""
        index = next(i for i, spec in enumerate(case.optimizers) if spec is self.spec)
        self.seen |= {name for name in weights if case.variables[name]["optimizer"] == index and weights[name].size}
        return self.seen


def rounded(w: np.ndarray, dtype: str) -> np.ndarray:
    """Return weights as a 16-bit dtype holds them; other dtypes are left alone."""
    return w.astype(dtype_of(dtype)).astype(np.float64) if dtype in ("float16", "bfloat16") else w


def constrained(w: np.ndarray) -> np.ndarray:
    """Apply the constraint that some variables have."""
    return np.clip(w, -0.7, 0.9)


class World:
    """Weights and optimizers of a node, with gradients that are wrong by `sign` times their rounding."""

    def __init__(self, case: Any, sign: int) -> None:
        self.case, self.sign, self.weights = case, sign, {}
        self.before: dict[str, np.ndarray] = {}  # the weights that a step computes all its gradients with
        self.optimizers = [Reference(spec) for spec in case.optimizers]

    def gradient(self, variable: dict[str, Any], ids: np.ndarray, weight: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradient summed over rows of the data, and the sum of the absolute values of its terms."""
        case, w, u = self.case, self.before[variable["name"]], self.case.u[ids]
        p, q = variable["p"], variable["q"]
        if variable["table"] is None:
            return weight * (len(ids) * (w - q) - u.sum() * p), weight * (len(ids) * abs(w - q) + abs(u).sum() * abs(p))
        g, size, where = np.zeros_like(w), np.zeros_like(w), case.ids[ids] % len(w)
        for row, some in zip(u, where, strict=True):
            part = weight * (w[some] - row * p[some] - q[some])
            np.add.at(g, some, part)
            np.add.at(size, some, abs(part))
        return g, size

    def loss(self, ids: np.ndarray, names: list[str]) -> np.ndarray:
        """Return the loss of each row."""
        total, u = np.zeros(len(ids)), self.case.u[ids]
        for name in names:
            variable, w = self.case.variables[name], self.weights[name]
            p, q = variable["p"], variable["q"]
            if not w.size:
                continue
            if variable["table"] is None:
                total += (((w - q) ** 2).mean() - 2 * u * ((w - q) * p).mean() + u**2 * (p * p).mean()) / 2
            else:
                where = self.case.ids[ids] % len(w)
                for i, some in enumerate(where):
                    total[i] += ((w[some] - u[i] * p[some] - q[some]) ** 2).mean() / 2
        return total
