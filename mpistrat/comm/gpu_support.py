"""Detection of an MPI library's support for GPU memory."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ..base.log import once

__all__ = ["ask", "gpu_aware", "uses_rocm"]

# MPICH's constants, which Cray MPICH shares: MPIX_GPU_SUPPORT_CUDA and MPIX_GPU_SUPPORT_HIP.
_CUDA, _HIP = 0, 2
_QUERIES = {_CUDA: ("MPIX_Query_cuda_support",), _HIP: ("MPIX_Query_rocm_support", "MPIX_Query_hip_support")}
_YES = ("1", "true", "yes", "on")


def uses_rocm() -> bool:
    """Return True if CuPy is imported and was built for AMD's GPUs."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and bool(getattr(cupy.cuda.runtime, "is_hip", False))


@functools.lru_cache(maxsize=1)
def gpu_aware() -> bool:
    """Return True if MPI supports memory of the GPUs that CuPy computes on. MPI is running.

    A library without an answer counts as unsupported.
    """
    answer = ask(amd=uses_rocm())
    if not answer:
        once(logging.DEBUG, "MPI does not report support for GPU memory: arrays on GPUs go through pinned host memory")
    return bool(answer)


def ask(*, amd: bool = False, environment: Mapping[str, str] = os.environ) -> bool | None:
    """Return True if the MPI library reports support for GPU memory; None if it has no query. MPI is running.

    It is queried through its extension: of Open MPI and MPICH (`MPIX_Query_cuda_support`, for AMD `MPIX_Query_rocm_support` or
    `MPIX_Query_hip_support`), and of Cray MPICH (`MPIX_GPU_query_support`). A yes does not count unless it applies to this run:

    - Cray MPICH supports GPU memory only under MPICH_GPU_SUPPORT_ENABLED=1.
    - Open MPI before 5 answers for its build. Its transport may lack CUDA, so OMPI_MCA_opal_cuda_support=1 must confirm it.
    - Spectrum MPI also answers yes if `jsrun` had no `--smpiargs=-gpu`.

    Args:
        amd: query for AMD's GPUs, not NVIDIA's.
        environment: the variables of this process.
    """
    from mpi4py import MPI

    version = MPI.Get_library_version()
    for path in _mpi_libraries():
        answer = _answer(path, _HIP if amd else _CUDA)
        if answer is not None:
            return answer and _of_this_run(version, environment)
    # One without a query; MPI_Init has rejected the variable if its library is missing.
    if "CRAY MPICH" in version.upper():
        return _of_this_run(version, environment)
    return None


def _answer(path: str, kind: int) -> bool | None:
    """Return the answer of one library, None if it has no query."""
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return None
    for name in _QUERIES[kind]:
        query = getattr(library, name, None)
        if query is not None:
            query.argtypes, query.restype = [], ctypes.c_int
            return bool(query())
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is None:
        return None
    query.argtypes, query.restype = [ctypes.c_int, ctypes.POINTER(ctypes.c_int)], ctypes.c_int
    supported = ctypes.c_int(0)
    return query(kind, ctypes.byref(supported)) == 0 and bool(supported.value)


def _of_this_run(version: str, environment: Mapping[str, str]) -> bool:
    """Return True if a library's yes applies to this run."""
    if "SPECTRUM MPI" in version.upper():
        return False
    if "CRAY MPICH" in version.upper():
        return environment.get("MPICH_GPU_SUPPORT_ENABLED", "") == "1"
    found = re.match(r"Open MPI v(\d+)", version)
    if found and int(found[1]) < 5:
        return environment.get("OMPI_MCA_opal_cuda_support", "").lower() in _YES
    return True


def _mpi_libraries() -> list[str]:
    """Return the extension module of mpi4py, whose dependencies are searched too, then every loaded MPI library."""
    from mpi4py import MPI

    loaded = []
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            path = line.split(maxsplit=5)[5:]
            if path and Path(path[0]).name.startswith(("libmpi.", "libmpich", "libmpi_abi", "libmpi_cray")):
                loaded.append(path[0])
    return [str(MPI.__file__), *dict.fromkeys(loaded)]
