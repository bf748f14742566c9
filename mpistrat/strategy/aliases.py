"""TensorFlow's other spellings of names: the one table of aliases, and what puts them in place."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["ALIASES", "with_aliases"]

# Where → TensorFlow's name → the real one here. "" is the package itself.
ALIASES: dict[str, dict[str, str]] = {
    "": {
        "CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy",
        "CollectiveCommunication": "CommunicationImplementation",
        "CollectiveHints": "CommunicationOptions",
        "experimental_set_strategy": "set_strategy",
    },
    "Strategy": {
        "experimental_distribute_dataset": "distribute_dataset",
        "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
        "experimental_distribute_values_from_function": "distribute_values_from_function",
        "experimental_local_results": "local_results",
        "experimental_run_v2": "run",
        "unwrap": "local_results",
    },
    "StrategyExtended": {
        "call_for_each_replica": "run",
    },
    "ReplicaContext": {},
}

C = TypeVar("C", bound=type[Any])


def with_aliases(cls: C) -> C:
    """Give a class the aliases that the table has for it. A decorator."""
    for alias, name in ALIASES[cls.__name__].items():
        setattr(cls, alias, getattr(cls, name))
    return cls
