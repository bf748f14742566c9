"""One test ran on several ranks: make one set of pytest reports of theirs, in which every failure names its rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch.launcher_batch import Outcome

SERIALIZED = ("setup", "call", "teardown")


def merged(item: pytest.Item, outcome: Outcome) -> list[pytest.TestReport]:
    """The reports to show for an item: one for setup, one for the call, one for teardown, or one for a lost test."""
    ranks = [[_restored(item.config, data) for data in reports] for reports in outcome.reports]
    if outcome.problem is not None:
        return [_lost(item, ranks, outcome.problem)]
    named = "_layout" in getattr(getattr(item, "callspec", None), "params", {})
    phases = []
    for when in SERIALIZED:
        found = {rank: report for rank, reports in enumerate(ranks) for report in reports if report.when == when}
        if found:
            phases.append(_phase(item, found, len(ranks)) if named else found[0])
    return phases


def skipped(item: pytest.Item, reason: str) -> list[pytest.TestReport]:
    """The reports of a test that cannot run here."""
    place = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {reason}")
    return [_report(item, "skipped", place, "setup"), _report(item, "passed", None, "teardown")]


def failed(item: pytest.Item, text: str) -> list[pytest.TestReport]:
    """The report of a test that could not be started."""
    return [_report(item, "failed", text, "setup")]


def _restored(config: pytest.Config, data: dict[str, Any]) -> pytest.TestReport:
    report = config.hook.pytest_report_from_serializable(config=config, data=data)
    if isinstance(report.longrepr, list):  # a skip's place and reason, which JSON made a list of
        report.longrepr = tuple(report.longrepr)
    report.location = tuple(report.location)
    report.sections = [tuple(section) for section in report.sections]
    return report


def _phase(item: pytest.Item, found: dict[int, pytest.TestReport], ranks: int) -> pytest.TestReport:
    failed = {rank: report for rank, report in found.items() if report.failed}
    slowest = max(report.duration for report in found.values())
    if not failed:
        kinds = {report.outcome for report in found.values()}
        if len(kinds) > 1 or len(found) < ranks:
            did = ", ".join(
                f"rank {rank}: {found[rank].outcome if rank in found else 'nothing'}" for rank in range(ranks)
            )
            when = next(iter(found.values())).when
            return _report(item, "failed", f"the ranks do not agree on whether this test runs\n{did}", when)
    rank, report = next(iter((failed or found).items()))
    report.duration = slowest
    if failed:
        _name_rank(report, rank, ranks)
        for other, further in list(failed.items())[1:]:
            report.sections.append((f"rank {other} of {ranks} failed too", further.longreprtext))
            report.sections += [(f"rank {other}: {title}", text) for title, text in further.sections]
    return report


def _name_rank(report: pytest.TestReport, rank: int, ranks: int) -> None:
    report.sections = [(f"rank {rank}: {title}", text) for title, text in report.sections]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = f"rank {rank}: {crash.message}"  # in the short summary
        report.longrepr.addsection(f"rank {rank} of {ranks} failed", "")
    else:
        report.longrepr = f"rank {rank} of {ranks} failed\n{report.longreprtext}"


def _lost(item: pytest.Item, ranks: list[list[pytest.TestReport]], problem: str) -> pytest.TestReport:
    pieces = [problem.splitlines()[0]]
    for rank, reports in enumerate(ranks):
        pieces += [f"---- rank {rank} failed\n{report.longreprtext}" for report in reports if report.failed]
    return _report(item, "failed", "\n".join([*pieces, *problem.splitlines()[1:]]), "call")


def _report(item: pytest.Item, outcome: Any, longrepr: Any, when: Any) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, longrepr, when)
