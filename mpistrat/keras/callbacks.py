"""Callbacks of a distributed fit: all ranks run them with the same logs, but those that write or show run on one rank only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import keras

from ..base.errors import explain
from .link import ModelLink
from .state import arrays_of

__all__ = ["on_this_rank"]

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
    """The last callback: what the others did on this rank alone is brought to all."""

    def __init__(self, link: ModelLink) -> None:
        super().__init__()
        self._link = link

    def on_train_begin(self, logs: Any = None) -> None:
        """Take over the root's weights, and its epoch: it may have read a backup. Collective."""
        self._link.wants_stop = self._link.stops = False
        self._link.begin_training()
        self.model.take_from_root()
        if self._link.update is not None:
            self._link.update.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Under parameter servers, begin a pass. Collective."""
        if self._link.update is not None:
            self._link.update.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Let `stop_training` be what all ranks have agreed on: the sum of the next step's gradients carries a wish along."""
        link = self._link
        if link.strategy.size == 1 or link.served:
            return
        if self.model.stop_training and not link.stops:
            link.wants_stop = True
        link.stop_together()
        self.model.stop_training = link.stops

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree on `stop_training`, and compare the learning rates and the weights. Collective."""
        self.model.stop_training = self._link.agree_on_stop(bool(self.model.stop_training))
        rate = getattr(self.model.optimizer, "learning_rate", None)
        if rate is not None:
            self._link.same("fit", "learning rate after an epoch", repr(float(keras.ops.convert_to_numpy(rate))))
        self._compare_weights("after an epoch")

    def on_train_end(self, logs: Any = None) -> None:
        """Compare the weights: callbacks of some ranks may have changed theirs, as to the best ones. Collective."""
        self._compare_weights("after fit")

    def _compare_weights(self, when: str) -> None:
        weights = self.model.trainable_weights
        if not self._link.served:  # which have given all ranks theirs
            self._link.compare_weights(when, [weight.path for weight in weights], arrays_of(weights))


def on_this_rank(link: ModelLink, callbacks: Any) -> list[Any]:
    """Return the callbacks that this rank runs: others than the root neither write nor print.

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
