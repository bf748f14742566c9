"""The page of a run: one self-contained HTML file with curves, ranks and warnings."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..timeline import RankTimes

__all__ = ["RunRecord", "document", "page"]

_COLOURS = ("#2f6fb3", "#d1701f", "#3c8d53", "#a24a8c", "#7a6a2b", "#557")
_PARTS = {
    "input": "#8a63b8", "compute": "#3c8d53", "communication": "#2f6fb3", "waiting": "#d1701f", "saving": "#7a6a2b",
}  # fmt: skip
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 200, 56, 30
_MOST_RANKS = 64

_STYLE = """
:root { color-scheme: light dark; --line: #8885; --text: #1c2330; --back: #fff; --soft: #5f6876 }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7ec; --back: #14181f; --soft: #9aa4b2 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem }
body { color: var(--text); background: var(--back) }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem; border-bottom: 1px solid var(--line) }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top }
td:last-child { overflow-wrap: anywhere }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem } figure { margin: 0 } figcaption { font-weight: 600 }
svg text { fill: var(--soft); font-size: 11px } svg .axis { stroke: var(--line) } svg .bar { fill: var(--text) }
.key span { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; border-radius: 2px }
.soft { color: var(--soft) } pre { overflow: auto; white-space: pre-wrap }
"""


@dataclass
class RunRecord:
    """The data of a run's page.

    Attributes:
        title: of the page.
        state: "runs", "ended", or the error that ended it.
        facts: names and texts: the configuration.
        epochs: results by name, with "epoch", "step", "seconds" and "samples_per_second".
        ranks: the latest times of each rank by activity.
        warnings: texts.
    """

    title: str
    state: str = "runs"
    facts: dict[str, str] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[RankTimes] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def page(record: RunRecord) -> str:
    """Return the page."""
    parts = [f'<p class="soft">{html.escape(_summary(record))}</p>']
    if record.epochs:
        parts += ["<h2>Results</h2>", f'<div class="charts">{"".join(_charts(record.epochs))}</div>']
        parts.append(_last(record.epochs[-1]))
    if record.ranks:
        parts += ["<h2>Time of each rank</h2>", _bars(record.ranks), _stragglers(record.ranks)]
    if record.warnings:
        lines = "\n".join(html.escape(text) for text in record.warnings)
        parts += ["<h2>Warnings</h2>", f"<pre>{lines}</pre>"]
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in record.facts.items())
    parts += ["<h2>Configuration</h2>", f"<table>{rows}</table>"]
    return document(record.title, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """Return a page of HTML in the style of this package.

    Args:
        title: its text.
        parts: of its body, after the title; in HTML.
    """
    shown = html.escape(title)
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{shown}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body><h1>{shown}</h1>",
    )
    return "\n".join([*head, *parts, "</body></html>\n"])


def _summary(record: RunRecord) -> str:
    epochs = record.epochs
    if not epochs:
        return record.state
    seconds = sum(epoch["seconds"] for epoch in epochs)
    rates = [epoch["samples_per_second"] for epoch in epochs if epoch["samples_per_second"]]
    fastest = f", {max(rates):,.0f} samples/s in the fastest epoch" if rates else ""
    return f"{record.state}: {len(epochs)} epochs, {epochs[-1]['step']} steps, {seconds:,.1f} s{fastest}"


def _charts(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return charts of the results, each with that of validation, and of the speed."""
    names = [
        name
        for name in dict.fromkeys(key for epoch in epochs for key in epoch)
        if name not in ("epoch", "step", "seconds")
    ]
    charts = []
    for name in names:
        if name.startswith("val_") and name[4:] in names:
            continue
        curves = {
            shown: [(epoch["epoch"] + 1, epoch[shown]) for epoch in epochs if _finite(epoch.get(shown))]
            for shown in (name, f"val_{name}")
        }
        curves = {shown: points for shown, points in curves.items() if points}
        if curves:
            charts.append(_chart(name.replace("_", " "), curves))
    return charts


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _chart(title: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    points = [point for curve in curves.values() for point in curve]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    smallest, largest = min(y for _, y in points), max(y for _, y in points)
    by_powers = 0 < smallest < largest / 50
    scale = math.log10 if by_powers else float
    ticks = _powers(smallest, largest) if by_powers else _ticks(smallest, largest)
    low, high = scale(ticks[0]), scale(ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) if right > left else 0.5
        return (
            round(_LEFT + across * (_WIDTH - _LEFT - 12), 1),
            round((_HEIGHT - _BOTTOM) - (scale(y) - low) / (high - low) * (_HEIGHT - _BOTTOM - 10), 1),
        )

    parts = []
    for tick in ticks:
        _, y = place(left, tick)
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_short(tick)}</text>')
    for x in sorted({left, right}):
        parts.append(f'<text x="{place(x, ticks[0])[0]}" y="{_HEIGHT - 12}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 2}" text-anchor="middle">epoch</text>')
    for colour, (name, curve) in zip(_COLOURS, curves.items(), strict=False):
        places = [place(*point) for point in curve]
        line = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(curve) <= 100:
            for (x, y), (epoch, value) in zip(places, curve, strict=True):
                about = html.escape(f"epoch {epoch:g}: {name} {value:.6g}")
                parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"><title>{about}</title></circle>')
    key = "".join(
        f'<span style="background:{colour}"></span>{html.escape(name)}'
        for colour, name in zip(_COLOURS, curves, strict=False)
    )
    legend = f'<div class="key">{key}</div>' if len(curves) > 1 else ""
    svg = (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    )
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}{legend}</figure>"


def _ticks(low: float, high: float) -> list[float]:
    """Return 3 to 7 round numbers around a range."""
    if high <= low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = max((high - low) / 4, 1e-300)  # a quarter of the smallest number is 0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Return powers of ten around a range; for a long one, every second or third."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = 1 + (last - first) // 6
    return [10.0**power for power in range(first, last + every, every)]


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def _last(epoch: Mapping[str, Any]) -> str:
    cells = "".join(
        f'<tr><th>{html.escape(name)}</th><td class="number">{html.escape(_text(value))}</td></tr>'
        for name, value in epoch.items()
        if name != "epoch"
    )
    return f"<h2>After epoch {epoch['epoch'] + 1}</h2><table>{cells}</table>"


def _text(value: Any) -> str:
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _shown(ranks: Sequence[RankTimes]) -> list[RankTimes]:
    """Return all ranks; of very many, those for which others waited longest."""
    most = sorted(ranks, key=lambda one: -one.cost)[:_MOST_RANKS]
    return sorted(most, key=lambda one: one.rank)


def _bars(ranks: Sequence[RankTimes]) -> str:
    rows = _shown(ranks)
    height, width = 20, 600
    parts = []
    for index, one in enumerate(rows):
        y, x = index * height, 130.0
        parts.append(
            f'<text x="122" y="{y + 14}" text-anchor="end">{html.escape(f"rank {one.rank} {one.host}"[:20])}</text>'
        )
        for part, colour in _PARTS.items():
            share = getattr(one, part)
            about = html.escape(f"rank {one.rank}: {part} {share:.1%}")
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{share * width:.1f}" height="{height - 6}" fill="{colour}">'
                f"<title>{about}</title></rect>"
            )
            x += share * width
    key = "".join(f'<span style="background:{colour}"></span>{part}' for part, colour in _PARTS.items())
    left_out = (
        f'<p class="soft">{len(ranks) - len(rows)} more ranks are not shown.</p>' if len(rows) < len(ranks) else ""
    )
    seconds = f"{min(one.seconds for one in ranks):.3g}"
    about = f"Shares of the last {seconds} s, as recorded. The rest of a bar is the program in between."
    return (
        f'<div class="key">{key}</div><svg width="740" height="{len(rows) * height}" role="img" '
        f'aria-label="shares of time by rank">{"".join(parts)}</svg><p class="soft">{about}</p>{left_out}'
    )


def _stragglers(ranks: Sequence[RankTimes]) -> str:
    late = sorted((one for one in ranks if one.last), key=lambda one: -one.cost)[:10]
    if not late:
        return "<p>No rank came more than 0.1 ms late to a collective.</p>" if len(ranks) > 1 else ""
    rows = "".join(
        f'<tr><td>rank {one.rank} on {html.escape(one.host)}</td><td class="number">{one.last} of {one.compared}</td>'
        f'<td class="number">{one.cost:.3g} s</td></tr>'
        for one in late
    )
    head = '<tr><th>came last</th><th class="number">collectives</th><th class="number">the others waited, together</th></tr>'
    return f"<h2>Stragglers</h2><table>{head}{rows}</table>"
