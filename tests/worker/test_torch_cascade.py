"""Cascade attention in the worker: the same answers, whatever of a batch is read once.

Each answer is compared with transformers' own, token for token, in float32.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvway_kernels.api import PagedPlan
from kvway_worker.scheduling.prefix_groups import CascadeCosts
from kvway_worker.torch_engine import AttentionOptions, TorchEngine
from kvway_worker.torch_engine.attention import ALWAYS, Attention
from kvway_worker.torch_engine.calls import Part
from tests.worker.cascading import (
    NUM_NEW,
    Batch,
    answers,
    batch_of_256,
    expected,
    random_batch,
)
from tests.worker.torch_models import Driver, check_by_transformers, write_model

NEVER = CascadeCosts(paged_key=0.0, run=1.0, run_key=0.0, run_pair=0.0, merge=0.0)
SHARING = AttentionOptions("sdpa", costs=ALWAYS)
OPTIONS = {
    "on": SHARING,
    "off": replace(SHARING, cascade=False),
}
BLOCK = 16


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


def engine_of(folder: Path, attention: AttentionOptions, **options: Any) -> TorchEngine:
    """An engine in whose blocks whatever is read before it is written shows up as NaN."""
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks": 256, **options}
    engine = TorchEngine(folder, attention=attention, **settings)
    for layer in (*engine._cache.k, *engine._cache.v):
        layer.fill_(float("nan"))
    return engine


@pytest.fixture(scope="module")
def sharing(folder: Path) -> TorchEngine:
    return engine_of(folder, SHARING)


@pytest.fixture(scope="module")
def batches(folder: Path) -> list[tuple[Batch, list[list[int]]]]:
    """Batches with transformers' own answers."""
    return [(batch, expected(folder, batch)) for batch in map(random_batch, range(3))]


@pytest.mark.parametrize("how", OPTIONS)
def test_greedy_equals_generate_in_batches_of_groups_levels_chunks_and_lone_requests(
    folder: Path, batches: list[tuple[Batch, list[list[int]]]], how: str
) -> None:
    engine = engine_of(folder, OPTIONS[how])
    for batch, own in batches:
        assert answers(engine, batch) == own
    assert bool(engine.attention().num_passes) == (how != "off")


@pytest.mark.parametrize("how", OPTIONS)
def test_greedy_equals_transformers_in_a_batch_of_256(folder: Path, how: str) -> None:
    engine = engine_of(folder, OPTIONS[how], num_blocks=600)
    check_by_transformers(folder, batch_of_256(engine))
    assert bool(engine.attention().num_passes) == (how != "off")


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 1}),
        ("smollm3", {"use_sliding_window": False}),  # runs in transformers' own code
    ],
)
def test_greedy_equals_generate_for_other_families(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    folder = write_model(tmp_path, model_type, **changes)
    engine, batch = engine_of(folder, SHARING), random_batch(7)
    assert answers(engine, batch) == expected(folder, batch)
    assert engine.attention().num_passes


def test_scores_with_a_shared_pass_are_those_without_within_rounding(folder: Path) -> None:
    """Log probabilities too, which greedy tokens alone would not show."""
    rng = random.Random(3)
    shared = [rng.randrange(256) for _ in range(80)]
    found = []
    for how in ("on", "off"):
        driver = Driver(engine_of(folder, OPTIONS[how]))
        ids = [driver.add([*shared, i], NUM_NEW, logprobs=0).request_id for i in range(4)]
        driver.finish()
        found.append([[one.logprob for one in driver.logprobs[name]] for name in ids])
    assert torch.allclose(torch.tensor(found[0]), torch.tensor(found[1]), atol=1e-4)


def shared_by_four(driver: Driver, num_shared: int) -> None:
    """Decode four requests that have as many tokens in common, all in the same steps."""
    rng = random.Random(1)
    shared = [rng.randrange(256) for _ in range(num_shared)]
    for index in range(4):
        driver.add([*shared, 100 + index], 4)
        driver.step()  # the first writes what the others find
    driver.finish()


def test_what_is_read_once_is_counted(folder: Path) -> None:
    """By the step; blocks behind the last full one are nobody's but their owner's."""
    driver = Driver(engine_of(folder, SHARING))
    shared_by_four(driver, 5 * BLOCK + 3)
    counted = driver.engine.attention()
    # The requests come in steps of their own and decode 3 tokens each behind the first: 2, 3, 3,
    # and 2 of them together.
    assert counted.num_shared_steps == counted.num_passes == 4
    assert counted.num_tokens_once == 4 * 5 * BLOCK
    assert counted.num_tokens_saved == (1 + 2 + 2 + 1) * 5 * BLOCK


def test_levels_are_passes_of_their_own(folder: Path) -> None:
    """A system prompt of four requests and a header of two of them: two passes in one step."""
    driver = Driver(engine_of(folder, SHARING))
    system, header = [7] * (2 * BLOCK), [8] * BLOCK
    driver.add([*system, *header, 1], 1)
    driver.finish()
    before = driver.engine.attention()
    prompts = [[*system, *header, 2], [*system, *header, 3], [*system, 4], [*system, 5]]
    for prompt in prompts:
        driver.add(prompt, 1)
    driver.step()  # all that is left of each is one token
    counted = driver.engine.attention()
    assert counted.num_passes - before.num_passes == 2
    assert counted.num_shared_steps - before.num_shared_steps == 1
    assert counted.num_tokens_once - before.num_tokens_once == 3 * BLOCK
    assert counted.num_tokens_saved - before.num_tokens_saved == (3 * 2 + 1) * BLOCK


@pytest.mark.parametrize(
    ("attention", "cascade"),
    [
        (replace(SHARING, costs=NEVER), "on"),
        (replace(SHARING, cascade=False), "off: --no-cascade"),
    ],
    ids=["does not pay", "off"],
)
def test_nothing_is_read_once_where_it_does_not_pay_or_is_off(
    folder: Path, attention: AttentionOptions, cascade: str
) -> None:
    driver = Driver(engine_of(folder, attention))
    shared_by_four(driver, 5 * BLOCK)
    counted = driver.engine.attention()
    assert (counted.cascade, counted.num_shared_steps, counted.num_passes) == (cascade, 0, 0)


def test_the_deterministic_mode_shares_nothing_and_says_so(folder: Path) -> None:
    driver = Driver(engine_of(folder, AttentionOptions(costs=ALWAYS), deterministic=True))
    shared_by_four(driver, 5 * BLOCK)
    counted = driver.engine.attention()
    assert (counted.implementation, counted.reason) == ("sdpa", "--deterministic")
    assert (counted.cascade, counted.num_passes) == ("off: --deterministic", 0)


def test_lone_requests_have_no_passes(sharing: TorchEngine) -> None:
    before = sharing.attention().num_passes
    driver = Driver(sharing)
    for index in range(4):
        driver.add([index] * 40, 5)
    driver.finish()
    assert sharing.attention().num_passes == before


def test_a_chunk_of_a_prompt_is_no_member(folder: Path) -> None:
    """Its rows read the prefix once for all of them anyway."""
    driver = Driver(engine_of(folder, SHARING))
    prefix = [9] * (4 * BLOCK)
    driver.add([*prefix, 1], 8)
    driver.step()
    driver.add([*prefix, *range(10, 40)], 2)
    driver.step()  # a decode row, and a chunk behind the same prefix
    assert driver.engine.attention().num_passes == 0
    driver.step()  # two decode rows
    assert driver.engine.attention().num_passes == 1


def test_loading_leaves_no_trace(folder: Path) -> None:
    """Neither in the blocks nor in the counters, although it has shared blocks."""
    engine = TorchEngine(folder, dtype="float32", device="cpu", num_blocks=64, attention=SHARING)
    assert not any(layer.any() for layer in (*engine._cache.k, *engine._cache.v))
    counted = engine.attention()
    assert (counted.num_shared_steps, counted.num_passes, counted.num_tokens_once) == (0, 0, 0)


@pytest.mark.parametrize(
    ("max_model_len", "num_levels"), [(16, 0), (17, 1), (24, 1), (32, 1), (33, 2), (48, 2)]
)
def test_loading_runs_a_shared_pass_wherever_requests_may_share_a_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch, max_model_len: int, num_levels: int
) -> None:
    """Two requests of 17 tokens have a block in front of their last: later nothing is compiled."""
    found: list[int] = []
    plan = Attention.plan

    def note(self: Attention, parts: Sequence[Part]) -> PagedPlan:
        made = plan(self, parts)
        found.append(made.num_levels)
        return made

    monkeypatch.setattr(Attention, "plan", note)
    engine_of(folder, AttentionOptions("sdpa", costs=ALWAYS), max_model_len=max_model_len)
    assert max(found) == num_levels


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 6])
def test_the_smallest_caches_load(folder: Path, num_blocks: int) -> None:
    engine = engine_of(folder, SHARING, num_blocks=num_blocks)
    assert len(Driver(engine).answer([5], 3)[0]) == 3
