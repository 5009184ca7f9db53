"""One request's state."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds

import pytest

from kvway_core.blocks import BlockHash, Namespace, block_hashes
from kvway_core.errors import InvalidRequest
from kvway_worker.scheduling.sampling_params import SamplingParams, TokenLogprobs
from kvway_worker.scheduling.sequence import Sequence, Status
from tests.worker.batching import request


class Recorder:
    """A chain that only remembers what it was given."""

    def __init__(self) -> None:
        self.hashes: list[BlockHash] = []
        self.given: list[int] = []

    def extend(self, token_ids: TokenIds[int]) -> None:
        self.given += token_ids


def test_a_new_sequence_waits_and_has_computed_nothing() -> None:
    seq = request("0", range(5))
    assert (seq.status, seq.num_tokens, seq.num_computed_tokens) == (Status.WAITING, 5, 0)
    assert seq.cached_tokens is None
    assert seq.block_table == []


def test_prompt_and_output_are_told_apart() -> None:
    seq = request("0", [1, 2, 3])
    seq.append(9)
    seq.append(8)
    assert seq.token_ids == [1, 2, 3, 9, 8]
    assert (seq.prompt_token_ids, seq.output_token_ids) == ([1, 2, 3], [9, 8])
    assert (seq.num_prompt_tokens, seq.num_output_tokens) == (3, 2)


def test_each_token_is_hashed_once() -> None:
    chain = Recorder()
    seq = request("0", range(40), chain=chain)
    for token in range(40, 60):
        seq.append(token)
    assert chain.given == list(range(60))


def test_its_hashes_are_those_of_all_its_tokens() -> None:
    namespace = Namespace("m", block_size=4, cache_salt="s")
    seq = Sequence("0", range(10), params=SamplingParams(max_tokens=9), namespace=namespace)
    for token in range(10, 17):
        seq.append(token)
    assert seq.chain.hashes == block_hashes(range(16), parent=namespace.root(), block_size=4)


def test_a_fork_has_the_prompt_and_its_hashes_and_a_life_of_its_own() -> None:
    seq = request("0", range(20), priority=3, ephemeral=True, salt="s")
    fork = seq.fork("1", SamplingParams(max_tokens=9, seed=7))
    assert seq.forks == [fork]
    assert (fork.request_id, fork.params.seed, fork.forks) == ("1", 7, [])
    assert (fork.priority, fork.ephemeral, fork.namespace) == (3, True, seq.namespace)
    assert fork.chain.hashes == seq.chain.hashes
    for token in range(20):
        fork.append(token)
        fork.block_table.append(token)
    assert (seq.num_tokens, seq.block_table, len(seq.chain.hashes)) == (20, [], 1)
    again = request("2", [*range(20), *range(20)], salt="s")
    assert fork.chain.hashes == again.chain.hashes, "it goes on where the prompt ended"


def test_the_caller_keeps_its_own_list() -> None:
    prompt = [1, 2, 3]
    seq = request("0", prompt)
    seq.append(4)
    assert prompt == [1, 2, 3]


def test_prompt_log_probabilities_take_their_places() -> None:
    """Computed again they replace what was there; those of the answer are not the prompt's."""
    seq = request("0", range(5))
    of = [TokenLogprobs(token, -float(token), 1) for token in range(9)]
    seq.add_prompt_logprobs(0, of[1:3])
    seq.add_prompt_logprobs(2, of[3:6])
    assert seq.prompt_logprobs == of[1:5]
    seq.add_prompt_logprobs(1, of[2:4])
    assert seq.prompt_logprobs == of[1:5]
    seq.add_prompt_logprobs(4, of[5:7])
    assert seq.prompt_logprobs == of[1:5]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "has no tokens"), ([-1], "out of range"), ([2**32], "out of range")],
)
def test_a_prompt_that_is_none_is_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        request("0", prompt)
    assert caught.value.param == "prompt"
