"""A small plot in SVG: lines over two logarithmic axes, in panels side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Line = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 380, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 40, 44
_FONT = 'font-family="sans-serif" font-size="11"'
_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")


class Panel(NamedTuple):
    """One plot.

    Attributes:
        title: Above it.
        lines: Name -> points, x and y above zero, x ascending.
    """

    title: str
    lines: Mapping[str, Line]


def svg(panels: Sequence[Panel], *, x_label: str, y_label: str) -> str:
    """Draw panels with the same axes; ticks at powers of two. There is at least one point."""
    points = [point for panel in panels for line in panel.lines.values() for point in line]
    x_ticks = _ticks([x for x, _ in points])
    y_ticks = _ticks([*(y for _, y in points), 1.0])
    width = len(panels) * _WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" {_FONT}>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate({index * _WIDTH},0)">')
        parts += _panel(panel, x_ticks, y_ticks, labels=(x_label, y_label))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    panel: Panel, x_ticks: Sequence[float], y_ticks: Sequence[float], *, labels: tuple[str, str]
) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [_text(_WIDTH / 2, 18, panel.title, "middle", size=13)]
    for tick in x_ticks:
        x = _place(tick, x_ticks, _LEFT, right)
        parts.append(_stroke([(x, _TOP), (x, bottom)], "#dddddd", 1))
        parts.append(_text(x, bottom + 15, f"{tick:g}", "middle"))
    for tick in y_ticks:
        y = _place(tick, y_ticks, bottom, _TOP)
        parts.append(_stroke([(_LEFT, y), (right, y)], "#888888" if tick == 1 else "#dddddd", 1))
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", "end"))
    for index, (name, line) in enumerate(panel.lines.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        placed = [
            (_place(x, x_ticks, _LEFT, right), _place(y, y_ticks, bottom, _TOP)) for x, y in line
        ]
        parts.append(_stroke(placed, colour, 2))
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in placed
        ]
        parts.append(
            _stroke([(_LEFT + 8, 50 + 14 * index), (_LEFT + 24, 50 + 14 * index)], colour, 2)
        )
        parts.append(_text(_LEFT + 28, 54 + 14 * index, name, "start"))
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 10, labels[0], "middle"))
    parts.append(_text(_LEFT - 40, _TOP - 10, labels[1], "start"))
    return parts


def _ticks(values: Sequence[float]) -> list[float]:
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    return [2.0**power for power in range(low, max(high, low + 1) + 1)]


def _place(value: float, ticks: Sequence[float], first: float, last: float) -> float:
    low, high = math.log2(ticks[0]), math.log2(ticks[-1])
    return first + (last - first) * (math.log2(value) - low) / (high - low)


def _stroke(points: Line, colour: str, width: int) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, content: str, anchor: str, *, size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{content}</text>'
    )
