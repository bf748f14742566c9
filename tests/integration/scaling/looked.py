"""How often each rank opens files of a dataset, and asks what they are, as it is made, distributed and read, in a JSON file.

Started by test_files.py with count_files.c preloaded: a folder for its files, and one with folders of shards.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpistrat as ms

counter = ctypes.CDLL(os.environ["LD_PRELOAD"])
phases: dict[str, tuple[int, int]] = {}


def phase(name: str, act: Callable[[], Any]) -> Any:
    before = counter.count_opens(), counter.count_stats()
    result = act()
    phases[name] = counter.count_opens() - before[0], counter.count_stats() - before[1]
    return result


def distributed(strategy: ms.Strategy, folder: Path, policy: str) -> Any:
    def make() -> ms.data.Dataset:
        options = ms.data.Options(policy)
        return ms.data.HDF5Dataset(folder).shuffle(seed=1).batch(64).repeat(1).with_options(options)

    rows = phase(f"{folder.name}: made", make)
    return phase(f"{folder.name}: distributed", lambda: strategy.distribute_dataset(rows))


def main() -> None:
    told, shards = map(Path, sys.argv[1:])
    strategy = ms.MultiWorkerMirroredStrategy()
    for kind in ("written", "foreign"):
        data = distributed(strategy, shards / kind, "data")
        phase(f"{kind}: begun", functools.partial(iter, data))
        data = distributed(strategy, shards / kind, "file")
        assert phase(f"{kind}: read", functools.partial(list, data))
        phase(f"{kind}: read again", functools.partial(list, data))
    rank = strategy.extended.topology.rank
    (told / f"rank-{rank}.json").write_text(
        json.dumps({"nodes": strategy.extended.topology.num_nodes, "phases": phases})
    )
    strategy.close()


if __name__ == "__main__":
    main()
