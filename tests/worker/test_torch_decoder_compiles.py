"""Our own forward pass compiles whole around the attention operation, once for all steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import kvway_kernels.op  # noqa: F401 (registers the operation)
from kvway_kernels.api import RequestRows, plan
from kvway_worker.torch_engine import decoder
from kvway_worker.torch_engine.kv_cache import PagedKVCache
from kvway_worker.torch_engine.model import HuggingFaceModel, StepContext
from tests.worker.torch_models import write_model

CPU = torch.device("cpu")
BLOCK = 4
NUM_BLOCKS = 64


class Named(NamedTuple):
    """What the graph gets of a plan: tensors alone."""

    slots: Tensor
    key: Tensor


@pytest.mark.timeout(300)
def test_the_forward_pass_compiles_whole_and_once_for_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = HuggingFaceModel(write_model(tmp_path, "qwen3"), dtype=torch.float32, device=CPU)
    caches = [
        PagedKVCache(model.kv_shape(BLOCK, torch.float32), num_blocks=NUM_BLOCKS, device=CPU)
        for _ in range(2)
    ]
    steps = [step_of(random.Random(seed)) for seed in range(8)]

    def expected(token_ids: Tensor, positions: Tensor, keep: Tensor, step: Any) -> Tensor:
        return model.forward(token_ids, positions, keep=keep, step=StepContext(caches[0], step))

    with torch.inference_mode():
        wanted = [expected(*step) for step in steps]

    def store(
        k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, step: Named, **no_scales: None
    ) -> None:
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, step.slots, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, step.slots, v)

    def attend(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: Named,
        *,
        scale: float,
        **no_scales: None,
    ) -> Tensor:
        found: Tensor = torch.ops.kvway.cascade_attention(q, k_cache, v_cache, step.key, scale)[0]
        return found

    monkeypatch.setattr(decoder, "write_kv", store)
    monkeypatch.setattr(decoder, "paged_attention", attend)
    own: Any = model._model

    def whole(
        token_ids: Tensor, positions: Tensor, keep: Tensor, slots: Tensor, key: Tensor
    ) -> Tensor:
        named: Any = Named(slots, key)
        found: Tensor = own(token_ids, positions, keep=keep, cache=caches[1], plan=named)
        return found

    counter = CompileCounter()
    compiled = torch.compile(whole, fullgraph=True, dynamic=True, backend=counter)
    with torch.inference_mode():
        for (token_ids, positions, keep, step), scores in zip(steps, wanted, strict=True):
            found = compiled(token_ids, positions, keep, step.slot_mapping, step.key)
            torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def step_of(rng: random.Random) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Requests that bring all of their tokens; the last one's scores of each are wanted."""
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    lengths = [rng.randint(1, 12) for _ in range(rng.randint(2, 5))]
    tables = [[blocks.pop() for _ in range(3)] for _ in lengths]
    step = plan(
        [RequestRows(n, n, table) for n, table in zip(lengths, tables, strict=True)],
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        implementation="sdpa",
    )
    token_ids = torch.tensor([rng.randrange(256) for _ in range(sum(lengths))])
    positions = torch.cat([torch.arange(n) for n in lengths])
    return token_ids, positions, torch.tensor(lengths).cumsum(0) - 1, step
