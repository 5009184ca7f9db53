"""What a policy may remember from one choice to the next, as a value that its owner keeps.

Chance is a value too: numbers are drawn by hashing a seed, the number of the choice and the number
of the draw, so the same state draws the same numbers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

NUM_BUCKETS: Final = 18
"""Parts of the window: it forgets an eighteenth of itself at a time."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent to one replica in some time.

    Attributes:
        num_requests: Requests.
        work_s: Their prefill and expected decode work, seconds.
    """

    num_requests: int = 0
    work_s: float = 0.0

    def plus(self, other: Sent) -> Sent:
        """Returns the sum of both."""
        return Sent(self.num_requests + other.num_requests, self.work_s + other.work_s)


@dataclass(frozen=True, slots=True)
class Window:
    """What was sent to each replica in the last `length_s` seconds, in `NUM_BUCKETS` parts.

    A value: `sent` returns a newer one. A part is forgotten as a whole, so between
    `length_s - length_s / NUM_BUCKETS` and `length_s` are remembered. Bounded by the parts times
    the replicas that were chosen in them.

    Attributes:
        length_s: How long is remembered, seconds; 0 remembers nothing.
        parts: Number of the part and what was sent in it, the oldest first.
    """

    length_s: float = 0.0
    parts: tuple[tuple[int, Mapping[str, Sent]], ...] = ()

    def sent(self, replica_id: str, work_s: float, *, now_s: float) -> Window:
        """Returns the window after one more request."""
        if self.length_s <= 0:
            return self
        now = self._part_at(now_s)
        parts = [part for part in self.parts if now - NUM_BUCKETS < part[0] < now]
        newest = next((dict(sent) for number, sent in self.parts if number == now), {})
        newest[replica_id] = newest.get(replica_id, Sent()).plus(Sent(1, work_s))
        return Window(self.length_s, (*parts, (now, newest)))

    def totals(self, *, now_s: float) -> dict[str, Sent]:
        """Returns what each replica was sent; those that were sent nothing are not named."""
        if self.length_s <= 0:
            return {}
        now = self._part_at(now_s)
        totals: dict[str, Sent] = {}
        for number, part in self.parts:
            if number > now - NUM_BUCKETS:
                for replica_id, sent in part.items():
                    totals[replica_id] = totals.get(replica_id, Sent()).plus(sent)
        return totals

    def _part_at(self, now_s: float) -> int:
        return int(now_s * NUM_BUCKETS / self.length_s)


class PolicyState(msgspec.Struct, frozen=True):
    """Everything that a router remembers for its policy.

    Attributes:
        seed: Routers with other seeds draw other numbers.
        num_choices: Choices made so far, which is the counter of round robin.
        window: What was sent of late, if the policy asks for it.
    """

    seed: int = 0
    num_choices: int = 0
    window: Window = Window()

    def draw(self, limit: int, *, number: int = 0) -> int:
        """Draws one of 0 to `limit - 1`, each as likely: the `number`-th draw of this choice."""
        return self._digest(number) % limit

    def draw_share(self) -> float:
        """Draws a number from 0 to less than 1."""
        return (self._digest(0) >> 11) / (1 << 53)

    def after(self, replica_id: str, work_s: float, *, now_s: float) -> PolicyState:
        """Returns the state after a choice."""
        window = self.window
        if window.length_s > 0:
            window = window.sent(replica_id, work_s, now_s=now_s)
        return PolicyState(self.seed, self.num_choices + 1, window)

    def _digest(self, number: int) -> int:
        mask = (1 << 64) - 1
        return xxhash.xxh3_64_intdigest(
            struct.pack("<3Q", self.seed & mask, self.num_choices & mask, number)
        )
