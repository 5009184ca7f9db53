"""Looking a prefix up again gives what looking it up for the first time gives."""

from __future__ import annotations

import random

import pytest

from kvway_worker.cache.block_content import BlockContent
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.scheduling.lookup import PrefixLookup
from tests.worker.batching import Counted, OneHash, request
from tests.worker.pools import give_back, serve, take

SIZE = 4


@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_remembered_is_right_whatever_happened_to_the_pool(
    seed: int, *, collide: bool
) -> None:
    rng = random.Random(seed)
    pool = BlockPool(12, SIZE)
    lookup = PrefixLookup(pool)
    trunk = [rng.randrange(2) for _ in range(30)]

    def prompt() -> list[int]:
        begun = trunk[: rng.randint(0, 30)]
        return [*begun, *(rng.randrange(3) for _ in range(rng.randint(1, 34 - len(begun))))]

    waiting = [
        request(str(index), prompt(), block_size=SIZE, chain=OneHash(SIZE) if collide else None)
        for index in range(3)
    ]
    lengths = set()
    held: tuple[list[int], list[int]] | None = None
    for _ in range(150):
        if held is not None:
            if rng.random() < 0.3:
                give_back(pool, *held)
                held = None
        elif (action := rng.random()) < 0.3:
            tokens = prompt()
            held = take(pool, tokens), tokens
        elif action < 0.9:
            serve(pool, prompt(), ephemeral=rng.random() < 0.3)
        elif action < 0.93:
            assert pool.reset()
        seq = waiting[0] if rng.random() < 0.8 else rng.choice(waiting)
        found = lookup.again(seq)
        assert found == pool.match(seq.chain.hashes, seq.token_ids, namespace=seq.namespace)
        assert found == lookup.once(seq) == lookup.again(seq)
        lengths.add(len(found.blocks))
    assert collide or len(lengths) > 1


def test_a_block_that_is_as_before_behind_another_one_is_not_what_was_found() -> None:
    """As a collision could make it: the same hash, tokens and parent, in the same places."""
    pool = BlockPool(2, SIZE)
    lookup = PrefixLookup(pool)
    seq = request("0", range(9), block_size=SIZE)
    first, second = seq.chain.hashes
    for tokens, num_found in (((0, 1, 2, 3), 2), ((9, 9, 9, 9), 0)):
        pool.allocate(2)
        pool.publish(0, BlockContent(first, seq.namespace, tokens))
        pool.publish(1, BlockContent(second, 0, (4, 5, 6, 7)))
        pool.commit()
        assert len(lookup.again(seq).blocks) == num_found
        pool.free((0, 1))
        assert pool.reset()


def test_only_what_changed_is_looked_up_again() -> None:
    pool = BlockPool(300, SIZE)
    lookup = PrefixLookup(pool)
    serve(pool, range(800))
    seq = request("0", range(1000), block_size=SIZE)
    tokens = seq.token_ids = Counted(seq.token_ids)
    assert len(lookup.again(seq).blocks) == 200
    assert tokens.num_read >= 800
    tokens.num_read = 0
    assert len(lookup.again(seq).blocks) == 200
    assert tokens.num_read <= SIZE, "what may follow"
    serve(pool, range(840))
    assert len(lookup.again(seq).blocks) == 210
    assert tokens.num_read <= 40 + 3 * SIZE
    serve(pool, range(5000, 5000 + 4 * 200))  # 90 are blank: what is deep goes
    tokens.num_read = 0
    assert len(lookup.again(seq).blocks) == 100
    assert tokens.num_read <= SIZE
    lookup.forget(seq)
    lookup.again(seq)
    assert tokens.num_read >= 400


def test_who_asks_for_log_probabilities_of_the_prompt_finds_nothing() -> None:
    pool = BlockPool(9, SIZE)
    serve(pool, range(8))
    seq = request("0", range(9), block_size=SIZE, prompt_logprobs=1)
    lookup = PrefixLookup(pool)
    assert lookup.again(seq).blocks == lookup.once(seq).blocks == ()
