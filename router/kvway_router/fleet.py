"""What the fleet looks like from here: read by the admin API, the page and the metrics."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.replicas import ReplicaSet

_MAX_REPLICAS: Final = 1024


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens since the router started. Cached ÷ prompt tokens is the hit rate.

    Attributes:
        requests: Requests that got an answer of status 200 to its end.
        prompt_tokens: Prompt tokens of those whose replica said how many it had cached.
        cached_tokens: How many it said.
        matched_tokens: How many the router's index had said.
        reachable_tokens: How many the index had said of the candidate that held the most.
        ceiling_tokens: How many had been sent before, to whomever, or were cached all the same.
        streams: Answers that came as a stream from the first replica that was tried.
        predicted_ttft_s: Sum of their predicted times to first token, seconds.
        ttft_s: Sum of their real ones.
        ttft_error_s: Sum of how far each was off, either way.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    matched_tokens: int = 0
    reachable_tokens: int = 0
    ceiling_tokens: int = 0
    streams: int = 0
    predicted_ttft_s: float = 0.0
    ttft_s: float = 0.0
    ttft_error_s: float = 0.0

    def plus(self, more: TokenCounts) -> TokenCounts:
        """Returns the sum of both."""
        return TokenCounts(**{name: getattr(self, name) + getattr(more, name) for name in _COUNTS})

    def minus(self, before: TokenCounts) -> TokenCounts:
        """Returns what was counted since `before`."""
        return TokenCounts(
            **{name: getattr(self, name) - getattr(before, name) for name in _COUNTS}
        )


_COUNTS: Final = TokenCounts.__struct_fields__


class Traffic:
    """Token counts of all replicas together and of each of those last seen."""

    def __init__(self) -> None:
        """Starts with nothing."""
        self.total = TokenCounts()
        self._by_replica: OrderedDict[str, TokenCounts] = OrderedDict()

    def add(
        self,
        replica_id: str,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        matched_tokens: int,
        reachable_tokens: int,
        ceiling_tokens: int,
    ) -> None:
        """Counts one answer."""
        self._add(
            replica_id,
            TokenCounts(
                requests=1,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                matched_tokens=matched_tokens,
                reachable_tokens=reachable_tokens,
                ceiling_tokens=ceiling_tokens,
            ),
        )

    def add_ttft(self, replica_id: str, *, predicted_s: float, real_s: float) -> None:
        """Compares a predicted time to first token with the real one."""
        self._add(
            replica_id,
            TokenCounts(
                streams=1,
                predicted_ttft_s=predicted_s,
                ttft_s=real_s,
                ttft_error_s=abs(real_s - predicted_s),
            ),
        )

    def _add(self, replica_id: str, more: TokenCounts) -> None:
        counts = self._by_replica.pop(replica_id, TokenCounts())
        self._by_replica[replica_id] = counts.plus(more)
        self.total = self.total.plus(more)
        while len(self._by_replica) > _MAX_REPLICAS:
            self._by_replica.popitem(last=False)

    def of(self, replica_id: str) -> TokenCounts:
        """Returns the counts of a replica."""
        return self._by_replica.get(replica_id, TokenCounts())


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica now.

    Attributes:
        replica_id: ``host:port``.
        url: Its address.
        state: "starting", "ready", "unhealthy" or "draining".
        error: Why it is not ready; empty when it is.
        no_report: Why it is used without a load report; empty when it gives one or is of a kind
            that has none.
        in_flight: Requests there, as far as known.
        queued_prefill_s: Prefill work sent and not yet done, seconds.
        num_prefills: Prefills queued or running.
        decode_step_s: One decode step now, seconds; 0 when unknown or idle.
        prefill_tokens_per_s: Its rate; None while unknown.
        blocks_pinned: KV blocks in use or wanted by its queue.
        blocks_total: Its KV blocks; None when it does not say.
        blocks_held: Blocks the index lists for it.
        fed: Whether its KV events keep the index true now.
        requests: Answers it has given.
        prompt_tokens: Of those that reported cached tokens.
        cached_tokens: What they reported.
        matched_tokens: What the index had said it holds of them.
        reachable_tokens: What the index had said of whoever held the most.
    """

    replica_id: str
    url: str
    state: str
    error: str
    no_report: str
    in_flight: int
    queued_prefill_s: float
    num_prefills: int
    decode_step_s: float
    prefill_tokens_per_s: float | None
    blocks_pinned: int
    blocks_total: int | None
    blocks_held: int
    fed: bool
    requests: int
    prompt_tokens: int
    cached_tokens: int
    matched_tokens: int
    reachable_tokens: int


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """All replicas now, and the tokens of all of them together."""

    model: str
    replicas: list[ReplicaView]
    totals: TokenCounts


class Fleet:
    """Puts together what the parts know of each replica."""

    def __init__(
        self,
        *,
        model: str,
        replicas: ReplicaSet,
        index: BlockIndex,
        ledger: Ledger,
        traffic: Traffic,
    ) -> None:
        """Takes the parts; nothing is copied before someone asks."""
        self._model = model
        self._replicas = replicas
        self._index = index
        self._ledger = ledger
        self.traffic = traffic

    def view(self) -> FleetView:
        """Returns the fleet as it is now."""
        replicas = self._replicas.all()
        held = [(replica.id, self._index.num_blocks(replica.id)) for replica in replicas]
        loads = self._ledger.loads(held)
        views = []
        for replica, load in zip(replicas, loads, strict=True):
            counts = self.traffic.of(replica.id)
            views.append(
                ReplicaView(
                    replica_id=replica.id,
                    url=replica.url,
                    state=replica.state.value,
                    error=replica.error,
                    no_report=replica.no_report,
                    in_flight=load.in_flight,
                    queued_prefill_s=load.queued_prefill_s,
                    num_prefills=load.num_prefills,
                    decode_step_s=load.decode_step_s,
                    prefill_tokens_per_s=load.prefill_tokens_per_s,
                    blocks_pinned=load.blocks_pinned,
                    blocks_total=load.blocks_total,
                    blocks_held=load.blocks_held,
                    fed=self._replicas.is_fed(replica.id),
                    requests=counts.requests,
                    prompt_tokens=counts.prompt_tokens,
                    cached_tokens=counts.cached_tokens,
                    matched_tokens=counts.matched_tokens,
                    reachable_tokens=counts.reachable_tokens,
                )
            )
        return FleetView(model=self._model, replicas=views, totals=self.traffic.total)
