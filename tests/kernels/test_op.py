"""Attention as one operation of a compiled model."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import Tensor, library
from torch._dynamo.testing import CompileCounter
from typing_extensions import override

from kvway_kernels.api import PagedPlan, RequestRows, cascade_attention, plan
from kvway_kernels.op import cascade_attention_op
from tests.kernels.trees import BLOCK_SIZE, TREES, Tree

SCALE = 0.125


def planned(case: Tree) -> PagedPlan:
    return plan(
        case.requests,
        num_blocks=len(case.k_cache),
        block_size=BLOCK_SIZE,
        shared=case.shared,
        implementation="sdpa",
    )


def test_it_is_cascade_attention() -> None:
    case = Tree.of(TREES["three levels"])
    step = planned(case)
    found = cascade_attention_op(case.q, case.k_cache, case.v_cache, step.key, SCALE, 5.0)
    expected = cascade_attention(
        case.q, case.k_cache, case.v_cache, step, scale=SCALE, softcap=5.0
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_torch_finds_nothing_wrong_with_it() -> None:
    case = Tree.of(TREES["one prefix"])
    step = planned(case)
    library.opcheck(
        cascade_attention_op,
        (case.q, case.k_cache, case.v_cache, step.key, SCALE),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_a_plan_that_is_gone_is_named() -> None:
    case = Tree.of(TREES["one prefix"])
    key = planned(case).key
    gc.collect()
    with pytest.raises(KeyError, match="keep the plan while its step runs"):
        cascade_attention_op(case.q, case.k_cache, case.v_cache, key, SCALE)


class Toy(torch.nn.Module):
    """Two layers that store keys and values and attend."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(32, 64) for _ in range(2))
        self.k_cache = [torch.zeros(40, BLOCK_SIZE, 1, 16) for _ in range(2)]
        self.v_cache = [torch.zeros(40, BLOCK_SIZE, 1, 16) for _ in range(2)]

    @override
    def forward(self, x: Tensor, slots: Tensor, key: Tensor) -> Tensor:
        for layer, k_cache, v_cache in zip(self.qkv, self.k_cache, self.v_cache, strict=True):
            rows = layer(x)
            q, k, v = rows[:, :32].view(-1, 2, 16), rows[:, 32:48], rows[:, 48:]
            k_cache.view(-1, 16).index_copy_(0, slots, k)
            v_cache.view(-1, 16).index_copy_(0, slots, v)
            out, _ = torch.ops.kvway.cascade_attention(q, k_cache, v_cache, key, SCALE)
            x = x + out.reshape(-1, 32)
        return x


def test_a_model_compiles_whole_and_only_once_for_all_plans() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    counter = CompileCounter()
    toy, twin = Toy(), Toy()
    twin.load_state_dict(toy.state_dict())
    compiled = torch.compile(toy, fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(30):
            requests = _random_requests(rng)
            step = plan(requests, num_blocks=40, block_size=BLOCK_SIZE, implementation="sdpa")
            x = torch.randn(step.num_rows, 32)
            slots = step.slot_mapping.clone()
            torch._dynamo.decorators.mark_unbacked(x, 0)
            torch._dynamo.decorators.mark_unbacked(slots, 0)
            found = compiled(x, slots, step.key)
            torch.testing.assert_close(found, twin(x, step.slot_mapping, step.key))
    assert counter.frame_count == 1


def _random_requests(rng: random.Random) -> list[RequestRows]:
    blocks = list(range(40))
    rng.shuffle(blocks)
    requests = []
    for _ in range(rng.randint(1, 5)):
        num_keys = rng.randint(1, 60)
        table = [blocks.pop() for _ in range(-(-num_keys // BLOCK_SIZE))]
        requests.append(RequestRows(rng.randint(1, num_keys), num_keys, table))
    return requests
