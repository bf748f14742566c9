"""Variables of a model over all ranks: rank 0's weights and slots, seeds, means of running statistics."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras.src.random import seed_generator

from .compiled import describe_layers
from .link import ModelLink, arrays_of

__all__ = [
    "describe",
    "describe_optimizer",
    "optimizers_in",
    "own_arrays",
    "statistics_of",
    "take_from_root",
]


def _is_seed(variable: Any) -> bool:
    """Return whether a variable is the state of a random generator."""
    return bool(variable.name == "seed_generator_state")


def optimizers_in(model: Any) -> list[Any]:
    """Return the optimizers in attributes of a model and its layers, also in lists, tuples and dicts, and those that joined."""
    owners = [model, *model._flatten_layers(include_self=False)]
    values = [value for owner in owners for value in list(vars(owner).values())]
    return _once([*(optimizer for value in values for optimizer in _optimizers(value)), *model.mpistrat.joined])


def _optimizers(value: Any) -> Iterator[Any]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for child in list(value.values() if isinstance(value, dict) else value):
            yield from _optimizers(child)


def _once(items: list[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())


def describe(model: Any) -> str:
    """Describe the shapes, dtypes, layers and optimizers, which must be equal on all ranks."""
    texts = []
    for variable in model.variables:
        kind = "" if variable.trainable else " not trained"
        texts.append(f"{variable.name} {variable.dtype} {_shape(variable)}{kind}")
    return ", ".join([*texts, describe_layers(model), *map(describe_optimizer, optimizers_in(model))])


def describe_optimizer(optimizer: Any) -> str:
    """Describe the properties of an optimizer that must be equal on all ranks."""
    settings = sorted((name, value) for name, value in optimizer.get_config().items() if name != "name")
    texts = [f"{type(optimizer).__name__} with {len(optimizer.variables)} variables"]
    texts += [f"{name}={_without_names(value)!r}" for name, value in settings]
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of one that scales losses
    for place, variable in enumerate(inner._trainable_variables):
        if not inner._use_weight_decay(variable):
            texts.append(f"no weight decay of variable {place} ({variable.name})")
    return re.sub(r" at 0x[0-9a-f]+", "", ", ".join(texts))  # of objects in closures


def _shape(variable: Any) -> str:
    return "x".join(map(str, variable.shape)) or "scalar"


def _without_names(config: Any) -> Any:
    """Return a configuration without the names that Keras numbers."""
    if isinstance(config, dict):
        return {name: _without_names(value) for name, value in config.items() if name != "name"}
    return config


def _all(model: Any) -> list[Any]:
    """Return every variable of a model and its optimizers once, in a common order."""
    theirs = [variable for optimizer in optimizers_in(model) for variable in optimizer.variables]
    return _once([*model.variables, *theirs])


def take_from_root(link: ModelLink, model: Any) -> None:
    """Use the root's values for the model and its optimizers, and another seed per replica. Collective."""
    own_arrays(model)
    rows = _states_of_rows(model)
    variables = [variable for variable in _all(model) if variable.dtype != "string" and id(variable) not in rows]
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
        if _is_seed(variable) and not link.first:
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


def own_arrays(model: Any) -> None:
    """Give each of JAX's variables of a model and its optimizers its own array.

    After an assignment both variables share an array, as averages and weights at the end of a fit. A step of Keras deletes
    the arrays of its variables.
    """
    if keras.backend.backend() != "jax":
        return
    import jax.numpy as jnp

    seen: set[int] = set()
    for variable in _all(model):
        array = variable.value
        if id(array) in seen:
            variable.assign(jnp.array(array, copy=True))
        seen.add(id(array))


def _bits(array: np.ndarray) -> np.ndarray:
    """Return an array's bytes, in which NaN equals itself."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _state_of_torch() -> np.ndarray:
    """Return the state of torch's generator, which dropout uses; a constant for other backends."""
    if keras.backend.backend() != "torch":
        return np.zeros(1, np.uint8)
    import torch

    return np.array(torch.get_rng_state())


def statistics_of(model: Any) -> list[Any]:
    """Return the variables that change by rows: floating, not trained, of layers that are not frozen."""
    others = {
        id(variable)
        for layer in model._flatten_layers()
        if not layer.trainable
        for variable in layer.non_trainable_weights
    } | _states_of_rows(model)
    return [
        variable for variable in model.non_trainable_weights if "float" in variable.dtype and id(variable) not in others
    ]


def _states_of_rows(model: Any) -> set[int]:
    """Return the ids of stateful layers' states per row."""
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    states = keras.tree.flatten([getattr(layer, "states", None) for layer in layers])
    return {id(state) for state in states if state is not None}
