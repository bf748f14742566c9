"""`mpistrat bench` over two hosts: no window is shared between them, which is no error."""

import json

import pytest

PROGRAM = """
import sys
from mpistrat.cli.main import main
sys.exit(main(["bench", "--quick", "--no-plot", *sys.argv[1:]]))
"""


@pytest.mark.timeout(300)
def test_transports_that_do_not_fit_are_left_out(mpi_run, hosts, tmp_path):
    (tmp_path / "bench.py").write_text(PROGRAM)
    words = ["--only", "window", "--only", "input", "--folder", str(tmp_path), "--json", str(tmp_path / "found.json")]
    result = mpi_run([str(tmp_path / "bench.py"), *words], 2, timeout=240, hosts=hosts)
    assert result.returncode == 0, result
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["machine"]["nodes"] == 2
    values = document["benchmarks"]["window"]["values"]
    assert [set(rates) for rates in values.values()] == [{"one_sided", "messages"}] * 4
    assert "–" not in result.out[0] and "shared_window  " not in result.out[0]
    assert len(document["benchmarks"]["input"]["values"]) == 4
    assert not list(tmp_path.glob("mpistrat-bench-*"))
