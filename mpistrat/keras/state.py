"""Variables of a model over all ranks: rank 0's weights and slots, a seed for each rank, means of running statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.random import seed_generator

from .link import Link

__all__ = ["arrays_of", "describe", "is_seed", "statistics_of", "take_from_rank_0"]


def arrays_of(variables: Sequence[Any]) -> list[np.ndarray]:
    """Return what variables hold, copied."""
    return [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in variables]


def is_seed(variable: Any) -> bool:
    """Return whether a variable is the state of a random generator."""
    return bool(variable.name == "seed_generator_state")


def _optimizers(model: Any) -> Iterator[Any]:
    for value in vars(model).values():
        if isinstance(value, keras.optimizers.Optimizer):
            yield value


def _all(model: Any) -> list[Any]:
    """Every variable once, the same order on every rank."""
    found = [*model.variables]
    for optimizer in _optimizers(model):
        found += optimizer.variables
    return list({id(variable): variable for variable in found}.values())


def describe(model: Any) -> str:
    """Return what must be the same on every rank: names without Keras's numbers, shapes and dtypes of all variables."""
    of = [f"{variable.name} {variable.dtype} {tuple(variable.shape)}" for variable in _all(model)]
    frozen = sum(not variable.trainable for variable in model.variables)
    settings = [
        f"{type(optimizer).__name__} {sorted((k, v) for k, v in optimizer.get_config().items() if k != 'name')}"
        for optimizer in _optimizers(model)
    ]
    return ", ".join([*of, f"{frozen} not trainable", *settings])


def take_from_rank_0(link: Link, model: Any) -> None:
    """Give the variables of the model and its optimizers rank 0's numbers, and each rank seeds of its own. Collective."""
    variables = [variable for variable in _all(model) if variable.dtype != "string"]
    arrays = arrays_of(variables)
    common = seed_generator.global_seed_generator().state
    theirs = link.broadcast([*arrays, *arrays_of([common])])
    if not link.rank:
        return
    seeds = 0
    for variable, mine, array in zip([*variables, common], [*arrays, None], theirs, strict=True):
        if is_seed(variable):
            array = array.copy()
            mixed = np.random.SeedSequence([int(array.reshape(-1)[0]), link.rank, seeds]).generate_state(1)
            array.reshape(-1)[0] = mixed[0] >> 1
            seeds += 1
        elif mine is not None and mine.tobytes() == array.tobytes():
            continue
        variable.assign(array)


def statistics_of(model: Any) -> list[Any]:
    """Return the variables that each rank changes by its own rows: floating, not trained, of layers that are not frozen."""
    frozen = {
        id(variable)
        for layer in model._flatten_layers()
        if not layer.trainable
        for variable in layer.non_trainable_weights
    }
    return [
        variable for variable in model.non_trainable_weights if "float" in variable.dtype and id(variable) not in frozen
    ]
