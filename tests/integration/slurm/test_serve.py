"""`mpistrat serve` in a job of a real SLURM, and a client on the head node."""

from __future__ import annotations

import re
import shlex

import pytest

pytestmark = pytest.mark.timeout(300)

CLIENT = """
import socket
import numpy as np
import mpistrat as ms

with ms.connect("serve.json", timeout=120) as cluster:
    w = cluster.call(lambda: ms.Variable(np.zeros(3), name="w"))
    hosts = [cluster.schedule(socket.gethostname, worker=index) for index in range(cluster.num_workers)]
    for _ in range(10):
        cluster.schedule(lambda: w.assign_add(np.ones(3)))
    cluster.join()
    print(cluster.num_workers, sorted(set(cluster.fetch(hosts))), w.get().tolist())
    cluster.shutdown()
"""


def test_a_client_on_the_head_node_has_both_hosts_compute(slurm, slurm_mpi, tmp_path) -> None:
    from tests.harness import slurm_jobs as jobs

    (tmp_path / "client.py").write_text(CLIENT)
    words = ("-m", "mpistrat", "serve", str(tmp_path / "serve.json"), "--host")
    job = jobs.submit(slurm, slurm_mpi, "srun", tmp_path, *jobs.TWO_BY_TWO, *words)
    assert slurm.ok(slurm_mpi.python, "client.py", cwd=tmp_path) == "2 ['h1', 'h2'] [10.0, 10.0, 10.0]\n"
    job.completed()
    assert not (tmp_path / "serve.json").exists()


END = """
import mpistrat as ms

with ms.connect("serve.json") as cluster:
    cluster.shutdown()
"""


def test_the_page_s_own_blocks(slurm, slurm_mpi, tmp_path) -> None:
    """Its command, with two ranks on a node, and its program as it stands, on the head node."""
    from tests.harness import pages
    from tests.harness import slurm_jobs as jobs

    blocks = pages.read("docs/notebooks.md").blocks
    at, command = next((at, block) for at, block in enumerate(blocks) if "mpistrat serve" in block.text)
    program, shown = blocks[at + 1 : at + 3]
    words = shlex.split(command.commands()[0][0])
    assert words[:2] == ["mpistrat", "job"] and program.language == "python" and shown.language == "text"
    words.remove("--submit")
    words[words.index("--ranks-per-node") + 1] = "2"
    job = jobs.submit(slurm, slurm_mpi, "srun", tmp_path, *words[2:])
    (tmp_path / "cell.py").write_text(program.text)
    (tmp_path / "end.py").write_text(END)
    lines = slurm.ok(slurm_mpi.python, "cell.py", cwd=tmp_path).splitlines()
    assert lines[-1] == shown.text.splitlines()[-1]
    assert all(re.fullmatch(r"\(\d+, 1000\)", line) for line in lines[:-1])
    slurm.ok(slurm_mpi.python, "end.py", cwd=tmp_path)
    job.completed()
