"""One self-contained HTML page: nothing is fetched, no script runs; light or dark as the reader's system."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
:root{color-scheme:light dark;--bg:#fdfdfc;--fg:#1c1c1a;--dim:#6b6b66;--grid:#e3e3de;--mark:#b91c1c;
--c0:#0b62c4;--c1:#c2410c;--c2:#15803d;--c3:#8b2fc9;--c4:#92720a;--c5:#0f766e}
@media (prefers-color-scheme:dark){:root{--bg:#161614;--fg:#ececea;--dim:#a3a39d;--grid:#33332f;
--mark:#f87171;--c0:#6cb2ff;--c1:#ff9d5c;--c2:#5fd38d;--c3:#cf9dff;--c4:#e6c34a;--c5:#4fd1c5}}
*{box-sizing:border-box}
body{margin:0 auto;padding:24px;max-width:1240px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.1rem;margin:1.8rem 0 .5rem}
p{margin:.3rem 0;color:var(--dim)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:20px}
figure{margin:0;min-width:0}
figcaption{display:flex;flex-wrap:wrap;gap:2px 16px;padding-left:64px;font-size:.85rem}
svg text{fill:var(--dim);font:11px system-ui,sans-serif}
svg text.title{fill:var(--fg);font-size:13px;font-weight:600}
.grid{stroke:var(--grid)}.mark{stroke:var(--mark);stroke-dasharray:2 3}
.line{fill:none;stroke:currentColor;stroke-width:1.7;stroke-linejoin:round}.dashed{stroke-dasharray:6 4}
.dots{fill:none;stroke:currentColor;stroke-width:3.2;stroke-linecap:round;stroke-opacity:.45}
.few{stroke-width:6;stroke-opacity:.8}.fill{fill:currentColor}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:3px 14px 3px 0;text-align:right;border-bottom:1px solid var(--grid);font-weight:400}
thead th{color:var(--dim);vertical-align:bottom}th:first-child{text-align:left;white-space:nowrap}
details{margin-top:1.2rem}pre{overflow-x:auto;font-size:.8rem}
"""


def page(title: str, body: str) -> str:
    """The whole document; `body` is HTML, `title` is text."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def charts(figures: Sequence[str]) -> str:
    """Charts in as many columns as there is room for."""
    return f'<div class="charts">{"".join(figures)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text; the first column names the row."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(summary: str, text: str) -> str:
    """Text that a reader opens when wanted."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
