"""From token ids to the text a client sees: whole characters, and nothing of a stop string.

token ids ──Detokenizer──> whole characters ──StopScanner──> text that is safe to send
"""

from __future__ import annotations

from collections.abc import Sequence

from kvway_core.prompts import Detokenizer


class StopScanner:
    """Passes text through and ends it before the first stop string to complete.

    Of several that complete with the same character the longest counts, as it begins first. So the
    text is the same wherever token borders lie.

    Text is held back only while a stop string may still begin in it, so at most one character less
    than the longest stop string is ever held. Without stop strings nothing is.

    Invariants:
        1. What was passed on, then what is held, is the text so far up to that stop string.
        2. What was passed on never contains the beginning of a stop string that came true.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take more text and return what is certain by now; "" once a stop string was met."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        held = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            _, begin = min(found)
            return held[:begin]
        keep = max(_overlap(held, stop) for stop in self._stops)
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """Return what was held back: the text is over and no stop string came true in it."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of one answer, token by token.

    Joined, what `push` and `finish` return is the decoded answer up to the first stop string to
    complete.
    """

    def __init__(self, detokenizer: Detokenizer, *, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)

    @property
    def stopped(self) -> bool:
        """True once a stop string was met; nothing more comes."""
        return self._scanner.stopped

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token, often ""."""
        return self._scanner.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Return the rest: held text, and a replacement for a character that was cut."""
        return self._scanner.push(self._detokenizer.flush()) + self._scanner.flush()


def _overlap(text: str, stop: str) -> int:
    """Return how many last characters of `text` begin `stop`, short of all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
