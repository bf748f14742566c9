"""The page of a check: one self-contained HTML file."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...base.text import counted, decimal_size, duration
from ...train.html_page import document, table
from .steps import ItemReport

__all__ = ["page"]

_COLOURS = {"passed": "green", "failed": "red", "hung": "red", "skipped": "olive", "not run": "olive"}
_NAMED = 3  # hosts to name if nodes are equal
_ORDER = ("failed", "hung", "not run", "passed", "skipped")


def page(about: Mapping[str, Any], reports: Sequence[ItemReport]) -> str:
    """Return the page.

    Args:
        about: version, date, launcher and seconds of the check.
        reports: of all items; those without a result are not run.
    """
    start = next((report for report in reports if report.nodes), None)
    parts = [f'<p class="soft">{html.escape(_summary(about, start))}</p>', _items(reports)]
    for report in reports:
        if report.numbers:
            parts += [f"<h2>{html.escape(report.name)}</h2>", *_numbers(report.numbers)]
    if start is not None:
        parts += ["<h2>Nodes</h2>", _nodes(start.nodes), *_machine(start, about["variables"])]
        parts += ["<h2>Findings of the doctor</h2>", _findings(start.findings)]
    for report in reports:
        if report.output:
            parts += [
                f"<h2>The end of the output of {html.escape(report.name)}</h2>",
                f"<pre>{html.escape(report.output)}</pre>",
            ]
    return document(f"Check of a cluster: {_layout(start)}", parts)


def _layout(start: ItemReport | None) -> str:
    if start is None:
        return "MPI did not start"
    nodes = counted(len(start.nodes), "node")
    return f"{counted(start.facts['ranks'], 'rank')} on {nodes}, {start.facts['vendor']}"


def _summary(about: Mapping[str, Any], start: ItemReport | None) -> str:
    words = [about["date"], f"mpistrat {about['mpistrat']}", f"ranks started by: {' '.join(about['launcher'])}"]
    if start is not None:
        machine = start.facts["machine"]
        words.append(f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB")
    return " · ".join(words)


def _items(reports: Sequence[ItemReport]) -> str:
    counts = [(word, sum(report.status == word for report in reports)) for word in _ORDER]
    said = ", ".join(f"{count} {word}" for word, count in counts if count)
    rows = (
        [
            html.escape(report.name), f'<b style="color:var(--{_COLOURS[report.status]})">{report.status}</b>',
            f"{report.seconds:.0f}&nbsp;s", html.escape(report.what or report.proves),
        ]
        for report in reports
    )  # fmt: skip
    return f"<p><b>{said}</b></p>" + table("Items of the check", ["item", "result", "time", "what"], rows, numbers=(2,))


def _numbers(numbers: Sequence[Sequence[Any]]) -> Iterable[str]:
    """Yield a table per unit: a row per name, grouped by operation, and a column per contender."""
    operations = list(dict.fromkeys(row.split()[0] for row, *_ in numbers))
    numbers = sorted(numbers, key=lambda number: operations.index(number[0].split()[0]))
    for unit in dict.fromkeys(unit for *_, unit in numbers):
        found: dict[str, dict[str, float]] = {}
        for row, column, value, own in numbers:
            if own == unit:
                found.setdefault(row, {})[column] = value
        columns = list(dict.fromkeys(column for values in found.values() for column in values))
        ratio = len(columns) == 2 and columns[1] == "MPI"
        head = [html.escape(title) for title in ("measured", *columns, *([f"{columns[0]} / MPI"] if ratio else []))]
        rows = []
        for name, values in found.items():
            cells = [
                html.escape(name),
                *(_text(values[column], unit) if column in values else "–" for column in columns),
            ]
            if ratio:
                cells.append(f"{values[columns[0]] / max(values['MPI'], 1e-9):.2f}" if len(values) == 2 else "–")
            rows.append(cells)
        yield table(f"Measurements in {unit}", head, rows, numbers=tuple(range(1, len(head))))


def _text(value: float, unit: str) -> str:
    if unit == "seconds":
        return duration(value)
    return f"{decimal_size(value)}/s" if unit == "bytes per second" else f"{value:g} {unit}".strip()


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the nodes; equal ones in one row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        lists = [", ".join(node[name]) or "none" for name in ("cards", "libraries", "devices")]
        key = (str(node["ranks"]), str(node["node_cores"]), str(node["threads"]), str(node["node_gpus"]), *lists)
        alike.setdefault(key, []).append(node["host"])
    rows = []
    for key, hosts in alike.items():
        more = f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else ""
        rows.append([html.escape(text) for text in (", ".join(hosts[:_NAMED]) + more, *key)])
    head = [
        "hosts",
        "ranks",
        "cores",
        "threads of a rank",
        "GPUs",
        "network cards",
        "libraries in use",
        "devices in use",
    ]
    return table("Nodes", head, rows, numbers=(1, 2, 3, 4))


def _machine(start: ItemReport, variables: Mapping[str, str]) -> list[str]:
    facts = start.facts
    versions = {name: number for name, number in facts["machine"]["versions"].items() if number}
    rows = [
        ["MPI", facts["mpi"].splitlines()[0]],
        ["thread level", facts["thread_level"]],
        ["versions", ", ".join(f"{name} {number}" for name, number in versions.items())],
        ["system", f"{facts['machine']['system']}, Python {facts['machine']['python']}"],
        *([f"file system of {name}", kind or "unknown"] for name, kind in facts["file_systems"].items()),
        *([name, value] for name, value in variables.items()),
    ]
    lines = "\n".join(facts.get("transports", [])) or "The MPI library printed nothing about its transports."
    return [
        "<h2>Transports, as the libraries print them on rank 0</h2>", f"<pre>{html.escape(lines)}</pre>", "<h2>Software</h2>",
        table("Software", [], ([html.escape(text) for text in row] for row in rows)),
    ]  # fmt: skip


def _findings(findings: Sequence[Mapping[str, str]]) -> str:
    rows = (
        [html.escape(finding["status"]), html.escape(finding["name"]), html.escape(finding["what"])]
        for finding in findings
    )
    return table("Findings of the doctor", [], rows)
