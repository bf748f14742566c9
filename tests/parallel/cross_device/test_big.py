"""Arrays of more than 2^31 bytes."""

import numpy as np
import pytest

from mpistrat.cross_device.hierarchical import HierarchicalAllReduce
from mpistrat.cross_device.mpi import MpiAllReduce
from tests.harness.process_groups import open_group

SIZE = (1 << 31) + 12_345


@pytest.mark.ranks(2)
@pytest.mark.big(gib=9)
def test_more_bytes_than_32_bits_count():
    with open_group("shared", abort_after=300.0) as group:
        value = np.zeros(SIZE, np.int8)
        value[[0, SIZE // 2, -1]] = group.topology.rank + 1
        for ops in (HierarchicalAllReduce(), MpiAllReduce()):
            ops.bind(group)
            total = ops.reduce("sum", value)
            assert total[[0, SIZE // 2, -1]].tolist() == [3, 3, 3]
            assert np.count_nonzero(total) == 3
            del total
