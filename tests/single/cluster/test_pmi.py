"""Which protocol srun must be told for an MPI library. What srun says is quoted from its versions, MPIs' names from mpi4py."""

import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.batch_jobs import SiteProfile
from mpistrat.batch_jobs.render import FOR_PMI2
from mpistrat.cluster.launcher_variables import (
    fitting_pmi,
    offered_pmis,
    srun_environment,
    srun_remedy,
    unset_variable,
    wanted_pmis,
)
from mpistrat.cluster.launchers import MPILibrary, loaded_library
from tests.launch.launcher import ROOT

MPICH = MPILibrary("MPICH", "5.0.2", "MPICH Version:      5.0.2")
MVAPICH = MPILibrary("MVAPICH", "4.0.0", "MVAPICH Version:      4.0")
CRAY = MPILibrary("Cray MPICH", "8.1.28", "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)")
OLD_CRAY = MPILibrary("MPICH", "3.4.0", CRAY.text)  # as older mpi4pys name it
INTEL = MPILibrary("Intel MPI", "2021.13.0", "Intel(R) MPI Library 2021.13 for Linux* OS")
OPENMPI = MPILibrary("Open MPI", "5.0.11", "Open MPI v5.0.11, package: Open MPI root@cray-login Distribution")
SPECTRUM = MPILibrary("Spectrum MPI", "10.4.0", "IBM Spectrum MPI")
OTHER = MPILibrary("Microsoft MPI", "10.1.0", "")
KNOWN = (MPICH, MVAPICH, CRAY, OLD_CRAY, INTEL, OPENMPI, SPECTRUM)
EVERY = ["none", "cray_shasta", "pmi2", "pmix", "pmix_v4", "openmpi"]


@pytest.fixture(autouse=True)
def _no_setting(monkeypatch):
    monkeypatch.delenv("I_MPI_PMI_LIBRARY", raising=False)


@pytest.mark.parametrize(
    ("library", "offered", "fits"),
    [
        (MPICH, EVERY, "pmi2"),
        (MVAPICH, EVERY, "pmi2"),
        (INTEL, EVERY, "pmi2"),
        (MPICH, ["none", "pmix"], None),
        (OPENMPI, EVERY, "pmix"),
        (OPENMPI, ["none", "pmi2", "pmix_v4", "pmix"], "pmix"),
        (OPENMPI, ["pmix_v4"], "pmix_v4"),
        (OPENMPI, ["none", "pmi2"], None),
        (SPECTRUM, EVERY, "pmix"),
        (CRAY, EVERY, "cray_shasta"),
        (CRAY, ["none", "pmi2", "cray_shasta"], "cray_shasta"),
        (CRAY, ["none", "pmi2", "pmix"], "pmi2"),
        (CRAY, ["none", "pmix"], None),
        (OLD_CRAY, EVERY, "cray_shasta"),
        (OLD_CRAY, ["none", "pmi2", "pmix"], "pmi2"),
        (OTHER, EVERY, None),
        (MPICH, [], None),
    ],
)
def test_the_protocol_that_fits(library, offered, fits):
    assert fitting_pmi(library, offered) == fits


@pytest.mark.parametrize("library", KNOWN, ids=str)
def test_a_remedy_names_what_srun_would_be_started_with(library):
    best = fitting_pmi(library, EVERY)
    said = srun_remedy(library)
    assert said.startswith(f"use srun --mpi={best}, or mpistrat job --mpi {best};") and "srun --mpi=list" in said
    assert all(f"--mpi={name}" in said for name in wanted_pmis(library))
    for name in wanted_pmis(library):
        assert SiteProfile(mpi=name).mpi == name


def test_a_library_that_is_not_known_gets_all_that_are():
    said = srun_remedy(OTHER)
    assert said == srun_remedy(None)
    assert all(f"--mpi={name}" in said for library in KNOWN for name in wanted_pmis(library))


def test_batch_scripts_set_what_an_unknown_mpi_may_want():
    assert dict(FOR_PMI2) == srun_environment(None, "pmi2")


def test_the_comment_in_batch_scripts_says_the_same():
    """It is in every script whose MPI nobody knows."""
    template = (ROOT / "mpistrat/batch_jobs/templates/launch.jinja").read_text()
    assert f"SLURM_MPI_TYPE={wanted_pmis(MPICH)[0]} for MPICH, ={wanted_pmis(OPENMPI)[0]} for Open MPI." in template


def test_intel_mpi_wants_the_library_of_slurm(monkeypatch):
    assert unset_variable(INTEL).startswith("I_MPI_PMI_LIBRARY=") and unset_variable(MPICH) == ""
    assert f"export {unset_variable(INTEL)}" in srun_remedy(INTEL)
    monkeypatch.setenv("I_MPI_PMI_LIBRARY", "/usr/lib64/libpmi2.so")
    assert unset_variable(INTEL) == "" and "export" not in srun_remedy(INTEL)


@pytest.mark.parametrize(
    ("said", "offered"),
    [
        ("MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4",
         ["none", "pmi2", "pmix", "pmix_v4"]),
        ("srun: MPI types are...\nsrun: none\nsrun: openmpi\nsrun: pmi2", ["none", "openmpi", "pmi2"]),
        ("MPI plugin types are...\n\tcray_shasta\n\tnone", ["cray_shasta", "none"]),
    ],
)  # fmt: skip
def test_what_srun_offers(tmp_path, said, offered):
    assert offered_pmis(srun(tmp_path, said)) == offered


def test_an_srun_without_a_cluster_offers_nothing(tmp_path):
    assert offered_pmis(srun(tmp_path, "none pmix", status=1)) == []
    assert offered_pmis(str(tmp_path / "missing")) == []


def srun(folder: Path, said: str, status: int = 0) -> str:
    path = folder / "srun"
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{said}\nEOF\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def test_the_library_that_is_imported_is_the_one_that_another_process_loads():
    program = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpistrat.cluster.launchers import imported_library\n"
        "before = imported_library()\n"
        "import mpi4py.MPI\n"
        "library = imported_library()\n"
        "print(before, library.name, library.version, library.text, sep='|')\n"
    )
    reply = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    library = loaded_library()
    assert reply.stdout == f"None|{library.name}|{library.version}|{library.text}\n"
