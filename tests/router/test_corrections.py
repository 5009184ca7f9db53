"""What answers of replicas without KV events do to the index."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvway_core.testing.fake_replica import Answer
from kvway_router.corrections import Corrections, Expectation
from kvway_router.index import BlockIndex
from tests.router.conftest import Bench

REPLICA = "a:1"
LONG = list(range(1000, 1040))
OLDER = list(range(2000, 2020))
NEWER = list(range(3000, 3020))
BLOCK_SIZE = 16


class Router:
    def __init__(self) -> None:
        self.index = BlockIndex()
        self.corrections = Corrections(self.index, block_size=BLOCK_SIZE)

    def send(self, hashes: Sequence[int]) -> Expectation:
        """A prompt is sent and its answer begins."""
        expected = self.corrections.expect(REPLICA, hashes)
        self.index.confirm(self.index.speculate(REPLICA, hashes))
        return expected

    def answer(self, expected: Expectation, blocks: int | None) -> None:
        tokens = None if blocks is None else blocks * BLOCK_SIZE
        self.corrections.learn(expected, cached_tokens=tokens)

    def serve(self, hashes: Sequence[int], blocks: int | None) -> None:
        self.answer(self.send(hashes), blocks)

    def matched(self, hashes: Sequence[int]) -> int:
        return self.index.match(hashes).get(REPLICA, 0)


@pytest.fixture
def router() -> Router:
    """It sent OLDER, LONG and NEWER, one after the other."""
    router = Router()
    for hashes in (OLDER, LONG, NEWER):
        router.serve(hashes, 0)
    assert [router.matched(hashes) for hashes in (OLDER, LONG, NEWER)] == [20, 40, 20]
    return router


def test_what_was_used_before_an_evicted_prompt_is_gone_too(router: Router) -> None:
    router.serve(LONG, 0)
    assert [router.matched(hashes) for hashes in (OLDER, LONG, NEWER)] == [0, 40, 20]


def test_an_answer_as_expected_corrects_nothing(router: Router) -> None:
    for blocks in (40, 36, 35):  # the engine's blocks may be larger, and one token is computed
        router.serve(LONG, blocks)
    assert [router.matched(hashes) for hashes in (OLDER, LONG, NEWER)] == [20, 40, 20]


def test_an_answer_that_does_not_say_corrects_nothing(router: Router) -> None:
    router.serve(LONG, None)
    assert router.matched(OLDER) == 20


def test_more_than_was_listed_is_listed_then(router: Router) -> None:
    longer = [*LONG, *range(1040, 1060)]
    router.serve(longer, 60)
    assert router.matched(longer) == 60
    assert router.matched(OLDER) == 20


def test_a_part_that_is_cached_tells_of_what_is_behind_it(router: Router) -> None:
    """The end of LONG was last used before NEWER, its beginning after it."""
    router.serve(LONG[:20], 20)
    router.serve(LONG, 20)
    assert [router.matched(hashes) for hashes in (OLDER, LONG, NEWER)] == [0, 40, 20]


def test_a_replica_that_keeps_nothing_is_listed_with_what_it_reports(router: Router) -> None:
    router.serve(LONG, 0)
    router.serve(LONG, 0)
    assert router.matched(LONG) == 0
    router.serve(LONG, 0)  # nothing was listed: nothing to learn
    router.serve(LONG, 7)
    assert router.matched(LONG) == 7


def test_a_replica_that_keeps_prompts_again_is_believed_again(router: Router) -> None:
    router.serve(LONG, 0)
    router.serve(LONG, 40)
    router.serve(NEWER, 0)
    assert router.matched(NEWER) == 20


def test_answers_to_prompts_that_were_sent_together_are_one_miss(router: Router) -> None:
    together = [router.send(hashes) for hashes in (OLDER, LONG, NEWER)]
    for expected in together:
        router.answer(expected, 0)
    assert router.matched(NEWER) == 20


def test_siblings_of_a_prompt_that_is_being_computed_expect_nothing(router: Router) -> None:
    new = list(range(5000, 5020))
    router.index.speculate(REPLICA, new)
    assert router.corrections.expect(REPLICA, new).num_blocks == 0


def test_memory_of_replicas_is_bounded(router: Router) -> None:
    for number in range(2_000):
        expected = Expectation(f"r:{number}", LONG, [(40, 1)], 1)
        router.answer(expected, 0)
    assert len(router.corrections._misses) == 1024


async def test_answers_that_pass_by_correct_the_index(bench: Bench) -> None:
    bench.replica.answer = Answer(cached_tokens=0)
    matched = []
    for _ in range(4):
        _, headers, _ = await bench.chat("x" * 200)
        matched.append((await bench.decision(headers))["matched_tokens"])
    assert matched == [0, 208, 208, 0]
