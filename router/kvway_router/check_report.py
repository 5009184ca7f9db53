"""The report of `kvway check`, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvway_router.check_prompts import CheckedPrompt
from kvway_router.prefixes.comparing import Loss
from kvway_router.prefixes.findings import Finding
from kvway_router.prefixes.seen import SeenPrompt
from kvway_router.prefixes.values import SAME_CONTENTS, Kind

_COLUMNS: Final = 64
_MAX_FINDINGS: Final = 10
_MAX_PICTURES: Final = 3
_LEAST_STRANDED: Final = 0.005
"""Of all prompt tokens: less than this in shared parts of blocks is not spoken of."""

_HELD, _VARIES, _LOST, _NEW = "█", "▼", "░", "·"
_LEGEND: Final = (
    f"{_HELD} held by the cache   {_VARIES} what varies   {_LOST} seen before, computed again   "
    f"{_NEW} new"
)


@dataclass(slots=True)
class Checked:
    """What a file shows.

    Attributes:
        block_size: Tokens of a block.
        is_estimated: Whether tokens are reckoned, not counted.
        prompts: The prompts, in their order.
        losses: What each of them lost.
        findings: What they lost to, the most costly first.
        skipped: What was no request, and why.
        is_cut: Whether there were more requests than are read.
    """

    block_size: int
    is_estimated: bool
    prompts: list[CheckedPrompt] = field(default_factory=list)
    losses: list[tuple[Loss, ...]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    is_cut: bool = False

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(prompt.seen.num_tokens for prompt in self.prompts)

    @property
    def hit_rate(self) -> float:
        """Of these, the share that an endless cache would hold."""
        held = sum(prompt.seen.hit_tokens for prompt in self.prompts)
        return held / max(1, self.num_tokens)

    @property
    def avoidable_share(self) -> float:
        """Of these, the share that was computed again because of a finding."""
        return sum(finding.lost_tokens for finding in self.findings) / max(1, self.num_tokens)


class Stranded(NamedTuple):
    """A shared beginning that ends inside a block.

    Attributes:
        num_tokens: Tokens that are shared.
        num_requests: Requests that went on from it.
    """

    num_tokens: int
    num_requests: int


def render(checked: Checked, *, fix_hint: bool, show_values: bool) -> str:
    """Returns the report.

    Args:
        checked: What to tell.
        fix_hint: Whether with the order that the parts should have.
        show_values: Whether what varies is shown as it is; else its shape.
    """
    lines = [*_summary(checked)]
    for number, finding in enumerate(checked.findings[:_MAX_FINDINGS], start=1):
        lines += ["", *_finding(number, finding, checked, show_values=show_values)]
        if fix_hint:
            lines += ["", *_skeleton(finding, checked)]
    if len(checked.findings) > _MAX_FINDINGS:
        lines += ["", f"and {len(checked.findings) - _MAX_FINDINGS} more"]
    lines += _boundaries(checked)
    return "\n".join(lines) + "\n"


def _summary(checked: Checked) -> Iterator[str]:
    how = "about 4 characters each; --model counts them" if checked.is_estimated else "counted"
    num = len(checked.prompts)
    yield f"{num:,} {_s(num, 'request')}, {checked.num_tokens:,} prompt tokens ({how})"
    if checked.skipped:
        yield f"{len(checked.skipped)} skipped; the first: {checked.skipped[0]}"
    if checked.is_cut:
        yield "the file has more requests; --limit says how many are read"
    yield f"an endless cache would hold {checked.hit_rate:.1%} of them"
    if not checked.findings:
        yield "no prefix killer found"
        return
    best = checked.hit_rate + checked.avoidable_share
    yield f"and {best:.1%} without what follows, which costs {checked.avoidable_share:.1%}"


def _finding(
    number: int, finding: Finding, checked: Checked, *, show_values: bool
) -> Iterator[str]:
    index = _index_of(finding.example, checked)
    seen, losses = checked.prompts[index].seen, checked.losses[index]
    loss = next(loss for loss in losses if loss.kind is finding.kind)
    shown = _value(seen, loss) if show_values and finding.shape else finding.shape
    where = finding.role if finding.message is None else f"message {finding.message}"
    where = where if finding.message is None else f"{where} ({finding.role})"
    yield f"{number}. {finding.what}" + (f": {' '.join(shown.split())}" if shown else "")
    yield f"   at token {finding.token:,}, {where}, character {finding.char:,}; {finding.example}"
    yield (
        f"   {finding.requests:,.0f} of {len(checked.prompts):,} requests lose "
        f"{finding.lost_tokens_per_request:,.0f} tokens each, {finding.lost_tokens:,.0f} in all: "
        f"{finding.token_share:.1%} of all prompt tokens"
    )
    yield (
        f"   hit rate of these requests {finding.hit_rate:.1%}, with this mended "
        f"{finding.hit_rate_if_moved:.1%}"
    )
    yield f"   {finding.advice}"
    yield ""
    losing = [
        at
        for at, found in enumerate(checked.losses)
        if any(loss.kind is finding.kind for loss in found)
    ]
    shown_at = [at for at in losing if at <= index][-_MAX_PICTURES:]
    first = [shown_at[0] - 1] if shown_at and shown_at[0] else []
    for at in [*first, *shown_at]:
        yield f"   {picture(checked.prompts[at].seen, checked.losses[at], checked.block_size)}"
    yield f"   {_LEGEND}"


def picture(seen: SeenPrompt, losses: Sequence[Loss], block_size: int) -> str:
    """Returns a prompt block by block, in at most `_COLUMNS` columns, with its numbers."""
    num_blocks = max(1, -(-seen.num_tokens // block_size))
    per_column = -(-num_blocks // _COLUMNS)
    num_columns = -(-num_blocks // per_column)
    bytes_each = per_column * block_size / max(seen.tokens_per_byte, 1e-9)
    columns = [
        _HELD if (column + 1) * per_column * block_size <= seen.hit_tokens else _NEW
        for column in range(num_columns)
    ]
    for loss in losses:
        first, last = round(loss.lost_from / bytes_each), round(loss.until / bytes_each)
        for column in range(first, min(last, num_columns)):
            columns[column] = _LOST
    for loss in losses:
        columns[min(num_columns - 1, int(loss.begin / bytes_each))] = _VARIES
    each = f", {per_column} blocks a column" if per_column > 1 else ""
    return f"{''.join(columns)}  {seen.ref}: {seen.num_tokens:,} tokens{each}"


def _skeleton(finding: Finding, checked: Checked) -> Iterator[str]:
    """Yields the parts of the example in the order that they should have."""
    index = _index_of(finding.example, checked)
    seen = checked.prompts[index].seen
    loss = next(loss for loss in checked.losses[index] if loss.kind is finding.kind)
    ratio, end = seen.tokens_per_byte, loss.until
    varies = f"{{{finding.kind.value}}}"
    yield f"   as it is, {finding.example}:"
    yield f"     {_about(loss.begin * ratio)} the same each time"
    if finding.kind in SAME_CONTENTS:
        yield f"     {_about((end - loss.begin) * ratio)} {varies}"
    else:
        yield f"     {_about((loss.resumes - loss.begin) * ratio)} {varies}"
        yield f"     {_about((end - loss.resumes) * ratio)} seen before, computed again"
    yield f"     {_about((len(seen.data) - end) * ratio)} the rest, new"
    yield "   as it should be:"
    if finding.kind in SAME_CONTENTS:
        yield f"     {_about(end * ratio)} the same each time, {_ORDERED[finding.kind]}"
    elif finding.kind is Kind.HISTORY:
        yield f"     {_about(end * ratio)} what was sent before, unchanged"
    else:
        stable = loss.begin + end - loss.resumes
        yield f"     {_about(stable * ratio)} the same each time, with no {varies}"
        last = seen.parts[-1].message if seen.parts else None
        into = "behind it" if last is None else f"at the front of message {last}"
        yield f"     {_about((loss.resumes - loss.begin) * ratio)} {varies}, {into}"
    yield f"     {_about((len(seen.data) - end) * ratio)} the rest, new"


_ORDERED: Final = {
    Kind.REORDERED: "its blocks in one order",
    Kind.KEY_ORDER: "its keys and tools sorted",
    Kind.WHITESPACE: "its white space normalized",
}


def _boundaries(checked: Checked) -> Iterator[str]:
    """Yields what shared beginnings lose because they end inside a block."""
    if checked.is_estimated:
        return
    for part in stranded(checked)[:_MAX_PICTURES]:
        num_blocks, left = divmod(part.num_tokens, checked.block_size)
        pad = checked.block_size - left
        yield ""
        yield (
            f"{part.num_requests:,} requests share {part.num_tokens:,} tokens: "
            f"{num_blocks:,} {_s(num_blocks, 'block')} of {checked.block_size}, and {left} "
            f"{_s(left, 'token')} in a block that they do not share"
        )
        yield (
            f"   {pad} {_s(pad, 'token')} of padding behind the shared part would fill the block "
            f"and save {left * part.num_requests:,} tokens in all"
        )


def stranded(checked: Checked) -> list[Stranded]:
    """Returns beginnings that three requests or more went on from, and that end inside a block.

    The most costly first. A beginning is counted to the token: from the request that had the same
    blocks last.
    """
    size = checked.block_size
    owners: dict[bytes, Sequence[int]] = {}
    shared: Counter[int] = Counter()
    for prompt in checked.prompts:
        num_held = prompt.seen.hit_tokens // size
        other = owners.get(prompt.hashes[num_held - 1]) if num_held else None
        if other is not None:
            at = num_held * size
            end = min(len(other), len(prompt.tokens), at + size)
            while at < end and other[at] == prompt.tokens[at]:
                at += 1
            shared[at] += 1
        for block in prompt.hashes:
            owners.setdefault(block, prompt.tokens)
    least = _LEAST_STRANDED * checked.num_tokens
    found = [Stranded(at, n) for at, n in shared.items() if n >= 3 and n * (at % size) >= least]
    return sorted(found, key=lambda part: -(part.num_tokens % size) * part.num_requests)


def _index_of(ref: str, checked: Checked) -> int:
    return next(n for n, prompt in enumerate(checked.prompts) if prompt.seen.ref == ref)


def _value(seen: SeenPrompt, loss: Loss) -> str:
    text = seen.data[loss.begin : loss.end].decode("utf-8", "replace")
    return text if len(text) <= _COLUMNS else text[:_COLUMNS] + "…"


def _about(num_tokens: float) -> str:
    return f"{round(num_tokens):>7,} tokens "


def _s(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"
