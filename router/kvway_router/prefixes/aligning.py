"""Two prompts: where they part, and what they have in common behind that, in whatever order."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvway_router.prefixes.seen import ANCHOR_BYTES, SeenPrompt

MAX_MATCHES: Final = 64
"""Two prompts that agree in more pieces than this have words in common, not passages."""

_FIRST_STEP: Final = 256
_LAST_STEP: Final = 64 * 1024

Bytes = NDArray[np.uint8]


class Match(NamedTuple):
    """The same `length` bytes at `a` in the earlier prompt and at `b` in the later one."""

    a: int
    b: int
    length: int

    @property
    def a_end(self) -> int:
        """Where it ends in the earlier prompt."""
        return self.a + self.length

    @property
    def b_end(self) -> int:
        """Where it ends in the later prompt."""
        return self.b + self.length


def common_prefix(a: Bytes, b: Bytes) -> int:
    """Returns how many leading bytes are the same."""
    end, at, step = min(len(a), len(b)), 0, _FIRST_STEP
    while at < end:
        stop = min(end, at + step)
        differ = a[at:stop] != b[at:stop]
        first = int(differ.argmax())
        if differ[first]:
            return at + first
        at, step = stop, min(step * 4, _LAST_STEP)
    return end


def common_suffix(a: Bytes, b: Bytes) -> int:
    """Returns how many last bytes are the same."""
    return common_prefix(a[::-1], b[::-1])


def matches_behind(earlier: SeenPrompt, later: SeenPrompt, start: int) -> list[Match]:
    """Returns passages that both prompts have behind `start`, in the later one's order.

    They do not overlap in the later prompt. Each holds an anchor, so none is shorter than one.

    Args:
        earlier: A prompt.
        later: Another.
        start: Where they part.
    """
    keys_a, places_a = earlier.anchors
    keys_b, places_b = later.anchors
    if not len(keys_a) or not len(keys_b):
        return []
    at = np.searchsorted(keys_a, keys_b).clip(max=len(keys_a) - 1)
    same = (keys_a[at] == keys_b) & (places_a[at] >= start) & (places_b >= start)
    pairs = np.stack((places_b[same], places_a[at][same]), axis=1)
    pairs = pairs[pairs[:, 0].argsort()]
    a, b, found, end = earlier.array, later.array, list[Match](), start
    for b_at, a_at in pairs.tolist():
        if b_at < end:
            continue
        back = common_suffix(a[start:a_at], b[end:b_at])
        match = Match(a_at - back, b_at - back, back + common_prefix(a[a_at:], b[b_at:]))
        if match.length < ANCHOR_BYTES:  # two keys of different bytes
            continue
        found.append(match)
        end = match.b_end
        if len(found) == MAX_MATCHES:
            break
    return found


def heaviest_rise(matches: list[Match]) -> list[Match]:
    """Returns the matches that are in the same order in both prompts, the most bytes of them."""
    best: list[tuple[int, int | None]] = []
    for number, match in enumerate(matches):
        before = [(best[n][0], n) for n in range(number) if matches[n].a_end <= match.a + _OVERLAP]
        weight, last = max(before, default=(0, None))
        best.append((weight + match.length, last))
    chain: list[Match] = []
    at = max(range(len(best)), key=lambda n: best[n][0], default=None)
    while at is not None:
        chain.append(matches[at])
        at = best[at][1]
    return chain[::-1]


_OVERLAP: Final = 16
"""Passages may overlap by so much in the earlier prompt: where one ends is a matter of chance."""


class Permutation(NamedTuple):
    """Passages that stand in another order.

    Attributes:
        a_end: Where they end in the earlier prompt.
        b_end: Where they end in the later one.
        num_bytes: Bytes of them.
        num_moved: Of those, bytes that are out of the order of the others.
        num_matches: How many passages.
    """

    a_end: int
    b_end: int
    num_bytes: int
    num_moved: int
    num_matches: int


def permutation(matches: list[Match], start: int) -> Permutation | None:
    """Returns the first stretch of the matches that is in another order, None if there is none.

    Args:
        matches: As `matches_behind` returns them.
        start: Where the prompts part; both stretches begin there.
    """
    a_end, num_bytes, falls = start, 0, False
    for number, match in enumerate(matches):
        falls |= match.a < a_end - _OVERLAP
        a_end = max(a_end, match.a_end)
        num_bytes += match.length
        if all(later.a >= a_end - _OVERLAP for later in matches[number + 1 :]):
            if not falls:
                return None
            group = matches[: number + 1]
            num_moved = num_bytes - sum(m.length for m in heaviest_rise(group))
            return Permutation(a_end, match.b_end, num_bytes, num_moved, len(group))
    return None
