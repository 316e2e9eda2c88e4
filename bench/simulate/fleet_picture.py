"""Draws the simulator's table as an SVG picture: a chart for each quantity, over the number of workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log10

WIDTH, HEIGHT, PLOT_LEFT, PLOT_TOP, PLOT_HEIGHT, PLOT_WIDTH = 440, 210, 60, 44, 120, 350
COLOURS = ("#9ca3af", "#2563eb", "#d97706", "#059669")
STYLE = "font: 12px sans-serif; fill: #111827"
TITLE = 30


@dataclass(frozen=True)
class Line:
    """One line of a chart: a value for each number of workers."""

    name: str
    values: list[float]


def drawn(title: str, workers: Sequence[int], charts: Mapping[str, Sequence[Line]]) -> str:
    """Returns the picture: two charts side by side in each row. Each vertical axis goes from 0 to the largest value,
    the horizontal axis is logarithmic."""
    height = TITLE + (len(charts) + 1) // 2 * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" style="{STYLE}">',
        f'<rect width="{2 * WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    for at, (name, lines) in enumerate(charts.items()):
        parts += _chart(name, workers, lines, at % 2 * WIDTH, TITLE + at // 2 * HEIGHT)
    return "\n".join([*parts, "</svg>", ""])


def _chart(name: str, workers: Sequence[int], lines: Sequence[Line], left: float, top: float) -> list[str]:
    most = max((value for line in lines for value in line.values), default=0.0) or 1.0
    x, y = left + PLOT_LEFT, top + PLOT_TOP
    parts = [f'<text x="{x}" y="{top + 16}">{escape(name)}</text>']
    for share in (0.0, 0.5, 1.0):
        height = y + PLOT_HEIGHT * (1 - share)
        parts.append(f'<path d="M{x} {height}h{PLOT_WIDTH}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{x - 8}" y="{height + 4}" text-anchor="end">{share * most:.3g}</text>')
    places = [x + PLOT_WIDTH * place for place in _places(workers)]
    for place, count in zip(places, workers, strict=True):
        parts.append(f'<text x="{place:.1f}" y="{y + PLOT_HEIGHT + 18}" text-anchor="middle">{count:,}</text>')
    for at, (line, colour) in enumerate(zip(lines, COLOURS, strict=False)):
        points = [(px, y + PLOT_HEIGHT * (1 - value / most)) for px, value in zip(places, line.values, strict=True)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
        parts.append(f'<text x="{x + 110 * at}" y="{top + 34}" fill="{colour}">{escape(line.name)}</text>')
    return parts


def _places(workers: Sequence[int]) -> list[float]:
    """Returns the position of each number of workers on a logarithmic axis from 0 to 1."""
    low, high = log10(min(workers)), log10(max(workers))
    return [(log10(count) - low) / (high - low) if high > low else 0.5 for count in workers]
