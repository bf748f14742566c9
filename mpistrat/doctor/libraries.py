"""The compiled loops, HDF5, GPUs, NCCL: a probe, this module as a program, imports and reports them; findings."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from ..base.text import counted
from ..cluster.launchers import MPILibrary
from .finding import Finding, ok, problem, warning
from .probe import Outcome, report, step

__all__ = ["check_gpus", "check_hdf5", "check_loops", "gpus_of_machine", "main"]


def check_loops(outcome: Outcome) -> Iterator[Finding]:
    """Check that sums and update rules are compiled."""
    name, found = "compiled loops", outcome.get("loops")
    if found is None:
        remedy = "MPISTRAT_COMPILED_LOOPS=0 leaves them to NumPy; or install mpistrat again, on this machine"
        yield problem(name, f"{outcome.step} {outcome.end()}", remedy)
        return
    instructions, reason = found
    if instructions:
        yield ok(name, f"sums and update rules use {instructions}")
    else:
        again = "Install gcc and Python's headers (python3-dev), then mpistrat again: pip install --force-reinstall --no-deps ."
        remedy = "unset MPISTRAT_COMPILED_LOOPS" if "MPISTRAT_COMPILED_LOOPS" in reason else again
        yield warning(name, f"{reason}: NumPy sums and updates, more slowly", remedy)


def check_hdf5(outcome: Outcome, library: MPILibrary | None, needs: Collection[str]) -> Iterator[Finding]:
    """Check that h5py works, and is parallel if the user needs "parallel-hdf5"."""
    name, found = "HDF5", outcome.get("h5py")
    if found is None:
        yield problem(name, f"{outcome.step} {outcome.end()}", "pip install --force-reinstall h5py, or load the site's")
        return
    h5py, hdf5, parallel = found
    text = f"h5py {h5py}, HDF5 {hdf5}, {'parallel' if parallel else 'serial'}"
    build = "CC=mpicc HDF5_MPI=ON HDF5_DIR=… pip install --no-binary=h5py h5py; conda install 'h5py=*=mpi_*'"
    others = [path for path in outcome.get("libmpi") if not _same(path, library)]
    if parallel and library is not None and others:
        what = f"{text}; but it was built with another MPI ({others[0]}) than mpi4py loads ({library.path})"
        yield problem(name, what, f"Build h5py with the MPI of mpi4py: {build}")
    elif "parallel-hdf5" in needs and not parallel:
        what = f"{text}: driver='mpio' will fail"
        yield problem(name, what, f"{build}. mpistrat needs it only where ranks write one file together")
    else:
        yield ok(name, text if parallel else f"{text}: every rank reads for itself, which is all that mpistrat needs")


def _same(path: str, library: MPILibrary | None) -> bool:
    return library is None or not library.path or os.path.realpath(path) == os.path.realpath(library.path)


def check_gpus(outcome: Outcome, needs: Collection[str]) -> Iterator[Finding]:
    """Check the GPUs that CuPy finds, and its NCCL; of the user's needs "gpu" and "nccl" count."""
    gpus, reason = outcome.get("gpus"), outcome.get("no_gpu")
    if outcome.get("h5py") is not None and gpus is None:
        yield problem("GPU", f"{outcome.step} {outcome.end()}", "Install the CuPy of the driver's CUDA version")
        return
    if outcome.get("h5py") is None and gpus is None:
        yield warning("GPU", "not checked, because h5py failed first", "Fix h5py first: see its line")
        return
    if gpus:
        names = ", ".join(f"{model} ({uuid})" for uuid, model in gpus)
        yield ok("GPU", f"{len(gpus)} for this process: {names}")
    elif "gpu" in needs or "nccl" in needs:
        yield problem("GPU", "CuPy finds none", reason or "Ask the batch system for one")
    elif count := len(gpus_of_machine()):
        maker = "AMD" if amd_alone() else "NVIDIA"
        what = f"this machine has {counted(count, f'{maker} GPU')}, and this process can use none: it trains on the CPU"
        yield warning("GPU", what, reason or "Ask the batch system for one")
    else:
        yield ok("GPU", "none: devices are CPUs")
    missing = outcome.get("no_nccl")
    if missing is None and "nccl" in needs:
        yield problem("NCCL", f"{outcome.step} {outcome.end()}", "Install the CuPy of the driver's CUDA version")
    elif missing and "nccl" in needs:
        yield problem("NCCL", f"not usable: {missing}", "Or train without it: communication AUTO does not need it")
    elif gpus and missing:
        yield warning("NCCL", f"not usable: {missing}", "Sums of GPUs' arrays go through host memory, which is slower")
    elif missing == "":
        yield ok("NCCL", "CuPy has it")
    for library, package in _FRAMEWORKS.items():
        if gpus and (found := outcome.get(package)) is not None:
            yield _same_gpus(library, found, [uuid for uuid, _ in gpus])


_FRAMEWORKS = {"PyTorch": "torch", "JAX": "jax"}


def _same_gpus(library: str, found: list[str], of_cupy: list[str]) -> Finding:
    """Compare the GPUs of a library, by UUID or "?", with CuPy's: a rank passes both the same number."""
    name = f"GPUs of {library}"
    if not found:
        remedy = (
            f"Install the {library} of the driver's CUDA or ROCm version: models of {library} then compute on CPUs only"
        )
        return warning(name, f"{library} sees none, CuPy {len(of_cupy)}", remedy)
    if len(found) == len(of_cupy) and all(mine in ("?", other) for mine, other in zip(found, of_cupy, strict=True)):
        return ok(name, f"{library} and CuPy see the same, in the same order")
    what = f"{library} sees {', '.join(found)}, CuPy {', '.join(of_cupy)}: a rank would compute on two GPUs"
    return problem(
        name, what, "unset CUDA_DEVICE_ORDER, or export it and CUDA_VISIBLE_DEVICES before any library is imported"
    )


_NVIDIA, _AMD = Path("/proc/driver/nvidia/gpus"), Path("/sys/class/kfd/kfd/topology/nodes")


def gpus_of_machine() -> list[str]:
    """Return the PCI addresses of this machine's GPUs of NVIDIA, or else of AMD, usable or not."""
    try:
        return sorted(path.name for path in _NVIDIA.iterdir())
    except OSError:
        return amd_gpus(_AMD)


def amd_alone() -> bool:
    """Return whether this machine has GPUs of AMD, and none of NVIDIA."""
    return not _NVIDIA.exists() and bool(amd_gpus(_AMD))


def amd_gpus(nodes: Path) -> list[str]:
    """Return the PCI addresses of AMD's GPUs, from the driver's folders."""
    found = []
    for path in sorted(nodes.glob("*/properties")):
        about = {}
        with contextlib.suppress(OSError, ValueError):
            about = {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}
        if about.get("simd_count", 0):  # a processor has none
            place = about.get("location_id", 0)
            found.append(f"{about.get('domain', 0):04x}:{place >> 8 & 255:02x}:{place >> 3 & 31:02x}.{place & 7}")
    return sorted(found)


def reachable_gpus(files: Path = Path("/dev")) -> int | None:
    """Return the number of NVIDIA's GPUs whose device files this process may open; None without such files.

    A batch system may forbid the others by a cgroup. Then GPUs cannot access each other's memory.
    """
    paths = [path for path in files.glob("nvidia*") if path.name[6:].isdigit()]
    return sum(map(_opens, paths)) if paths else None


def _opens(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def main() -> None:
    """Import the libraries, and report their versions and properties. MPI is not started."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    step("loading the compiled loops")
    from ..base import loops

    report(loops=loops.used())
    step("import h5py")
    import h5py

    versions = h5py.version
    report(h5py=[versions.version, versions.hdf5_version, bool(h5py.get_config().mpi)], libmpi=_mpi_files())
    step("asking CuPy for GPUs")
    from ..base.devices import gpu_identities

    gpus, reason = gpu_identities()
    report(gpus=[list(gpu) for gpu in gpus], no_gpu=reason)
    step("asking CuPy for NCCL")
    from ..comm.gpu import nccl_available

    report(no_nccl=nccl_available())
    for library, package in _FRAMEWORKS.items():
        if gpus and importlib.util.find_spec(package) is not None:
            step(f"asking {library} for GPUs")
            report(**{package: _gpus_of(package)})


def _gpus_of(package: str) -> list[str]:
    """Return the UUIDs of the GPUs of PyTorch or JAX, "?" if unknown."""
    if package == "torch":
        import torch

        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [f"GPU-{uuid}" if (uuid := getattr(about, "uuid", None)) is not None else "?" for about in found]
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # JAX would take most of the GPUs' memory
    import jax

    return ["?" for device in jax.local_devices() if device.platform != "cpu"]


def _mpi_files() -> list[str]:
    """Return the files of MPI libraries that this process has loaded."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps}
    except OSError:
        return []
    return sorted(path for path in paths if path.rpartition("/")[2].startswith("libmpi.so"))


if __name__ == "__main__":
    main()
