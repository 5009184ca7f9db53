"""Phase 3 of a request: one of the replicas is chosen, by the policy and what is known now."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.policies.base import Policy, Situation, decide
from kvway_router.policies.state import PolicyState
from kvway_router.policy import Decision, PolicyParams, Prompt
from kvway_router.reading import Reading, ReadRequest
from kvway_router.replicas import ReplicaSet

PATIENCE: Final = 3.0
"""A first token is waited for this many times as long as was predicted, within bounds."""
LEAST_PATIENCE_S: Final = 30.0
"""A worker serves short prompts first, so that a long one may wait for some time."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica and what was expected of it.

    Attributes:
        request: What it was chosen for: what was known of it then.
        decision: Which one, why, and all that it was weighed against.
        is_rate_known: Whether the prediction is that of a replica whose speed is known.
    """

    request: ReadRequest
    decision: Decision
    is_rate_known: bool

    def first_token_limit_s(self, *, most_s: float) -> float:
        """Returns how long the first token is waited for, `most_s` at most."""
        if not self.is_rate_known:
            return most_s
        return min(most_s, max(LEAST_PATIENCE_S, PATIENCE * self.decision.chosen.ttft_s))


class Chooser:
    """Chooses replicas, and keeps what the policy remembers.

    Args:
        policy: How.
        state: What the policy begins with.
        params: The constants of the choice.
        replicas: Who there is.
        index: Who holds which blocks.
        ledger: Who is how busy.
        block_size: Tokens per block.
    """

    def __init__(
        self,
        policy: Policy,
        state: PolicyState,
        params: PolicyParams,
        *,
        replicas: ReplicaSet,
        index: BlockIndex,
        ledger: Ledger,
        block_size: int,
    ) -> None:
        """Takes what it chooses by."""
        self._policy = policy
        self._state = state
        self._params = params
        self._replicas = replicas
        self._index = index
        self._ledger = ledger
        self._block_size = block_size

    def choose(self, reading: Reading, *, tried: AbstractSet[str]) -> Choice:
        """Chooses a replica that was not tried; the caller charges it in the same step.

        Raises:
            NoReplicaAvailable: There is none.
        """
        choice, self._state = self._choose(reading, tried=tried)
        return choice

    def preview(self, reading: Reading) -> Decision:
        """Returns what `choose` would decide now, and changes nothing.

        Raises:
            NoReplicaAvailable: There is no replica.
        """
        choice, _ = self._choose(reading, tried=frozenset())
        return choice.decision

    def _choose(self, reading: Reading, *, tried: AbstractSet[str]) -> tuple[Choice, PolicyState]:
        request = reading.request  # a thread may publish more at any time
        prompt = Prompt(
            num_tokens=request.num_tokens,
            block_size=self._block_size,
            prefix_key=request.prefix_key,
            num_output_tokens=request.num_output_tokens,
            sticky_key=request.sticky_key,
        )
        matches = self._index.match(request.hashes)
        situation = Situation(
            prompt=prompt,
            matches=matches,
            slower=self._index.match_slower(request.hashes, matches),
            loads=self._replicas.loads(exclude=tried | self._too_small(reading)),
            params=self._params,
            mean_work_s=self._ledger.mean_work_s,
            retry=bool(tried),
            now_s=self._ledger.now(),
            busy_share=self._ledger.busy_share,
        )
        decision, state = decide(self._policy, situation, self._state)
        load = next(load for load in situation.loads if load.replica_id == decision.replica_id)
        is_rate_known = load.prefill_tokens_per_s is not None
        return Choice(request, decision, is_rate_known=is_rate_known), state

    def _too_small(self, reading: Reading) -> frozenset[str]:
        """Returns the replicas that say that their context is too short for the longest prompt.

        None, if by an estimate it is too long for all.
        """
        usable = self._replicas.usable()
        longest = reading.longest_prompt
        small = frozenset(
            replica.id
            for replica in usable
            if replica.report is not None and replica.report.max_model_len <= longest
        )
        return small if len(small) < len(usable) else frozenset()
