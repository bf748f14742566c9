"""Device strings: "cpu:0", "gpu:1" and TensorFlow's spellings; and the devices of a rank."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
from collections.abc import Sequence
from uuid import UUID

from .errors import DeviceError, explain
from .log import once

__all__ = [
    "bus_ids",
    "canonical",
    "check_devices",
    "count_gpus",
    "default_devices",
    "gpu_identities",
    "parse",
    "use_device",
]

# Optional job/replica/task parts, then "cpu", "gpu:1", "/gpu:1" or "/device:GPU:1".
_DEVICE = re.compile(
    r"(?:/job:[a-z0-9_]+)?(?:/replica:[0-9]{1,9})?(?:/task:[0-9]{1,9})?/?(?:device:)?(cpu|gpu)(?::([0-9]{1,6}))?",
    re.IGNORECASE,
)
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # of CUDA and ROCm, of HIP, of ROCm
_EMPTY = "{} is empty and hides every GPU: unset it, or list the GPUs in it"
_FORMS = "a device such as 'cpu:0', 'gpu:1' or '/device:GPU:1'"


def parse(device: str) -> tuple[str, int]:
    """Return the type ("cpu" or "gpu") and the index on this rank of a device string.

    TensorFlow's spellings are understood; job, replica and task are ignored, because a rank names only its own devices.

    Raises:
        DeviceError: the string is malformed.

    Example:
        >>> parse("/job:worker/task:0/device:GPU:1")
        ('gpu', 1)
    """
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise DeviceError(explain("parse", "device", expected=_FORMS, got=f"{device!r:.80}"))
    return match.group(1).lower(), int(match.group(2) or 0)


def canonical(device: str) -> str:
    """Return the canonical spelling of a device.

    Raises:
        DeviceError: the string is malformed.

    Example:
        >>> canonical("/device:GPU:1"), canonical("CPU")
        ('gpu:1', 'cpu:0')
    """
    kind, index = parse(device)
    return f"{kind}:{index}"


def count_gpus() -> int:
    """Return the number of GPUs that this process can use through CuPy; 0 without CuPy."""
    return _find_gpus()[0]


def _find_gpus() -> tuple[int, str]:
    """Return the number of usable GPUs and, if it is 0, the reason and the remedy."""
    # An empty list hides every GPU; do not query CUDA or import CuPy. ROCm reads CUDA's variable too.
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() == "":
        return 0, _EMPTY.format("CUDA_VISIBLE_DEVICES")
    if importlib.util.find_spec("cupy") is None:
        return 0, "CuPy is not installed: pip install 'mpistrat[cuda12x]' or 'mpistrat[cuda13x]' (AMD: cupy-rocm-7-0)"
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # CuPy raises its own types for a missing driver, others for a missing library
        remedy = "check the driver with nvidia-smi (AMD: rocm-smi)"
        return 0, _hidden() or f"CuPy finds no usable GPU ({type(error).__name__}: {error}): {remedy}"
    remedy = "ask the batch system for one, or check with nvidia-smi (AMD: rocm-smi)"
    return count, "" if count else _hidden() or f"CuPy finds no GPU: {remedy}"


def _hidden() -> str:
    """Return the reason why no AMD GPU is visible, if a variable hides them."""
    runtime = getattr(getattr(sys.modules.get("cupy"), "cuda", None), "runtime", None)
    if getattr(runtime, "is_hip", False):
        for name in _VISIBLE:
            if os.environ.get(name, "unset").strip() == "":
                return _EMPTY.format(name)
    return ""


def gpu_identities() -> tuple[list[tuple[str, str]], str]:
    """Return UUID and model of each GPU that this process can use; and without one, the reason and the remedy.

    A GPU whose UUID CuPy does not report has its bus id instead.
    """
    count, reason = _find_gpus()
    found = []
    for index in range(count):
        import cupy

        about = cupy.cuda.runtime.getDeviceProperties(index)
        model, uuid = about["name"], bytes(about.get("uuid", b""))  # CuPy 13 truncates it at a zero byte
        name = f"GPU-{UUID(bytes=uuid)}" if len(uuid) == 16 else cupy.cuda.runtime.deviceGetPCIBusId(index)
        found.append((str(name), model.decode(errors="replace") if isinstance(model, bytes) else str(model)))
    return found, reason


def bus_ids() -> list[str]:
    """Return the PCI bus id of each GPU that this process can use, by which NCCL distinguishes GPUs.

    Instances of one GPU (MIG) have their own UUIDs and the same bus id.
    """
    found = []
    for index in range(count_gpus()):
        import cupy

        runtime = cupy.cuda.runtime
        bus = runtime.deviceGetPCIBusId(index) if hasattr(runtime, "deviceGetPCIBusId") else ""
        found.append(bus.decode() if isinstance(bus, bytes) else str(bus))
    return found


def default_devices(local_rank: int, local_size: int) -> tuple[str, ...]:
    """Return the devices of a rank if the user names none.

    A rank alone on its node takes every GPU. Otherwise each takes the GPU of its rank on the node, and ranks share GPUs if there
    are fewer GPUs than ranks. Without a GPU that CuPy can use: the CPU.
    """
    gpus = count_gpus()
    if gpus == 0:
        return ("cpu:0",)
    if local_size == 1:
        return tuple(f"gpu:{index}" for index in range(gpus))
    # With such a variable, one visible GPU usually means that the launcher gave each rank its own.
    bound_by_launcher = gpus == 1 and any(name in os.environ for name in _VISIBLE)
    if gpus < local_size and not bound_by_launcher and local_rank == 0:
        once(logging.WARNING, f"{local_size} ranks on this node share {gpus} GPU(s): start as many ranks as GPUs")
    return (f"gpu:{local_rank % gpus}",)


def use_device(device: str) -> None:
    """Make a GPU the current one of this thread, for CuPy and PyTorch; do nothing for a CPU.

    New arrays are then on it: `cupy.zeros(3)`, `torch.zeros(3, device="cuda")`.

    Args:
        device: such as "gpu:1", a device of this rank.
    """
    kind, index = parse(device)
    if kind != "gpu":
        return
    import cupy

    cupy.cuda.Device(index).use()
    torch = sys.modules.get("torch")  # if imported later, it uses the thread's current GPU
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(index)


def check_devices(devices: Sequence[str] | str, function: str = "check_devices") -> tuple[str, ...]:
    """Return the devices in their canonical spelling after checking that this rank has them.

    CPU devices are logical: "cpu:0", "cpu:1", … may be named freely, and each is a replica.

    Raises:
        DeviceError: no device, a malformed one, one named twice, or a GPU that this rank does not see.
    """
    given: object = [devices] if isinstance(devices, str) else devices
    if not isinstance(given, Sequence) or not given:
        raise DeviceError(explain(function, "devices", expected="at least one device", got=f"{given!r:.80}"))
    result = []
    for name in given:
        try:
            kind, index = parse(name)
        except DeviceError:
            raise DeviceError(explain(function, "devices", expected=_FORMS, got=f"{name!r:.80}")) from None
        if kind == "gpu":
            _check_gpu(function, name, index)
        result.append(f"{kind}:{index}")
    if len(set(result)) < len(result):
        raise DeviceError(explain(function, "devices", expected="each device once", got=", ".join(result)))
    return tuple(result)


def _check_gpu(function: str, name: str, index: int) -> None:
    count, reason = _find_gpus()
    if index >= count:
        exist = f"gpu:0 to gpu:{count - 1}" if count > 1 else "gpu:0" if count == 1 else "no GPU"
        remedy = reason or "Each rank counts its own visible GPUs from 0"
        raise DeviceError(
            explain(
                function, "devices", expected=f"a device of this rank ({exist}, cpu:0)", got=repr(name), remedy=remedy
            )
        )
