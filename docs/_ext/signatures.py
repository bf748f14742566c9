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
#: Collectives of the same classes that move no values of the program between replicas.
OTHERS = {
    "begin_save", "call_for_each_replica", "close", "create_variable", "distribute_dataset", "distribute_datasets_from_function",
    "export", "merge_call", "newest_snapshot", "outer_step", "prepare_save", "process_set", "restore", "restore_snapshot",
    "run", "save", "should_stop", "take_snapshot", "update",
}  # fmt: skip
#: What belongs to a collective, and moves nothing itself.
HALVES = re.compile(r"replicate|shard|\w+_backward")


SENTENCE = re.compile(r"(?<![\w`])Collective((?:`[^`]*`|[^.`])*)\.(?=\s|$)")


def first_paragraph(lines: list[str]) -> tuple[str, int]:
    """Return the first paragraph as one line, and the number of lines that it takes."""
    end = next((number for number, line in enumerate(lines) if not line.strip()), len(lines))
    return " ".join(line.strip() for line in lines[:end]), end


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
        if name[0] != "_" and (HALVES.fullmatch(name) or (name not in OTHERS and is_collective(getattr(cls, name))))
    }


def is_collective(method: object) -> bool:
    """Return whether the first paragraph of a docstring says "Collective"."""
    return SENTENCE.search(first_paragraph((inspect.getdoc(method) or "").splitlines())[0]) is not None
