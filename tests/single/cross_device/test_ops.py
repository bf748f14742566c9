"""CrossDeviceOps that no strategy has."""

import numpy as np
import pytest

import mpistrat as ms


@pytest.mark.parametrize("kind", [ms.HierarchicalAllReduce, ms.MpiAllReduce, ms.ReductionToOneDevice])
def test_an_object_without_a_strategy_says_so(kind):
    with pytest.raises(RuntimeError, match="expected an object of a strategy, got a loose one"):
        kind().reduce("SUM", np.ones(3))
    kind().close()
