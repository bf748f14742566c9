"""What a person sees of the doctor: the two tables, the conclusion, and the status of the command."""

from __future__ import annotations

import pytest

from mpistrat.cli import doctor
from mpistrat.cli.main import main
from mpistrat.doctor.finding import Finding, Summary, ok, problem, warning

MARKUP = "[red]x[/red] [/] [bold] \\[a]"  # rich could take parts of it for styles, and fail on the rest


@pytest.fixture
def print_findings(monkeypatch, capsys):
    """Run the command on what the doctor found: its exit status, and the lines that it printed."""
    monkeypatch.setattr(doctor, "launched_rank", lambda: None)

    def run(*findings: Finding, ranks: list[dict] | None = None) -> tuple[int, list[str]]:
        monkeypatch.setattr(doctor, "check_login", lambda *_, **__: list(findings))
        monkeypatch.setattr(doctor, "check_ranks", lambda *_, **__: Summary(findings, ranks or ()))
        status = main(["doctor"] if ranks is None else ["doctor", "--ranks"])
        said = capsys.readouterr()
        assert said.err == ""
        return status, [line.rstrip() for line in said.out.splitlines()]

    return run


def rank(number: int, **own: object) -> dict:
    """What one rank says of itself."""
    row = {
        "rank": number,
        "host": "h1",
        "local_rank": number % 4,
        "role": f"worker {number}",
        "gpus": [],
        "cores": "0-1",
    }
    return {**row, "threads": 2, "mpi": "MPICH 5.0.2", **own}


def test_every_status_has_its_line(print_findings):
    status, lines = print_findings(
        ok("MPI start", "it started"),
        ok("GPU", "none", "a hint"),
        warning("stack", "little", "ulimit -s 8192"),
        problem("mpiexec", "another MPI", "Start with /opt/mpiexec"),
    )
    assert status == 1
    assert lines == [
        "OK       MPI start  it started",
        "OK       GPU        none",
        "                    → a hint",
        "warning  stack      little",
        "                    → ulimit -s 8192",
        "problem  mpiexec    another MPI",
        "                    → Start with /opt/mpiexec",
        "",
        "1 problem and 1 warning",
    ]


@pytest.mark.parametrize(
    ("problems", "warnings", "status", "words"),
    [
        (0, 0, 0, "all is well"),
        (0, 1, 0, "1 warning"),
        (0, 2, 0, "2 warnings"),
        (1, 0, 1, "1 problem"),
        (3, 0, 1, "3 problems"),
        (2, 1, 1, "2 problems and 1 warning"),
    ],
)
def test_the_conclusion_and_the_status(print_findings, problems, warnings, status, words):
    found = [*[warning("w", "a", "b")] * warnings, ok("o", "c"), *[problem("p", "d", "e")] * problems]
    ended, lines = print_findings(*found)
    assert ended == status and lines[-2:] == ["", words]


def test_long_text_is_folded_within_its_column(print_findings):
    _, lines = print_findings(problem("launch", "word " * 60, "x" * 200))
    assert all(len(line) <= 160 for line in lines)
    assert all(line.startswith(" " * 17) for line in lines[1:-2])
    assert " ".join(lines).count("word") == 60 and "".join(lines).count("x") == 200


def test_text_that_looks_like_markup_comes_out_as_it_is(print_findings):
    _, lines = print_findings(warning(MARKUP, MARKUP, MARKUP))
    assert lines[:2] == [f"warning  {MARKUP}  {MARKUP}", f"{' ' * (11 + len(MARKUP))}→ {MARKUP}"]


def test_the_ranks_have_a_table_before_the_findings(print_findings):
    gpus = ["GPU-1", "0000:cd:00.0"]  # which might be taken for an emoji
    like = "[red]x[/]"
    rows = [rank(0, gpus=gpus), rank(1, host=like, role=like, gpus=[like], cores=like, mpi=like)]
    status, lines = print_findings(ok("ranks", "2 on 2 nodes"), ranks=rows)
    assert status == 0
    assert lines[0].split() == ["rank", "host", "local", "role", "GPU", "cores", "threads", "MPI"]
    assert lines[1].split() == ["0", "h1", "0", "worker", "0", "GPU-1,", "0000:cd:00.0", "0-1", "2", "MPICH", "5.0.2"]
    assert lines[2].split() == ["1", like, "1", like, like, like, "2", like]
    assert lines[3:] == ["", "OK  ranks  2 on 2 nodes", "", "all is well"]


def test_a_rank_without_gpus(print_findings):
    _, lines = print_findings(ok("ranks", "1 on 1 node"), ranks=[rank(0)])
    assert lines[1].split() == ["0", "h1", "0", "worker", "0", "-", "0-1", "2", "MPICH", "5.0.2"]


@pytest.mark.parametrize("ranks", [64, 65, 1000])
def test_of_many_ranks_the_first_are_shown(print_findings, ranks):
    _, lines = print_findings(ok("ranks", f"{ranks} on 1 node"), ranks=[rank(number) for number in range(ranks)])
    shown = [line for line in lines if "worker" in line]
    assert [int(line.split()[0]) for line in shown] == list(range(64))
    more = [f"… and {ranks - 64} more ranks; --json lists all of them"] if ranks > 64 else []
    assert lines[65:] == [*more, "", f"OK  ranks  {ranks} on 1 node", "", "all is well"]


def test_only_the_first_process_speaks(print_findings, monkeypatch):
    monkeypatch.setattr(doctor, "launched_rank", lambda: 1)
    assert print_findings(problem("a", "b", "c")) == (0, [])
    assert print_findings(problem("a", "b", "c"), ranks=[rank(0)]) == (1, [])  # what befell this process ends the job
