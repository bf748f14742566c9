"""Texts that describe a model's layers and arguments of `compile`, and its losses in a step.

Ranks with equal models and settings have equal texts.

Keras divides a loss with a mask by the number of valid elements, and with `reduction="mean_with_sample_weight"` by the sum of
weights. A rank only knows its own rows. So in a step, such a loss is multiplied by the rank's mean of the mask or weights
over the mean of all ranks: the mean over ranks, weighted by rows, is then the loss of the whole batch. So that `Mean` is that
of whole batches, too, a number that it gets without a weight, as a loss, counts by the rank's rows over the mean of all ranks.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import math
import re
import types
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.losses import loss as keras_losses
from keras.src.metrics import reduction_metrics as keras_means

from ..arena.values import checksum
from ..comm.monitor.abort import is_user_code
from .link import ModelLink
from .optimizer import sum_over_ranks

__all__ = [
    "describe_compiled",
    "describe_layers",
    "over_ranks",
]


_DEEPEST = 6  # levels of description
# In configurations: names that Keras counts, settings that rank 0's weights replace, and those that may differ by rank.
_NO_SETTING = re.compile("name|seed|.*initializer|build_config|build_input_shape|batch_shape|compile_config")
_OF_A_RANK = re.compile("(.*_)?(rank|hostname|pid|seed|process_index|worker_index)", re.IGNORECASE)
_SMALL = 1 << 16  # elements of an array that is compared
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), np.generic)


def describe_compiled(model: Any) -> str:
    """Return the arguments of `compile` without the optimizer; "" if not compiled."""
    if not model.compiled:
        return ""
    given = model._compile_config.config
    _described.set([])
    return "compiled with " + ", ".join(
        f"{name}={_word(value, 0)}" for name, value in given.items() if name != "optimizer"
    )


def describe_layers(model: Any) -> str:
    """Return the classes of a model and its layers, their settings, functions and connections."""
    _described.set([])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a function that cannot be saved
        return ", ".join(_layer(layer, f"layer {place}") for place, layer in enumerate(model._flatten_layers()))


def _layer(layer: Any, title: str) -> str:
    """Return a layer's class, configuration, or else numbers among its attributes, and functions."""
    kind, own, is_model = type(layer), vars(layer), isinstance(layer, keras.Model)
    parts = (types.FunctionType, keras.regularizers.Regularizer, keras.constraints.Constraint)
    # Functions of a model are its losses; Keras's own are in the configuration.
    given = {name: each for name, each in own.items() if isinstance(each, parts) and not is_model}
    shown = {name: each for name, each in given.items() if not each.__module__.startswith("keras.")}
    if not is_model and not kind.__module__.startswith("keras."):
        shown |= {name: each for name, each in vars(kind).items() if isinstance(each, types.FunctionType)}
    try:
        texts = _configuration(_without_layers(layer))
    except Exception:  # there is none, or it fails
        texts = {}
        if not is_model:  # a model's numbers often control printing on one rank
            shown |= {name: each for name, each in own.items() if type(each) in (bool, int, float) and name[:1] != "_"}
    texts |= {name: _word(each, 0) for name, each in shown.items() if not _NO_SETTING.fullmatch(name)}
    texts["dtype"] = layer.dtype_policy.name
    settings = "".join(f", {kind.__name__} {name}={text}" for name, text in sorted(texts.items()))
    return re.sub(r" at 0x[0-9a-f]+", "", f"{title} {kind.__module__}.{kind.__qualname__}{settings}")


def _without_layers(layer: Any) -> dict[str, Any]:
    """Return the configuration of a layer or a model, without other layers' configurations."""
    config = dict(layer.get_config())
    if isinstance(layer, keras.Model) and "layers" in config:
        inner = {each.name for each in layer._layers}
        config["layers"] = [
            {**each, "config": {}} if each["config"].get("name") in inner else each for each in config["layers"]
        ]
    return config


def _configuration(config: Mapping[str, Any], places: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return a configuration's settings as text; layers by index instead of name."""
    layers = config.get("layers")
    if isinstance(layers, list):
        places = {str(layer.get("name")): place for place, layer in enumerate(layers) if isinstance(layer, Mapping)}
    return {name: _setting(each, places or {}) for name, each in config.items() if not _NO_SETTING.fullmatch(str(name))}


def _setting(value: Any, places: Mapping[str, int]) -> str:
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":  # its bytes differ between processes; the attribute describes it
            return "lambda"
        if value.get("class_name") == "__keras_tensor__":
            return _setting(value["config"]["keras_history"], places)
        return f"{{{', '.join(f'{name}: {text}' for name, text in _configuration(value, places).items())}}}"
    if isinstance(value, (list, tuple)):
        if len(value) == 3 and isinstance(value[0], str) and value[0] in places:  # an output of a layer
            return f"#{places[value[0]]}:{value[1]}:{value[2]}"
        return f"[{', '.join(_setting(each, places) for each in value)}]"
    return _word(value, 0)


def _word(value: Any, depth: int) -> str:
    """Return a value as text: numbers and text literally, others by class and settings."""
    inside = depth + 1
    if isinstance(value, _SIMPLE):
        return repr(value)
    if depth > _DEEPEST:
        return type(value).__name__
    if isinstance(value, np.ndarray):
        return f"array{value.shape}" + f"#{checksum(np.ascontiguousarray(value).reshape(-1)):08x}" * (
            value.dtype != object
        )
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_word(item, inside) for item in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_word(item, inside) for item in value))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_word(item, inside)}' for key, item in value.items())}}}"
    if isinstance(value, functools.partial):
        return f"partial({_word(value.func, inside)}, {_word(value.args, inside)}, {_word(value.keywords, inside)})"
    if isinstance(value, types.MethodType):
        return f"{_word(value.__self__, inside)}.{_word(value.__func__, inside)}"
    if isinstance(value, types.FunctionType):
        return _function(value, inside)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    return _object(value, inside)


def _function(function: types.FunctionType, depth: int) -> str:
    """Return a function's name, a digest of its code, and the values and functions that it uses."""
    text = f"{function.__module__}.{function.__qualname__}#{_digest(function.__code__):08x}"
    if function in _described.get():  # the functions of a module may call each other
        return text
    _described.get().append(function)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found: dict[str, Any] = {}
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    found |= _read_by(function)
    shown: dict[str, Any] = {name: _array(value) for name, value in found.items() if _is_plain(value)}
    shown |= {"defaults": function.__defaults__} if function.__defaults__ else {}
    shown |= {"keywords": function.__kwdefaults__} if function.__kwdefaults__ else {}
    return text + (f"({_pairs(shown, depth)})" if shown else "")


def _read_by(function: types.FunctionType) -> dict[str, Any]:
    """Return the values that a function reads from modules of the program and objects in them.

    Without True and False and numbers named rank, which often control printing on one rank; but a lambda computes.
    """
    found: dict[str, Any] = {}
    if not is_user_code(function.__code__.co_filename):
        return found
    for name, attribute in _names(function.__code__):
        value = function.__globals__.get(name)
        if attribute:
            foreign = isinstance(value, types.ModuleType) and not is_user_code(getattr(value, "__file__", None) or "")
            value = None if foreign else getattr(value, "__dict__", {}).get(attribute)
        prints = isinstance(value, (bool, np.bool_)) or _OF_A_RANK.fullmatch(attribute or name)
        if value is not None and (not prints or function.__name__ == "<lambda>"):
            found[f"{name}.{attribute}" if attribute else name] = value
    return found


@functools.lru_cache(1024)
def _names(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """Return the global names that code reads, each with an attribute, or ""."""
    found: dict[tuple[str, str], None] = {}
    last = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            last = instruction.argval
            found[last, ""] = None
        else:
            if last and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                found[last, instruction.argval] = None
            last = ""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= dict.fromkeys(_names(inner))
    return tuple(found)


def _is_plain(value: Any) -> bool:
    """Return whether a read value is compared: numbers, texts, small arrays, tuples, functions."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, np.ndarray) or keras.ops.is_tensor(value):
        return math.prod(value.shape) <= _SMALL and str(value.dtype) != "object"
    return isinstance(value, (*_SIMPLE, types.FunctionType))


def _array(value: Any) -> Any:
    """Convert a tensor to a NumPy array; return other values unchanged."""
    return keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value


def _digest(code: types.CodeType) -> int:
    """Return a digest of code, equal in every process of one Python."""
    constants = [f"#{_digest(one):08x}" if isinstance(one, types.CodeType) else _word(one, 0) for one in code.co_consts]
    return zlib.crc32(repr((code.co_code, code.co_names, code.co_varnames, constants)).encode())


def _object(value: Any, depth: int) -> str:
    """Return an object's class, configuration and other attributes.

    Without numbers of metrics, which are counts.
    """
    kind = type(value)
    numbers = () if isinstance(value, keras.metrics.Metric) else (bool, int, float)
    settings: dict[str, Any] = {}
    for name, each in getattr(value, "__dict__", {}).items():
        if (type(each) in numbers and name[:1] != "_") or isinstance(each, types.FunctionType):
            settings[name] = each
        elif isinstance(each, Mapping) and all(isinstance(one, _SIMPLE) for one in each.values()):
            settings[name] = dict(each)  # the arguments of a function, as Keras stores them
    if not kind.__module__.startswith("keras."):
        settings |= {name: each for name, each in vars(kind).items() if isinstance(each, types.FunctionType)}
    with contextlib.suppress(Exception):  # there is none, or it fails
        settings |= {name: each for name, each in value.get_config().items() if name != "name"}
    return f"{kind.__module__}.{kind.__qualname__}({_pairs(settings, depth)})"


def _pairs(values: Mapping[str, Any], depth: int) -> str:
    text = ", ".join(f"{name}={_word(value, depth)}" for name, value in sorted(values.items()))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


_described: ContextVar[list[types.FunctionType]] = ContextVar("mpistrat_keras_described")
_reduce = keras_losses.reduce_weighted_values
_of_samples = keras_means.reduce_to_samplewise_values


class _Sums:
    """The sums of a step's losses over all ranks.

    Attributes:
        link: of the model.
        last: the latest sum, JAX's array or tracer.
    """

    def __init__(self, link: ModelLink) -> None:
        self.link = link
        self.last: Any = None


_sums: ContextVar[_Sums | None] = ContextVar("mpistrat_keras_losses", default=None)


@contextlib.contextmanager
def over_ranks(link: ModelLink) -> Iterator[None]:
    """Divide losses by sums over the rows of all ranks in a `with` block, collectively."""
    if keras_losses.reduce_weighted_values is _reduce:
        keras_losses.reduce_weighted_values = _reduced
        keras_means.reduce_to_samplewise_values = _weighted
    token = _sums.set(_Sums(link) if link.meets and link.size > 1 else None)
    try:
        yield
    finally:
        _sums.reset(token)


def _reduced(
    values: Any, sample_weight: Any = None, mask: Any = None, reduction: str = "sum_over_batch_size", dtype: Any = None
) -> Any:
    """Return Keras's loss; in a step, this rank's share of the loss of all ranks."""
    exact = keras.backend.standardize_dtype(dtype or keras.config.floatx()) == "float64"
    divisors, exact_dtype = mask, "float64" if exact else "float32"
    if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
        given = sample_weight  # copied, since apply_mask changes it in place
        given = None if given is None else ops.convert_to_tensor(given, exact_dtype) * 1.0
        divisors = keras_losses.apply_mask(given, mask, exact_dtype, reduction)
    loss = _reduce(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    sums = _sums.get()
    if sums is None or divisors is None:
        return loss
    mine = ops.stop_gradient(ops.mean(ops.cast(divisors, exact_dtype)))
    if keras.backend.backend() == "jax":
        mine = _after(sums.last, mine)
    (sums.last,) = sum_over_ranks(sums.link, [mine], lambda: sums.link.share)
    return loss * ops.cast(ops.divide_no_nan(mine, sums.last), loss.dtype)


def _weighted(values: Any, sample_weight: Any, reduce_fn: Any, dtype: Any) -> Any:
    """Return Keras's values and weights of a metric; in a step, a number that is a mean over rows counts by this rank's rows."""
    sums = _sums.get()
    if (
        sums is not None
        and sample_weight is None
        and reduce_fn is ops.mean
        and len(ops.convert_to_tensor(values).shape) == 0
    ):
        sample_weight = _rows_here(sums.link)
    return _of_samples(values, sample_weight, reduce_fn, dtype)


def _rows_here(link: ModelLink) -> Any:
    """Return this rank's rows of the batch over the mean of all ranks, as a number of the backend, read when the step runs."""

    def read() -> Any:
        return np.array(link.share * link.size, np.float32)

    if keras.backend.backend() == "jax":
        import jax
        from jax.experimental import io_callback

        return io_callback(read, jax.ShapeDtypeStruct((), np.float32))
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.ensure_shape(tf.numpy_function(read, [], tf.float32), ())
    return read()


def _after(first: Any, second: Any) -> Any:
    """Return JAX's second array, computed after the first: ranks sum in the same order."""
    import jax

    if first is None or getattr(first, "_trace", None) is not getattr(second, "_trace", None):
        return second
    return jax.lax.optimization_barrier((first, second))[1]
