"""The scripts in jobscripts/. `python -m mpistrat.batch_jobs.examples FOLDER` writes them."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from .job import Array, BatchJob, Preemption
from .render import render
from .site import SiteProfile, read_site

__all__ = ["EXAMPLES", "main"]

_SITE = dataclasses.replace(read_site("generic"), venv=".venv")
_PROGRAM = ("train.py", "--epochs", "10")
_CPU = BatchJob(program=_PROGRAM, name="train", nodes=2, ranks_per_node=4, cpus_per_rank=8)
_GPU = dataclasses.replace(_CPU, nodes=4, gpus_per_node=4, time="02:00:00")
_SERVERS = dataclasses.replace(_CPU, strategy="parameter_server", num_ps=2)
_ARRAY = Array("0-9%4", index_argument="seed", output_argument="output", output_folder="results")
_PREEMPTIBLE = dataclasses.replace(_CPU, preemption=Preemption())
_MPIRUN = dataclasses.replace(_SITE, launcher="openmpi")


def _under(scheduler: str) -> SiteProfile:
    return dataclasses.replace(_SITE, scheduler=scheduler)


EXAMPLES: dict[str, tuple[BatchJob, SiteProfile]] = {
    "slurm-cpu.sh": (_CPU, _SITE),
    "slurm-cpu-mpirun.sh": (_CPU, _MPIRUN),
    "slurm-gpu.sh": (_GPU, _SITE),
    "slurm-parameter-servers.sh": (_SERVERS, _SITE),
    "slurm-parameter-servers-het.sh": (dataclasses.replace(_SERVERS, gpus_per_node=4, ps_nodes=1), _SITE),
    "slurm-array.sh": (dataclasses.replace(_CPU, nodes=1, array=_ARRAY), _SITE),
    "slurm-preemptible.sh": (_PREEMPTIBLE, _SITE),
    "slurm-preemptible-mpirun.sh": (_PREEMPTIBLE, _MPIRUN),
    "slurm-restarts.sh": (dataclasses.replace(_CPU, restarts=20), _SITE),
    "slurm-apptainer.sh": (
        dataclasses.replace(_GPU, container="mpistrat.sif"),
        dataclasses.replace(_SITE, venv="", mpi="pmix"),
    ),
    "pbs-cpu.sh": (_CPU, _under("pbs")),
    "pbs-gpu.sh": (_GPU, _under("pbs")),
    "lsf-gpu.sh": (_GPU, _under("lsf")),
    "flux-gpu.sh": (_GPU, _under("flux")),
}


def main(folder: str) -> None:
    """Write every script into a folder."""
    for name, (job, site) in EXAMPLES.items():
        path = Path(folder) / name
        path.write_text(render(job, site), encoding="utf-8")
        os.chmod(path, 0o755)


if __name__ == "__main__":
    main(*sys.argv[1:])
