"""The timeline of a chaos run in SVG: how requests ended, over what was done to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Final

from loadtests.chaos_clients import Ending, Outcome
from loadtests.chaos_faults import Kind, Mark

_WIDTH: Final = 1100
_LEFT: Final = 64
_TOP: Final = 64
_BARS_HEIGHT: Final = 220
_LANE_HEIGHT: Final = 26
_FONT: Final = 'font-family="sans-serif" font-size="11"'
_ENDINGS: Final = {
    Ending.DONE: "#cfd8dc",
    Ending.LEFT: "#90a4ae",
    Ending.REFUSED: "#ffd54f",
    Ending.INTERRUPTED: "#ff9800",
    Ending.FAILED: "#d50000",
    Ending.LOST: "#aa00ff",
    Ending.UNCLEAR: "#000000",
}
_KINDS: Final = {
    Kind.KILL: "#b71c1c",
    Kind.STOP: "#6a1b9a",
    Kind.DRAIN: "#00695c",
    Kind.DROP: "#283593",
    Kind.CONNECTIONS: "#ef6c00",
    Kind.FEED: "#9e9d24",
}


def svg(outcomes: Sequence[Outcome], marks: Sequence[Mark]) -> str:
    """Draws a run; there is at least one request."""
    length_s = max([*(o.ended_s for o in outcomes), *(m.ended_s for m in marks)]) + 1
    workers = sorted({mark.worker for mark in marks})
    lanes_top = _TOP + _BARS_HEIGHT + 40
    height = lanes_top + _LANE_HEIGHT * len(workers) + 30
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" {_FONT}>',
            '<rect width="100%" height="100%" fill="white"/>',
            *_legend(12, {ending.value: colour for ending, colour in _ENDINGS.items()}),
            *_legend(32, {kind.value: colour for kind, colour in _KINDS.items()}),
            *_bars(outcomes, length_s),
            *_lanes(marks, workers, length_s, top=lanes_top),
            "</svg>",
            "",
        ]
    )


def _x(at_s: float, length_s: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - 16) * at_s / length_s


def _bars(outcomes: Sequence[Outcome], length_s: float) -> list[str]:
    """Requests that ended in each second, one colour on the other."""
    ended = Counter((int(o.ended_s), o.ending) for o in outcomes)
    most = max(Counter(int(o.ended_s) for o in outcomes).values())
    bottom = _TOP + _BARS_HEIGHT
    parts = [
        _text(_LEFT - 8, _TOP + 8, str(most), "end"),
        _text(_LEFT - 8, bottom, "0", "end"),
        _text(12, _TOP - 8, "requests ended per second"),
    ]
    step_s = max(1, round(length_s / 12))
    parts += [
        _text(_x(at_s, length_s), bottom + 16, f"{at_s} s", "middle")
        for at_s in range(0, int(length_s) + 1, step_s)
    ]
    width = _x(1, length_s) - _x(0, length_s)
    for second in range(int(length_s) + 1):
        y = float(bottom)
        for ending, colour in _ENDINGS.items():
            tall = _BARS_HEIGHT * ended[second, ending] / most
            if tall:
                y -= tall
                parts.append(_box(_x(second, length_s), y, width * 0.9, tall, colour))
    return parts


def _lanes(
    marks: Sequence[Mark], workers: Sequence[str], length_s: float, *, top: float
) -> list[str]:
    """What was done to each worker, from when to when."""
    parts = []
    for number, worker in enumerate(workers):
        y = top + _LANE_HEIGHT * number
        parts.append(_text(_LEFT - 8, y + 14, f"worker {worker}", "end"))
        for mark in (mark for mark in marks if mark.worker == worker):
            x = _x(mark.began_s, length_s)
            width = max(1.5, _x(mark.ended_s, length_s) - x)
            title = f"{mark.kind} {mark.detail}".strip()
            parts.append(_box(x, y, width, _LANE_HEIGHT - 8, _KINDS[mark.kind], title))
    return parts


def _legend(y: float, colours: dict[str, str]) -> list[str]:
    parts, x = [], float(_LEFT)
    for name, colour in colours.items():
        parts += [_box(x, y, 12, 12, colour), _text(x + 16, y + 10, name)]
        x += 36 + 6.5 * len(name)
    return parts


def _box(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{colour}"'
    return f"<rect {shape}><title>{escape(title)}</title></rect>" if title else f"<rect {shape}/>"


def _text(x: float, y: float, content: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'
