"""One request's state: its tokens, its blocks and how far it is computed.

token_ids     [0, num_prompt_tokens) is the prompt, the rest was generated
KV            [0, num_computed_tokens) is computed; what follows is known and waits for a step
block_table   block i holds the KV of tokens [i * block_size, (i + 1) * block_size)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as TokenIds
from copy import copy
from typing import Literal, Protocol

from kvway_core.blocks import BlockHash, HashChain, Namespace
from kvway_core.errors import InvalidRequest
from kvway_worker.scheduling.sampling_params import SamplingParams, TokenLogprobs

FinishReason = Literal["stop", "length", "abort"]


class Status(enum.Enum):
    """Where a sequence is in its life; the last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class Chain(Protocol):
    """What a sequence needs of its block hashes; `HashChain` is the real one."""

    hashes: list[BlockHash]

    def extend(self, token_ids: TokenIds[int]) -> None:
        """Appends tokens and the hashes of the blocks they fill."""


class Sequence:
    """A request as the scheduler knows it; only the scheduler changes one.

    Attributes:
        request_id: Unique among the requests of a worker that have not ended.
        token_ids: Every known token, prompt first. Only accepted tokens are ever in it.
        num_prompt_tokens: How many of them are the prompt.
        params: How tokens are chosen.
        namespace: What else the KV depends on.
        arrival_s: When the request came, seconds on the caller's clock; kept through preemption.
        arrival_index: Its place in the order of arrival at the scheduler, which sets it; kept
            through preemption.
        priority: Lower ones are served first.
        ephemeral: Nothing of it stays cached when it has ended.
        forks: Requests with the same prompt that begin when this one's prompt is computed: they
            share its blocks. Empty from then on.
        chain: Hashes of the full blocks of `token_ids`; each token is hashed once.
        block_table: Ids of the blocks that hold its KV, in order.
        num_computed_tokens: Leading tokens whose KV is in the blocks.
        num_published_blocks: Leading blocks whose content the pool knows.
        shared_blocks: Block index -> id of a block of the pool with the same content as
            `block_table[index]`; it takes that place when the step is done. Empty between steps.
        prompt_logprobs: Of the prompt's tokens from the second on, as far as computed; when the
            request asks for them.
        cached_tokens: Prompt tokens whose KV was reused; fixed at first admission, None before.
        num_uncached_tokens: Prompt tokens to compute, as seen at arrival; for load reports.
        status: Where it is in its life.
    """

    __slots__ = (
        "arrival_index",
        "arrival_s",
        "block_table",
        "cached_tokens",
        "chain",
        "ephemeral",
        "forks",
        "namespace",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_uncached_tokens",
        "params",
        "priority",
        "prompt_logprobs",
        "request_id",
        "shared_blocks",
        "status",
        "token_ids",
    )

    def __init__(  # noqa: PLR0913 - what a request is
        self,
        request_id: str,
        prompt_token_ids: TokenIds[int],
        *,
        params: SamplingParams,
        namespace: Namespace,
        arrival_s: float = 0.0,
        priority: int = 0,
        ephemeral: bool = False,
        forks: TokenIds[Sequence] = (),
        chain: Chain | None = None,
    ) -> None:
        """Makes a sequence that has computed nothing yet.

        Args:
            request_id: Its name.
            prompt_token_ids: The prompt, not empty, each within uint32.
            params: How tokens are chosen.
            namespace: What else the KV depends on.
            arrival_s: When the request came, seconds.
            priority: Lower ones are served first.
            ephemeral: Keep nothing of it cached when it has ended.
            forks: Requests with the same prompt and namespace that begin when its prompt is
                computed.
            chain: Its block hashes, empty; None makes them for `namespace`.

        Raises:
            InvalidRequest: If the prompt is empty or a token id is not one.
        """
        if not prompt_token_ids:
            raise InvalidRequest("The prompt has no tokens; send at least one.", param="prompt")
        self.request_id = request_id
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        self.namespace = namespace
        self.arrival_s = arrival_s
        self.arrival_index = 0
        self.priority = priority
        self.ephemeral = ephemeral
        self.forks: list[Sequence] = list(forks)
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.chain = chain or HashChain(namespace.root(), namespace.block_size)
        try:
            self.chain.extend(self.token_ids)
        except (ValueError, TypeError) as exc:
            raise InvalidRequest(
                "A token id of the prompt is out of range.", param="prompt"
            ) from exc
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_published_blocks = 0
        self.shared_blocks: dict[int, int] = {}
        self.cached_tokens: int | None = None
        self.num_uncached_tokens = self.num_prompt_tokens
        self.status = Status.WAITING

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of what was generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def fork(self, request_id: str, params: SamplingParams) -> Sequence:
        """Adds a request for another answer to the same prompt, and returns it.

        It begins when this one's prompt is computed, and has its hashes: nothing is hashed again.
        To be called before this one is handed to a scheduler.
        """
        fork = copy(self)
        fork.request_id, fork.params = request_id, params
        fork.token_ids = list(self.token_ids)
        fork.chain = copy(self.chain)
        fork.chain.hashes = list(self.chain.hashes)
        fork.forks, fork.prompt_logprobs = [], []
        fork.block_table, fork.shared_blocks = [], {}
        self.forks.append(fork)
        return fork

    def append(self, token_id: int) -> None:
        """Adds an accepted token, and the hash of the block it fills if it fills one."""
        self.token_ids.append(token_id)
        self.chain.extend((token_id,))

    def add_prompt_logprobs(self, start: int, logprobs: TokenIds[TokenLogprobs]) -> None:
        """Takes in those of the prompt tokens from position `start` + 1 on.

        What is computed again, after a preemption, is the same and takes the same place.
        """
        end = min(start + len(logprobs), self.num_prompt_tokens - 1)
        self.prompt_logprobs[start:end] = logprobs[: end - start]

    def shared_or_own(self, index: int) -> int:
        """Returns the block that holds block `index` once the step is done."""
        return self.shared_blocks.get(index, self.block_table[index])
