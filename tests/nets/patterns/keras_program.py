"""Fit, evaluate and predict of Keras, and the base of all programs that differ from it in one place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import keras
import numpy as np
from keras import layers, ops

import mpistrat as ms
from tests.nets.patterns import keras_models as zoo
from tests.nets.patterns.environments import Environment, sizes

Config = dict[str, Any]
KINDS = ("equal", "unequal", "last", "empty")


def cross_entropy(**options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


class Program:
    """A model that is fitted, evaluated and used. A subclass is a program of the name of its class."""

    programs: ClassVar[dict[str, type[Program]]] = {}
    backends: ClassVar[tuple[str, ...]] = ("torch", "jax")
    kinds: ClassVar[tuple[str, ...]] = KINDS
    optimizers: ClassVar[tuple[str, ...]] = zoo.USUAL
    tolerance = 2e-4  # float32
    epochs = 3
    validates: ClassVar[bool | None] = None  # None: it is drawn
    fit_options: ClassVar[dict[str, Any]] = {}
    optimizer_options: ClassVar[dict[str, Any]] = {}
    compile_options: ClassVar[dict[str, Any]] = {}
    loss: Any = None  # None: cross entropy
    metrics: ClassVar[Any] = ("accuracy",)
    weighted_metrics: ClassVar[Any] = None
    policy = "float32"
    evaluates = True

    def __init_subclass__(cls) -> None:
        if zoo.BACKEND in cls.backends and not cls.__name__.startswith("_"):
            Program.programs[re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()] = cls

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Config:
        """Draw what the program leaves open."""

        def choose(options: Iterable[Any]) -> Any:
            options = list(options)
            return options[int(rng.integers(len(options)))]

        return {
            "kind": choose(cls.kinds), "optimizer": choose(cls.optimizers), "seed": int(rng.integers(1000)),
            "steps_per_execution": choose((1, 1, 1, 2) if zoo.BACKEND == "jax" else (1,)), "jit": choose((None, True, False)),
            "functional": bool(rng.integers(2)), "compiled_before": bool(rng.integers(2)),
            "validates": bool(rng.random() < 0.4), "tolerance": cls.tolerance,
        }  # fmt: skip

    def __init__(self, env: Environment, config: Config, ranks: int) -> None:
        keras.utils.clear_session()
        keras.config.set_dtype_policy(self.policy)
        self.env, self.config, self.ranks, self.results = env, config, ranks, {}
        self.steps = config["steps_per_execution"]
        kind = "last" if self.steps > 1 and config["kind"] == "empty" else config["kind"]
        rng = self.rng = np.random.default_rng(config["seed"])
        self.rows, self.batch_rows = sizes(kind, ranks)
        self.x, self.y = self.drawn(self.rows)
        self.held_x, self.held_y = self.drawn(2 * ranks + 1 + self.batch_rows)
        self.weights: Any = None
        self.prepare_data()
        del rng
        keras.utils.set_random_seed(config["seed"])
        self.model = self.build()
        if config["compiled_before"]:
            self.compile()
        self.model = self.distribute(self.model)
        if not config["compiled_before"]:
            self.compile()

    # what subclasses change

    def prepare_data(self) -> None:
        """Change the data."""

    def build(self) -> Any:
        """Return the model."""
        return self.model_of(layers.Dense(8, "tanh"))

    def optimizer(self) -> Any:
        return zoo.OPTIMIZERS[self.config["optimizer"]](**self.optimizer_options)

    def callbacks(self) -> list[Any]:
        return []

    def train(self) -> Any:
        """Fit; return the history."""
        return self.fit()

    def evaluated(self) -> dict[str, Any]:
        """Return the options of evaluate."""
        return {}

    # what they share

    def drawn(self, rows: int) -> tuple[Any, Any]:
        x = self.rng.normal(size=(rows, zoo.FEATURES)).astype(np.float32)
        return x, self.rng.integers(0, zoo.CLASSES, rows)

    def model_of(self, *between: Any, outputs: int = zoo.CLASSES) -> Any:
        """Return a model with these layers before the last one, sequential or functional."""
        inputs, last = keras.Input(self.x.shape[1:]), layers.Dense(outputs, name="output")
        if not self.config["functional"]:
            return keras.Sequential([inputs, *between, last])
        x = inputs
        for layer in between:
            x = layer(x)
        return keras.Model(inputs, last(x))

    def compile(self, **options: Any) -> None:
        options = {
            "optimizer": self.optimizer(), "loss": self.loss or cross_entropy(), "metrics": self.metric_objects(),
            "weighted_metrics": self.weighted_metrics, "steps_per_execution": self.steps,
            **self.compile_options, **options,
        }  # fmt: skip
        if zoo.BACKEND == "jax" and self.config["jit"] is not None:
            options.setdefault("jit_compile", self.config["jit"])
        self.model.compile(**options)

    def metric_objects(self) -> Any:
        return list(self.metrics) if isinstance(self.metrics, tuple) else self.metrics

    def distribute(self, model: Any) -> Any:
        if self.env.plain:
            return model
        with self.env.scope():
            return ms.keras.distribute(model)

    def fit_arguments(self, **options: Any) -> dict[str, Any]:
        made = {"epochs": self.epochs, "batch_size": self.batch_rows, "shuffle": False, "verbose": 0}
        made |= self.fit_options | {"callbacks": self.callbacks()}
        if self.validates or (self.validates is None and self.config["validates"]):
            held = (self.held_x, self.held_y)
            made["validation_data"] = held if self.held_y is not None else self.held_x
        return made | options

    def fit(self, **options: Any) -> Any:
        arguments = self.fit_arguments(**options)
        if self.y is None:
            return self.model.fit(self.x, **arguments)
        return self.model.fit(self.x, self.y, sample_weight=self.weights, **arguments)

    def own_path(self, name: str) -> str:
        return os.path.join(self.env.folder, name)

    def keep(self, name: str, value: Any) -> None:
        self.results[name] = np.array(ops.convert_to_numpy(value), np.float64)

    def finish(self, history: Any) -> None:
        """Add the history, what evaluate and predict give, and all variables to the results."""
        if history is not None:
            for name, values in history.history.items():
                self.keep("history " + re.sub(r"_\d+$", "", name), np.array(values))
        if self.evaluates:
            options = {"batch_size": self.batch_rows, "verbose": 0}
            given = (self.held_x,) if self.held_y is None else (self.held_x, self.held_y)
            for name, value in self.model.evaluate(*given, return_dict=True, **options, **self.evaluated()).items():
                self.keep("evaluated " + re.sub(r"_\d+$", "", name), value)
            for i, value in enumerate(keras.tree.flatten(self.model.predict(self.held_x, **options))):
                self.keep(f"predicted {i}", value)
        for i, variable in enumerate(self.model.trainable_variables):
            self.keep(f"trainable {i}", variable.value)
        for i, variable in enumerate(self.model.non_trainable_variables):
            if "seed" not in variable.path and "state" not in variable.path:  # of this rank's rows
                self.keep(f"not trainable {i}", variable.value)


def run(env: Environment, config: Config, ranks: int) -> dict[str, np.ndarray]:
    """Run a program; return its numbers."""
    program = Program.programs[config["program"]](env, config, ranks)
    program.finish(program.train())
    return program.results


def config(rng: np.random.Generator, number: int, name: str | None = None) -> Config:
    """Draw the configuration of a program: each program in turn, or always the one of a name."""
    names = list(Program.programs)
    name = name or names[number % len(names)]
    return {"program": name} | Program.programs[name].draw(rng)
