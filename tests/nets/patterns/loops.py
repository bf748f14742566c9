"""Loops over batches that the programs of several frameworks share: the usual one, and other orders of drawing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Loop:
    """The usual loop: each epoch takes a step with each batch.

    Attributes:
        epochs: how many.
        batch_rows: rows of a global batch.
        config: what was drawn for the program.
        env: runs it under a strategy, or plainly.
    """

    epochs: int
    batch_rows: int
    config: dict[str, Any]
    env: Any

    def data(self, seed: int = 0, batch: int | None = None) -> Iterable[Any]:
        """Return batches of the rows, in an order of its own for each seed."""
        raise NotImplementedError

    def deliver(self, batch: Any, step: Callable[..., Any] | None = None) -> Any:
        """Take a step with a batch."""
        raise NotImplementedError

    def after_epoch(self, epoch: int) -> None:
        """Do something between epochs."""

    def train(self) -> None:
        """Run all epochs."""
        data = self.data()
        for epoch in range(self.epochs):
            for batch in data:
                self.deliver(batch)
            self.after_epoch(epoch)

    def finish(self) -> None:
        """Do something at the end."""


class Ahead(Loop):
    """The next batch is drawn before the step with this one."""

    def train(self) -> None:
        for epoch in range(self.epochs):
            for batch in ahead(iter(self.data(epoch))):
                self.deliver(batch)


class AtOnce(Loop):
    """All batches of an epoch are drawn into a list first, and taken from its end."""

    def train(self) -> None:
        for epoch in range(self.epochs):
            for batch in reversed(list(self.data(epoch))):
                self.deliver(batch)


class Left(Loop):
    """A loop is left by break, and another data set is begun."""

    def train(self) -> None:
        for epoch in range(self.epochs):
            for batch in self.data(epoch):
                self.deliver(batch)
                break
            for batch in self.data(epoch + 7, self.batch_rows + 1):
                self.deliver(batch)


class Pairs(Loop):
    """Two data sets of other sizes, drawn in turn; one step with both, or one with each."""

    def both(self, batch: Any, other: Any) -> None:
        """Take one step with a batch of each data set."""
        raise NotImplementedError

    def take(self, batch: Any, other: Any) -> None:
        if self.config["seed"] % 2:
            self.deliver(batch)
            self.deliver(other)
        else:
            self.both(batch, other)

    def train(self) -> None:
        for epoch in range(self.epochs):
            pairs = zip(self.data(epoch), self.data(epoch + 7, self.batch_rows - 2), strict=False)
            for batch, other in itertools.islice(pairs, 3):
                self.take(batch, other)


class PairsInRun(Pairs):
    """Batches of two data sets as arguments of one strategy.run."""

    def take(self, batch: Any, other: Any) -> None:
        self.env.run(self.both, args=(batch, other))


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Draw one batch ahead."""
    before = next(batches)
    for batch in batches:
        yield before
        before = batch
    yield before
