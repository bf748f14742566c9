"""Options of reductions, of local steps and of `Strategy.run`, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import explain
from .types import CommunicationImplementation

__all__ = ["WIRES", "CommunicationOptions", "LocalSteps", "RunOptions", "StepOptions"]

WIRES = ("bfloat16", "int8")


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of a reduction (TF: tf.distribute.experimental.CommunicationOptions). None means: not set here.

    Args:
        bytes_per_pack: the most bytes that are reduced in one call; 0 for no limit.
        timeout_seconds: seconds after which the collective raises CollectiveTimeoutError.
        implementation: the algorithm; with AUTO the chooser decides.
        wire: the encoding of float32 numbers between nodes: "bfloat16" or "int8", whose numbers differ from float32's; None for
            float32. Given to a strategy, it applies to optimizer steps, not to other reductions. Given to a call of reduce or
            all_reduce, which supports "bfloat16" only, it applies to that call. Within one node it has no effect. Under a
            ParameterServerStrategy it applies to pushes of whole gradients to servers, except through shared memory.

    Raises:
        ValueError: for a negative size, a timeout that is not positive, or an unknown name.
    """

    bytes_per_pack: int | None = None
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str | None = None
    wire: str | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_pack is not None and self.bytes_per_pack < 0:
            raise ValueError(
                explain("CommunicationOptions", "bytes_per_pack", expected=">= 0", got=self.bytes_per_pack)
            )
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ValueError(
                explain("CommunicationOptions", "timeout_seconds", expected="> 0", got=self.timeout_seconds)
            )
        if self.wire not in (None, *WIRES):
            expected = f"None or one of {', '.join(WIRES)}"
            raise ValueError(explain("CommunicationOptions", "wire", expected=expected, got=repr(self.wire)))
        if isinstance(self.implementation, str):
            name = self.implementation.upper()
            if name not in CommunicationImplementation.__members__:
                legal = ", ".join(CommunicationImplementation.__members__)
                raise ValueError(
                    explain("CommunicationOptions", "implementation", expected=f"one of {legal}", got=repr(name))
                )
            object.__setattr__(self, "implementation", CommunicationImplementation[name])

    def __repr__(self) -> str:
        """Return the fields that are set, as source code."""
        said = [(f.name, getattr(self, f.name)) for f in fields(self)]
        words = [
            f"{name}={value.name!r}" if isinstance(value, CommunicationImplementation) else f"{name}={value!r}"
            for name, value in said
            if value is not None
        ]
        return f"CommunicationOptions({', '.join(words)})"

    def merge(self, override: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options with every field that the other one sets.

        Example:
            >>> options = CommunicationOptions(bytes_per_pack=8)
            >>> options.merge(CommunicationOptions(bytes_per_pack=0)).bytes_per_pack
            0
        """
        if override is None:
            return self
        said = {f.name: getattr(override, f.name) for f in fields(override)}
        return CommunicationOptions(
            **{f.name: getattr(self, f.name) if said[f.name] is None else said[f.name] for f in fields(self)}
        )

    def between_nodes(self) -> dict[str, Any]:
        """Return the given options of messages between nodes, by name. A strategy's apply to its training steps only."""
        return {} if self.wire is None else {"wire": self.wire}


@dataclass(frozen=True)
class LocalSteps:
    """Local training of each node with an outer step after every n updates: `MultiWorkerMirroredStrategy(local_steps=…)`.

    The ranks of a node step together, without the other nodes. After `every` updates all nodes take an outer step: SGD with
    Nesterov's momentum, whose gradient is the mean over nodes of anchor minus weights. The anchor is the weights after the last
    outer step.

    Args:
        every: updates of an optimizer from one outer step to the next, 1 or more.
        outer_learning_rate: 1 with outer_momentum 0 sets weights to their mean over nodes.
        outer_momentum: from 0, below 1.

    Raises:
        ValueError: a number out of range.
        TypeError: `every` is not an integer.

    Example:
        >>> LocalSteps(every=500)
        LocalSteps(every=500, outer_learning_rate=0.7, outer_momentum=0.9)

    Source: Douillard et al., DiLoCo (arXiv 2311.08105), whose outer rate and momentum are the defaults.
    """

    every: int
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        given: object = self.every
        if not isinstance(given, int) or isinstance(given, bool):
            raise TypeError(explain("LocalSteps", "every", expected="an integer of at least 1", got=repr(given)))
        if given < 1:
            raise ValueError(explain("LocalSteps", "every", expected="an integer of at least 1", got=given))
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        if not 0 < rate < float("inf"):
            raise ValueError(explain("LocalSteps", "outer_learning_rate", expected="a number > 0", got=rate))
        if not 0 <= momentum < 1:
            raise ValueError(explain("LocalSteps", "outer_momentum", expected="0 <= value < 1", got=momentum))


@dataclass(frozen=True)
class StepOptions:
    """The options of a strategy's training steps; None means: not given.

    Args:
        sharded_slots: whether each node updates its part of the weights and alone has the slots of it.
        local_steps: the steps that nodes take by themselves, or their number.
        wire: the encoding of numbers between nodes, as in `CommunicationOptions`.
        sharded_gradients: whether gradients are submitted early, so that no memory holds all of them.
    """

    sharded_slots: bool | None = None
    local_steps: LocalSteps | int | None = None
    wire: str | None = None
    sharded_gradients: bool | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that are given, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def rows(self, nodes: int) -> Iterator[tuple[str, str]]:
        """Yield what steps on a number of nodes do, for `show_config`."""
        if nodes > 1:
            yield (
                "optimizers' slots",
                "a part on each node, but for small arenas" if self.sharded_slots else "all on every node",
            )
            yield "steps between nodes", "numbers as they are" if self.wire is None else f"float32 as {self.wire}"
        if self.local_steps is not None:
            yield "local steps", repr(self.local_steps)

    def in_effect(self, all_nodes: int, nodes: int, divides: bool) -> StepOptions:
        """Return the options that have an effect on this number of nodes, with the default of `sharded_slots`.

        Args:
            all_nodes: the nodes of all ranks.
            nodes: the nodes of the ranks that step together.
            divides: whether slots are divided over nodes if nothing is said.
        """
        local = self.local_steps
        if local is not None:
            local = None if all_nodes == 1 else local if isinstance(local, LocalSteps) else LocalSteps(local)
        sharded = (divides and local is None) if self.sharded_slots is None else self.sharded_slots
        if self.wire is not None or self.sharded_gradients:
            sharded = True
        return replace(self, local_steps=local, sharded_slots=sharded and nodes > 1)


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`, accepted for TF's programs; they have no effect (there is no graph compiler)."""

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
