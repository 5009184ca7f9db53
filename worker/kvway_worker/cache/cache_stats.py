"""Why the prefix cache missed, and how long its blocks live. Pure: the time is given.

Each prompt token of a request is counted once, when the request first gets a place:

    prompt  │ cached │ full blocks that were not │ tail, or the one token
            │        │ there                     │ that is always computed
              hit      evicted, salted, cold       partial

    all of it is bypassed when the cache was not read, too_short when the prompt fills no block
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from kvway_core.blocks import BlockHash, Namespace, block_hashes
from kvway_worker.cache.histogram import Histogram, HistogramReading
from kvway_worker.cache.reuse import ReuseDistances, ReuseReading

MissReason = Literal["cold", "evicted", "too_short", "salted", "bypassed", "partial"]
MISS_REASONS: Final[tuple[MissReason, ...]] = get_args(MissReason)

GHOSTS_PER_BLOCK: Final = 4
MAX_GHOSTS: Final = 2**20
"""Evicted blocks that are remembered: so many per block of the pool, and never more than this."""
AGE_BUCKETS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)


@dataclass(frozen=True, slots=True)
class CacheReading:
    """What was counted since the start.

    Attributes:
        queries: Prompt tokens of all requests; hits and misses together.
        hits: Prompt tokens whose KV was reused.
        misses: Prompt tokens that were computed, by reason; each reason is there.
        lifetime_s: How long evicted blocks had been there, seconds.
        idle_s: How long they had not been used, seconds.
        reuse_gap_s: Time between two uses of a block, seconds.
        reuse: What pools of other sizes would hit.
    """

    queries: int
    hits: int
    misses: Mapping[MissReason, int]
    lifetime_s: HistogramReading
    idle_s: HistogramReading
    reuse_gap_s: HistogramReading
    reuse: ReuseReading


class CacheStats:
    """Counts what a pool and its scheduler tell.

    Args:
        num_blocks: Blocks of the pool.
        block_size: Tokens per block.

    Attributes:
        now_s: The time of what is told next, seconds on the caller's clock.

    Invariants:
        1. queries = hits + the misses of all reasons.
        2. It knows at most `num_blocks` stored blocks, and at most 4 times as many evicted ones
           and as many salted ones.

    Complexity:
        O(1) per block told, and what `ReuseDistances` takes for those that it samples.
    """

    __slots__ = (
        "_block_size",
        "_ghosts",
        "_hits",
        "_idle_s",
        "_lifetime_s",
        "_lives",
        "_max_ghosts",
        "_misses",
        "_reuse",
        "_reuse_gap_s",
        "_salts",
        "_sees_salts",
        "now_s",
    )

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.now_s = 0.0
        self._block_size = block_size
        self._max_ghosts = min(GHOSTS_PER_BLOCK * num_blocks, MAX_GHOSTS)
        self._hits = 0
        self._misses: dict[MissReason, int] = dict.fromkeys(MISS_REASONS, 0)
        self._lives: dict[BlockHash, _Life] = {}
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        self._salts: OrderedDict[BlockHash, str] = OrderedDict()
        self._sees_salts = False
        self._lifetime_s = Histogram(AGE_BUCKETS_S)
        self._idle_s = Histogram(AGE_BUCKETS_S)
        self._reuse_gap_s = Histogram(AGE_BUCKETS_S)
        self._reuse = ReuseDistances(num_blocks)

    def stored(self, block_hash: BlockHash) -> None:
        """Takes note of a block that can be found from now on."""
        self._ghosts.pop(block_hash, None)
        self._lives[block_hash] = _Life(self.now_s, self.now_s)
        self._reuse.store(block_hash)

    def hit(self, block_hashes: Sequence[BlockHash]) -> None:
        """Takes note of the blocks that a request reuses; pending ones may be among them."""
        used: dict[float, int] = {}  # most of them were used together before
        for life in map(self._lives.get, block_hashes):
            if life is not None:
                used[life.used_s] = used.get(life.used_s, 0) + 1
                life.used_s = self.now_s
        for used_s, num_blocks in used.items():
            self._reuse_gap_s.observe(self.now_s - used_s, num_blocks)

    def evicted(self, block_hash: BlockHash) -> None:
        """Takes note of a stored block that was given up for other content."""
        life = self._lives.pop(block_hash)
        self._lifetime_s.observe(self.now_s - life.stored_s)
        self._idle_s.observe(self.now_s - life.used_s)
        self._ghosts[block_hash] = None
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def dropped(self, block_hash: BlockHash) -> None:
        """Takes note of a stored block that is gone because nobody wanted it to be kept."""
        del self._lives[block_hash]

    def cleared(self) -> None:
        """Takes note of a reset: nothing is stored, and nothing is known of what was."""
        self._lives.clear()
        self._ghosts.clear()
        self._salts.clear()
        self._reuse.clear()

    def admitted(
        self,
        *,
        hashes: Sequence[BlockHash],
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        num_cached_tokens: int,
        namespace: Namespace,
        bypassed: bool,
    ) -> None:
        """Counts a request when it first gets a place, before its own blocks are stored.

        Args:
            hashes: Of the full blocks of `token_ids`.
            token_ids: Its tokens, the prompt first.
            num_prompt_tokens: How many of them are the prompt.
            num_cached_tokens: Leading ones whose KV is reused.
            namespace: What else the KV depends on.
            bypassed: The cache was not read.
        """
        self._hits += num_cached_tokens
        num_missed = num_prompt_tokens - num_cached_tokens
        if bypassed:
            self._misses["bypassed"] += num_missed
            return
        num_blocks = num_prompt_tokens // self._block_size
        if not num_blocks:
            self._misses["too_short"] += num_missed
            return
        in_blocks = max(0, num_blocks * self._block_size - num_cached_tokens)
        self._misses["partial"] += num_missed - in_blocks
        salted = self._salted(token_ids, num_blocks, namespace)
        self._reuse.look_up(hashes[:num_blocks])
        first = num_cached_tokens // self._block_size
        for index in range(first, num_blocks):
            start = max(num_cached_tokens, index * self._block_size)
            reason = self._reason(hashes[index], last=index == num_blocks - 1)
            if reason == "cold" and index in salted:
                reason = "salted"
            self._misses[reason] += (index + 1) * self._block_size - start

    def read(self) -> CacheReading:
        """Returns what was counted up to now."""
        return CacheReading(
            queries=self._hits + sum(self._misses.values()),
            hits=self._hits,
            misses=dict(self._misses),
            lifetime_s=self._lifetime_s.read(),
            idle_s=self._idle_s.read(),
            reuse_gap_s=self._reuse_gap_s.read(),
            reuse=self._reuse.read(),
        )

    def _reason(self, block_hash: BlockHash, *, last: bool) -> MissReason:
        """Returns why a full block is computed, salts aside."""
        if block_hash in self._ghosts:
            return "evicted"
        # A last block that is there: of a fully cached prompt something is always computed.
        return "partial" if last and block_hash in self._lives else "cold"

    def _salted(
        self, token_ids: Sequence[int], num_blocks: int, namespace: Namespace
    ) -> frozenset[int]:
        """Returns which blocks' tokens were seen under another salt, all before them included.

        Blocks are known by their hash in the namespace without salt. Nothing is noted before the
        first salt is seen: who uses none pays nothing.
        """
        salt = namespace.cache_salt
        self._sees_salts = self._sees_salts or bool(salt)
        if not self._sees_salts:
            return frozenset()
        size = self._block_size
        unsalted = block_hashes(
            token_ids[: num_blocks * size],
            parent=replace(namespace, cache_salt="").root(),
            block_size=size,
        )
        seen = [index for index, key in enumerate(unsalted) if self._salts.get(key, salt) != salt]
        for key in unsalted:
            self._salts[key] = salt
            self._salts.move_to_end(key)
        while len(self._salts) > self._max_ghosts:
            self._salts.popitem(last=False)
        return frozenset(seen)


@dataclass(slots=True)
class _Life:
    """When a block was stored and last used, seconds."""

    stored_s: float
    used_s: float
