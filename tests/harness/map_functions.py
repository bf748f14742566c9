"""Functions for Dataset.map in processes, which import them from here."""

import os
import signal
import threading
from typing import Any

import numpy as np


def double(x: Any) -> Any:
    return 2 * x


def add(x: Any, y: Any) -> Any:
    return x + y


def process(x: Any) -> int:
    return os.getpid()


def launcher_variables(x: Any) -> int:
    return sum(name.startswith(("PMI_", "PMIX_", "MPI_", "HYDRA_", "OMPI_", "PRTE_")) for name in os.environ)


def import_mpi(x: Any) -> int:
    import mpi4py.MPI

    return mpi4py.MPI.COMM_WORLD.size


def die_at_5(x: Any) -> Any:
    if x == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def exit_at_5(x: Any) -> Any:
    if x == 5:
        os._exit(7)
    return x


def fail_at_5(x: Any) -> Any:
    if x == 5:
        raise KeyError("not five")
    return x


def nothing_at_5(x: Any) -> Any:
    if 5 not in np.atleast_1d(x):
        return x
    return None


def lock(x: Any) -> Any:
    return threading.Lock()


class SecretError(Exception):
    def __init__(self, a: int, b: int) -> None:  # cannot be made anew from its args
        super().__init__("secret")


def fail_secretly(x: Any) -> Any:
    raise SecretError(1, 2)


def large(x: Any) -> Any:
    return np.full(1 << 20, x)
