"""A Keras model whose fit, evaluate and predict run over all ranks.

All ranks run callbacks with the same logs; those that write or print run on one rank only.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, final

import keras
import numpy as np
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils

from ..base.context import OBSERVERS
from ..base.errors import explain
from .compiled import describe_compiled, over_ranks
from .inputs import KerasBatches, arrays_in, batches_of, with_row
from .jax_step import JaxStep
from .link import ModelLink, arrays_of
from .metrics import REMEDY
from .observed import inputs_of, observed_step
from .optimizer import distribute_optimizer
from .state import describe, optimizers_in, own_arrays, statistics_of, take_from_root

__all__ = [
    "DistributedModel",
    "on_this_rank",
]


_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in (
        *("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint", "ProgbarLogger", "RemoteMonitor"),
        "TensorBoard",
    )
    if hasattr(keras.callbacks, name)
)


@final
class Agreement(keras.callbacks.Callback):
    """The last callback: it shares effects of other callbacks with all ranks."""

    def __init__(self, link: ModelLink) -> None:
        super().__init__()
        self._link = link

    def on_train_begin(self, logs: Any = None) -> None:
        """Use the root's weights, and its epoch, perhaps of a backup, on all ranks. Collective."""
        self._link.wants_stop = self._link.stops = False
        self._link.begin_training()
        self.model.take_from_root()
        if self._link.update is not None:
            self._link.update.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Under parameter servers, start a pass. Collective."""
        if self._link.update is not None:
            self._link.update.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Set `stop_training` to the agreed value."""
        self.model.stop_training = self._link.stop_together(bool(self.model.stop_training))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree on `stop_training`, and compare the learning rates and the weights. Collective."""
        self.model.stop_training = self._link.agree_on_stop(bool(self.model.stop_training))
        rate = getattr(self.model.optimizer, "learning_rate", None)
        if rate is not None:
            self._link.same("fit", "learning rate after an epoch", repr(float(keras.ops.convert_to_numpy(rate))))
        self._link.compare_weights("after an epoch", self.model.trainable_weights)

    def on_train_end(self, logs: Any = None) -> None:
        """Compare the weights: callbacks may have changed some, as to the best ones. Collective."""
        self._link.compare_weights("after fit", self.model.trainable_weights)


def on_this_rank(link: ModelLink, callbacks: Any) -> list[Any]:
    """Return the callbacks of this rank: only the root's write and print.

    Raises:
        TypeError: a CallbackList.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        expected, got = "a callback or a list of callbacks", "a CallbackList"
        raise TypeError(explain("fit", "callbacks", expected=expected, got=got))
    given: Sequence[Any] = keras.tree.flatten(callbacks) if callbacks else []
    if not link.writes:
        given = [callback for callback in given if not isinstance(callback, _WRITERS)]
        for callback in given:
            if getattr(callback, "verbose", 0):
                callback.verbose = 0
    return [*given, Agreement(link)]


class DistributedModel(keras.Model):
    """Methods that `distribute` adds before those of a model's class, in a subclass of both."""

    mpistrat: ModelLink
    train_function: Any
    test_function: Any
    _initial_epoch: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain model, as for clones and configurations."""
        return cls.__bases__[1](*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickle as a plain model."""
        _, arguments = super().__reduce__()
        plain: Any = type(self).__bases__[1]
        return plain._unpickle_model, arguments

    # compile

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile as Keras does, and distribute the optimizers.

        Raises:
            ValueError: a setting that cannot be divided over ranks.
            ContextError: an optimizer that was distributed in another strategy.
        """
        if keras.backend.backend() == "tensorflow" and kwargs.get("jit_compile", "auto") == "auto":
            kwargs["jit_compile"] = False
        super().compile(*args, **kwargs)
        self.distribute_compiled()

    def distribute_compiled(self) -> None:
        """Distribute the optimizers of a compiled model, and check its other settings."""
        _check_model(self)
        self._distribute_optimizers()
        self.mpistrat.current, self.mpistrat.steps = False, self.steps_per_execution

    def _distribute_optimizers(self) -> None:
        for optimizer in optimizers_in(self):
            distribute_optimizer(self.mpistrat, optimizer)

    def make_train_function(self, force: bool = False) -> Any:
        """Make the function of a training step."""
        seen = bool(OBSERVERS)
        force, self.mpistrat.traced = force or seen != self.mpistrat.traced, seen
        super().make_train_function(force)
        function = self.train_function
        if not isinstance(function, KerasStep) and (step := JaxStep.of(self)) is not None:
            function = self._make_function(step)
        self.train_function = KerasStep.around(self, function, training=True)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Make the function of an evaluation step."""
        super().make_test_function(force)
        self.test_function = KerasStep.around(self, self.test_function)
        return self.test_function

    def _symbolic_build(self, *args: Any, **kwargs: Any) -> None:
        with self.mpistrat.step():
            super()._symbolic_build(*args, **kwargs)

    # loops

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Keras does, each rank on its share of every batch. Collective.

        Arguments are Keras's. Every rank passes the whole arrays; `batch_size` is that of all ranks together.

        Raises:
            CollectiveMismatchError: on every rank, when models, data or arguments differ.
        """
        link, given = self.mpistrat, _arguments(super().fit, args, kwargs)
        if not self.compiled:
            return super().fit(*args, **kwargs)  # Keras's error
        with link.errors(), link.together("fit"):
            batches, validation = self._training_batches(given)
        with link.errors(), warnings.catch_warnings():
            texts = [batches.describe(), "" if validation is None else validation.describe()]
            names = ("epochs", "initial_epoch", "steps_per_epoch", "validation_steps", "validation_freq")
            texts += [f"{name}={given[name]}" for name in names]
            self._begin("fit", batches, ", ".join(filter(None, texts)))
            given["steps_per_epoch"] = batches.begin(self, given["steps_per_epoch"])
            try:
                history = super().fit(
                    batches,
                    epochs=given["epochs"],
                    verbose=given["verbose"] if link.writes else 0,
                    callbacks=on_this_rank(link, given["callbacks"]),
                    validation_data=validation,
                    shuffle=False,
                    **{name: given[name] for name in names[1:]},
                )
                own_arrays(self)  # Keras lets weights and averages have one
                return history
            finally:
                link.update, link.in_epoch = None, False
                batches.close()

    def _training_batches(self, given: dict[str, Any]) -> tuple[KerasBatches, KerasBatches | None]:
        x, y, weight = given["x"], given["y"], given["sample_weight"]
        held_out = given["validation_data"]
        if given["validation_split"] and held_out is None:
            parts = array_slicing.train_validation_split((x, y, weight), validation_split=given["validation_split"])
            (x, y, weight), held_out = parts
        size, steps = given["batch_size"], given["steps_per_epoch"]
        batches = batches_of(
            self.mpistrat, "fit", x, y, weight, size, steps, given["class_weight"], given["shuffle"], training=True
        )
        if held_out is None:
            return batches, None
        x, y, weight = data_adapter_utils.unpack_x_y_sample_weight(held_out)
        size = given["validation_batch_size"] or (size if y is not None else None)
        return batches, batches_of(self.mpistrat, "fit", x, y, weight, size, given["validation_steps"])

    def _begin(self, function: str, batches: KerasBatches, text: str) -> None:
        """Build the model, and check that all ranks do the same. Collective."""
        link = self.mpistrat
        link.same(function, "arguments", text)
        with link.together(function):
            self._distribute_optimizers()
            example = batches.example()
            self._symbolic_build(data_batch=example)
        link.same(function, "model", describe(self))
        link.same(function, "arguments of compile", describe_compiled(self))
        if batches.training:
            batches.compare_first(example)

    def take_from_root(self) -> None:
        """Set the root's weights, slots and epoch on all ranks. Collective."""
        link = self.mpistrat
        take_from_root(link, self)
        epoch = -1 if self._initial_epoch is None else int(self._initial_epoch)
        (epochs,) = link.broadcast([np.array([epoch])])
        self._initial_epoch = None if epochs[0] < 0 else int(epochs[0])
        link.current = True

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as Keras does, each row on one rank; the results are the same on all. Collective."""
        cached = kwargs.pop("_use_cached_eval_dataset", False)
        given, link = _arguments(super().evaluate, args, kwargs), self.mpistrat
        if cached:  # within fit
            return super().evaluate(_use_cached_eval_dataset=True, **given)
        if not self.compiled:
            return super().evaluate(*args, **kwargs)  # Keras's error
        with link.errors():
            with link.together("evaluate"):
                weight, size, steps = given.pop("sample_weight"), given.pop("batch_size"), given["steps"]
                batches = batches_of(link, "evaluate", given.pop("x"), given.pop("y"), weight, size, steps)
            self._begin("evaluate", batches, f"{batches.describe()}, steps={steps}")
            self._average_statistics()
            self.take_from_root()
            return super().evaluate(batches, **self._shown(given))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs for all rows, in their order, on every rank. Collective."""
        given, link = _arguments(super().predict, args, kwargs), self.mpistrat
        with link.errors():
            with link.together("predict"):
                size, steps = given.pop("batch_size"), given["steps"]
                batches = batches_of(link, "predict", given.pop("x"), None, None, size, steps)
            link.same("predict", "arguments", f"{batches.describe()}, steps={steps}")
            with link.together("predict"):
                x, _, _ = data_adapter_utils.unpack_x_y_sample_weight(batches.example())
                if not self.built:
                    keras.backend.compute_output_spec(self, keras.tree.map_structure(_symbolic, x), training=False)
            link.same("predict", "model", describe(self))
            self._average_statistics()
            self.take_from_root()
            return _in_order(link, super().predict(batches, **self._shown(given)), batches.counts)

    def _shown(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of evaluate and predict with which only rank 0 writes and prints."""
        link = self.mpistrat
        shown = on_this_rank(link, given["callbacks"])[:-1]
        return {**given, "callbacks": shown, "verbose": given["verbose"] if link.writes else 0}

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Take one step on a batch of each rank. Collective.

        Batches of a distributed dataset weigh by rows; others count equally.

        Raises:
            LayoutError: under parameter servers.
            BatchError: replicas have unequal shares of batches, and the batch cannot be identified.
        """
        return self._on_batch(super().train_on_batch, args, kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch of each rank. Collective."""
        return self._on_batch(super().test_on_batch, args, kwargs)

    def _on_batch(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        link, given = self.mpistrat, _arguments(function, args, kwargs)
        as_dict = given.pop("return_dict")
        names = [name for name in ("x", "y", "sample_weight") if name in given]
        with link.errors():
            data = tuple(given[name] for name in names)
            link.begin_own_batch(function.__name__, [leaf for leaf in keras.tree.flatten(data) if leaf is not None])
            link.compare_replicas(function.__name__, "batches", arrays_in(data))
            if OBSERVERS and function.__name__ == "train_on_batch":
                link.read[:] = [inputs_of(data, link.rowless)]
            if link.rowless:
                data = keras.tree.map_structure(with_row, data, none_is_leaf=False)
                given.update(zip(names, data, strict=True))
            if not link.current:
                with link.together(function.__name__):
                    self._distribute_optimizers()
                    self._symbolic_build(data_batch=tuple(given[name] for name in names))
                link.same(function.__name__, "model", describe(self))
                link.same(function.__name__, "arguments of compile", describe_compiled(self))
                self.take_from_root()
            own_arrays(self)
            function(**given, return_dict=True)
            logs = {name: float(value) for name, value in self.get_metrics_result().items()}
        return logs if as_dict else self._flatten_metrics_in_order(logs)

    # metrics

    def get_metrics_result(self) -> Any:
        """Return the metrics; between steps those of all ranks, collectively."""
        if self.mpistrat.in_step:
            return super().get_metrics_result()
        link, variables, statistics = self.mpistrat, self.metrics_variables, statistics_of(self)
        if link.in_epoch:
            link.update.leave()
        mine = arrays_of(variables)
        parts = [_part(link, variable, array) for variable, array in zip(variables, mine, strict=True)]
        parts += arrays_of(statistics)
        *totals, count = link.sum([*(parts if link.counts else map(np.zeros_like, parts)), np.ones(()) * link.counts])
        if link.in_epoch:
            link.update.end_epoch()
            self.take_from_root()
        for variable, total in zip(variables, totals, strict=False):
            if variable.aggregation == "mean":
                total = total / count
            variable.assign(total.astype(variable.dtype))
        self._assign_means(statistics, totals[len(mine) :], count)
        results = super().get_metrics_result()
        results = keras.tree.map_structure(lambda value: np.array(keras.ops.convert_to_numpy(value)), results)
        for variable, array in zip(variables, mine, strict=True):
            variable.assign(array)
        return results

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        link = self.mpistrat
        result = super()._get_metrics_result_or_logs(logs) if link.counts else self.get_metrics_result()
        own = logs if result is logs and isinstance(logs, dict) else {}  # the last results of a step of the user's own
        mine = {name: np.asarray(keras.ops.convert_to_numpy(value), np.float64) for name, value in own.items()}
        return link.means(mine) or result

    def _average_statistics(self) -> None:
        """Set running statistics to their means over all ranks. Collective."""
        statistics = statistics_of(self)
        self._assign_means(statistics, self.mpistrat.sum(arrays_of(statistics)), self.mpistrat.size)

    def _assign_means(self, statistics: list[Any], totals: list[np.ndarray], count: Any) -> None:
        if self.mpistrat.size > 1:
            for variable, total in zip(statistics, totals, strict=True):
                variable.assign((total / count).astype(variable.dtype))

    # files

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Save as Keras does, on rank 0 or the first worker only."""
        return super().save(*args, **kwargs) if self.mpistrat.writes else None

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Save as Keras does, on rank 0 or the first worker only."""
        return super().save_weights(*args, **kwargs) if self.mpistrat.writes else None

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """Export as Keras does, on rank 0 or the first worker only."""
        return super().export(*args, **kwargs) if self.mpistrat.writes else None


def _arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    bound.arguments.pop("kwargs", None)
    return dict(bound.arguments)


def _part(link: ModelLink, variable: Any, array: np.ndarray) -> np.ndarray:
    """Return this rank's summand of a metric's variable over all ranks.

    Raises:
        ValueError: the variable has no aggregation, and there are several ranks.
    """
    if variable.aggregation == "none" and link.size > 1:
        expected, got = "variables with an aggregation", "'none'"
        text = explain("metrics", variable.path, expected=expected, got=got, remedy=REMEDY)
        raise ValueError(text)
    if variable.aggregation == "only_first_replica" and not link.first:
        return np.zeros_like(array)
    return array


def _symbolic(array: Any) -> Any:
    return keras.KerasTensor(array.shape, keras.backend.standardize_dtype(array.dtype))


def _in_order(link: ModelLink, outputs: Any, counts: list[int]) -> Any:
    """Return the rows of all ranks, batch by batch, without placeholders."""
    leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(outputs)]
    kept = np.repeat(np.array(counts) > 0, np.maximum(counts, 1))
    (table,) = link.gather([np.array([counts], np.int64)])
    everything = link.gather([leaf[kept] for leaf in leaves])
    starts = np.cumsum(np.concatenate([[0], table.reshape(-1)[:-1]])).reshape(table.shape)
    order = np.concatenate(
        [np.arange(starts[rank, step], starts[rank, step] + table[rank, step]) for step in range(table.shape[1])
         for rank in range(link.size)]
    )  # fmt: skip
    return keras.tree.pack_sequence_as(outputs, [leaf[order] for leaf in everything])


@final
class KerasStep:
    """Keras's function of a step, with this rank's own metrics.

    A rank without rows of the batch computes with another row, which does not count. It then restores its metrics, and those
    of the model's states that depend on rows: the ones that differ between the ranks with rows.
    """

    def __init__(self, model: Any, function: Callable[..., Any], training: bool) -> None:
        self._model, self._function, self._training = model, function, training

    @classmethod
    def around(cls, model: Any, function: Any, training: bool = False) -> KerasStep:
        """Return the step of a function, or the function itself if it is one."""
        return function if isinstance(function, cls) else cls(model, function, training)

    def __call__(self, *args: Any) -> Any:
        """Take a step: torch (batches), TensorFlow (iterator), JAX (state, iterator). Collective in training."""
        *state, source = args
        if keras.backend.backend() != "torch" and self._model.steps_per_execution == 1:
            source = iter([next(source)])  # raises if there is no row
        link = self._model.mpistrat
        if not link.counts:
            return ({}, *state) if state else {}
        with link.step(), over_ranks(link):
            take = self._with_rowless_ranks if link.some_rowless else self._function
            if OBSERVERS and self._training:
                return observed_step(self._model, take, *state, source)
            return take(*state, source)

    def _with_rowless_ranks(self, *args: Any) -> Any:
        model, link = self._model, self._model.mpistrat
        if keras.backend.backend() != "jax":
            statistics, metrics = statistics_of(model), model.metrics_variables
            before = arrays_of([*statistics, *metrics])
            logs = self._function(*args)
            back = [*link.differ(arrays_of(statistics)), *[True] * len(metrics)]
            for variable, array, differs in zip([*statistics, *metrics], before, back, strict=True):
                if differs and link.rowless:
                    variable.assign(array)
            return logs
        import jax.numpy as jnp

        (state, source) = args  # the step may change them
        kept = [[jnp.array(array) for array in state[index]] for index in (1, -1)]
        logs, (first, others, *slots, metrics) = self._function(state, source)
        variables = {id(variable): index for index, variable in enumerate(model.non_trainable_variables)}
        places = [variables[id(variable)] for variable in statistics_of(model)]
        differ = dict(zip(places, link.differ([np.asarray(others[place]) for place in places]), strict=True))
        if link.rowless:
            others = [kept[0][place] if differ.get(place) else array for place, array in enumerate(others)]
            metrics = kept[1]
        return logs, (first, others, *slots, metrics)


def _check_model(model: Any) -> None:
    """Check a model's layers and its arguments of `compile`.

    Raises:
        ValueError: a setting that has no meaning, or another one, on several ranks.
    """
    function = "ms.keras.distribute"
    if keras.distribution.distribution() is not None:
        remedy = "keras.distribution.set_distribution(None): the strategy divides the batches"
        raise ValueError(explain(function, "model", expected="no keras.distribution", got="a mesh", remedy=remedy))
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False):
            remedy = "Keras synchronizes within tf.distribute only: leave it out; running statistics are averaged"
            got = f"True of {layer.name}"
            raise ValueError(explain(function, "synchronized", expected="False", got=got, remedy=remedy))
    if not model.compiled:
        return
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        remedy = "Pass jit_compile=False to compile: XLA's code under TensorFlow cannot call MPI"
        raise ValueError(
            explain("compile", "jit_compile", expected="False under TensorFlow", got="True", remedy=remedy)
        )
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        if getattr(loss, "reduction", "") in ("sum", "none", None):
            expected = "a loss whose reduction is a mean over the rows, as sum_over_batch_size"
            got = f"{loss.reduction!r} of {loss.name}"
            remedy = "Gradients are averaged over ranks: divide the loss by the rows, and enlarge the learning rate"
            raise ValueError(explain("compile", "loss", expected=expected, got=got, remedy=remedy))
