"""What `kvway top` shows: two looks at a router in, one picture out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvway_router.decisions import DecisionSummary
from kvway_router.fleet import FleetView, ReplicaView, TokenCounts
from kvway_router.prefixes.findings import Finding
from kvway_router.prefixes.watch import PrefixReport
from kvway_router.terminal import plain

MAX_KILLERS: Final = 3
WIDE: Final = 120
"""Columns from which on tables are whole."""

_SHORT_ID: Final = 8
_NONE: Final = "-"
_STATE_STYLES: Final = {"ready": "green", "unhealthy": "bold red"}


@dataclass(frozen=True, slots=True)
class Look:
    """What a router said at a moment, seconds of any clock."""

    at_s: float
    fleet: FleetView
    decisions: Sequence[DecisionSummary]
    prefixes: PrefixReport


def view(before: Look | None, now: Look, *, width: int) -> Group:
    """Returns the picture of a moment.

    Args:
        before: The look that rates are since; without one they are since the router's start.
        now: The look that is shown.
        width: Columns of the terminal: below `WIDE` some of the tables' are left out.
    """
    if before is not None and before.fleet.totals.requests > now.fleet.totals.requests:
        before = None  # another router, or another life of it
    old, is_wide = before.fleet if before else None, width >= WIDE
    parts: list[RenderableType] = [
        _totals(old, now.fleet, now.at_s - before.at_s if before else None),
        _replicas(old, now.fleet, is_wide=is_wide),
        *(
            plain(f"{it.replica_id}: {it.error or it.no_report}", style="red")
            for it in now.fleet.replicas
            if it.error or it.no_report
        ),
    ]
    if now.prefixes.findings:
        parts += [Text(), *_killers(now.prefixes.findings)]
    if now.decisions:
        parts += [Text(), _decisions(now.decisions, is_wide=is_wide)]
    return Group(*parts)


def _totals(old: FleetView | None, fleet: FleetView, seconds: float | None) -> Text:
    ready = sum(replica.state == "ready" for replica in fleet.replicas)
    since = _since(old.totals if old else None, fleet.totals)
    parts = [fleet.model, f"{ready} of {len(fleet.replicas)} replicas ready"]
    if seconds:
        parts.append(f"{since.requests / seconds:,.1f} answers/s")
        parts.append(f"{since.prompt_tokens / seconds:,.0f} prompt tokens/s")
    else:
        parts.append(f"{since.requests:,} answers")
        parts.append(f"{since.prompt_tokens:,} prompt tokens")
    cached = _share(since.cached_tokens, since.prompt_tokens)
    reachable = _share(since.reachable_tokens, since.prompt_tokens)
    parts.append(f"{cached} cached, {reachable} held by some replica")
    if since.streams:
        real_s, predicted_s = since.ttft_s / since.streams, since.predicted_ttft_s / since.streams
        parts.append(f"first token {real_s:.3f} s, predicted {predicted_s:.3f} s")
    return plain("  ".join(parts), style="bold")


def _replicas(old: FleetView | None, fleet: FleetView, *, is_wide: bool) -> Table:
    """Returns a row per replica, those that need a look first."""
    table = Table(box=None, pad_edge=False)
    for name in ("replica", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("in flight", "queue", "cached", "KV live", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_wide:
        for name in ("listed", "answers", "step", "prefill/s", "index"):
            table.add_column(name, justify="right", no_wrap=True)
    known = {replica.replica_id: replica for replica in old.replicas} if old else {}
    for it in sorted(fleet.replicas, key=_urgency):
        was = known.get(it.replica_id)
        cells: list[str | Text] = [
            plain(it.replica_id),
            plain(it.state, style=_STATE_STYLES.get(it.state, "yellow")),
            f"{it.in_flight:,}",
            f"{it.queued_prefill_s:.2f} s",
            _hit_rate(was, it),
            f"{it.blocks_pinned:,}",
            f"{it.blocks_total:,}" if it.blocks_total else _NONE,
        ]
        if is_wide:
            cells += [
                f"{it.blocks_held:,}",
                f"{it.requests - (was.requests if was else 0):,}",
                f"{it.decode_step_s * 1e3:.0f} ms" if it.decode_step_s else _NONE,
                f"{it.prefill_tokens_per_s:,.0f}" if it.prefill_tokens_per_s else _NONE,
                "events" if it.fed else "estimate",
            ]
        table.add_row(*cells)
    return table


def _urgency(replica: ReplicaView) -> tuple[bool, float, str]:
    return replica.state == "ready", -replica.queued_prefill_s, replica.replica_id


def _hit_rate(was: ReplicaView | None, now: ReplicaView) -> str:
    cached = now.cached_tokens - (was.cached_tokens if was else 0)
    prompt = now.prompt_tokens - (was.prompt_tokens if was else 0)
    return _share(cached, prompt)


def _killers(findings: Sequence[Finding]) -> Iterator[Text]:
    """Yields two lines for each of the most costly."""
    for it in findings[:MAX_KILLERS]:
        yield plain(
            f"prefix killer: {it.what} {it.shape}, {it.role}, character {it.char:,}, token "
            f"{it.token:,}: {it.lost_tokens:,.0f} tokens lost, {it.token_share:.0%} of all",
            style="yellow",
        )
        yield plain(f"  {it.advice}")


def _decisions(decisions: Iterable[DecisionSummary], *, is_wide: bool) -> Table:
    """Returns a row per request; a narrow one has only the beginning of its id."""
    table = Table(box=None, pad_edge=False)
    for name in ("request", "replica", "reason"):
        table.add_column(name, no_wrap=True)
    for name in ("matched", "of", "first token"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_wide:
        for name in ("predicted", "cached", "end"):
            table.add_column(name, justify="right", no_wrap=True)
    for it in decisions:
        cells: list[str | Text] = [
            plain(it.id if is_wide else it.id[:_SHORT_ID]),
            plain(it.replica_id or _NONE),
            it.reason,
            f"{it.matched_tokens:,}",
            f"{it.prompt_tokens:,}",
            _NONE if it.ttft_s is None else f"{it.ttft_s:.3f} s",
        ]
        if is_wide:
            cells += [
                f"{it.predicted_ttft_s:.3f} s",
                _NONE if it.cached_tokens is None else f"{it.cached_tokens:,}",
                it.finish if it.status in {None, 200} else f"{it.finish} {it.status}",
            ]
        table.add_row(*cells)
    return table


def _since(old: TokenCounts | None, now: TokenCounts) -> TokenCounts:
    """Returns what was counted since."""
    if old is None:
        return now
    fields = TokenCounts.__struct_fields__
    return TokenCounts(**{name: getattr(now, name) - getattr(old, name) for name in fields})


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else _NONE
