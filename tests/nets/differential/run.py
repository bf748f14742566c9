"""A case as it runs: the strategy, its variables and optimizers, and the worlds of the reference."""

from __future__ import annotations

import copy
import hashlib
import re
from typing import Any

import numpy as np

import mpistrat as ms
from tests.nets.differential.case import Case
from tests.nets.differential.layouts import RANK, SIZE, WORLD, block, nodes_of, set_layout
from tests.nets.differential.reference import World, constrained, dtype_of
from tests.nets.differential.rules import made_rate


class Failure(Exception):
    """The package and the reference differ. Raised on all ranks together."""


class Run:
    """One case with its strategy, variables and optimizers, and the worlds of the reference."""

    def __init__(self, case: Case, folder: str) -> None:
        self.case, self.folder = case, folder
        self.tags: set[tuple[str, str]] = set()  # the options that the case had, each with its strategy
        self.strategy: Any = None
        self.problem = ""
        self.before: dict[str, np.ndarray] = {}  # weights of this rank's node before the last step
        self.coded = False  # whether numbers have lost bits between nodes
        self.apart: dict[str, np.ndarray] = {}  # how far the worlds' weights were apart after the last step, if so
        self.bits = hashlib.blake2b(digest_size=8)  # of every number that was compared
        self.counts = {name: np.zeros(c["shape"]) for name, c in case.counters.items()}
        self.specs = [copy.deepcopy(spec) for spec in case.optimizers]
        case.optimizers = self.specs
        self.first_specs = copy.deepcopy(case.optimizers)  # as a program makes optimizers before it restores a file
        self.worlds: dict[int, list[World]] = {}

    def start(self) -> None:
        """Make the first strategy, its variables and the worlds. Collective."""
        self.open(self.case.strategy)
        self.worlds = {node: [World(self.case, sign) for sign in (0, 1, -1)] for node in self.nodes()}
        self.make_variables(0)

    def nodes(self) -> list[int]:
        """Return the nodes that have weights of their own: one, but under local steps."""
        local = self.spec["more"].get("local_steps") and len(set(nodes_of(self.spec["layout"]))) > 1
        return sorted(set(nodes_of(self.spec["layout"]))) if local else [0]

    def open(self, spec: dict[str, Any]) -> None:
        """Make a strategy. Collective."""
        self.spec = spec
        set_layout(spec["layout"])
        kind, kwargs = spec["kind"], {}
        counts = [1] * SIZE if spec["devices"] is None else spec["devices"]
        if spec["replicas"]:
            kwargs["replicas"] = spec["replicas"]
            counts = [block(spec["replicas"], SIZE, rank) for rank in range(SIZE)]
        elif spec["devices"]:
            kwargs["compute_devices" if kind == "CentralStorage" else "devices"] = [
                f"cpu:{i}" for i in range(counts[RANK])
            ]
        if spec["ops"]:
            make = {"Hierarchical": ms.HierarchicalAllReduce, "Hierarchical2": lambda: ms.HierarchicalAllReduce(3)}
            make |= {
                "Mpi": ms.MpiAllReduce,
                "Ordered": ms.OrderedAllReduce,
                "Auto": ms.AutoAllReduce,
                "ToOne": ms.ReductionToOneDevice,
            }
            make |= {"ToOneFn": lambda: ms.ReductionToOneDevice("cpu:0", lambda parts: np.sum(parts, axis=0))}
            kwargs["cross_device_ops"] = make[spec["ops"]]()
        if spec["options"]:
            kwargs["communication_options"] = ms.CommunicationOptions(**spec["options"])
        more = dict(spec["more"])
        if "local_steps" in more:
            more["local_steps"] = ms.LocalSteps(*more["local_steps"])
        if "partitioner" in more:
            more["variable_partitioner"] = ms.partitioners.FixedShardsPartitioner(more.pop("partitioner"))
        if kind == "Mesh":
            kwargs["axes"] = {"data": -1, "model": spec["model"]}
            self.replica_ranks = [rank for rank in range(SIZE) if rank % spec["model"] == 0]
        elif kind == "ParameterServer":
            self.replica_ranks = [rank for rank in range(spec["workers"]) for _ in range(counts[rank])]
        else:
            self.replica_ranks = [rank for rank in range(SIZE) for _ in range(counts[rank])]
        self.strategy = getattr(ms, kind + "Strategy")(**kwargs, **more)
        self.is_server = kind == "ParameterServer" and self.strategy.is_server
        self.works = not self.is_server
        self.comm = WORLD.Split(int(self.works))
        self.tag(kind)
        for key in ("layout", "ops", "mode"):
            self.tag(f"{key}={spec[key]}")
        for name, on in (
            ("devices", spec["devices"]),
            ("replicas", spec["replicas"]),
            ("model split", spec["model"] > 1),
        ):
            if on:
                self.tag(name)
        for key, value in (spec["options"] | spec["more"]).items():
            self.tag(f"{key}={value if key not in ('local_steps', 'num_ps', 'partitioner') else 'yes'}")

    def note(self, text: str) -> None:
        """Record a difference. Only the first counts: others may follow from it."""
        self.problem = self.problem or f"differs: {text}"

    def agree(self) -> None:
        """Raise Failure on all ranks if a rank has recorded a difference. Collective."""
        texts = WORLD.allgather(self.problem)
        if any(texts):
            raise Failure(next(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))

    def tag(self, text: str) -> None:
        """Count an option of the case."""
        self.tags.add((self.spec["kind"], text))

    def close(self) -> None:
        """Close the strategy. Collective."""
        strategy, self.strategy = self.strategy, None
        if strategy is not None:
            strategy.close()
            self.comm.Free()

    def make_variables(self, segment: int) -> None:
        """Make the variables that appear in a segment, and the optimizers if the strategy has none."""
        case = self.case
        with self.strategy.scope():
            if segment == 0 or not self.made:
                self.made, self.counters = {}, {}
            for variable in case.variables.values():
                name = variable["name"]
                if variable["born"] <= segment and name not in self.made:
                    start = variable["start"].astype(dtype_of(variable["dtype"]))
                    kwargs = {"name": name, "constraint": constrained if variable["constraint"] else None}
                    if variable["layout"] is not None and self.spec["kind"] == "Mesh":
                        kwargs["layout"] = [None] * start.ndim
                        kwargs["layout"][variable["layout"]] = "model"
                    self.made[name] = ms.Variable(
                        (lambda start=start: start) if variable["callable"] else start, **kwargs
                    )
                    for worlds in self.worlds.values():
                        for world in worlds:
                            world.weights.setdefault(name, start.astype(np.float64))
            for name, c in case.counters.items():
                if name not in self.counters:
                    sync = ms.VariableSynchronization.ON_READ if c["on_read"] else ms.VariableSynchronization.AUTO
                    self.counters[name] = ms.Variable(
                        np.zeros(c["shape"], c["dtype"]), trainable=False, name=name, synchronization=sync,
                        aggregation=ms.VariableAggregation[c["kind"]],
                    )  # fmt: skip
            if segment == 0 or not self.optimizers:
                self.optimizers = [self.make_optimizer(self.as_made(i), i) for i in range(len(self.specs))]

    def as_made(self, index: int) -> dict[str, Any]:
        """Return the settings with which a program makes an optimizer: those of its first line, not those set later."""
        spec, first = self.specs[index], self.first_specs[index]
        numbers = isinstance(spec["rate"], float) and isinstance(first["rate"], float)
        return spec | {"args": first["args"], "common": first["common"]} | ({"rate": first["rate"]} if numbers else {})

    def make_optimizer(self, spec: dict[str, Any], index: int) -> Any:
        """Make an optimizer of the package."""
        optimizer = getattr(ms.optimizers, spec["rule"])(made_rate(spec["rate"]), **spec["args"], **spec["common"])
        names = [v["name"] for v in self.case.variables.values() if v["excluded"]]
        later = [n for n in names if spec["excluding"] == "names" or n not in self.made]
        patterns = [f"^{re.escape(n)}(/part|$)" for n in later]  # of shards, too
        optimizer.exclude_from_weight_decay([self.made[n] for n in names if n not in later], patterns)
        self.tag(spec["rule"])
        for key in (*spec["args"], *spec["common"]):
            if (spec["args"] | spec["common"])[key]:
                self.tag(key)
        self.tag("schedule" if not isinstance(spec["rate"], float) else "rate")
        if spec["scaled"]:
            self.tag("LossScaleOptimizer")
            return ms.optimizers.LossScaleOptimizer(optimizer, **spec["scaled"], name=f"scale{index}")
        return optimizer

    def reference_state(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the state of the reference."""
        worlds = [
            [(w.weights, [vars(o) | {"spec": None} for o in w.optimizers]) for w in some]
            for some in self.worlds.values()
        ]
        return worlds, self.counts

    def load_reference(self, state: tuple[list[Any], dict[str, Any]]) -> None:
        """Set the state of the reference."""
        for some, old in zip(self.worlds.values(), state[0], strict=True):
            for world, (weights, states) in zip(some, old, strict=True):
                world.weights = weights
                for optimizer, each in zip(world.optimizers, states, strict=True):
                    vars(optimizer).update(each, spec=optimizer.spec)
        self.counts = state[1]
