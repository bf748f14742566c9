"""The driver of the nets: which cases run, what becomes of jobs that die, the summary, the exit status."""

from __future__ import annotations

import json

import pytest

from tests.launch.launcher import MpiEnv, Result
from tests.nets import nightly, same_bits
from tests.nets.patterns.documented import DIFFERENCES
from tests.nets.patterns.verdicts import Failure, distance, verdict

MPI = MpiEnv("mpich", "python", ("mpiexec",), "MPICH")
CONFIG = {"program": "plain", "kind": "last", "tolerance": 1e-9}


def lines(*numbers: int, result: str = "equal", begun: int | None = None) -> str:
    """What rank 0 of a job prints."""
    texts = [json.dumps({"number": n, "result": result, "detail": ""}) for n in numbers]
    if begun is not None:
        texts.append(json.dumps({"number": begun, "begins": True}))
    return "\n".join(texts) + "\n"


def ended(text: str, returncode: int | None = 0) -> Result:
    return Result(returncode, [text], ["the end"], "", 1.0, returncode is None, [])


def test_a_night_has_all_cases_over_ranks_and_mpis():
    other = MpiEnv("openmpi", "python", ("mpiexec",), "Open MPI")
    made = nightly.shares([MPI, other], MPI)
    assert sum(share.count for share in made if share.net == "differential") == 2000
    assert {(share.mpi.name, share.ranks) for share in made if share.net == "differential"} == {
        (name, ranks) for name in ("mpich", "openmpi") for ranks in (1, 2, 3, 4)
    }
    programs = {net: sum(share.count for share in made if share.net == net) for net in nightly.PROGRAMS}
    assert programs == {"torch": 500, "jax": 300, "keras-torch": 250, "keras-jax": 250}
    assert {share.ranks for share in made if share.net == "jax"} == {2, 3}


def test_a_job_that_dies_costs_one_case():
    """Cases 0 and 1 end, 2 kills the job: the next one starts with 3."""
    asked = []

    def launch(words, ranks, mpi, timeout, env, hosts):
        asked.append(words[words.index("--first") + 1])
        return ended(lines(0, 1, begun=2), 6) if asked == ["0"] else ended(lines(3, 4))

    found = list(nightly.run(nightly.Share("torch", MPI, 2, 5), 7, launch))
    assert asked == ["0", "3"]
    assert [(record["number"], record["result"]) for record in found] == [
        (0, "equal"), (1, "equal"), (2, "died"), (3, "equal"), (4, "equal"),
    ]  # fmt: skip
    assert "exit status 6" in found[2]["detail"]
    assert "the end" in found[2]["detail"]


def test_a_job_that_never_starts_is_not_started_for_each_case():
    found = list(nightly.run(nightly.Share("jax", MPI, 2, 500), 7, lambda *_, **__: ended("no module\n", 1)))
    assert [record["result"] for record in found] == ["died"]


@pytest.mark.parametrize(
    ("clear", "returncode", "result"), [(True, 1, "error"), (False, 1, "died"), (True, None, "died")]
)
def test_a_clear_error_that_ends_the_job_is_one(clear, returncode, result):
    """A rank whose program raises an error ends the others; its own line tells which error it was."""
    line = json.dumps({"number": 0, "failed": "BatchError: ms.torch: no batch", "clear": clear})
    job = ended(lines(begun=0), returncode)
    job.out.append(line)
    (found,) = nightly.run(nightly.Share("torch", MPI, 2, 1), 7, lambda *_, **__: job)
    assert found["result"] == result
    assert ("BatchError" in found["detail"]) == (result == "error")


def test_a_hang_is_told():
    share = nightly.Share("torch", MPI, 2, 1)
    found = list(nightly.run(share, 7, lambda *_, **__: ended(lines(begun=0), None)))
    assert "did not end within 102 s" in found[0]["detail"]


@pytest.mark.parametrize(("result", "status"), [("equal", 0), ("error", 0), ("documented", 0), ("wrong", 1)])
def test_the_exit_status_and_the_summary_tell_what_was_wrong(result, status, monkeypatch, tmp_path):
    monkeypatch.setattr(nightly, "mpi_env", lambda python, name=None: MPI)
    monkeypatch.setattr(nightly, "shares", lambda *_: [nightly.Share("torch", MPI, 2, 1)])
    monkeypatch.setattr(nightly.run, "__defaults__", (lambda *_, **__: ended(lines(0, result=result)),))
    assert nightly.main(["--seed", "7", "--no-hosts", "--output", str(tmp_path)]) == status
    assert "seed 7" in (tmp_path / "nets.md").read_text()
    row = "| torch | mpich | 2 ranks | " + " | ".join(str(int(name == result)) for name in nightly.RESULTS) + " |"
    assert row in (tmp_path / "nets.md").read_text()
    assert json.loads((tmp_path / "nets.jsonl").read_text())["result"] == result


OURS = Failure("BatchError", "ms.torch: x: expected a batch, got none. Use strategy.batch(x)", True, "")
PYTHON = Failure("TypeError", "unsupported operand", False, "")


@pytest.mark.parametrize(
    ("failures", "away", "result"),
    [
        ([None, None], 1e-10, "equal"),
        ([None, None], 1e-8, "wrong"),
        ([None, None], float("inf"), "wrong"),
        ([OURS, OURS], 0.0, "error"),
        ([OURS, None], 0.0, "wrong"),  # on one rank only
        ([PYTHON, PYTHON], 0.0, "wrong"),  # not the package's
        ([OURS, PYTHON], 0.0, "wrong"),
        ([Failure("ValueError", "no form at all", True, "")] * 2, 0.0, "wrong"),
        ([Failure("CollectiveMismatchError", "Strategy.run: the ranks differ", True, "")] * 2, 0.0, "wrong"),
        ([OURS, Failure("CollectiveMismatchError", "Strategy.run: the ranks differ", True, "")], 0.0, "error"),
    ],
)
def test_only_equal_numbers_and_clear_errors_of_all_ranks_pass(failures, away, result):
    assert verdict("torch", CONFIG, failures, None, [(away, "w"), (0.0, "")])[0] == result


def test_a_program_that_fails_in_plain_training_proves_nothing():
    assert verdict("torch", CONFIG, [None, None], PYTHON, [(0.0, "")] * 2)[0] == "wrong"
    assert verdict("torch", CONFIG, [PYTHON, PYTHON], PYTHON, [(0.0, "")] * 2)[0] == "equal"
    assert verdict("torch", CONFIG, [PYTHON, None], PYTHON, [(0.0, "")] * 2)[0] == "wrong"
    assert verdict("torch", CONFIG, [OURS, OURS], PYTHON, [(0.0, "")] * 2)[0] == "error"


def test_a_server_takes_no_steps_that_could_fail():
    assert verdict("torch", CONFIG | {"servers": True}, [OURS, OURS, None], None, [(0.0, "")] * 3)[0] == "error"
    assert verdict("torch", CONFIG | {"servers": True}, [OURS, None, None], None, [(0.0, "")] * 3)[0] == "wrong"


def test_documented_differences_are_those_of_their_program_and_parts_only():
    masks = CONFIG | {"program": "mean_weight_loss"}
    assert verdict("keras-jax", masks, [None], None, [(0.1, "w")])[0] == "documented"
    assert verdict("torch", masks, [None], None, [(0.1, "w")])[0] == "wrong"
    spectral = CONFIG | {"program": "spectral"}
    assert verdict("keras-torch", spectral | {"kind": "empty"}, [None], None, [(0.1, "w")])[0] == "documented"
    assert verdict("keras-torch", spectral | {"kind": "equal"}, [None], None, [(0.1, "w")])[0] == "wrong"


def test_a_program_that_only_the_package_runs_is_documented_or_wrong():
    sparse = CONFIG | {"model": "embedding_sparse"}
    refused = Failure("RuntimeError", "add(sparse, dense) is not supported. Use add(dense, sparse)", False, "")
    assert verdict("torch", sparse, [None, None], refused, [(0.0, "")] * 2)[0] == "documented"
    assert verdict("torch", sparse, [None, PYTHON], refused, [(0.0, "")] * 2)[0] == "wrong"
    assert verdict("torch", sparse, [None, None], PYTHON, [(0.0, "")] * 2)[0] == "wrong"
    assert verdict("torch", sparse, [None, None], None, [(0.1, "w")] * 2)[0] == "wrong"


def test_documented_differences_name_pages_that_speak_of_them():
    from tests.launch.launcher import ROOT

    for difference in DIFFERENCES:
        assert (ROOT / difference.page).is_file()
        assert difference.reason


def test_results_are_compared_by_name_shape_and_number():
    assert distance({"w": [1.0, float("nan")]}, {"w": [1.0, float("nan")]}) == (0.0, "")
    assert distance({"w": [1.0]}, {"w": [3.0]}) == (0.5, "w: 5.00e-01")
    assert distance({"w": [float("nan")]}, {"w": [3.0]})[0] == float("inf")
    assert distance({"w": [float("inf")]}, {"w": [3.0]})[0] == float("inf")
    assert distance({"w": [1.0]}, {"w": [[1.0]]})[0] == float("inf")
    assert distance({"w": 1.0}, {"v": 1.0})[0] == float("inf")


@pytest.mark.parametrize(
    ("nights", "status"),
    [(["ab", "ab"], 0), (["ab", "ac"], 1), (["ab", "ac", "ad"], 0), (["ab", "ac", "bc"], 1), (["a", ""], 1)],
)
def test_other_bits_are_found_where_they_are_steady(nights, status, tmp_path, capsys):
    """Each night is a text of digests: the n-th letter is that of case n."""
    files = []
    for night, text in enumerate(nights):
        records = [
            {"mpi": "mpich", "where": "2 ranks", "seed": 1, "number": n, "bits": bits} for n, bits in enumerate(text)
        ]
        files.append(tmp_path / f"{night}.jsonl")
        files[-1].write_text("".join(json.dumps(record) + "\n" for record in records))
    assert same_bits.main(list(map(str, files))) == status, capsys.readouterr().out
