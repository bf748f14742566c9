"""Sums that start during a backward pass, of buckets of parameters, by `Optimizer.begin`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, final

from ..base import log
from .module import TorchLink

__all__ = ["Overlap"]

_BUCKET_BYTES = 25 << 20  # as DDP's


@final
class Overlap:
    """The buckets of a module's parameters, in the order of a backward pass.

    A bucket starts when its gradients are complete and those before it have started, so the order is the same on all ranks.
    """

    def __init__(self, rule: Any, strategy: Any, links: Sequence[TorchLink]) -> None:
        """Make buckets if sums can start early: of enough bytes, on several nodes or on GPUs, with one replica per rank."""
        self._rule, self._strategy = rule, strategy
        self._buckets: list[list[TorchLink]] = []
        extended = strategy.extended
        placement = extended.placement
        several = placement.group.num_nodes > 1 or (rule._core.begun.on_one_node and placement.group.topology.size > 1)
        trained = [link for link in reversed(links) if link.gradient is not None]
        able = trained and len(extended.replicas) == 1 and several
        if able and sum(link.variable.nbytes for link in trained) >= rule._core.begun.least_bytes(strategy):
            self._fill(trained)
        self._versions: dict[TorchLink, int] = {}  # of the started sums
        self._reset()

    def _fill(self, links: Sequence[TorchLink]) -> None:
        room = 0
        for link in links:
            if room <= 0:
                self._buckets.append([])
                room = _BUCKET_BYTES
            self._buckets[-1].append(link)
            room -= link.variable.nbytes
            link.noted = self._note

    def _reset(self) -> None:
        self._versions.clear()
        self._next, self._missing = 0, [set(bucket) for bucket in self._buckets]

    def _note(self, link: TorchLink) -> None:
        """Record a completed gradient. Collective for the last one of a bucket."""
        if self._next == len(self._buckets) or not self._rule._core.begun.early:
            return
        for missing in self._missing[self._next :]:
            missing.discard(link)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            bucket = self._buckets[self._next]
            self._next += 1
            self._rule.begin_in_backward(self._strategy, bucket)
            self._versions.update((each, _version(each)) for each in bucket)

    def settle(self) -> None:
        """Make the step use the started sums, or sum again if a gradient has changed. Collective."""
        if not self._versions:
            if self._buckets:
                self._reset()
            return
        final = all(_version(link) == version for link, version in self._versions.items())
        group = self._strategy.extended.process_group
        with group.collective("begin: final"):
            final = bool(group.agree(int(final)))
        if not final:
            self._rule._core.begun.forget()
            why = (
                "gradients were changed after the backward pass that computed them, as by a second one before the step"
            )
            log.once(logging.INFO, f"ms.torch: sums wait for optimizer.step(): {why}")
        if not final or not self._rule._core.begun.able:
            self._stop()
        self._reset()

    def _stop(self) -> None:
        for bucket in self._buckets:
            for link in bucket:
                link.noted = None
        self._buckets = []


def _version(link: TorchLink) -> int:
    """Return the number of changes of a gradient; -1 if the program has replaced it."""
    if link.gradient is None or link.parameter.grad is not link.shown:
        return -1
    return link.gradient._version
