"""`mpistrat bench` on ranks: all of it, shortly; its files go, and a folder that is not there is an error."""

import json

from mpistrat.bench.constants import ALONE, COLUMNS, GRADIENT, PING, STEP, TOGETHER, name_of

PROGRAM = """
import sys
from mpistrat.cli.main import main
sys.exit(main(["bench", "--quick", "--no-plot", *sys.argv[1:]]))
"""


def test_everything(mpi_run, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (tmp_path / "bench.py").write_text(PROGRAM)
    words = ["--folder", str(folder), "--json", str(tmp_path / "found.json")]
    result = mpi_run([str(tmp_path / "bench.py"), *words], 2, timeout=240)
    assert result.returncode == 0, result
    assert not list(folder.iterdir())
    assert result.out[1] == "", "rank 0 speaks for all"
    document = json.loads((tmp_path / "found.json").read_text())
    values = {name: found["values"] for name, found in document["benchmarks"].items()}
    assert list(values) == ["all_reduce", "step", "constants", "window", "input"]
    assert next(iter(values["all_reduce"])) == "4 KB"
    assert set(values["window"]["push 4 KB"]) == {"shared_window", "one_sided", "messages"}
    assert set(values["input"]) == {
        "contiguous, in order",
        "contiguous, random rows",
        "gzip, in order",
        "gzip, shuffled",
    }
    constants = {name: [case[column] for column in COLUMNS] for name, case in values.pop("constants").items()}
    assert all(0 <= least <= median <= most for median, least, most in constants.values())
    # How long each takes is not compared: on a busy machine a step on few parameters may take as long.
    assert {name_of(what, "393 K") for what in (ALONE, TOGETHER, GRADIENT)} <= constants.keys()
    assert PING not in constants and not any(name.startswith(name_of(STEP, "")) for name in constants)
    assert all(figure > 0 for found in values.values() for case in found.values() for figure in case.values())
    assert document["machine"]["ranks"] == 2
    assert "Input from HDF5 files" in result.out[0]


def test_a_folder_that_is_not_there(mpi_run, tmp_path):
    (tmp_path / "bench.py").write_text(PROGRAM)
    words = ["--only", "input", "--folder", str(tmp_path / "missing")]
    result = mpi_run([str(tmp_path / "bench.py"), *words], 2, timeout=120)
    assert result.returncode == 1, result
    assert "missing" in result.err[0]


def test_ranks_that_share_cores_measure_whole_steps(mpi_run, tmp_path):
    (tmp_path / "bench.py").write_text("import os\nos.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n" + PROGRAM)
    words = ["--only", "constants", "--json", str(tmp_path / "found.json")]
    result = mpi_run([str(tmp_path / "bench.py"), *words], 2, timeout=120)
    assert result.returncode == 0, result
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["machine"]["cores"] == 1
    constants = document["benchmarks"]["constants"]["values"]
    assert name_of(STEP, "262 K") in constants and len(constants) == 2
    assert not any(name.startswith((ALONE, TOGETHER, GRADIENT)) for name in constants)
