"""What is known of one prefix killer, and what is said of it. No part of it holds prompt text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvway_router.prefixes.seen import Place
from kvway_router.prefixes.values import Kind

MAX_VALUES: Final = 256
"""Distinct values that are told apart; beyond, there are "at least" so many."""

_WHAT: Final = {
    Kind.TIMESTAMP: "a timestamp",
    Kind.EPOCH: "a Unix time",
    Kind.DATE: "a date",
    Kind.UUID: "a UUID",
    Kind.OPAQUE_ID: "an id",
    Kind.NUMERIC_ID: "a number that names something",
    Kind.NAME: "a name",
    Kind.NUMBER: "a number",
    Kind.USER_HEADER: "fields about the user",
    Kind.REORDERED: "the same blocks in another order",
    Kind.KEY_ORDER: "the same JSON in another order",
    Kind.WHITESPACE: "white space",
    Kind.HISTORY: "earlier messages",
}
_ADVICE: Final = {
    Kind.TIMESTAMP: (
        "Put the time into the last message, behind everything stable, or leave it to a tool."
    ),
    Kind.EPOCH: (
        "Put the time into the last message, behind everything stable, or leave it to a tool."
    ),
    Kind.DATE: "Put the date into the last message, behind everything stable.",
    Kind.UUID: "Send the id as metadata or a header; the model has no use for it in the prompt.",
    Kind.OPAQUE_ID: (
        "Send the id as metadata or a header; if the model needs it, put it into the last message."
    ),
    Kind.NUMERIC_ID: (
        "Send the id as metadata or a header; if the model needs it, put it into the last message."
    ),
    Kind.NAME: "Write the stable part without the name, and put the name into the last message.",
    Kind.NUMBER: "Put the number into the last message, behind everything stable.",
    Kind.USER_HEADER: "Put what is about the user behind everything that all users share.",
    Kind.REORDERED: (
        "Put the blocks into one order, such as by their id, and not by how well they fit."
    ),
    Kind.KEY_ORDER: "Sort the tools and keys before they are sent, such as with sort_keys=True.",
    Kind.WHITESPACE: "Render this part once, or normalize its white space before it is sent.",
    Kind.HISTORY: (
        "Append to the history and leave what was sent as it is; when it must become shorter, cut "
        "much at once and seldom."
    ),
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One prefix killer, as it is told. Requests and tokens of the router are estimates.

    They are counted in prompts that were looked at, each of which stands for those that were not.

    Attributes:
        kind: What varies.
        what: The same in words.
        namespace: Whose prompts.
        role: Of the message it is in; "tools", "template" or "prompt" where it is in none.
        message: Number of that message, None between messages.
        char: Characters of the message in front of it.
        token: Tokens of the prompt in front of it.
        shape: What it looks like, masked.
        num_values: How many different values were seen.
        requests: How many requests lost something to it.
        request_share: Their share of all requests.
        lost_tokens: Prompt tokens that were computed again, in all.
        lost_tokens_per_request: The same per request.
        token_share: Lost tokens as a share of all prompt tokens.
        hit_rate: Of those requests as they are: cached tokens by prompt tokens.
        hit_rate_if_moved: What it would be with this behind the stable part.
        ttft_s: Their mean time to first token; None if nobody knows.
        ttft_s_if_moved: What it would be, by the prefill rate that the router has learned.
        advice: What to do.
        example: A request that lost.
        first_seen: Unix seconds.
        last_seen: Unix seconds.
    """

    kind: Kind
    what: str
    namespace: str
    role: str
    message: int | None
    char: int
    token: int
    shape: str
    num_values: int
    requests: float
    request_share: float
    lost_tokens: float
    lost_tokens_per_request: float
    token_share: float
    hit_rate: float
    hit_rate_if_moved: float
    ttft_s: float | None
    ttft_s_if_moved: float | None
    advice: str
    example: str
    first_seen: float
    last_seen: float


@dataclass(slots=True)
class Totals:
    """All prompts, each by its weight.

    Attributes:
        requests: How many.
        prompt_tokens: Their tokens.
        hit_tokens: Those that could be reused.
    """

    requests: float = 0.0
    prompt_tokens: float = 0.0
    hit_tokens: float = 0.0

    def add(self, weight: float, prompt_tokens: int, hit_tokens: int) -> None:
        """Counts a prompt."""
        self.requests += weight
        self.prompt_tokens += weight * prompt_tokens
        self.hit_tokens += weight * hit_tokens


@dataclass(slots=True)
class Example:
    """Where it is in one request."""

    ref: str
    place: Place
    token: int
    shape: str


@dataclass(slots=True)
class Suspect:
    """A difference that keeps costing prompts what they have in common; a finding when proved.

    Attributes:
        namespace: Whose prompts.
        first_seen: Unix seconds.
        last_seen: Unix seconds.
        cut: Bytes of a prompt that hold the varying value and some text behind it; 0 where the
            value is not in one place.
        heads: Beginnings of so many bytes that have lost, as hashes: one per value.
        kinds: Requests by kind.
        num_lost: Prompts that lost, of those looked at.
        reused: Requests that began like one that had lost, and hit: the value came again.
        lost_tokens: Tokens lost.
        requests: The prompts that lost, by weight.
        ttft: Weight and seconds of those whose time to first token is known.
        saved_s: Seconds of prefill that those would not have taken.
        example: Where it is in the prompt that proved it; None before.
    """

    namespace: str
    first_seen: float
    last_seen: float
    cut: int
    heads: set[int] = field(default_factory=set)
    kinds: Counter[Kind] = field(default_factory=Counter)
    num_lost: int = 0
    reused: float = 0.0
    lost_tokens: float = 0.0
    requests: Totals = field(default_factory=Totals)
    ttft_weight: float = 0.0
    ttft_s: float = 0.0
    saved_s: float = 0.0
    example: Example | None = None

    @property
    def kind(self) -> Kind:
        """The kind that most requests show: some ids have no letters, by chance."""
        return self.kinds.most_common(1)[0][0]

    @property
    def losing_share(self) -> float:
        """Of the requests with such a value, those that lost."""
        return self.requests.requests / (self.requests.requests + self.reused)

    def finding(self, totals: Totals) -> Finding:
        """Returns what is said of it; it must have an example.

        Args:
            totals: Of all prompts.
        """
        assert self.example is not None  # noqa: S101  proved
        kind, ours, place = self.kind, self.requests, self.example.place
        mean_ttft_s = self.ttft_s / self.ttft_weight if self.ttft_weight else None
        mean_saved_s = self.saved_s / self.ttft_weight if self.ttft_weight else 0.0
        return Finding(
            kind=kind,
            what=_WHAT[kind],
            namespace=self.namespace,
            role=place.role,
            message=place.message,
            char=place.char,
            token=self.example.token,
            shape=self.example.shape,
            num_values=len(self.heads),
            requests=ours.requests,
            request_share=ours.requests / max(1.0, totals.requests),
            lost_tokens=self.lost_tokens,
            lost_tokens_per_request=self.lost_tokens / ours.requests,
            token_share=self.lost_tokens / max(1.0, totals.prompt_tokens),
            hit_rate=ours.hit_tokens / max(1.0, ours.prompt_tokens),
            hit_rate_if_moved=min(
                1.0, (ours.hit_tokens + self.lost_tokens) / max(1.0, ours.prompt_tokens)
            ),
            ttft_s=mean_ttft_s,
            ttft_s_if_moved=None if mean_ttft_s is None else max(0.0, mean_ttft_s - mean_saved_s),
            advice=_ADVICE[kind],
            example=self.example.ref,
            first_seen=self.first_seen,
            last_seen=self.last_seen,
        )
