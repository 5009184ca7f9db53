"""A chunk of a long prompt sees all that is in front of it: that part is attended to unmasked."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kvway_kernels import blocks, dense, reference, sdpa
from kvway_kernels.api import RequestRows, SharedRun, cascade_attention, chosen, plan
from kvway_kernels.rows import LONG_PAST, LONG_PAST_COMPILED

BLOCK_SIZE = 16
NUM_BLOCKS = 400


def table(num_keys: int, rng: random.Random) -> list[int]:
    return rng.sample(range(NUM_BLOCKS), -(-num_keys // BLOCK_SIZE))


def around(least: int) -> list[int]:
    return [least - 1, least, least + 17, 3 * least]


@pytest.mark.parametrize("num_rows", [16, 100])
@pytest.mark.parametrize(
    ("name", "least", "past"),
    [("sdpa", LONG_PAST, past) for past in around(LONG_PAST)]
    + [("compiled", LONG_PAST_COMPILED, past) for past in around(LONG_PAST_COMPILED)],
)
def test_chunks_of_long_prompts_are_within_the_error_budget(
    name: str, least: int, past: int, num_rows: int
) -> None:
    if name == "compiled" and chosen("auto")[0] != name:
        pytest.skip(chosen("auto")[1])
    rng, generator = random.Random(past), torch.Generator().manual_seed(past)
    requests = [
        RequestRows(1, 40, table(40, rng)),
        RequestRows(num_rows, past + num_rows, table(past + num_rows, rng)),
        RequestRows(20, 20, table(20, rng)),
    ]
    k_cache, v_cache = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, 2, 64, generator=generator)
    q = torch.randn(sum(r.num_queries for r in requests), 6, 64, generator=generator)
    step = plan(requests, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, implementation=name)
    assert bool(step.passes) == (past >= least)
    assert not step.shared, "nobody else reads it"
    out, lse = cascade_attention(q, k_cache, v_cache, step, scale=0.125)
    exact, exact_lse = reference.paged_attention(
        q, k_cache, v_cache, requests, scale=0.125, dtype=torch.float64
    )
    assert float((out - exact).norm() / exact.norm()) < 2e-6
    assert torch.allclose(lse.double(), exact_lse, rtol=2e-6, atol=2e-6)


def test_what_a_chunk_shares_is_not_taken_twice() -> None:
    rng = random.Random(1)
    blocks = table(2 * LONG_PAST, rng)
    free = [block for block in range(NUM_BLOCKS) if block not in blocks]
    requests = [
        RequestRows(16, 2 * LONG_PAST + 16, [*blocks, free[0]]),
        RequestRows(1, LONG_PAST + 5, [*blocks[: LONG_PAST // BLOCK_SIZE], free[1]]),
    ]
    run = SharedRun((0, 1), 0, LONG_PAST // BLOCK_SIZE)
    step = plan(
        requests,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        shared=[run],
        implementation="sdpa",
    )
    assert {key.num_keys for key in step.private} == {LONG_PAST + 16, 5}
    assert sum(piece.num_keys for piece in step.passes) == LONG_PAST


@pytest.mark.parametrize("options", [{"window": 4096}, {"fixed_shapes": True}])
def test_windows_and_fixed_shapes_keep_their_masks(options: dict[str, Any]) -> None:
    rng = random.Random(2)
    requests = [RequestRows(32, LONG_PAST + 32, table(LONG_PAST + 32, rng))]
    step = plan(
        requests, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, implementation="sdpa", **options
    )
    assert not step.passes


@pytest.mark.parametrize("is_scattered", [True, False])
@pytest.mark.parametrize("what", ["a shared run", "a lone request", "a chunk"])
def test_scattered_keys_are_copied_in_pieces(
    what: str, monkeypatch: pytest.MonkeyPatch, *, is_scattered: bool
) -> None:
    sizes = []

    def watched(cache: Any, ids: Any, keys: slice, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(keys.stop - keys.start)
        return blocks.load(cache, ids, keys, dtype)

    monkeypatch.setattr(blocks, "_PIECE_KEYS", 50)
    monkeypatch.setattr(dense, "load", watched)
    monkeypatch.setattr(sdpa, "load", watched)
    ids, generator = [*range(20, 32)], torch.Generator().manual_seed(3)
    if is_scattered:
        random.Random(3).shuffle(ids)
    requests = {
        "a shared run": [RequestRows(1, 193 + i, [*ids, 300 + i]) for i in range(3)],
        "a lone request": [RequestRows(1, 190, ids)],
        "a chunk": [RequestRows(20, 190, ids)],
    }[what]
    k_cache, v_cache = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, 2, 64, generator=generator)
    q = torch.randn(sum(r.num_queries for r in requests), 6, 64, generator=generator)
    step = plan(
        requests,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        shared=[SharedRun((0, 1, 2), 0, 12)] if what == "a shared run" else [],
        implementation="sdpa",
    )
    out, _ = cascade_attention(q, k_cache, v_cache, step, scale=0.125)
    exact, _ = reference.paged_attention(
        q, k_cache, v_cache, requests, scale=0.125, dtype=torch.float64
    )
    assert float((out - exact).norm() / exact.norm()) < 2e-6
    assert (max(sizes) <= 50) == is_scattered
