"""A step sends half of the bytes in bfloat16, a quarter in int8: counted where MPI is called."""

import json
import platform
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs Linux and gcc"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="passes arguments on in registers"),
]


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 2), (4, 2)])
def test_bytes_of_a_step(mpi, mpi_run, preload, tmp_path, ranks, nodes):
    """A node sends the other its sums of half of the gradients, and its half of the weights: all in all one array."""
    if "MPICH" not in mpi.vendor and nodes != ranks:
        pytest.skip("Open MPI's ranks are one node each")
    result = mpi_run([str(HERE / "counted_wire.py"), str(tmp_path)], ranks, 120, env=preload(nodes, ranks))
    assert result.returncode == 0, result
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    per_node = {name: sum(one["sent"][name] for one in told) / nodes for name in told[0]["sent"]}
    assert all(one["nodes"] == nodes for one in told)
    size = told[0]["size"]
    assert per_node["None"] == 4 * size
    assert per_node["bfloat16"] == 2 * size
    assert size * 4100 / 4096 <= per_node["int8"] <= size * 4100 / 4096 + 64
