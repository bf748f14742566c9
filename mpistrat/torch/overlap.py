"""Sums that start in the middle of a backward pass: buckets of parameters, for which `Optimizer.begin` is called."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, final

import torch

from ..base import log
from ..strategy.contexts import in_step
from .module import TorchLink

__all__ = ["Overlap"]

_BUCKET_BYTES = 25 << 20  # as DDP's
_REMEDY = "Call backward in the function that strategy.run runs"


@final
class Overlap:
    """The buckets of a module's parameters, the last ones first, as a backward pass reaches them.

    A bucket is begun when all its gradients are there and those before it were begun, so the order is the same on all ranks.
    """

    def __init__(self, rule: Any, strategy: Any, links: Sequence[TorchLink]) -> None:
        """Make buckets, where sums can start early: on several nodes with one replica a rank; else there are none."""
        self._rule, self._strategy = rule, strategy
        self._buckets: list[list[TorchLink]] = []
        extended = strategy.extended
        placement = extended.placement
        if placement.store is None and len(extended.replicas) == 1 and placement.group.num_nodes > 1:
            self._fill([link for link in reversed(links) if link.gradient is not None])
        self._versions: dict[TorchLink, int] = {}  # of what was begun
        self._reset()

    def _fill(self, links: Sequence[TorchLink]) -> None:
        room = 0
        for link in links:
            if room <= 0:
                self._buckets.append([])
                room = _BUCKET_BYTES
            self._buckets[-1].append(link)
            room -= link.variable.size * link.variable.dtype.itemsize
            link.noted = self._note

    def _reset(self) -> None:
        self._versions.clear()
        self._next, self._missing = 0, [set(bucket) for bucket in self._buckets]

    @torch.compiler.disable
    def _note(self, link: TorchLink) -> None:
        """Note that a backward pass has completed a gradient. Collective, where it is the last one of a bucket."""
        if self._next == len(self._buckets) or not self._rule._core.begun.early:
            return
        for missing in self._missing[self._next :]:
            missing.discard(link)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            bucket = self._buckets[self._next]
            self._next += 1
            variables = [each.variable for each in bucket]
            in_step(self._strategy, lambda: self._rule.begin(variables), "backward", _REMEDY)  # noqa: B023
            self._versions.update((each, _version(each)) for each in bucket)

    def settle(self) -> None:
        """Have the step that follows take what was begun, or sum again where a gradient was changed since. Collective."""
        if not self._versions:
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
    """Return the number of changes of a gradient; -1 where the program has replaced it."""
    if link.gradient is None or link.parameter.grad is not link.shown:
        return -1
    return link.gradient._version
