"""Draw strategies, optimizers and learning rates with their options."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.nets.differential.layouts import HOSTS, SIZE, nodes_of
from tests.nets.differential.rules import RULES, Rate

AGGREGATIONS = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")


def choose(rng: np.random.Generator, *options: Any) -> Any:
    """Return one of the options."""
    return options[int(rng.integers(len(options)))]


def draw_rate(rng: np.random.Generator, rule: str) -> Rate:
    """Draw a learning rate: a number or a schedule."""
    top = {"SGD": 0.2, "Adagrad": 0.2, "Adadelta": 1.0, "Lion": 0.02, "Ftrl": 0.3}.get(rule, 0.05)
    start = float(top * rng.uniform(0.2, 1.0))
    kind = choose(rng, *["number"] * 6, "Exponential", "Inverse", "Polynomial", "Cosine", "Piecewise", "callable")
    steps = int(rng.integers(2, 9))
    common = {"initial_learning_rate": start, "decay_steps": steps}
    stairs = {"decay_rate": 0.6, "staircase": bool(rng.integers(2))}
    if kind == "number":
        return start
    if kind == "Exponential":
        return "ExponentialDecay", common | stairs
    if kind == "Inverse":
        return "InverseTimeDecay", common | stairs
    if kind == "Polynomial":
        return "PolynomialDecay", common | {
            "end_learning_rate": start / 9,
            "power": 1.5,
            "cycle": bool(rng.integers(2)),
        }
    if kind == "Cosine":
        warm = bool(rng.integers(2))
        more = {"alpha": 0.1, "warmup_target": start * 2 if warm else None, "warmup_steps": 3 if warm else 0}
        return "CosineDecay", common | more
    if kind == "Piecewise":
        return "PiecewiseConstantDecay", {"boundaries": [1, steps], "values": [start, start / 2, start / 3]}
    return "callable", {"start": start}


def draw_optimizer(
    rng: np.random.Generator, servers: bool, narrow: bool, codec: str | None, split: bool
) -> dict[str, Any]:
    """Draw an optimizer with its settings, of those that the strategies and dtypes of the case support."""
    rules = [r for r in RULES if not (servers and r in ("Lamb", "Adafactor")) and not (split and r == "Adafactor")]
    if codec:
        rules = ["SGD", "SGD", "Adagrad"] + ["Adam", "RMSProp", "Adamax"] * (codec == "bfloat16")
    rules = [r for r in rules if not (narrow and r == "Lion")]  # signs of what is nearly 0
    rule = choose(rng, *rules, "SGD", "Adam")
    args, common = {}, {}
    epsilon = float(choose(rng, 1e-7, 1e-3)) if not narrow and not codec else 0.05
    if rule == "SGD" and rng.integers(3):
        args = {"momentum": float(rng.uniform(0.3, 0.95)), "nesterov": bool(rng.integers(2))}
    elif rule in ("Adam", "AdamW", "Adamax", "Nadam", "Lamb"):
        args = {
            "beta_1": float(choose(rng, 0.9, 0.5, 0.0)),
            "beta_2": float(choose(rng, 0.999, 0.9)),
            "epsilon": epsilon,
        }
        if rule in ("Adam", "AdamW") and rng.integers(2):
            args["amsgrad"] = True
    elif rule == "Adagrad":
        args = {"initial_accumulator_value": float(choose(rng, 0.1, 1.0)), "epsilon": epsilon}
    elif rule == "RMSProp":
        args = {"rho": float(choose(rng, 0.9, 0.5)), "epsilon": max(epsilon, 1e-3), "centered": bool(rng.integers(2))}
        if rng.integers(2):
            args["momentum"] = 0.7
    elif rule == "Adadelta":
        args = {"rho": float(choose(rng, 0.95, 0.6)), "epsilon": max(epsilon, 1e-3)}
    elif rule == "Lion":
        args = {"beta_1": float(choose(rng, 0.9, 1.0, 0.5)), "beta_2": float(choose(rng, 0.99, 0.5))}
    elif rule == "Ftrl":
        args = {"learning_rate_power": float(choose(rng, -0.5, -0.8, 0.0)), "beta": float(choose(rng, 0.0, 0.5))}
        args |= {"l1_regularization_strength": float(choose(rng, 0.0, 0.02))}
        args |= {"l2_regularization_strength": float(choose(rng, 0.0, 0.3))}
        args |= {"l2_shrinkage_regularization_strength": float(choose(rng, 0.0, 0.1))}
    elif rule == "Adafactor":
        args = {"beta_2_decay": float(choose(rng, -0.8, -0.5)), "clip_threshold": float(choose(rng, 1.0, 0.3))}
    if rule == "AdamW":
        common["weight_decay"] = float(choose(rng, 0.004, 0.3))
    elif rng.random() < 0.3:
        common["weight_decay"] = float(rng.uniform(0.05, 0.4))
    clip = choose(rng, None, None, "clipnorm", "clipvalue", "global_clipnorm")
    if clip:
        common[clip] = float({"clipnorm": 0.5, "clipvalue": 0.2, "global_clipnorm": 1.0}[clip] * rng.uniform(0.3, 2))
    scaled = None
    if not servers:
        if rng.random() < 0.2:
            common |= {"use_ema": True, "ema_momentum": float(choose(rng, 0.99, 0.6))}
            if rng.integers(2):
                common["ema_overwrite_frequency"] = int(rng.integers(1, 4))
        if rng.random() < 0.25:
            common["gradient_accumulation_steps"] = int(rng.integers(2, 4))
        if rng.random() < 0.15:
            scaled = {
                "initial_scale": float(choose(rng, 8.0, 64.0)),
                "dynamic_growth_steps": 999 if narrow else int(choose(rng, 1, 2, 4)),
            }
        elif rng.random() < 0.1:
            common["loss_scale_factor"] = float(choose(rng, 16.0, 5.0))
    if rng.random() < 0.15 or (servers and rng.random() < 0.1):
        common["check_numerics"] = True
    return {
        "rule": rule, "args": args, "common": common, "scaled": scaled, "rate": draw_rate(rng, rule),
        "excluding": choose(rng, "list", "names"), "begin": False,
    }  # fmt: skip


def draw_strategy(rng: np.random.Generator, kinds: tuple[str, ...] = ()) -> dict[str, Any]:
    """Draw a strategy with its options, one of `kinds` if any are given."""
    if SIZE == 1:
        kinds = kinds or ("OneDevice", "Mirrored", "MultiWorkerMirrored", "CentralStorage", "Mesh")
    elif HOSTS > 1:
        kinds = kinds or (*["MultiWorkerMirrored"] * 3, "Mesh", *["ParameterServer"] * 2)  # the others are of one node
    else:
        kinds = kinds or ("Mirrored", *["MultiWorkerMirrored"] * 3, "CentralStorage", "Mesh", *["ParameterServer"] * 2)
    kind = choose(rng, *kinds)
    spec = {
        "kind": kind, "layout": "shared", "devices": None, "replicas": None, "ops": None, "options": {}, "more": {}, "model": 1,
        "mode": "sync", "workers": SIZE,
    }  # fmt: skip
    if kind == "OneDevice":
        return spec
    if kind == "Mesh":
        spec["layout"] = choose(rng, "shared", "shared", "made up", "private")
        nodes = nodes_of(spec["layout"])
        fits = [
            m for m in range(1, SIZE + 1) if SIZE % m == 0 and all(nodes[r] == nodes[r - r % m] for r in range(SIZE))
        ]
        spec["model"] = choose(rng, *fits, max(fits))
        return spec
    spec["layout"] = choose(rng, "shared", "private", "made up" if kind == "MultiWorkerMirrored" else "shared")
    if rng.random() < 0.3:
        spec["devices"] = [int(n) for n in rng.integers(1, 3, SIZE)]
    if kind in ("Mirrored", "MultiWorkerMirrored"):
        if rng.random() < 0.2:
            spec["devices"], spec["replicas"] = None, SIZE + int(rng.integers(0, 4))
        elif rng.random() < 0.5:
            spec["ops"] = choose(rng, "Hierarchical", "Hierarchical2", "Mpi", "Ordered", "ToOne", "ToOneFn", "Auto")
    if kind == "MultiWorkerMirrored":
        options, more = spec["options"], spec["more"]
        if rng.random() < 0.4:
            options["bytes_per_pack"] = int(choose(rng, 0, 64, 1000, 1 << 20))
        if rng.random() < 0.2:
            options["timeout_seconds"] = 50.0
        if spec["ops"] is None and spec["replicas"] is None and rng.random() < 0.3:
            options["implementation"] = choose(rng, "AUTO", "MPI", "HIERARCHICAL")
        special = choose(
            rng, "none", "none", "local", "local", "gradients", "gradients", "wire", "wire both", "slots", "unslots"
        )
        sums_pieces = spec["ops"] in (None, "Hierarchical", "Hierarchical2", "Auto") and spec["replicas"] is None
        sums_pieces = sums_pieces and options.get("implementation") != "MPI"
        if special == "local" and spec["replicas"] is None:
            every = int(rng.integers(1, 5))
            plain = bool(rng.integers(2))
            more["local_steps"] = [every, 1.0 if plain else 0.7, 0.0 if plain else 0.9]
        elif special == "slots":
            more["sharded_slots"] = True
        elif special == "unslots":
            more["sharded_slots"] = False
        elif sums_pieces and special == "gradients":
            more["sharded_gradients"] = True
        elif sums_pieces and special.startswith("wire"):
            options["wire"] = choose(rng, "bfloat16", "int8")
            if special == "wire both":
                options["wire"], more["sharded_gradients"] = "bfloat16", True
    if kind == "ParameterServer":
        servers = int(rng.integers(1, SIZE))
        spec["workers"] = SIZE - servers
        more = spec["more"] = {"num_ps": servers}
        if spec["workers"] == 1:
            spec["mode"] = "one"
            if rng.integers(2):
                more["max_staleness"] = int(rng.integers(0, 2))
        else:
            spec["mode"] = choose(rng, "group", "stale0")
            more |= {"workers_in_sync": spec["workers"]} if spec["mode"] == "group" else {"max_staleness": 0}
        if rng.integers(2):
            more["placement"] = "bytes"
        if rng.random() < 0.4:
            more["transport"] = choose(rng, "messages", "one_sided", "shared_window")
            if (spec["layout"] == "private" or HOSTS > 1) and more["transport"] == "shared_window":
                more["transport"] = "messages"
        if rng.random() < 0.3:
            more["partitioner"] = int(rng.integers(2, 4))
        if spec["devices"]:
            spec["devices"][SIZE - servers :] = [1] * servers
    return spec
