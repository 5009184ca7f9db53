"""The prompts of late as hashes: where the traffic runs in the index, and what could be reused.

The *ceiling* of the traffic is the hit rate of one cache that never forgets. It is counted with a
second index that holds one replica, which is sent every prompt:

    prompt 1    a b c d       0 of 4 blocks were sent before
    prompt 2    a b x         2 of 3
    prompt 3    a b c d e     4 of 5        ceiling: 6 of 12

That one forgets too, the oldest first, but only what its budget has no room for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvway_router.index import MIN_BYTES, BlockIndex

MAX_PROMPTS: Final = 512
MAX_BLOCKS: Final = 2**19
"""Blocks of the prompts that are kept, at most: 4 MiB of hashes."""
MAX_MARKS: Final = 720

_EVERYONE: Final = "everyone"


class SentPrompt(NamedTuple):
    """A prompt that was answered.

    Attributes:
        request_id: Of the request.
        replica_id: Who answered.
        hashes: Its full blocks.
    """

    request_id: str
    replica_id: str
    hashes: Sequence[int]


class RecentPrompts:
    """The last prompts that were answered, and marks that tell when a tick of the index was.

    Not thread-safe: it belongs to the event loop.

    Args:
        max_ceiling_bytes: Budget of the cache that never forgets; 32 MiB are about two million
            blocks of long prompts.

    Invariants:
        1. At most `MAX_PROMPTS` prompts of at most `MAX_BLOCKS` blocks together are kept, or one.
        2. At most `MAX_MARKS` marks are kept, in the order of their time.
        3. `ceiling_bytes` is at most `max_ceiling_bytes`, or the smallest budget of an index.
    """

    def __init__(self, *, max_ceiling_bytes: int = 32 * 2**20) -> None:
        """Nothing was sent yet."""
        max_bytes = max(MIN_BYTES, max_ceiling_bytes)
        self._prompts: deque[SentPrompt] = deque()
        self._num_blocks = 0
        self._ticks: deque[int] = deque(maxlen=MAX_MARKS)
        self._times: deque[float] = deque(maxlen=MAX_MARKS)
        self._everyone = BlockIndex(max_blocks_per_replica=2**31, max_bytes=max_bytes)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def ceiling_bytes(self) -> int:
        """What the cache that never forgets takes, as `BlockIndex` counts it."""
        return self._everyone.size_bytes

    def __iter__(self) -> Iterator[SentPrompt]:
        """Yields the prompts, the oldest first."""
        return iter(self._prompts)

    def add(self, prompt: SentPrompt) -> int:
        """Takes in a prompt.

        Returns:
            How many of its leading blocks had been sent before, to whomever.

        Complexity: one match and one store of the index.
        """
        hashes = prompt.hashes
        num_known = self._everyone.match(hashes).get(_EVERYONE, 0)
        self._everyone.store(_EVERYONE, None, hashes)
        self._prompts.append(prompt)
        self._num_blocks += len(hashes)
        while len(self._prompts) > 1 and (
            len(self._prompts) > MAX_PROMPTS or self._num_blocks > MAX_BLOCKS
        ):
            self._num_blocks -= len(self._prompts.popleft().hashes)
        return num_known

    def mark(self, tick: int, now_s: float) -> None:
        """Notes that the index is at `tick` now."""
        self._ticks.append(tick)
        self._times.append(now_s)

    def age_s(self, tick: int, now_s: float) -> float | None:
        """Returns how long ago something had `tick`, at least; None if before the first mark."""
        place = bisect_right(self._ticks, tick)
        if place == len(self._ticks):
            return 0.0
        return now_s - self._times[place] if place else None
