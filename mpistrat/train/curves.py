"""Curves of results by epoch, as SVG, and the program that shows their values under the pointer and by arrow keys."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["EPOCHS", "SCRIPT", "charts", "columns", "value_text"]

#: The id of the table of results, in which `SCRIPT` finds the values.
EPOCHS = "epochs"
_COLOURS = ("blue", "orange")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM = 420, 200, 56, 408, 30
_DOTS = 100  # epochs, at most, that have a dot each

#: Without JavaScript the charts are images, and the table has their values.
SCRIPT = """<script>
for (const chart of document.querySelectorAll("svg[data-columns]")) {
  const table = document.getElementById("epochs"), rows = [...table.tBodies[0].rows];
  const head = [...table.tHead.rows[0].cells].map(cell => cell.textContent);
  const columns = chart.dataset.columns.split(" ").map(Number), [left, right] = chart.dataset.span.split(" ").map(Number);
  const epochs = rows.map(row => Number(row.cells[0].textContent)), first = epochs[0], last = epochs.at(-1);
  const x = i => last > first ? left + (epochs[i] - first) / (last - first) * (right - left) : (left + right) / 2;
  const guide = chart.querySelector(".guide"), tip = chart.parentNode.querySelector(".tip"), width = chart.viewBox.baseVal.width;
  let now = rows.length - 1;
  const text = i => `epoch ${epochs[i]}: ` + columns.map(at => `${head[at]} ${rows[i].cells[at].textContent}`).join(", ");
  const mark = i => {
    now = i;
    chart.setAttribute("aria-valuenow", epochs[i]);
    chart.setAttribute("aria-valuetext", text(i));
  };
  const show = i => {
    mark(i);
    tip.textContent = text(i);
    const share = x(i) / width;
    tip.style.left = share < .5 ? `${100 * share}%` : "auto";
    tip.style.right = share < .5 ? "auto" : `${100 * (1 - share)}%`;
    guide.setAttribute("x1", x(i));
    guide.setAttribute("x2", x(i));
    tip.hidden = false;
    guide.style.visibility = "visible";
  };
  const hide = () => { tip.hidden = true; guide.style.visibility = "hidden"; };
  const nearest = event => {
    const box = chart.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    let low = 0, high = rows.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((x(middle) + x(middle + 1)) / 2 < at) low = middle + 1; else high = middle;
    }
    return low;
  };
  chart.addEventListener("pointermove", event => show(nearest(event)));
  chart.addEventListener("pointerdown", event => show(nearest(event)));
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("focus", () => { if (chart.matches(":focus-visible")) show(now); });
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", event => {
    const page = Math.max(1, Math.round(rows.length / 10));
    const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -page, PageUp: page,
                   Home: -rows.length, End: rows.length }[event.key];
    if (event.key === "Escape") hide();
    if (step === undefined) return;
    event.preventDefault();
    show(Math.min(Math.max(now + step, 0), rows.length - 1));
  });
  chart.setAttribute("role", "slider");
  chart.setAttribute("tabindex", "0");
  chart.setAttribute("aria-valuemin", first);
  chart.setAttribute("aria-valuemax", last);
  mark(now);
}
</script>"""


def columns(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all results of epochs, in the order in which they come, without the epoch's own number."""
    return [name for name in dict.fromkeys(key for epoch in epochs for key in epoch) if name != "epoch"]


def value_text(value: Any) -> str:
    """Return a result as text."""
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def charts(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return charts of the results, each with that of validation, and of the speed.

    They need a table with the id `EPOCHS`: a row for each epoch, whose cells are its number, from 1, and `columns`.
    """
    every = columns(epochs)
    names = [name for name in every if name not in ("step", "seconds")]
    found = []
    for name in names:
        if name.startswith("val_") and name[4:] in names:
            continue
        curves = {
            shown: [(epoch["epoch"] + 1, epoch[shown]) for epoch in epochs if _finite(epoch.get(shown))]
            for shown in (name, f"val_{name}")
        }
        curves = {shown: points for shown, points in curves.items() if points}
        if curves:
            span = epochs[0]["epoch"] + 1, epochs[-1]["epoch"] + 1
            found.append(_chart(name.replace("_", " "), curves, span, [1 + every.index(shown) for shown in curves]))
    return found


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _chart(
    title: str, curves: Mapping[str, Sequence[tuple[float, float]]], span: tuple[int, int], cells: Sequence[int]
) -> str:
    points = [point for curve in curves.values() for point in curve]
    first, last = span
    smallest, largest = min(y for _, y in points), max(y for _, y in points)
    by_powers = 0 < smallest < largest / 50
    scale = math.log10 if by_powers else float
    marks = powers(smallest, largest) if by_powers else ticks(smallest, largest)
    low, high = scale(marks[0]), scale(marks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 0.5
        return (
            round(_LEFT + across * (_RIGHT - _LEFT), 1),
            round((_HEIGHT - _BOTTOM) - (scale(y) - low) / (high - low) * (_HEIGHT - _BOTTOM - 10), 1),
        )

    parts = []
    for mark in marks:
        _, y = place(first, mark)
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_short(mark)}</text>')
    for x in sorted({first, last}):
        parts.append(f'<text x="{place(x, marks[0])[0]}" y="{_HEIGHT - 12}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 2}" text-anchor="middle">epoch</text>')
    parts.append(f'<line class="guide" y1="10" y2="{_HEIGHT - _BOTTOM}" style="visibility:hidden"/>')
    for colour, dashes, (_, curve) in zip(_COLOURS, ("", "7 4"), curves.items(), strict=False):
        places = [place(*point) for point in curve]
        line = " ".join(f"{x},{y}" for x, y in places)
        style = f"fill:none;stroke:var(--{colour});stroke-width:2{dashes and f';stroke-dasharray:{dashes}'}"
        parts.append(f'<polyline points="{line}" style="{style}"/>')
        if len(curve) <= _DOTS:
            parts += [f'<circle cx="{x}" cy="{y}" r="3" style="fill:var(--{colour})"/>' for x, y in places]
    key = "".join(
        f'<span style="background:var(--{colour})"></span>{html.escape(name)}'
        for colour, name in zip(_COLOURS, curves, strict=False)
    )
    legend = f'<div class="key" aria-hidden="true">{key}</div>' if len(curves) > 1 else ""
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{html.escape(_in_words(curves))}" data-span="{_LEFT} {_RIGHT}" '
        f'data-columns="{" ".join(map(str, cells))}">{"".join(parts)}</svg>'
    )
    tip = '<p class="tip" aria-hidden="true" hidden></p>'
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}{tip}{legend}</figure>"


def _in_words(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Describe curves for a reader who does not see them."""
    texts = []
    for name, curve in curves.items():
        (first, begin), (last, end) = curve[0], curve[-1]
        texts.append(
            f"{name}: {value_text(begin)} in epoch {first:g}"
            + (f", {value_text(end)} in epoch {last:g}" if last > first else "")
        )
    return "; ".join(texts)


def ticks(low: float, high: float) -> list[float]:
    """Return 3 to 7 round numbers around a range."""
    if high <= low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = max((high - low) / 4, 1e-300)  # a quarter of the smallest number is 0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]


def powers(low: float, high: float) -> list[float]:
    """Return powers of ten around a range; for a long one, every second or third."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = 1 + (last - first) // 6
    return [10.0**power for power in range(first, last + every, every)]


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"
