"""Random programs of PyTorch next to the same ones in one process: a share of what `make nightly` runs."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize("ranks", [pytest.param(2, id="np2"), pytest.param(3, id="np3")])
@pytest.mark.parametrize("first", [0, 45])
def test_programs_are_equal_to_one_process_or_clear_errors(mpi, ranks, first):
    from tests.nets.programs import check

    check(mpi, "torch", ranks, first, first + 45)


@pytest.mark.ranks(2)
def test_a_wrong_weight_is_found(monkeypatch):
    """With passes that all weigh 1 programs with unequal parts are wrong, and those with equal parts are not."""
    import mpistrat.torch.weights as weights
    from tests.nets.patterns.__main__ import run_programs

    monkeypatch.setattr(weights, "weight_of_pass", lambda *_: 1.0)
    for kind, result in (("equal", "equal"), ("unequal", "wrong"), ("empty", "wrong")):
        only = {"program": "plain", "kind": kind, "model": "mlp", "optimizer": "sgd", "in_run": False}
        only |= {"layout": "shared", "servers": False}
        records = [record for record in run_programs("torch", 1, 0, 2, only) if "result" in record]
        assert [record["result"] for record in records] == [result] * 2, records
