"""The question whether MPI takes memory of GPUs, asked of small libraries that answer as the MPIs do."""

import ctypes
import subprocess

import pytest
from mpi4py import MPI

from mpistrat.comm import gpu_support
from mpistrat.comm.gpu_support import ask

YES, NO = 1, 0
CUDA, ROCM, HIP = ("MPIX_Query_cuda_support", "MPIX_Query_rocm_support", "MPIX_Query_hip_support")
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.29.0 (ANL base 3.4a2)"
ON = {"MPICH_GPU_SUPPORT_ENABLED": "1"}
CONFIRMED = {"OMPI_MCA_opal_cuda_support": "true"}
OPEN_MPI = "Open MPI v{}, package: Open MPI, ident: {}"


def of_kind(kind: int) -> str:
    """Cray's query, of a library for one kind of GPU: 0 CUDA, 2 HIP."""
    return f"int MPIX_GPU_query_support(int kind, int *yes) {{ *yes = kind == {kind}; return 0; }}"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Make a library of functions the one that is asked, with the version of an MPI."""

    def make(version, *functions, **answers):
        source = "\n".join([*functions, *(f"int {name}(void) {{ return {yes}; }}" for name, yes in answers.items())])
        (tmp_path / "mpi.c").write_text(source)
        path = tmp_path / f"libmpi{len(list(tmp_path.iterdir()))}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(tmp_path / "mpi.c")], check=True)
        monkeypatch.setattr(gpu_support, "_mpi_libraries", lambda: ["/no/such/library.so", str(path)])
        monkeypatch.setattr(MPI, "Get_library_version", lambda: version)

    return make


@pytest.mark.parametrize(
    ("version", "answers", "variables", "nvidia", "amd"),
    [
        ("MPICH Version: 5.0.2", {CUDA: YES, HIP: NO}, {}, True, False),
        ("MPICH Version: 5.0.2", {CUDA: NO, HIP: YES}, {}, False, True),
        (OPEN_MPI.format("5.0.8", "5.0.8"), {CUDA: YES, ROCM: NO}, {}, True, False),
        (OPEN_MPI.format("5.0.8", "5.0.8"), {CUDA: NO, ROCM: YES}, {}, False, True),
        (OPEN_MPI.format("4.1.6", "4.1.6"), {CUDA: YES}, {}, False, None),  # of the build alone
        (OPEN_MPI.format("4.1.6", "4.1.6"), {CUDA: YES}, CONFIRMED, True, None),
        (OPEN_MPI.format("4.1.6", "4.1.6"), {CUDA: NO}, CONFIRMED, False, None),
        ("IBM Spectrum MPI 10.4.0.3", {CUDA: YES}, {}, False, None),
        ("Open MPI v3", {}, {}, None, None),
        (CRAY, {}, ON, True, True),  # one that cannot be asked, and has started
        (CRAY, {}, {}, False, False),
    ],
)
def test_answers(library, version, answers, variables, nvidia, amd):
    library(version, **answers)
    assert (ask(environment=variables), ask(amd=True, environment=variables)) == (nvidia, amd)


@pytest.mark.parametrize(("kind", "nvidia", "amd"), [(0, True, False), (2, False, True)])
def test_cray_mpich_is_asked_for_a_kind_of_gpu(library, kind, nvidia, amd):
    library(CRAY, of_kind(kind))
    assert (ask(environment=ON), ask(amd=True, environment=ON)) == (nvidia, amd)
    assert ask(environment={}) is False or not nvidia


def test_this_mpi_answers():
    """The MPIs of the test environments are built without CUDA."""
    answer = ask()
    query = getattr(ctypes.CDLL(str(MPI.__file__)), CUDA, None)
    assert answer == (None if query is None else bool(query()))
