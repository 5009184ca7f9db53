"""One request in the books of its replica, from the choice to the end of the connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from kvway_router.policy import Candidate

if TYPE_CHECKING:
    from kvway_router.accounts import Account

_ARRIVAL_S: Final = 0.25
"""Time in which a request has surely been counted by its replica."""


class Charge:
    """One request at one replica; `Ledger.charge` is how to get one.

    Use it as a context manager, or call `close`. All methods may be called any number of times, in
    any order; each settles its part once.
    """

    __slots__ = (
        "_account",
        "_charged_s",
        "_is_open",
        "_is_seen",
        "_last_token_s",
        "cached_tokens",
        "is_prefilling",
        "num_blocks",
        "replica_id",
        "uncached_tokens",
        "work_tokens",
    )

    def __init__(self, account: Account, chosen: Candidate) -> None:
        """Open an entry for what was chosen."""
        self.replica_id = chosen.replica_id
        self.uncached_tokens = chosen.uncached_tokens
        self.cached_tokens = chosen.cached_tokens
        self.work_tokens = account.work_tokens(chosen.uncached_tokens, chosen.cached_tokens)
        self.num_blocks = chosen.own_blocks
        self.is_prefilling = True
        """Whether its prefill is still counted."""
        self._account = account
        self._charged_s = account.now()
        self._last_token_s: float | None = None
        self._is_open = True
        self._is_seen = False
        account.charges.add(self)
        account.num_prefills += 1
        account.prefill_tokens += self.work_tokens
        account.uncached_tokens += self.uncached_tokens
        account.num_blocks += self.num_blocks
        account.num_blocks_unseen += self.num_blocks
        account.load = None

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Settle whatever is open."""
        self.close()

    def token(self) -> None:
        """Note that content arrived: the first releases the prefill, later ones time a step."""
        if not self._is_open:
            return
        account = self._account
        now = account.now()
        if self.is_prefilling:
            self._release_prefill()
            account.prefilled(self)
        elif self._last_token_s is not None:
            account.rates.gap(now - self._last_token_s, now_s=now)
            account.load = None
        self._last_token_s = now

    def pause(self) -> None:
        """Note that nobody listened for a while: the time up to the next token says nothing."""
        self._last_token_s = None

    def recount(self, *, uncached_tokens: int, cached_tokens: int, num_blocks: int) -> None:
        """Takes what was counted of a prompt in place of the estimate it was charged for.

        Args:
            uncached_tokens: Tokens to compute.
            cached_tokens: Tokens before them.
            num_blocks: Blocks for them and the answer.
        """
        if not self._is_open:
            return
        account = self._account
        account.load = None
        account.num_blocks += num_blocks - self.num_blocks
        if not self._is_seen:
            account.num_blocks_unseen += num_blocks - self.num_blocks
        self.num_blocks = num_blocks
        if not self.is_prefilling:
            return
        work = account.work_tokens(uncached_tokens, cached_tokens)
        account.uncached_tokens += uncached_tokens - self.uncached_tokens
        account.prefill_tokens += work - self.work_tokens
        self.uncached_tokens, self.cached_tokens = uncached_tokens, cached_tokens
        self.work_tokens = work

    def close(self) -> None:
        """Release everything: the answer is complete, failed or nobody waits for it any more."""
        if not self._is_open:
            return
        self._is_open = False
        self.expect_prefilled()
        account = self._account
        account.load = None
        account.num_blocks -= self.num_blocks
        if not self._is_seen:
            account.num_blocks_unseen -= self.num_blocks
        account.leave(self)

    def see(self, *, asked_s: float, nothing_waits: bool) -> None:
        """Note that a report was made: what is past its prefill is in its count of blocks.

        Of an answer that is no stream no first token is seen; that its prefill is over shows in a
        report by which nothing waits.

        Args:
            asked_s: When the report was asked for, by the ledger's clock.
            nothing_waits: Whether the replica has no prefill left, queued or running.
        """
        if nothing_waits and asked_s - self._charged_s >= _ARRIVAL_S:
            self.expect_prefilled()
        if not self.is_prefilling and not self._is_seen:
            self._is_seen = True
            self._account.num_blocks_unseen -= self.num_blocks

    def expect_prefilled(self) -> None:
        """Release the prefill although no token was seen: how long it took is not known."""
        if self.is_prefilling:
            self._release_prefill()
            self._account.stretch = None

    def _release_prefill(self) -> None:
        self.is_prefilling = False
        account = self._account
        account.load = None
        account.num_prefills -= 1
        account.uncached_tokens -= self.uncached_tokens
        # Sums of floats drift; an empty queue is exactly empty.
        account.prefill_tokens = (
            account.prefill_tokens - self.work_tokens if account.num_prefills else 0.0
        )
