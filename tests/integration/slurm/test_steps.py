"""Several steps in one job, one after the other and at the same time: each is a cluster of its own."""

from __future__ import annotations

import json
import re
import sys

PROGRAM = """
import json, os, sys, time
from mpistrat.cluster_resolver import SlurmClusterResolver
from tests.harness.whole_lines import print
resolver = SlurmClusterResolver(port_base=0)
here = os.uname().nodename
assert resolver.master().split(":")[0] == here, (resolver.master(), here)
name, other = sys.argv[1:]
open(f"{name}.{os.environ['SLURM_PROCID']}", "w").close()
until = time.monotonic() + 60
while other and not os.path.exists(f"{other}.0"):  # the two steps run at the same time, or this one never ends
    assert time.monotonic() < until
    time.sleep(0.05)
task = resolver.task_id, int(os.environ["SLURM_PROCID"])
print(json.dumps([name, resolver.cluster_spec().job_tasks("worker"), *task]))
"""
WAITS = re.compile(
    r"srun: (Job \d+ step creation temporarily disabled, retrying|Step created for )"
)  # on a busy machine
SCRIPT = """#!/bin/bash
#SBATCH --output=job.out --nodes=2 --ntasks-per-node=2
set -e
srun {python} program.py all ""
srun -N1 -n1 -w h2 {python} program.py one ""
srun --exact -N1 -n2 -w h2 {python} program.py left right & left=$!
srun --exact -N2 -n2 --ntasks-per-node=1 --overlap {python} program.py right left & right=$!
wait $left; wait $right
"""


def test_steps_of_one_job(slurm, tmp_path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "job.sh").write_text(SCRIPT.format(python=sys.executable))
    told: dict[str, list[list]] = {}
    for line in slurm.submit(tmp_path / "job.sh").completed().splitlines():
        if WAITS.match(line):
            continue
        name, *rest = json.loads(line)
        told.setdefault(name, []).append(rest)
    expected = {
        "all": ["h1:0", "h1:1", "h2:0", "h2:1"],
        "one": ["h2:0"],
        "left": ["h2:0", "h2:1"],
        "right": ["h1:0", "h2:0"],
    }
    assert {name: sorted(lines) for name, lines in told.items()} == {
        name: [[addresses, task, task] for task in range(len(addresses))] for name, addresses in expected.items()
    }
