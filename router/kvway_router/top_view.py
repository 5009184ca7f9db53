"""What `kvway top` shows: two looks at a router in, one picture out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
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
_NONE: Final = "-"
_STATE_STYLES: Final = {"ready": "green", "unhealthy": "bold red"}


@dataclass(frozen=True, slots=True)
class Look:
    """What a router said at a moment, seconds of any clock."""

    at_s: float
    fleet: FleetView
    decisions: Sequence[DecisionSummary]
    prefixes: PrefixReport


def view(before: Look | None, now: Look) -> Group:
    """Returns the picture of a moment; rates are since `before`, without it since the start."""
    old = before.fleet if before else None
    restarted = old is not None and old.totals.requests > now.fleet.totals.requests
    if restarted or old is None:
        before = old = None
    parts: list[RenderableType] = [_totals(old, now.fleet, before and now.at_s - before.at_s)]
    parts.append(_replicas(old, now.fleet))
    if now.prefixes.findings:
        parts += [Text(), _killers(now.prefixes.findings)]
    if now.decisions:
        parts += [Text(), _decisions(now.decisions)]
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


def _replicas(old: FleetView | None, fleet: FleetView) -> Table:
    """Returns a row per replica, those that need a look first."""
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.add_column("replica", no_wrap=True)
    table.add_column("state")
    for name in ("in flight", "queue", "step", "prefill/s", "KV live", "of", "listed"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("cached", "answers"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    known = {replica.replica_id: replica for replica in old.replicas} if old else {}
    for it in sorted(fleet.replicas, key=_urgency):
        was = known.get(it.replica_id)
        table.add_row(
            plain(it.replica_id),
            Text(it.state, style=_STATE_STYLES.get(it.state, "yellow")),
            f"{it.in_flight:,}",
            f"{it.queued_prefill_s:.2f} s",
            f"{it.decode_step_s * 1e3:.0f} ms" if it.decode_step_s else _NONE,
            f"{it.prefill_tokens_per_s:,.0f}" if it.prefill_tokens_per_s else _NONE,
            f"{it.blocks_pinned:,}",
            f"{it.blocks_total:,}" if it.blocks_total else _NONE,
            f"{it.blocks_held:,}",
            _hit_rate(was, it),
            f"{it.requests - (was.requests if was else 0):,}",
            plain(it.error or it.no_report or ("events" if it.fed else ""), style="dim"),
        )
    return table


def _urgency(replica: ReplicaView) -> tuple[bool, float, str]:
    return replica.state == "ready", -replica.queued_prefill_s, replica.replica_id


def _hit_rate(was: ReplicaView | None, now: ReplicaView) -> str:
    cached = now.cached_tokens - (was.cached_tokens if was else 0)
    prompt = now.prompt_tokens - (was.prompt_tokens if was else 0)
    return _share(cached, prompt)


def _killers(findings: Iterable[Finding]) -> Table:
    table = Table("prefix killer", "where", "tokens lost", "advice", box=None, pad_edge=False)
    for it in list(findings)[:MAX_KILLERS]:
        table.add_row(
            plain(f"{it.what} {it.shape}"),
            plain(f"{it.role}, character {it.char:,}, token {it.token:,}"),
            f"{it.lost_tokens:,.0f}, {it.token_share:.0%} of all",
            it.advice,
        )
    return table


def _decisions(decisions: Iterable[DecisionSummary]) -> Table:
    table = Table("request", "at", "replica", "reason", box=None, pad_edge=False)
    for name in ("matched", "cached", "of", "predicted", "first token"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("end")
    for it in decisions:
        table.add_row(
            plain(it.id),
            f"{datetime.fromtimestamp(it.time).astimezone():%H:%M:%S}",
            plain(it.replica_id or _NONE),
            it.reason,
            f"{it.matched_tokens:,}",
            _NONE if it.cached_tokens is None else f"{it.cached_tokens:,}",
            f"{it.prompt_tokens:,}",
            f"{it.predicted_ttft_s:.3f} s",
            _NONE if it.ttft_s is None else f"{it.ttft_s:.3f} s",
            it.finish if it.status in {None, 200} else f"{it.finish} {it.status}",
        )
    return table


def _since(old: TokenCounts | None, now: TokenCounts) -> TokenCounts:
    """Returns what was counted since."""
    if old is None:
        return now
    fields = TokenCounts.__struct_fields__
    return TokenCounts(**{name: getattr(now, name) - getattr(old, name) for name in fields})


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else _NONE
