"""A simulated machine on which `mpistrat run` plans a start."""

import os

from mpistrat.base.cores import THREAD_VARIABLES
from mpistrat.cluster.launchers import Launcher, MPILibrary
from mpistrat.launcher import plan as run

MPICH = MPILibrary("MPICH", "5.0.2", "", "/opt/lib/libmpi.so.12")
OPENMPI = MPILibrary("Open MPI", "5.0.11", "")
LAUNCHERS = [
    Launcher(("/opt/mpich/mpiexec",), "MPICH", "5.0.2", "mpich", "PATH"),
    Launcher(("/opt/ompi/mpiexec", "--display", "map"), "Open MPI", "5.0.3", "openmpi", "$MPIEXEC"),
]


class Machine:
    """A machine with 8 cores and both launchers, without GPU, SLURM, InfiniBand and root, until a test changes it."""

    def __init__(self, monkeypatch, tmp_path):
        self._patch = monkeypatch
        for name in os.environ:
            if name.startswith(("SLURM_", "OMPI_", "PMI", "MPIEXEC", "MPISTRAT_")) or name in THREAD_VARIABLES:
                monkeypatch.delenv(name)
        monkeypatch.setattr(run, "_INFINIBAND", tmp_path / "infiniband")
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(run, "find_launchers", lambda library: LAUNCHERS)
        self.has(library=MPICH, cores=8, gpus=0)

    def has(self, *, library=None, cores=None, gpus=None):
        for name, value in (("loaded_library", library), ("usable_cores", cores), ("count_gpus", gpus)):
            if value is not None:
                self._patch.setattr(run, name, lambda value=value: value)

    def slurm(self, pmis, **variables):
        self._patch.setattr(run.shutil, "which", lambda name: f"/usr/bin/{name}")
        self._patch.setattr(run, "offered_pmis", lambda: pmis)
        for name, value in {"SLURM_JOB_ID": "77", **variables}.items():
            self._patch.setenv(name, value)
