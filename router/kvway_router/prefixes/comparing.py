"""A prompt that was not in the cache beside an earlier one: what was lost, and to what.

    earlier   [ same ][ varies ][ same ............ ][ varies ][ same ][ else ]
    later     [ same ][ varies ][ same ............ ][ varies ][ same ][ else ]
                      parts      lost to the first              lost to the second

Reading stops at the first difference that is content: behind that nothing could have been reused,
whatever is done about what stands before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kvway_router.prefixes.aligning import (
    Match,
    common_prefix,
    heaviest_rise,
    matches_behind,
    permutation,
)
from kvway_router.prefixes.seen import SeenPrompt
from kvway_router.prefixes.values import SAME_CONTENTS, Kind, is_json, varying

MIN_LOST_TOKENS: Final = 64
"""Less behind a difference is not worth anybody's time."""

MAX_DIFFERENCES: Final = 32
"""Differences of one prompt that are looked at."""

_MIN_STRETCH_BYTES: Final = 160
_MAX_REGION_BYTES: Final = 16 * 1024
_MAX_ENDS: Final = 4
_CONTEXT_BYTES: Final = 96
_SAME_SHARE: Final = 0.85
_MOVED_SHARE: Final = 0.05
_ABOUT: Final = 0.1
"""The place up to which a prompt was cached is known to so much of its length."""

_INNER_BYTES: Final = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that no character begins with."""


class Loss(NamedTuple):
    """What one prompt lost to one difference. Places are bytes of the later prompt.

    Attributes:
        kind: What varies.
        begin: Where what varies begins.
        end: Where it ends.
        resumes: Where the prompts agree again.
        until: Up to where they do.
        lost_bytes: How much of that was seen before and computed again, with what varies if that
            has the same contents.
    """

    kind: Kind
    begin: int
    end: int
    resumes: int
    until: int
    lost_bytes: int

    @property
    def lost_from(self) -> int:
        """Where what was lost begins."""
        return self.begin if self.kind in SAME_CONTENTS else self.resumes


def losses(earlier: SeenPrompt, later: SeenPrompt) -> list[Loss]:
    """Returns what the later prompt lost because it differs from an earlier one, the first first.

    Nothing, if what differs is content.
    """
    start = common_prefix(earlier.array, later.array)
    if start in (len(earlier.data), len(later.data)):
        return []
    matches = matches_behind(earlier, later, start)
    if not matches:
        return []
    # Behind where they part but for about nothing: then the earlier one is what was hit.
    hit = later.hit_bytes
    hit = start if hit - start < _ABOUT * len(later.data) else hit
    history = _history(earlier, later, start, hit)
    found = [history] if history is not None else _in_one(_stretches(earlier, later, matches, hit))
    least = MIN_LOST_TOKENS / later.tokens_per_byte
    return found if sum(loss.lost_bytes for loss in found) >= least else []


def _stretches(
    earlier: SeenPrompt, later: SeenPrompt, matches: list[Match], hit: int
) -> Iterator[Loss]:
    """Yields what was lost to each difference, up to the first that is content."""
    a = b = common_prefix(earlier.array, later.array)
    for _ in range(MAX_DIFFERENCES):
        matches = [match for match in matches if match.b >= b and match.a >= a]
        for region in _regions(matches, a, b):
            in_a, in_b = (a, region.a_end), (b, region.b_end)
            span = _named(earlier, later, in_a, in_b, is_permuted=region.is_permuted)
            if span is not None:
                break
        else:
            return
        kind, begin, end = span
        same = common_prefix(earlier.array[region.a_end :], later.array[region.b_end :])
        until = region.b_end + same
        lost_from = b if kind in SAME_CONTENTS else region.b_end
        yield Loss(kind, begin, end, region.b_end, until, max(0, until - max(lost_from, hit)))
        a, b = region.a_end + same, until


def _in_one(found: Iterable[Loss]) -> list[Loss]:
    """Returns losses with those of the same contents again, such as one per tool, put together."""
    together: list[Loss] = []
    for loss in found:
        last = together[-1] if together else None
        if last is not None and last.kind is loss.kind and loss.kind in SAME_CONTENTS:
            lost = last.lost_bytes + loss.lost_bytes
            together[-1] = loss._replace(begin=last.begin, lost_bytes=lost)
        else:
            together.append(loss)
    return together


class _Region(NamedTuple):
    """Where two prompts agree again behind a difference."""

    a_end: int
    b_end: int
    is_permuted: bool


def _regions(matches: list[Match], a: int, b: int) -> Iterator[_Region]:
    """Yields where the next difference may end, the likeliest first.

    Where the same things come in another order, one of them may look like the end.
    """
    moved = permutation(matches, a)
    if moved is not None:
        longest = max(moved.a_end - a, moved.b_end - b)
        if moved.num_bytes >= _SAME_SHARE * longest and moved.num_moved >= _MOVED_SHARE * longest:
            yield _Region(moved.a_end, moved.b_end, is_permuted=True)
    rising = [match for match in heaviest_rise(matches) if match.length >= _MIN_STRETCH_BYTES]
    for match in rising[:_MAX_ENDS]:
        if max(match.a - a, match.b - b) <= _MAX_REGION_BYTES:
            yield _Region(match.a, match.b, is_permuted=False)


def _named(
    earlier: SeenPrompt,
    later: SeenPrompt,
    in_a: tuple[int, int],
    in_b: tuple[int, int],
    *,
    is_permuted: bool,
) -> tuple[Kind, int, int] | None:
    """Returns the kind of a difference and where it is in the later prompt; None for content."""
    begin, end = in_b
    if is_permuted:
        text = _text(later.data[begin:end])
        return (Kind.KEY_ORDER if is_json(text) else Kind.REORDERED), begin, end
    before = _last_line(later.data[max(0, begin - _CONTEXT_BYTES) : begin])
    behind = _first_line(later.data[end : end + _CONTEXT_BYTES])
    text = _text(before + later.data[begin:end] + behind)
    region = len(_text(before)), len(_text(before + later.data[begin:end]))
    span = varying(_text(before + earlier.data[slice(*in_a)] + behind), text, region)
    if span is None:
        return None
    first = begin - len(before)
    at = first + len(text[: span.begin].encode())
    to = first + len(text[: span.end].encode())
    return None if _is_all_a_user_said(later, at, to) else (span.kind, at, to)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "ignore")


def _last_line(data: bytes) -> bytes:
    """Returns the last line of what stands before a difference, from a word's beginning."""
    line = data[data.rfind(b"\n") + 1 :]
    if len(line) == _CONTEXT_BYTES:
        line = line[line.find(b" ") + 1 :]
    return line.lstrip(_INNER_BYTES)


def _first_line(data: bytes) -> bytes:
    """Returns the first line of what stands behind a difference, to a word's end."""
    at = data.find(b"\n")
    if at >= 0:
        return data[:at]
    return data[: data.rfind(b" ") + 1] if len(data) == _CONTEXT_BYTES else data


def _is_all_a_user_said(prompt: SeenPrompt, begin: int, end: int) -> bool:
    """Says whether a user's message is nothing but what varies."""
    return any(
        part.role == "user" and begin <= part.begin and part.end <= end for part in prompt.parts
    )


def _history(earlier: SeenPrompt, later: SeenPrompt, start: int, hit: int) -> Loss | None:
    """Returns what a conversation lost because its past was left out or written anew.

    The later prompt goes on from the earlier one if that one's last messages are in it, with more
    behind them. Two at least: people say "go on" in many conversations.
    """
    keys_a, keys_b = earlier.message_keys, later.message_keys
    same = next(
        (n for n, (x, y) in enumerate(zip(keys_a, keys_b, strict=False)) if x != y),
        min(len(keys_a), len(keys_b)),
    )
    if same == len(keys_a) or len(keys_b) < 3:
        return None
    tail = next(
        (
            (at, num)
            for at in range(len(keys_b) - 2, same, -1)
            if (num := _common_tail(keys_a[same:], keys_b[same : at + 1])) >= 2
        ),
        None,
    )
    if tail is None:
        return None
    at, num = tail
    first, last = later.parts[at - num + 1], later.parts[at]
    part = later.parts[same]
    begin = max(part.begin, min(start, part.end))
    lost = max(0, last.end - max(first.begin, hit))
    return Loss(Kind.HISTORY, begin, max(part.end, begin), first.begin, last.end, lost)


def _common_tail(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Returns how many last numbers are the same."""
    num = 0
    while num < min(len(a), len(b)) and a[-1 - num] == b[-1 - num]:
        num += 1
    return num
