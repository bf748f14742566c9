"""TPUStrategy's names for values of the logical devices of a replica, which are its ranks."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError


@pytest.mark.ranks(4)
def test_logical_devices():
    x = np.arange(24.0).reshape(4, 6)
    with ms.MeshStrategy(axes={"rows": 2, "columns": 2}) as strategy:
        rank = strategy.rank

        def step():
            strategy = ms.get_strategy()
            assert strategy.experimental_replicate_to_logical_devices(x) is x
            assert np.array_equal(
                strategy.experimental_split_to_logical_devices(x, [2, 2]),
                np.split(np.split(x, 2)[rank // 2], 2, 1)[rank % 2],
            )
            assert np.array_equal(strategy.experimental_split_to_logical_devices(x, [4, 1]), x[[rank]])
            for device in range(4):
                assert strategy.experimental_assign_to_logical_device(np.array([rank]), device).tolist() == [device]

        strategy.run(step)
        for cuts in ([2, 1], [4], [1, 4]):
            with pytest.raises(ValueError, match="whose product is 4"):
                strategy.experimental_split_to_logical_devices(x, cuts)
        with pytest.raises(ValueError, match="0 <= root < 4"):
            strategy.experimental_assign_to_logical_device(x, 4)
        with pytest.raises(CollectiveMismatchError, match="root 0.*root 1"):
            strategy.experimental_assign_to_logical_device(x, rank % 2)
