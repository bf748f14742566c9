"""What a model must not have to be divided over ranks."""

from __future__ import annotations

from typing import Any

import keras

from ..errors import explain

__all__ = ["check_model"]


def check_model(model: Any) -> None:
    """Check the layers of a model, and what it was compiled with.

    Raises:
        ValueError: a setting that has no meaning, or another one, on several ranks.
    """
    function = "ms.keras.distribute"
    if keras.distribution.distribution() is not None:
        remedy = "keras.distribution.set_distribution(None): the strategy divides the batches"
        raise ValueError(explain(function, "model", expected="no keras.distribution", got="one", remedy=remedy))
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
