"""A model's weights on parameter servers: workers push gradients, and pull new weights."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import keras
import numpy as np

from ..base import nest
from ..base.errors import LayoutError, explain
from ..data import DistributedDataset
from ..strategy.input import Distributor, Division
from ..strategy.loss import summed_replicas, sums_workers, weight_of_pass
from ..variables import Variable
from .fused import CLIPS, fits, rule_of
from .inputs import KerasBatches
from .link import ModelLink, arrays_of
from .optimizer import DistributedOptimizer

__all__ = ["ServedLink"]


@final
class ServedLink(ModelLink):
    """The link to parameter servers, which hold the weights: ranks meet after epochs, not in steps."""

    meets = False

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, ServedOptimizer, strategy.extended.process_group)

    def begin_batch(self, rows: int | None, total: int, batch: Any, training: bool) -> None:
        """Start the step of a batch, which determines its share of the servers' step."""
        if not training:
            super().begin_batch(rows, total, batch, training)
            return
        share = weight_of_pass(self.strategy, nest.flatten(batch), "fit") if total else 1.0
        self.share, self.rowless = share / summed_replicas(self.strategy), rows == 0
        self.some_rowless = self.rowless

    def begin_own_batch(self, function: str, arrays: Sequence[Any]) -> None:
        if function == "train_on_batch":
            raise not_in_fit(function)
        super().begin_own_batch(function, arrays)

    def _reduce(self, mine: np.ndarray) -> np.ndarray:
        with self._group.collective("keras sum", dtype="float64", shape=mine.shape):
            parts = self._group.all_gather_bytes(mine.tobytes())
        total: np.ndarray = np.sum([np.frombuffer(part) for part in parts], axis=0)
        return total

    def means(self, numbers: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return the means over the ranks that have numbers. Collective."""
        texts = self.exchange("logs", json.dumps({name: float(value) for name, value in numbers.items()}))
        tables = [table for table in map(json.loads, texts) if table]
        return {name: np.mean([table[name] for table in tables]) for name in tables[0]} if tables else {}

    def differ(self, arrays: Sequence[np.ndarray]) -> list[bool]:
        """Return True for each array: any may differ. Local."""
        return [True] * len(arrays)

    def stop_together(self, wanted: bool) -> bool:
        """Return this rank's wish: ranks agree after the epoch."""
        return wanted

    def compare_weights(self, when: str, weights: Sequence[Any]) -> None:
        """Do nothing: all ranks have the servers' weights."""

    def distributed(self, function: str, dataset: Any, training: bool) -> DistributedDataset:
        """Return a dataset of this rank's batches; all ranks evaluate together. Collective.

        Raises:
            ValueError: a dataset distributed over the workers cannot be evaluated.
        """
        if training:
            return super().distributed(function, dataset, training)
        if isinstance(dataset, DistributedDataset):
            expected, got = "the dataset itself, of whose batches servers have a part, too", "a distributed one"
            raise ValueError(explain(function, "x", expected=expected, got=got))
        return Distributor(self._group, Division.together(self._group), None).of_dataset(dataset)

    def input(self, batches: KerasBatches, training: bool) -> KerasBatches:
        return ServedBatches(self, batches) if training else batches


class ServedOptimizer(DistributedOptimizer):
    """Methods of a distributed optimizer whose gradients go to servers."""

    def _sum_and_apply(self, grads: list[Any], variables: list[Any] | None) -> None:
        """Push the gradients, and set the servers' weights."""
        update, known = self.mpistrat.update, self._trainable_variables
        if update is None:
            raise not_in_fit("Optimizer.apply")
        if variables is None:
            variables = list(known)
        self._check_variables_are_known(variables)
        pairs = [(grad, v) for grad, v in zip(grads, variables, strict=True) if grad is not None]
        step = functools.partial(update.step, there=[self._get_variable_index(v) for _, v in pairs])
        new = _PUSHES[keras.backend.backend()](step, [grad for grad, _ in pairs], known)
        for variable, array in zip(known, new, strict=True):
            variable.assign(array)
        self.iterations.assign_add(1)

    def _sum_and_return(self, *_: Any) -> Any:
        expected, got = "Keras's own train_step, compiled", "another train_step, or no jit"
        remedy = "With JAX as Keras's backend, use ms.MultiWorkerMirroredStrategy() for a train_step of your own"
        raise LayoutError(explain("fit", "train_step", expected=expected, got=got, remedy=remedy))


def not_in_fit(function: str) -> LayoutError:
    """Return the error of a step without the servers."""
    expected, got = "a step of fit, which needs the servers", "a step outside of fit"
    remedy = "Call fit on every rank, or use ms.MultiWorkerMirroredStrategy()"
    return LayoutError(explain(function, "", expected=expected, got=got, remedy=remedy))


def _torch_push(step: Callable[..., list[np.ndarray]], gradients: list[Any], weights: list[Any]) -> list[Any]:
    import torch

    from ..torch.tensors import array_of, tensor_of

    def push() -> list[Any]:
        dense = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in gradients]
        return [tensor_of(array) for array in step([array_of(tensor.detach().cpu()) for tensor in dense])]

    disabled: Callable[[], list[Any]] = torch.compiler.disable(push)
    return disabled()


def _tensorflow_push(step: Callable[..., list[np.ndarray]], gradients: list[Any], weights: list[Any]) -> list[Any]:
    import tensorflow as tf

    dense = [tf.convert_to_tensor(tensor) for tensor in gradients]
    new = tf.numpy_function(lambda *arrays: step(arrays), dense, [weight.dtype for weight in weights], stateful=True)
    for array, weight in zip(new, weights, strict=True):
        array.set_shape(weight.shape)
    return list(new)


_PUSHES = {"torch": _torch_push, "tensorflow": _tensorflow_push}


@final
class ServedBatches(KerasBatches):
    """Batches for parameter servers: a worker has its own; a server has none, and serves until workers have finished.

    A rank without batches gets an example that is not used.

    Args:
        link: of the model.
        whole: the input of `fit`.
    """

    def __init__(self, link: ModelLink, whole: KerasBatches) -> None:
        super().__init__(link)
        self._whole, self._dealt = whole, whole.dealt()
        self._reading: Any = None

    @property
    def num_batches(self) -> int | None:
        return None if self.link.strategy.is_server else self._dealt.num_batches

    def describe(self) -> str:
        return self._whole.describe()

    def example(self) -> Any:
        return self._dealt.example()

    def compare_first(self, example: Any) -> None:
        self._whole.compare_first(example)

    def begin(self, model: Any, steps: int | None) -> int | None:
        """Create the optimizer's variables on the servers; return this rank's steps in an epoch. Collective."""
        link, optimizer = self.link, model.optimizer
        # The number of a worker's batches is not known before.
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        with link.together("fit"):
            check_served(link, optimizer)
        if optimizer.mpistrat_update is None:
            optimizer.__dict__["mpistrat_update"] = ServedUpdate(link, optimizer)
        link.update = optimizer.mpistrat_update
        return None if link.strategy.is_server else steps

    def on_epoch_begin(self) -> None:
        self._dealt.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dealt.on_epoch_end()

    def local_batches(self) -> Iterator[tuple[Any, int | None, int]]:
        link = self.link
        link.counts = False
        if link.strategy.is_server:
            link.strategy.serve()
        else:
            self._reading = self._dealt.local_batches()
            for batch in self._reading:
                link.counts = True
                yield batch
        if not link.counts:  # Keras's loops need a step
            yield self.example(), None, 0

    def close(self) -> None:
        """Stop reading, which belongs to a pass."""
        if self._reading is not None:
            self._reading.close()


@final
class ServedUpdate:
    """The steps of one optimizer on the servers, by the package's rule with its formula.

    Workers step independently. Between epochs all ranks have the servers' weights, and Keras's optimizer their state, as if
    it had updated itself: so callbacks, evaluation and files work as usual.
    """

    def __init__(self, link: ModelLink, optimizer: Any) -> None:
        """Create the variables of a checked optimizer. Collective, servers included."""
        rule = rule_of(optimizer)
        assert rule is not None
        self._form = rule
        self._link, self._optimizer = link, optimizer
        self._weights = list(optimizer._trainable_variables)
        with link.strategy.scope():
            self._rule = rule.kind(_rate_of(optimizer), **rule.numbers_of(optimizer))
            self._variables = [
                Variable(array, name=weight.path)
                for weight, array in zip(self._weights, arrays_of(self._weights), strict=True)
            ]
        kept = zip(self._weights, self._variables, strict=True)
        self._rule.exclude_from_weight_decay([v for weight, v in kept if not optimizer._use_weight_decay(weight)])
        self._slots = rule.slots_of(optimizer)
        self._there: list[np.ndarray] = []  # the servers' weights, as this rank last saw them
        self._count = [id(variable) for variable in optimizer.variables].index(id(optimizer.iterations))

    # steps, on workers

    def step(self, gradients: Sequence[np.ndarray], there: Sequence[int]) -> list[np.ndarray]:
        """Push some gradients, and return all weights, as new arrays. In any thread."""
        link = self._link
        if link.rowless:
            scaled = [np.zeros_like(gradient) for gradient in gradients]
        else:
            scaled = [np.asarray(gradient * gradient.dtype.type(link.share)) for gradient in gradients]
        pairs = [(gradient, self._variables[index]) for gradient, index in zip(scaled, there, strict=True)]
        try:
            new: list[np.ndarray] = link.strategy.run(functools.partial(self._push_and_pull, pairs))
            return new
        except BaseException as error:
            link.failure = error
            raise

    def _push_and_pull(self, pairs: list[tuple[np.ndarray, Any]]) -> list[np.ndarray]:
        self._rule.apply_gradients(pairs)
        return [np.array(variable.numpy()) for variable in self._variables]

    def __call__(self, weights: Any, slots: Any, gradients: Sequence[np.ndarray]) -> tuple[Any, Any]:
        """Return JAX's new weights and slots."""
        import jax.numpy as jnp

        slots = list(slots)
        slots[self._count] = slots[self._count] + 1
        return [jnp.array(array) for array in self.step(gradients, range(len(gradients)))], slots

    # epochs, on all ranks

    def begin(self) -> None:
        """Send the state of Keras's optimizer to the servers. Collective."""
        names = [variable.name for variable in self._variables]
        slots: dict[str, dict[str, np.ndarray]] = {name: {} for name in names}
        for slot, variables in self._slots.items():
            for name, array in zip(names, arrays_of(variables), strict=True):
                slots[name][slot] = array
        iterations = int(keras.ops.convert_to_numpy(self._optimizer.iterations))
        self._rule.set_state({"iterations": iterations, "slots": slots if iterations and self._slots else {}})

    def begin_epoch(self) -> None:
        """Send changed weights to the servers, and start a pass. Collective."""
        link = self._link
        for name, value in self._form.numbers_of(self._optimizer).items():
            if value != getattr(self._rule, name):
                setattr(self._rule, name, value)
        rate = _rate_of(self._optimizer)
        if isinstance(rate, float) and rate != self._rule._core.given_rate:
            self._rule.learning_rate = rate
        if link.writes:
            arrays = arrays_of(self._weights)
            for index, (variable, array) in enumerate(zip(self._variables, arrays, strict=True)):
                if not self._there or not np.array_equal(array, self._there[index], equal_nan=True):
                    variable.assign(array)
            link.strategy.flush()
        link.numbers("weights sent")
        link.in_epoch = True
        if not link.strategy.is_server:
            link.strategy.resume_pass()

    def leave(self) -> None:
        """End this worker's epoch; its input may continue in the next one."""
        if not self._link.strategy.is_server:
            self._link.strategy.suspend_pass()

    def end_epoch(self) -> None:
        """Set Keras's variables of this rank to the servers' values. Collective, when all workers have left.

        The weights on the root only.
        """
        link, rule = self._link, self._rule
        link.in_epoch = False
        if link.writes:
            self._there = [np.array(variable.numpy()) for variable in self._variables]
            for weight, array in zip(self._weights, self._there, strict=True):
                weight.assign(array)
        for index, variable in enumerate(self._variables):
            slots = rule.slots(variable)
            for name, array in slots.items():
                self._slots[name][index].assign(array)
        self._optimizer.iterations.assign(rule._core.all_iterations())


def _rate_of(optimizer: Any) -> float | Callable[[int], float]:
    """Return the learning rate for servers: a number, or a schedule."""
    given = optimizer._learning_rate
    if isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
        return lambda step: float(keras.ops.convert_to_numpy(given(step)))
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def check_served(link: ModelLink, optimizer: Any) -> None:
    """Check that servers can apply a built optimizer in single steps.

    Raises:
        ValueError: they cannot.
    """
    function = "fit"
    if link.steps > 1:
        got = f"{link.steps}, with parameter servers"
        raise ValueError(explain("compile", "steps_per_execution", expected="1", got=got))
    constrained = [v.path for v in optimizer._trainable_variables if v.constraint is not None]
    if not fits(optimizer) or constrained:
        expected = "SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, Ftrl or Lion of Keras's own, whose update servers have"
        got = f"constraints of {', '.join(constrained)}" if constrained else type(optimizer).__name__
        remedy = (
            "Without use_ema, gradient_accumulation_steps, loss scaling and constraints; or use "
            "ms.MultiWorkerMirroredStrategy()"
        )
        raise ValueError(explain(function, "optimizer", expected=expected, got=got, remedy=remedy))
    clips = [name for name in CLIPS if getattr(optimizer, name) is not None]
    if clips and sums_workers(link.strategy):
        expected = "no clipping, where servers sum the gradients of workers, which see their own only"
        remedy = "Set workers_in_sync=... to all workers, or use ms.MultiWorkerMirroredStrategy()"
        raise ValueError(explain(function, "optimizer", expected=expected, got=", ".join(clips), remedy=remedy))
