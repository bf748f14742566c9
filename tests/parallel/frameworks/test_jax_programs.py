"""Random programs of JAX next to the same ones in one process: a share of what `make nightly` runs."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")


@pytest.mark.parametrize("ranks", [pytest.param(2, id="np2"), pytest.param(3, id="np3")])
def test_programs_are_equal_to_one_process_or_clear_errors(mpi, ranks):
    from tests.nets.programs import check

    check(mpi, "jax", ranks, 0, 12)
