"""The page of a run: one self-contained HTML file with curves, ranks, hosts, files and warnings."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..base.text import decimal_size, named, ranges
from ..timeline import RankTimes
from .curves import EPOCHS, SCRIPT, charts, columns, value_text
from .html_page import document, table
from .machine import RankPlace

__all__ = ["RunRecord", "files_of", "page"]

_PARTS = {"input": "violet", "compute": "green", "communication": "blue", "waiting": "orange", "saving": "olive"}
_MOST = 64  # ranks, hosts and files that are shown
_ABOUT = {"metrics.jsonl": "results, a line per epoch", "tensorboard": "event files of TensorBoard"}
_NONE = "&ndash;"


@dataclass
class RunRecord:
    """The data of a run's page.

    Attributes:
        title: of the page.
        state: "runs", "ended", or the error that ended it.
        facts: names and texts: the configuration.
        epochs: results by name, with "epoch", "step", "seconds" and "samples_per_second".
        ranks: the latest times of each rank by activity.
        places: the host and devices of each rank.
        memory: the most bytes that each rank has used at once so far; None if unknown.
        files: of the run: the path from the page's folder, and its description.
        warnings: texts.
    """

    title: str
    state: str = "runs"
    facts: dict[str, str] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[RankTimes] = field(default_factory=list)
    places: list[RankPlace] = field(default_factory=list)
    memory: list[int | None] = field(default_factory=list)
    files: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def page(record: RunRecord) -> str:
    """Return the page."""
    parts = [f'<p class="soft">{html.escape(_summary(record))}</p>']
    if record.epochs:
        parts += ["<h2>Results</h2>", f'<div class="charts">{"".join(charts(record.epochs))}</div>']
        parts += [_epochs(record.epochs), _last(record.epochs[-1])]
    if record.ranks:
        parts += ["<h2>Time of each rank</h2>", _times(record.ranks), _stragglers(record.ranks)]
    if record.places:
        parts += ["<h2>Hosts</h2>", _hosts(record.places, record.memory)]
    if record.files:
        parts += ["<h2>Files</h2>", _files(record.files)]
    if record.warnings:
        lines = "\n".join(html.escape(text) for text in record.warnings)
        parts += ["<h2>Warnings</h2>", f"<pre>{lines}</pre>"]
    facts = [(html.escape(name), html.escape(text)) for name, text in record.facts.items()]
    parts += ["<h2>Configuration</h2>", table("Configuration", [], facts)]
    return document(record.title, [*parts, *([SCRIPT] if record.epochs else [])])


def files_of(folder: Path, places: Sequence[RankPlace]) -> list[tuple[str, str]]:
    """Return the files next to the page in a folder, and those with the ranks' output. Local.

    Args:
        folder: of the page; its hidden files and the page are left out.
        places: of all ranks.
    """
    found = {}
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            if not entry.name.startswith(".") and entry.name != "run.html":
                trace = "trace of the ranks, for ui.perfetto.dev" if entry.name.endswith(".json.gz") else ""
                found[entry.name + "/" * entry.is_dir()] = _ABOUT.get(entry.name, trace)
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        if place.output:
            ranks.setdefault(os.path.relpath(place.output, folder), []).append(rank)
    return [*found.items(), *((path, f"output of {named('rank', ranges(those))}") for path, those in ranks.items())]


def _summary(record: RunRecord) -> str:
    epochs = record.epochs
    if not epochs:
        return record.state
    seconds = sum(epoch["seconds"] for epoch in epochs)
    rates = [epoch["samples_per_second"] for epoch in epochs if epoch["samples_per_second"]]
    fastest = f", {max(rates):,.0f} samples/s in the fastest epoch" if rates else ""
    return f"{record.state}: {len(epochs)} epochs, {epochs[-1]['step']} steps, {seconds:,.1f} s{fastest}"


def _epochs(epochs: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all results, in which the charts' program finds the values."""
    names = columns(epochs)
    rows = (
        [
            str(epoch["epoch"] + 1),
            *(html.escape(value_text(epoch[name])) if name in epoch else _NONE for name in names),
        ]
        for epoch in epochs
    )
    head = ["epoch", *map(html.escape, names)]
    every = table("Results of each epoch", head, rows, range(len(head)), EPOCHS)
    return f"<details><summary>All epochs as a table</summary>{every}</details>"


def _last(epoch: Mapping[str, Any]) -> str:
    rows = [(html.escape(name), html.escape(value_text(value))) for name, value in epoch.items() if name != "epoch"]
    title = f"After epoch {epoch['epoch'] + 1}"
    return f"<h2>{title}</h2>{table(title, [], rows, (1,))}"


def _left_out(every: Sequence[object], noun: str) -> str:
    return f'<p class="soft">{len(every) - _MOST} more {noun} are not shown.</p>' if len(every) > _MOST else ""


def _times(ranks: Sequence[RankTimes]) -> str:
    """Return a bar and its numbers for each rank; of very many, for those for which others waited longest."""
    rows = []
    for one in sorted(sorted(ranks, key=lambda one: -one.cost)[:_MOST], key=lambda one: one.rank):
        bar = "".join(
            f'<i style="width:{getattr(one, part):.2%};background:var(--{colour})"></i>'
            for part, colour in _PARTS.items()
        )
        shares = [f"{getattr(one, part):.1%}" for part in _PARTS]
        rows.append([str(one.rank), f'<div class="bar" aria-hidden="true">{bar}</div>', *shares, html.escape(one.host)])
    key = "".join(f'<span style="background:var(--{colour})"></span>{part}' for part, colour in _PARTS.items())
    head = ["rank", "shares of time", *_PARTS, "host"]
    seconds = f"{min(one.seconds for one in ranks):.3g}"
    about = f"Shares of the last {seconds} s, as recorded. The rest of a bar is the program in between."
    shown = table("Shares of time by rank", head, rows, range(2, 2 + len(_PARTS)))
    return (
        f'<div class="key" aria-hidden="true">{key}</div>{shown}<p class="soft">{about}</p>{_left_out(ranks, "ranks")}'
    )


def _stragglers(ranks: Sequence[RankTimes]) -> str:
    late = sorted((one for one in ranks if one.last), key=lambda one: -one.cost)[:10]
    if not late:
        return "<p>No rank came more than 0.1 ms late to a collective.</p>" if len(ranks) > 1 else ""
    rows = [
        (f"rank {one.rank} on {html.escape(one.host)}", f"{one.last} of {one.compared}", f"{one.cost:.3g} s")
        for one in late
    ]
    head = ["came last", "collectives", "the others waited, together"]
    return f"<h2>Stragglers</h2>{table('Stragglers', head, rows, (1, 2))}"


def _hosts(places: Sequence[RankPlace], memory: Sequence[int | None]) -> str:
    """Return a row for each host; of very many, for those whose ranks use most memory."""
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, []).append(rank)

    def peak(ranks: Sequence[int]) -> int:
        return max((memory[rank] or 0 for rank in ranks if rank < len(memory)), default=0)

    most = sorted(hosts, key=lambda host: -peak(hosts[host]))[:_MOST]
    rows = []
    for host in (host for host in hosts if host in set(most)):
        ranks, first = hosts[host], places[hosts[host][0]]
        devices = dict.fromkeys(device for rank in ranks for device in places[rank].devices)
        used = peak(ranks)
        which = next((rank for rank in ranks if rank < len(memory) and memory[rank] == used), ranks[0])
        rows.append([
            html.escape(host), ", ".join(ranges(ranks)), html.escape(", ".join(devices)), str(first.cores),
            decimal_size(first.memory) if first.memory else _NONE,
            f"{decimal_size(used)} (rank {which})" if used else _NONE,
        ])  # fmt: skip
    head = ["host", "ranks", "devices", "cores", "memory", "most used by a rank"]
    return table("Hosts", head, rows, (3, 4, 5)) + _left_out(list(hosts), "hosts")


def _files(files: Sequence[tuple[str, str]]) -> str:
    rows = [
        (f'<a href="./{quote(os.fsencode(path))}">{html.escape(path)}</a>', html.escape(about))
        for path, about in files[:_MOST]
    ]
    return table("Files", [], rows) + _left_out(files, "files")
