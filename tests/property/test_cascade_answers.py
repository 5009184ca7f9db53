"""Random lives of requests in a worker that reads every shared prefix once.

Requests come, leave, are preempted, fork and guess, and share prefixes at several levels. Whoever
ends by itself has the answer that it gets alone, from an engine that shares nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvway_worker.scheduling.sampling_params import SamplingParams
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.torch_engine import AttentionOptions, TorchEngine
from kvway_worker.torch_engine.attention import ALWAYS, PLAIN
from tests.worker.torch_models import Driver, write_model

pytestmark = pytest.mark.property

BLOCK = 4
NUM_BLOCKS = 24
MAX_NEW = 10

Alone: TypeAlias = Callable[[tuple[int, ...]], list[int]]


@dataclass(frozen=True)
class Come:
    """A request: how much of the system prompt, whose header, how much of it, what of its own."""

    num_system: int
    tenant: int
    num_header: int
    tail: tuple[int, ...]
    num_new: int
    has_fork: bool

    @property
    def prompt(self) -> tuple[int, ...]:
        system = [position * 7 % 250 for position in range(self.num_system)]
        header = [(100 * self.tenant + position * 11) % 250 for position in range(self.num_header)]
        return (*system, *header, *self.tail)


COMES = st.builds(
    Come,
    num_system=st.sampled_from([0, 8, 16]),
    tenant=st.integers(0, 1),
    num_header=st.sampled_from([0, 4, 8]),
    tail=st.sampled_from([(1,), (2,), (3, 4, 5), (1,) * 7, (6, 7) * 5]),
    num_new=st.integers(1, MAX_NEW),
    has_fork=st.sampled_from([False, False, True]),
)
LEAVES = st.integers(0, 9)
STEPS = st.just("step")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


def engine_of(
    folder: Path, kv_dtype: str = "auto", attention: AttentionOptions = PLAIN
) -> TorchEngine:
    return TorchEngine(
        folder,
        dtype="float32",
        kv_dtype=kv_dtype,
        device="cpu",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        attention=attention,
    )


@dataclass(frozen=True)
class Both:
    """An engine that shares, and what one that does not answers."""

    sharing: TorchEngine
    alone: Alone

    @classmethod
    def of(cls, folder: Path, kv_dtype: str) -> Both:
        engine = engine_of(folder, kv_dtype)

        @functools.cache
        def answer(prompt: tuple[int, ...]) -> list[int]:
            return Driver(engine).answer(prompt, MAX_NEW)[0]

        return cls(engine_of(folder, kv_dtype, AttentionOptions("sdpa", costs=ALWAYS)), answer)


@pytest.fixture(scope="module", params=["auto", "fp8_e4m3"])
def both(folder: Path, request: pytest.FixtureRequest) -> Both:
    return Both.of(folder, request.param)


@settings(max_examples=20)
@given(
    events=st.lists(COMES | COMES | STEPS | STEPS | LEAVES, min_size=5, max_size=40),
    chunk=st.sampled_from([16, 24, 512]),
    num_drafts=st.sampled_from([0, 0, 2]),
)
def test_each_answer_is_the_one_it_gets_alone(
    both: Both,
    events: list[Come | str | int],
    chunk: int,
    num_drafts: int,
) -> None:
    sharing, alone = both.sharing, both.alone
    for layer in (*sharing._cache.k, *sharing._cache.v):
        layer.fill_(float("nan"))
    driver = Driver(sharing, max_num_batched_tokens=chunk, num_drafts=num_drafts)
    before = sharing.attention().num_passes
    live: list[tuple[Come, Request]] = []
    for happens in events:
        if isinstance(happens, Come):
            forks = [SamplingParams(happens.num_new)] if happens.has_fork else []
            request = driver.add(happens.prompt, happens.num_new, forks=forks)
            live.append((happens, request))
        elif isinstance(happens, int):
            if happens < len(live):
                _, request = live.pop(happens)
                for one in (request, *request.forks):
                    driver.scheduler.abort(one.request_id)
        elif driver.scheduler.has_work:
            driver.step()
    driver.finish()
    for come, request in live:
        for one in (request, *request.forks):
            assert one.output_token_ids == alone(come.prompt)[: come.num_new]
    event(f"shared: {sharing.attention().num_passes > before}")
    event(f"preempted: {driver.scheduler.counters.preemptions > 0}")


def test_random_lives_share_and_preempt(both: Both) -> None:
    """What the test above is about does happen in so small a pool."""
    sharing, alone = both.sharing, both.alone
    come = Come(16, 0, 8, (1,), MAX_NEW, has_fork=False)
    driver = Driver(sharing)
    before = sharing.attention().num_passes
    driver.add(come.prompt, 1)
    driver.finish()
    requests = [driver.add((*come.prompt, *[index] * 5), MAX_NEW) for index in range(16)]
    driver.finish()
    assert driver.scheduler.counters.preemptions
    assert sharing.attention().num_passes > before
    for request in requests:
        assert request.output_token_ids == alone(tuple(request.prompt_token_ids))
