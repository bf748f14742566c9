"""`mpistrat job --check` on a real SLURM of two hosts: the job as it is written, with its JSON file and its page."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.timeout(600)


def test_the_check_of_a_healthy_cluster(slurm, slurm_mpi, tmp_path):
    from tests.harness import slurm_jobs as jobs

    words = ("--check", "--nodes", "2", "--ranks-per-node", "2")
    script = jobs.render(slurm_mpi, tmp_path, *jobs.launcher_words(slurm_mpi, "srun"), *words)
    job = slurm.submit(script)
    out = job.completed(580)
    document = json.loads((tmp_path / f"mpistrat-check-{job.number}.json").read_text())
    items = {item["name"]: item for item in document["items"]}
    assert document["passed"] and document["launcher"][0] == "srun", out
    assert [(node["host"], node["ranks"]) for node in items["start"]["nodes"]] == [("h1", 2), ("h2", 2)]
    assert "4 ranks on 2 nodes" in (tmp_path / f"mpistrat-check-{job.number}.html").read_text()
    assert not (tmp_path / f"mpistrat-check-{job.number}.files").exists()
