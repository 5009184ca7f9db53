"""From token ids to the text a client sees: whole characters, and nothing of a stop string.

token ids ──Detokenizer──> whole characters ──StopScanner──> text that is safe to send
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvway_core.prompts import Detokenizer, PromptEncoder


class StopScanner:
    """Passes text through and ends it before the first stop string to complete.

    Of several that complete with the same character the longest counts, as it begins first. So the
    text is the same wherever token borders lie.

    Text is held back only while a stop string may still begin in it, so at most one character less
    than the longest stop string is ever held. Without stop strings nothing is.

    Args:
        stops: The stop strings.
        include_stop: Whether the text ends behind the stop string instead.

    Attributes:
        met: The stop string that came true, None before.

    Invariants:
        1. What was passed on, then what is held, is the text so far up to that stop string.
        2. What was passed on never contains the beginning of a stop string that came true, unless
           it is included.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include_stop = include_stop
        self._held = ""
        self.met: str | None = None

    @property
    def stopped(self) -> bool:
        """True once a stop string was met; nothing more comes."""
        return self.met is not None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take more text and return what is certain by now; "" once a stop string was met.

        Args:
            text: What follows the text so far.
            may_stop: Whether a stop string that completes in this text counts.
        """
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        num_old = len(self._held)
        held = self._held + text
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if may_stop and (at := held.find(stop, max(0, num_old - len(stop) + 1))) >= 0
        ]
        if found:
            end, begin, self.met = min(found)
            self._held = ""
            return held[: end if self._include_stop else begin]
        keep = max(_overlap(held, stop) for stop in self._stops)
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """Return what was held back: the text is over and no stop string came true in it."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True, slots=True)
class TextRules:
    """What of an answer is shown.

    Attributes:
        stops: Strings that end it.
        include_stop: Whether what ended it, string or token, is shown.
        min_tokens: A stop string that completes within the first so many tokens does not count.
        skip_special_tokens: Whether special tokens are left out.
        stop_token_ids: Tokens that end it because the request says so: the model's own end tokens
            are not among them unless it ignores these.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    stop_token_ids: frozenset[int] = frozenset()


class TextStream:
    """The text of one answer, token by token.

    Joined, what `push` and `finish` return is the decoded answer up to the first stop string to
    complete.
    """

    def __init__(self, encoder: PromptEncoder, rules: TextRules) -> None:
        self._detokenizer = Detokenizer(encoder, skip_special_tokens=rules.skip_special_tokens)
        self._scanner = StopScanner(rules.stops, include_stop=rules.include_stop)
        self._min_tokens = rules.min_tokens
        self._num_tokens = 0

    @property
    def met(self) -> str | None:
        """The stop string that ended the text; nothing more comes then."""
        return self._scanner.met

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token, often ""."""
        self._num_tokens += 1
        return self._scan(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Return the rest: held text, and a replacement for a character that was cut."""
        return self._scan(self._detokenizer.flush()) + self._scanner.flush()

    def _scan(self, text: str) -> str:
        return self._scanner.push(text, may_stop=self._num_tokens > self._min_tokens)


def _overlap(text: str, stop: str) -> int:
    """Return how many last characters of `text` begin `stop`, short of all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
