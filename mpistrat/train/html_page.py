"""Pages of HTML that need no other file: their frame and style, and tables that a screen reader can read."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__ = ["document", "table"]

# Text has a contrast of at least 4.5 to the background, bars and curves of at least 3, in both themes.
_STYLE = """
:root { color-scheme: light dark; --line: #8885; --text: #1c2330; --back: #fff; --soft: #5f6876; --link: #1f5f9f;
  --blue: #2f6fb3; --orange: #bd5f12; --green: #2f7d46; --violet: #7a4fb0; --olive: #7a6a2b; --red: #b3261e }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7ec; --back: #14181f; --soft: #9aa4b2; --link: #7db4ec;
  --blue: #5b9bdd; --orange: #e08e45; --green: #5cb478; --violet: #b08ae0; --olive: #b7a55a; --red: #f08a80 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem }
body { color: var(--text); background: var(--back) } a { color: var(--link) }
h1 { font-size: 1.5rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin-top: 2rem; border-bottom: 1px solid var(--line) }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top }
th { font-weight: 600 } td, th { overflow-wrap: anywhere } .wide td { overflow-wrap: normal } .wide th { white-space: nowrap }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.wide { overflow-x: auto } .soft { color: var(--soft) } pre { overflow: auto; white-space: pre-wrap }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap }
summary { cursor: pointer } :focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem } figure { margin: 0; position: relative; max-width: 100% }
figcaption { font-weight: 600; overflow-wrap: anywhere } svg { max-width: 100%; height: auto; display: block }
svg text { fill: var(--soft); font-size: 11px } svg .axis { stroke: var(--line) } svg .guide { stroke: var(--soft) }
.tip { position: absolute; top: 0; max-width: 75%; margin: 0; padding: .2em .6em; border-radius: 4px;
  font-size: 13px; overflow-wrap: anywhere; pointer-events: none; color: var(--back); background: var(--text) }
.key span { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; border-radius: 2px }
.bar { display: flex; width: 18rem; height: 14px; margin-top: .3rem } .bar i { height: 100%; box-shadow: inset 1px 0 var(--back) }
.bar i, .key span { forced-color-adjust: none; print-color-adjust: exact }
@media (max-width: 600px) { td, th { padding-right: .5rem } .bar { width: 11rem } }
"""


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
        f"<style>{_STYLE}</style></head><body><main><h1>{shown}</h1>",
    )
    return "\n".join([*head, *parts, "</main></body></html>\n"])


def table(
    about: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), name: str = ""
) -> str:
    """Return a table, whose rows begin with their titles. A narrow window scrolls it if it has a head.

    Args:
        about: its title, in text, which only screen readers read.
        head: the titles of the columns in HTML; empty for none.
        rows: the cells in HTML.
        numbers: the columns to align to the right.
        name: an id of its element.
    """

    def row(cells: Sequence[str], first: str, kind: str) -> str:
        line = []
        for index, cell in enumerate(cells):
            kind_of = first if index == 0 else kind
            own = ' class="number"' if index in numbers else ""
            line.append(f"<{kind_of}{own}>{cell}</{kind_of.split()[0]}>")
        return f"<tr>{''.join(line)}</tr>"

    column, title = 'th scope="col"', html.escape(about)
    titles = f"<thead>{row(head, column, column)}</thead>" if head else ""
    lines = "".join(row(cells, 'th scope="row"', "td") for cells in rows)
    own = f' id="{name}"' if name else ""
    found = f"<table{own}><caption>{title}</caption>{titles}<tbody>{lines}</tbody></table>"
    return f'<div class="wide" role="region" aria-label="{title}" tabindex="0">{found}</div>' if head else found
