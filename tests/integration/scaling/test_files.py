"""How often all ranks together open the files of a dataset does not grow with their number: counted where the calls are made."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpistrat.data import write_shards

HERE = Path(__file__).parent
SEEN = 3  # files of which the first rank of each node asks whether all nodes see the same
FIELDS, ROWS = 2, 8
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs Linux and gcc"),
]


@pytest.fixture
def counter(tmp_path):
    library = tmp_path / "count_files.so"
    command = ["gcc", "-O1", "-Wall", "-shared", "-fPIC", "-o", str(library), str(HERE / "count_files.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


@pytest.fixture
def count(mpi, mpi_run, counter, tmp_path):
    """Run the program; return for each phase opens and questions of all ranks together."""

    def run(files, ranks, nodes=1):
        shards, told = tmp_path / f"{files}-files", tmp_path / f"{files}-{ranks}-{nodes}"
        told.mkdir()
        if not shards.exists():
            rows = {"x": np.arange(files * ROWS * 4.0).reshape(-1, 4), "y": np.arange(files * ROWS)}
            write_shards(shards / "written", rows, num_shards=files)
            (shards / "foreign").mkdir()
            for number in range(files):
                with h5py.File(shards / "foreign" / f"{number}.h5", "w") as file:
                    for name, array in rows.items():
                        file[name] = array[number * ROWS :][:ROWS]
        env = {"LD_PRELOAD": str(counter), "COUNTED": str(shards), "MPISTRAT_WARN_AFTER": "100"}
        if "MPICH" in mpi.vendor:
            env["MPIR_CVAR_NUM_CLIQUES"] = str(nodes)
        result = mpi_run([str(HERE / "looked.py"), str(told), str(shards)], ranks, 120, env=env)
        assert result.returncode == 0, result
        found = [json.loads((told / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        assert found[0]["nodes"] == nodes
        return {name: np.sum([one["phases"][name] for one in found], axis=0).tolist() for name in found[0]["phases"]}

    return run


def test_files_are_opened_once_by_one_rank(mpi, count):
    small, more_ranks, more_files = count(8, 2), count(8, 4), count(32, 4)
    assert small == more_ranks
    for kind in ("written", "foreign"):
        assert small[f"{kind}: made"] == [0, 0]
        opens, questions = small[f"{kind}: distributed"]
        assert 8 <= opens <= 8 * 5 and questions <= 8 * 10  # by HDF5, and for a digest or some rows
        assert more_files[f"{kind}: distributed"][0] == 4 * opens
        assert small[f"{kind}: begun"] == [0, 0]
        assert small[f"{kind}: read"] == [8 * FIELDS, 0]  # with FILE: a map for each field
        assert small[f"{kind}: read again"] == [0, 8]
    if "MPICH" in mpi.vendor:
        nodes = count(8, 4, nodes=2)
        for name, (opens, questions) in nodes.items():
            assert [opens, questions] == [small[name][0], small[name][1] + 2 * SEEN * name.endswith("distributed")], (
                name
            )
