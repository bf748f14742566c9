"""Functions that make one dataset of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .._util import nest
from .._util.arguments import integer
from ..errors import explain
from .dataset import Dataset
from .permutation import DEFAULT_SEED

__all__ = ["sample_from_datasets", "zip"]


def _check(function: str, datasets: Sequence[Any]) -> None:
    for value in datasets:
        if not isinstance(value, Dataset):
            raise TypeError(explain(function, "datasets", expected="Datasets", got=type(value).__name__))
    if not datasets:
        raise ValueError(explain(function, "datasets", expected="at least one Dataset", got="none"))


def zip(*datasets: Any) -> Dataset:
    """Put datasets side by side: an element is made of one element of each (TF: tf.data.Dataset.zip).

    There are as many elements as the shortest dataset has.

    Args:
        datasets: datasets, for tuples; or one nest of datasets, whose structure the elements have.

    Raises:
        ValueError: for rows beside batches, and while reading for batches of different lengths.

    Example:
        >>> numbers = ms.data.from_arrays(np.arange(3))
        >>> [int(a + b) for a, b in ms.data.zip(numbers, numbers.skip(1))]
        [1, 3]
    """
    from .nodes.combine import Zipped

    structure = datasets[0] if len(datasets) == 1 and not isinstance(datasets[0], Dataset) else datasets
    _check("zip", nest.flatten(structure))
    return Zipped(structure)


def sample_from_datasets(
    datasets: Sequence[Dataset], weights: Sequence[float] | None = None, seed: int | None = None,
    stop_on_empty_dataset: bool = False,
) -> Dataset:  # fmt: skip
    """Draw each element from one of several datasets (TF: tf.data.Dataset.sample_from_datasets).

    The proportions are those of the weights, exactly: after any multiple of 256 draws each dataset is off by less than
    one draw for each dataset. Which draw is whose depends on the seed and the epoch only. A dataset's own elements stay
    in their order.

    Args:
        datasets: their elements must look alike.
        weights: one for each dataset, finite, at least 0 and not all 0; None for equal ones. A dataset of weight 0 is
            never drawn from.
        seed: any integer, the same on every rank. None is 0, in every run.
        stop_on_empty_dataset: end before a dataset would be drawn from that has no element left; else go on with the
            others, so that all elements come.

    Raises:
        ValueError: for impossible weights.

    Example:
        >>> tens, ones = ms.data.from_arrays(np.arange(10, 16)), ms.data.from_arrays(np.arange(2))
        >>> both = sample_from_datasets([tens, ones], [0.75, 0.25], seed=1)
        >>> sorted(int(x) for x in both)
        [0, 1, 10, 11, 12, 13, 14, 15]
    """
    from .nodes.combine import Joined
    from .nodes.sample import Sample

    _check("sample_from_datasets", datasets)
    if weights is None:
        weights = [1.0] * len(datasets)
    values = [float(weight) for weight in weights]
    if len(values) != len(datasets):
        expected = f"one weight for each of the {len(datasets)} datasets"
        raise ValueError(explain("sample_from_datasets", "weights", expected=expected, got=len(values)))
    if not all(math.isfinite(value) and value >= 0 for value in values) or not any(values):
        expected = "finite numbers of at least 0, not all 0"
        raise ValueError(explain("sample_from_datasets", "weights", expected=expected, got=repr(values)))
    seed = integer("sample_from_datasets", "seed", DEFAULT_SEED if seed is None else seed)
    return Joined(datasets, Sample(values, seed, bool(stop_on_empty_dataset)))
