"""Making and closing groups again and again."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks(2)


def test_groups_leave_nothing_behind(make_group):
    def held():
        shm = [line for line in Path("/proc/self/maps").read_text().splitlines() if "shm" in line or "osc" in line]
        return len(list(Path("/proc/self/fd").iterdir())), len(shm)

    for _ in range(3):  # what is made once
        group = make_group()
        group.close()
        group.topology.close()
    before = held()
    for _ in range(30):
        group = make_group()
        group.barrier()
        group.close()
        group.topology.close()
    after = held()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 2
