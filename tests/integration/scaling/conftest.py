"""The counter of MPI calls, preloaded into programs, and simulated nodes for them."""

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def counter(mpi, tmp_path):
    library = tmp_path / "count_mpi.so"
    large = ["-DLARGE_COUNTS"] if "MPICH" in mpi.vendor else []
    command = ["gcc", "-O1", "-Wall", *large, "-shared", "-fPIC", "-o", str(library), str(HERE / "count_mpi.c")]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True, timeout=60)
    return library


@pytest.fixture
def preload(mpi, counter):
    """Return the environment of a program whose calls are counted, by numbers of nodes and ranks: MPICH's nodes are simulated."""

    def environment(nodes, ranks):
        library = Path(mpi.python).parent.parent / "lib" / ("libmpi.so.12" if "MPICH" in mpi.vendor else "libmpi.so.40")
        if not library.exists():
            pytest.skip(f"needs {library}, of the MPI's wheel")
        env = {"LD_PRELOAD": str(counter), "MPI_LIBRARY": str(library)}
        if "MPICH" in mpi.vendor:
            env["MPIR_CVAR_NUM_CLIQUES"] = str(nodes)
        elif nodes == ranks:
            env["MPISTRAT_SHARED_MEMORY"] = "0"
        return env

    return environment
