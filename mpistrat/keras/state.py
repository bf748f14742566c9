"""Variables of a model over all ranks: rank 0's weights and slots, seeds of the replicas, means of running statistics."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.random import seed_generator

from .link import Link

__all__ = ["arrays_of", "describe", "is_seed", "statistics_of", "take_from_root"]


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
    """Return what must be the same on every rank: shapes and dtypes of all variables, and the optimizers' settings."""
    texts = []
    for variable in model.variables:
        kind = "" if variable.trainable else " not trained"
        texts.append(f"{variable.name} {variable.dtype} {_shape(variable)}{kind}")
    for optimizer in _optimizers(model):
        settings = sorted((name, value) for name, value in optimizer.get_config().items() if name != "name")
        texts.append(f"{type(optimizer).__name__} with {len(optimizer.variables)} variables")
        texts += [f"{name}={_without_names(value)!r}" for name, value in settings]
    return ", ".join(texts)


def _shape(variable: Any) -> str:
    return "x".join(map(str, variable.shape)) or "scalar"


def _without_names(config: Any) -> Any:
    """A configuration without the numbers that Keras gives to names."""
    if isinstance(config, dict):
        return {name: _without_names(value) for name, value in config.items() if name != "name"}
    return config


def take_from_root(link: Link, model: Any) -> None:
    """Give the variables of the model and its optimizers the root's numbers, and replicas other seeds. Collective."""
    variables = [variable for variable in _all(model) if variable.dtype != "string"]
    arrays = [np.asarray(keras.ops.convert_to_numpy(variable.value)) for variable in variables]
    common = seed_generator.global_seed_generator().state
    *theirs, state = link.broadcast([*arrays, *arrays_of([common]), _state_of_torch()])
    if link.writes:
        return
    own_seeds = (
        int(seed) >> 1
        for index in itertools.count()
        for seed in np.random.SeedSequence([zlib.crc32(state.data), link.rank, index]).generate_state(1)
    )
    for variable, mine, array in zip([*variables, common], [*arrays, None], theirs, strict=True):
        if is_seed(variable) and not link.first:
            array = array.copy()
            array[0] = next(own_seeds) ^ int(array[0])
        elif mine is not None and np.array_equal(_bits(mine), _bits(array)):
            continue
        variable.assign(array)
    if keras.backend.backend() == "torch":
        import torch

        if link.first:
            torch.set_rng_state(torch.from_numpy(state))
        else:
            torch.manual_seed(next(own_seeds))


def _bits(array: np.ndarray) -> np.ndarray:
    """What an array is made of, in which NaN equals itself."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _state_of_torch() -> np.ndarray:
    """The state of torch's generator, by which Keras's dropout draws there; of other backends nothing that changes."""
    if keras.backend.backend() != "torch":
        return np.zeros(1, np.uint8)
    import torch

    return np.array(torch.get_rng_state())


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
