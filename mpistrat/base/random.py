"""Random numbers that do not depend on the number of ranks: a generator for every (seed, step, sample or replica)."""

from __future__ import annotations

import hashlib
import operator

import numpy as np

__all__ = ["rng"]

_PER_STEP, _PER_SAMPLE, _PER_REPLICA = 0, 1, 2
_WORD = 1 << 64


def rng(*, seed: int, step: int = 0, sample: int | None = None, replica: int | None = None) -> np.random.Generator:
    """Return the random generator of a seed, a step and a sample (or a replica).

    Equal arguments give the same numbers on every rank; any difference gives an independent stream. With `sample` (the example's
    index in the dataset) the numbers are the same for any number of ranks; with `replica` for one layout only; with neither they
    are shared by all.

    Args:
        seed: any integer.
        step: the training step, from 0 up.
        sample: the example's index, from 0 up.
        replica: the replica id in the sync group, from 0 up; not together with `sample`.

    Raises:
        ValueError: for a negative step, sample or replica, and for both a sample and a replica.

    Source: Philox, a counter-based generator (Salmon et al., SC 2011), with the seed as key and the rest as counter.

    Example:
        >>> a = rng(seed=1, step=3, sample=42).random()
        >>> a == rng(seed=1, step=3, sample=42).random()
        True
        >>> a == rng(seed=1, step=3, sample=43).random()
        False
    """
    if sample is not None and replica is not None:
        raise ValueError("rng: expected a sample or a replica, got both")
    kind, index = _PER_STEP, 0
    if sample is not None:
        kind, index = _PER_SAMPLE, operator.index(sample)
    elif replica is not None:
        kind, index = _PER_REPLICA, operator.index(replica)
    step = operator.index(step)
    for name, value in (("step", step), ("replica" if kind == _PER_REPLICA else "sample", index)):
        if not 0 <= value < _WORD:
            raise ValueError(f"rng: {name}: expected an integer in [0, 2**64), got {value}")
    digest = hashlib.blake2b(f"mpistrat.random/1:{operator.index(seed)}".encode(), digest_size=16).digest()
    # Word 0 of the counter advances as numbers are drawn; the other three identify the stream.
    counter = np.array([0, step, index, kind], np.uint64)
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, "<u8").astype(np.uint64), counter=counter))
