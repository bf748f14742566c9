"""The signatures of the collectives of all fronts, read from the code. It needs no Sphinx: their test runs it, too."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import mpistrat

FRONTS = {
    "Strategy": "outside of steps",
    "StrategyExtended": "for authors of libraries",
    "ReplicaContext": "in a step",
    "ProcessSet": "some ranks",
    "Mesh": "the ranks along `mesh_axis`",
}
OPERATIONS = re.compile(
    r"(batch_)?reduce(_to)?|gather|all_\w+|reduce_scatter\w*|re?shard\w*|shard\w*|replicate\w*|broadcast\w*|barrier"
)


def shown(method: Callable[..., object]) -> str:
    """Return the signature of a method, without self and annotations."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(method).parameters.values()]
    return str(inspect.Signature([p for p in parameters if p.name != "self"]))


def signatures() -> dict[str, str]:
    """Return the signature of each collective, by front and method: in order of definition, those of base classes first."""
    return {
        f"{front}.{name}": shown(getattr(cls, name))
        for front in FRONTS
        for cls in [getattr(mpistrat, front)]
        for name in dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
        if OPERATIONS.fullmatch(name)
    }
