"""What a fault proxy can do to a connection, and what it tells of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Self


class End(Enum):
    """How a fault ends a connection."""

    RESET = "reset"
    """RST to both sides; what was on its way may be lost."""
    CLOSE = "close"
    """An orderly end of both sides, in the middle of whatever was said."""
    HALF_CLOSE = "half_close"
    """End of file for who is being sent to; the other direction goes on."""
    SILENCE = "silence"
    """Nothing passes any more, either way, and nothing ends until the client leaves."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one connection. The default is nothing.

    Attributes:
        end: How it ends. Without one of the next three at once when it is accepted, and the
            target never hears of it.
        request_bytes: It ends when so many bytes of the client's were passed on.
        answer_bytes: It ends when so many bytes of the answer were; with 0, when the target
            begins to answer.
        reused: It ends when the client sends more after an answer began: a kept-alive connection
            that the server gives up just then.
        in_chunk: After `answer_bytes` the end waits for the middle of the next chunk of a
            chunked HTTP answer.
        junk_chunk: The first size line of a chunk after `answer_bytes` (else the first) is
            replaced by one that is none; the connection goes on.
        delay_s: Each piece of the answer is late by this.
        bytes_per_s: The answer passes no faster.
    """

    end: End | None = None
    request_bytes: int | None = None
    answer_bytes: int | None = None
    reused: bool = False
    in_chunk: bool = False
    junk_chunk: bool = False
    delay_s: float = 0.0
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        """Refuses what has no meaning."""
        counts = (self.request_bytes, self.answer_bytes)
        assert all(count is None or count >= 0 for count in counts), "bytes are 0 or more"
        has_point = self.request_bytes is not None or self.reused or self.in_chunk
        has_point |= self.answer_bytes is not None and not self.junk_chunk
        assert self.end or not has_point, "an end is missing"
        assert self.end is not End.HALF_CLOSE or has_point, "half of nothing"
        assert not (self.end and self.junk_chunk), "after junk the connection goes on"
        assert self.bytes_per_s is None or self.bytes_per_s > 0, "no speed is SILENCE"

    @property
    def at_accept(self) -> bool:
        """Whether the connection ends before anything passes."""
        counts = (self.request_bytes, self.answer_bytes)
        return (
            self.end is not None and counts == (None, None) and not (self.reused or self.in_chunk)
        )

    def later(self, request_bytes: int, answer_bytes: int) -> Self:
        """Returns this fault for a connection on which so much has passed already."""
        return replace(
            self,
            request_bytes=_sum(self.request_bytes, request_bytes),
            answer_bytes=_sum(self.answer_bytes, answer_bytes),
        )


@dataclass(slots=True)
class Connection:
    """One connection as it went.

    Attributes:
        fault: What was to happen to it.
        request_bytes: Passed on to the target.
        answer_bytes: Passed on to the client.
        end: How a fault or `cut` ended it; None as long as none has.
        closed: Whether it is over.
    """

    fault: Fault
    request_bytes: int = 0
    answer_bytes: int = 0
    end: End | None = None
    closed: bool = False


def _sum(limit: int | None, passed: int) -> int | None:
    return None if limit is None else limit + passed
