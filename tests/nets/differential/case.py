"""A case: everything that is drawn from the seed, the same on all ranks."""

from __future__ import annotations

import numpy as np

from tests.nets.differential.drawing import AGGREGATIONS, choose, draw_optimizer, draw_strategy
from tests.nets.differential.layouts import SIZE, nodes_of
from tests.nets.differential.reference import BFLOAT16

SHAPES = [(), (1,), (1, 1), (7,), (5, 3), (4, 8), (2, 3, 4), (0,), (3, 0), (17, 2), (64,), (8,), (300,), (1000, 3)]


class Case:
    """Everything that is drawn of a case. `kinds` are strategies to draw from; none are all."""

    def __init__(self, seed: int, number: int, kinds: tuple[str, ...] = ()) -> None:
        self.seed, self.number = seed, number
        rng = self.rng = np.random.default_rng([seed, number, SIZE])
        self.segments = int(rng.integers(2, 5))
        self.strategy = draw_strategy(rng, kinds)
        self.later, self.events = [], []
        servers = self.strategy["kind"] == "ParameterServer"
        self.split = self.strategy["model"] > 1
        for _ in range(self.segments - 1):
            event = choose(
                rng,
                "none",
                "rate",
                "assign",
                "scatter",
                "new",
                "again",
                "switch",
                "switch",
                "validate",
                "decay",
                "iterations",
                "state",
                "owner",
            )
            self.events.append(event)
            other = draw_strategy(rng, kinds) if event == "switch" else None
            self.later.append(other)
            if other:
                servers |= other["kind"] == "ParameterServer"
                self.split |= other["model"] > 1
        for i, event in enumerate(self.events):  # another optimizer would be in files, too
            if event == "state" and {"again", "switch"} & set(self.events[i:]):
                self.events[i] = "none"
        specs = [self.strategy] + [s for s in self.later if s]
        self.codec = next((s["options"]["wire"] for s in specs if s["options"].get("wire")), None)
        if any(s["options"].get("wire") == "int8" for s in specs):
            self.codec = "int8"
        more = np.random.default_rng([seed, number, SIZE, 1])  # of its own: what was drawn before stays as it is
        self.narrow = bool(more.random() < 0.2) if servers else bool(rng.random() < 0.2)
        self.settings = [bool(more.random() < 0.3) for _ in self.events]
        self.large = SIZE > 1 and (
            self.codec is not None
            or rng.random() < 0.15
            or (rng.random() < 0.5 and any(len(set(nodes_of(s["layout"]))) > 1 for s in specs))
        )
        self.optimizers = [
            draw_optimizer(rng, servers, self.narrow, self.codec, self.split) for _ in range(choose(rng, 1, 1, 1, 2))
        ]
        self.servers = servers
        self.draw_variables(rng)
        self.draw_data(rng)
        scaled = any(o["scaled"] for o in self.optimizers)
        checked = any(o["common"].get("check_numerics") for o in self.optimizers)
        self.overflow = (
            rng.random() < 0.5 and (scaled or checked) and not self.codec and all(s["mode"] != "stale0" for s in specs)
        )
        self.begin = bool(
            not self.overflow and (rng.random() < 0.4 or any(s["more"].get("sharded_gradients") for s in specs))
        )
        self.manual = bool(rng.random() < 0.1) and not servers and not self.begin
        self.manual &= not any(
            s["more"].get("local_steps") or s["more"].get("sharded_gradients") or s["options"].get("wire")
            for s in specs
        )
        self.absent = rng.random() < 0.35
        self.delivery = {name: choose(rng, "grad", "grad", "own", "float64", "strided") for name in self.variables}

    def draw_variables(self, rng: np.random.Generator) -> None:
        """Draw variables and counters, some of which appear later."""
        self.variables, self.counters = {}, {}
        dtypes = choose(rng, ["float64"], ["float64"], ["float64", "float32"], ["float32"])
        if self.codec:
            dtypes = ["float32"]
        if self.narrow:
            dtypes = dtypes + ["float16"] + (["bfloat16"] if BFLOAT16 is not None else [])
        count = int(rng.integers(1, 7))
        shapes = [choose(rng, *SHAPES) for _ in range(count)]
        if self.large:
            each = int(rng.integers(20_000, 60_000)) * (
                SIZE if self.codec or rng.random() < 0.5 else 1
            )  # slots divided from 256 KB a rank on
            shapes[: int(rng.integers(1, 3))] = [(each,), (each // 311, 311)][: int(rng.integers(1, 3))]
        if all(0 in shape for shape in shapes):
            shapes.append((3,))
        for i, shape in enumerate(shapes):
            size = int(np.prod(shape))
            table = i if len(shape) == 2 and shape[0] > 1 and size and size < 9000 and rng.random() < 0.5 else None
            layout = None
            if self.split and table is None and shape and rng.random() < 0.6:
                dims = [d for d, n in enumerate(shape) if n and all(n % m == 0 for m in (2, 3, 4) if SIZE % m == 0)]
                layout = choose(rng, *dims) if dims else None
            name = choose(rng, "w", "layer/w", "b") + str(i)
            self.variables[name] = {
                "name": name, "shape": shape, "table": table, "layout": layout, "dtype": choose(rng, *dtypes),
                "optimizer": int(rng.integers(len(self.optimizers))), "born": 0, "excluded": bool(rng.random() < 0.3),
                "constraint": bool(layout is None and not self.codec and rng.random() < 0.12), "start": rng.normal(size=shape),
                "p": rng.normal(size=shape), "q": rng.normal(size=shape), "callable": bool(rng.integers(2)),
            }  # fmt: skip
        names = list(self.variables)
        for segment, event in enumerate(self.events):
            if event == "new":
                late = dict(self.variables[names[0]]) | {
                    "name": f"late{segment}",
                    "born": segment + 1,
                    "shape": (6, 4),
                    "layout": None,
                }
                late |= {"table": choose(rng, None, 9), "constraint": False}
                late |= {key: rng.normal(size=(6, 4)) for key in ("start", "p", "q")}
                self.variables[late["name"]] = late
        for i in range(int(rng.integers(0, 3))):
            on_read = bool(rng.integers(2)) and not self.servers
            kind = choose(rng, *AGGREGATIONS)
            dtype = choose(rng, "float64", "int64") if kind != "MEAN" else "float64"
            self.counters[f"count{i}"] = {
                "kind": kind,
                "dtype": dtype,
                "on_read": on_read,
                "shape": choose(rng, (), (3,)),
            }
        for spec in [self.strategy] + [s for s in self.later if s]:
            if spec["more"].get("partitioner") and any(v["constraint"] for v in self.variables.values()):
                for v in self.variables.values():
                    v["constraint"] = False

    def draw_data(self, rng: np.random.Generator) -> None:
        """Draw rows, and how each segment gets them."""
        self.rows = int(rng.integers(3, 40))
        self.u, self.ids = rng.normal(size=self.rows), rng.integers(0, 1000, (self.rows, 3))
        if rng.integers(2):
            self.ids[:, 1] = self.ids[:, 0]  # duplicates in each row
        self.data = [choose(rng, "dataset", "shuffled", "own", "own") for _ in range(self.segments)]
        self.explicit = bool(rng.integers(2))  # whether the global batch size is passed
