"""Random programs of Keras next to the same ones in one process: a share of what `make nightly` runs."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("keras")


@pytest.mark.parametrize("ranks", [pytest.param(2, id="np2"), pytest.param(3, id="np3")])
def test_programs_are_equal_to_one_process_or_documented(mpi, ranks):
    from tests.nets.programs import check

    backend = os.environ.get("KERAS_BACKEND", "")
    if backend not in ("torch", "jax"):
        pytest.skip(f"no programs for KERAS_BACKEND={backend!r}")
    first, count = 0 if ranks == 2 else 40, 20 if backend == "torch" else 8  # JAX compiles each program
    check(mpi, f"keras-{backend}", ranks, first, first + count)
