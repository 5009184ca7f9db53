"""Many prompts to findings, in bounded memory.

prompt --> was it in the cache?  yes: does it begin like one that lost?  count it as reused
             | no
             v
           whose anchors are these?  nobody's: remember it
             | an earlier prompt's
             v
           what was lost, and to what? (comparing.py)  to content: remember it
             | to a value, an order, a rewritten past
             v
           a suspect: proved when enough prompts lost to it, with different values each,
           and more of them lost than came again
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from kvway_router.prefixes.comparing import MIN_LOST_TOKENS, Loss, losses
from kvway_router.prefixes.findings import MAX_VALUES, Example, Finding, Suspect, Totals
from kvway_router.prefixes.owners import Owners
from kvway_router.prefixes.seen import Keys, SeenPrompt
from kvway_router.prefixes.values import Kind, shape

MIN_LOST: Final = 5
"""So many prompts must have lost before a difference is called a killer: fewer may be the first
requests of so many applications."""

MIN_LOSING_SHARE: Final = 0.1
"""A value that comes again nine times before the next one costs little where it stands."""

MAX_SUSPECTS: Final = 64
MAX_PROMPTS: Final = 512
MAX_PROMPT_BYTES: Final = 16 * 1024 * 1024
FORGET_S: Final = 3600.0
"""A finding that cost nothing for so long is over."""

_MIN_VOTES: Final = 3
_CUT_MARGIN_BYTES: Final = 64
_BEFORE_BYTES: Final = 24
_HEAD_SIZES: Final = tuple(round(8 * 1.25**n) for n in range(28))
"""Bytes of beginnings that are remembered, up to about 3,000."""

CountTokens = Callable[[str], int]


class Look(NamedTuple):
    """What one prompt shows.

    Attributes:
        losses: What it lost.
        proved: What has just become a finding.
    """

    losses: tuple[Loss, ...] = ()
    proved: tuple[Finding, ...] = ()


class PrefixFinder:
    """Finds what keeps prompts from sharing. Not safe for threads.

    Attributes:
        totals: All prompts that were looked at, by weight.
        avoidable_tokens: Tokens lost to findings so far, by kind; never less than before.

    Args:
        count_tokens: Tokens of a text, for the offset of a finding.

    Invariants:
        1. At most `MAX_PROMPTS` prompts of `MAX_PROMPT_BYTES` together are remembered, the last;
           where their passages are, in a table of a fixed size.
        2. At most `MAX_SUSPECTS` differences are followed; who lost least lately goes first.
    """

    def __init__(self, count_tokens: CountTokens) -> None:
        """Starts with nothing seen."""
        self.totals = Totals()
        self.avoidable_tokens: dict[Kind, float] = dict.fromkeys(Kind, 0.0)
        self._count_tokens = count_tokens
        self._prompts: OrderedDict[int, SeenPrompt] = OrderedDict()
        self._num_bytes = 0
        self._next = 1
        self._owners = Owners()
        self._suspects: OrderedDict[tuple[object, ...], Suspect] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Text that is remembered."""
        return self._num_bytes

    def look(self, prompt: SeenPrompt, *, now_s: float, weight: float = 1.0) -> Look:
        """Looks at one prompt, after it was served.

        Args:
            prompt: The prompt.
            now_s: Unix seconds.
            weight: How many requests it stands for.

        """
        self.totals.add(weight, prompt.num_tokens, prompt.hit_tokens)
        if prompt.num_tokens - prompt.hit_tokens < MIN_LOST_TOKENS:
            self._note_reuse(prompt, weight)
            return Look()
        found: list[Loss] = []
        for earlier in self._siblings(prompt):
            if found := losses(earlier, prompt):
                break
        else:
            self._note_reuse(prompt, weight)
        self._remember(prompt)
        proved = [
            suspect
            for loss in found
            if (suspect := self._note_loss(prompt, loss, weight, now_s=now_s)) is not None
        ]
        return Look(tuple(found), tuple(suspect.finding(self.totals) for suspect in proved))

    def findings(self, *, now_s: float) -> list[Finding]:
        """Returns what keeps prompts from sharing, the most costly first."""
        for key, suspect in list(self._suspects.items()):
            if now_s - suspect.last_seen > FORGET_S:
                del self._suspects[key]
        proved = [s for s in self._suspects.values() if s.example and _is_proved(s)]
        return sorted((s.finding(self.totals) for s in proved), key=lambda f: -f.lost_tokens)

    # -- prompts --------------------------------------------------------------------------------

    def _siblings(self, prompt: SeenPrompt) -> list[SeenPrompt]:
        """Returns remembered prompts that have much of what this one did not find cached.

        First those that have most of it; where several have the same, the last one. Then the one
        that begins most like this prompt: of applications that share much it is of the same.
        """
        keys, places = prompt.anchors
        votes = Counter(self._owners.of(keys[places >= prompt.hit_bytes]).tolist())
        voted = [owner for owner, num in votes.most_common(2) if owner and num >= _MIN_VOTES]
        if not voted:
            return []
        begins = next(filter(None, reversed(self._owners.of(_heads(prompt)).tolist())), 0)
        siblings = [self._prompts.get(owner) for owner in dict.fromkeys((*voted, begins))]
        return [s for s in siblings if s is not None and s.namespace == prompt.namespace]

    def _remember(self, prompt: SeenPrompt) -> None:
        self._prompts[self._next] = prompt
        self._num_bytes += len(prompt.data)
        self._owners.put(prompt.anchors[0], self._next)
        self._owners.put(_heads(prompt), self._next)
        self._next += 1
        while len(self._prompts) > MAX_PROMPTS or self._num_bytes > MAX_PROMPT_BYTES:
            _, gone = self._prompts.popitem(last=False)
            self._num_bytes -= len(gone.data)

    # -- suspects -------------------------------------------------------------------------------

    def _note_reuse(self, prompt: SeenPrompt, weight: float) -> None:
        """Counts a prompt that begins like one that lost: its value was not new."""
        for suspect in self._suspects.values():
            if suspect.cut and hash(prompt.data[: suspect.cut]) in suspect.heads:
                suspect.reused += weight

    def _note_loss(
        self, prompt: SeenPrompt, loss: Loss, weight: float, *, now_s: float
    ) -> Suspect | None:
        """Counts a loss; returns the suspect if that proves it."""
        key = _key(prompt, loss)
        suspect = self._suspects.get(key)
        if suspect is None:
            cut = 0 if loss.kind is Kind.HISTORY else loss.resumes + _CUT_MARGIN_BYTES
            suspect = Suspect(prompt.namespace, first_seen=now_s, last_seen=now_s, cut=cut)
            self._suspects[key] = suspect
            if len(self._suspects) > MAX_SUSPECTS:
                self._suspects.popitem(last=False)
        head = hash(prompt.data[: suspect.cut or None])
        if head in suspect.heads:  # this value was there before: evicted, or on another replica
            suspect.reused += weight
            return None
        self._suspects.move_to_end(key)
        if len(suspect.heads) < MAX_VALUES:
            suspect.heads.add(head)
        lost = loss.lost_bytes * prompt.tokens_per_byte
        suspect.last_seen = now_s
        suspect.kinds[loss.kind] += 1
        suspect.num_lost += 1
        suspect.lost_tokens += weight * lost
        suspect.requests.add(weight, prompt.num_tokens, prompt.hit_tokens)
        if prompt.ttft_s is not None and prompt.token_s is not None:
            suspect.ttft_weight += weight
            suspect.ttft_s += weight * prompt.ttft_s
            suspect.saved_s += weight * lost * prompt.token_s
        if suspect.example is not None:
            self.avoidable_tokens[suspect.kind] += weight * lost
            return None
        if not _is_proved(suspect):
            return None
        suspect.example = self._example(prompt, loss)
        self.avoidable_tokens[suspect.kind] += suspect.lost_tokens
        return suspect

    def _example(self, prompt: SeenPrompt, loss: Loss) -> Example:
        before = prompt.data[: loss.begin].decode("utf-8", "ignore")
        varying = prompt.data[loss.begin : loss.end].decode("utf-8", "ignore")
        return Example(
            ref=prompt.ref,
            place=prompt.place(loss.begin),
            token=self._count_tokens(before),
            shape=shape(varying) if loss.kind in _VALUE_KINDS else "",
        )


def _heads(prompt: SeenPrompt) -> Keys:
    """Returns names of a prompt's beginnings, the shortest first."""
    sizes = [size for size in _HEAD_SIZES if size <= len(prompt.data)]
    return np.array([hash(prompt.data[:size]) for size in sizes], np.int64).view(np.uint64)


def _is_proved(suspect: Suspect) -> bool:
    return (
        suspect.num_lost >= MIN_LOST
        and suspect.losing_share >= MIN_LOSING_SHARE
        and suspect.lost_tokens >= MIN_LOST_TOKENS * suspect.requests.requests
    )


def _key(prompt: SeenPrompt, loss: Loss) -> tuple[object, ...]:
    """Returns what is the same for all prompts that lose to the same thing."""
    if loss.kind in _VALUE_KINDS:
        place = prompt.place(loss.begin)
        before = prompt.data[max(0, loss.begin - _BEFORE_BYTES) : loss.begin]
        return prompt.namespace, place.message, place.role, before
    head = b"".join(prompt.data[: min(loss.begin, _HEAD_SIZES[-1])].split())[:_BEFORE_BYTES]
    return prompt.namespace, loss.kind, head[: len(head) // 8 * 8]


_VALUE_KINDS: Final = frozenset(Kind) - {
    Kind.REORDERED,
    Kind.KEY_ORDER,
    Kind.WHITESPACE,
    Kind.HISTORY,
}
