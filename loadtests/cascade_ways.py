"""One layer's attention of a decode step in four ways, over one set of keys and values.

    paged        our paged path: each request reads all of its blocks
    gather       blocks copied into one dense batch (`K[block_table]`), then torch's attention
    contiguous   torch's attention over keys that each request has to itself, without a gap
    cascade      the shared run once, the rest as the paged path, merged

Requests are all equally long, which is kind to the dense ways: they pad nothing. Each timed call
takes the next of several layers, so that its keys are not in the processor's cache.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvway_kernels.api import RequestRows, SharedRun, cascade_attention, plan
from kvway_kernels.costs import HeadShape
from kvway_worker.scheduling.prefix_groups import CascadeCosts, PrefixGroups, TableRow, paying

WAYS: Final = ("paged", "gather", "contiguous", "cascade")
BLOCK_SIZE: Final = 16
ROTATED_BYTES: Final = 96 * 2**20
"""Keys and values of all layers of a way, at least: three times the largest cache near a core
that we have measured on."""

STEP_LAYERS: Final = 8
"""Layers of a step that is timed whole, with its planning; models have more."""

MIN_LAYERS: Final = {"cpu": 1, "cuda": 8}


class Case(NamedTuple):
    """Decode rows on one prefix.

    Attributes:
        heads: Of a layer.
        dtype: Of queries, keys and values.
        num_requests: Of one row each.
        num_shared: Tokens that all of them have in common.
        num_own: Tokens that each has to itself.
    """

    heads: HeadShape
    dtype: torch.dtype
    num_requests: int
    num_shared: int
    num_own: int

    @property
    def key_bytes(self) -> int:
        """A token's key and value."""
        return 2 * self.heads.num_kv_heads * self.heads.head_dim * self.dtype.itemsize

    @property
    def once_bytes(self) -> int:
        """Keys and values, each read once: the least that any way must read."""
        return (self.num_shared + self.num_requests * self.num_own) * self.key_bytes

    @property
    def plain_bytes(self) -> int:
        """Keys and values where every request reads all of its own."""
        return self.num_requests * (self.num_shared + self.num_own) * self.key_bytes

    @property
    def operations(self) -> int:
        """Multiplications and additions: scores, and values weighted by them."""
        pairs = self.num_requests * (self.num_shared + self.num_own)
        return 4 * pairs * self.heads.num_heads * self.heads.head_dim

    def floor_s(self, bytes_per_s: float, operations_per_s: float) -> float:
        """Return the least time there is: of the bytes or of the operations."""
        return max(self.once_bytes / bytes_per_s, self.operations / operations_per_s)


@dataclass(frozen=True, slots=True)
class Tables:
    """Where the keys of a case are: the prefix in one piece, then blocks of each in turn."""

    tables: list[list[int]]
    num_blocks: int
    run: SharedRun

    @classmethod
    def of(cls, case: Case) -> Tables:
        """Lay out a case as a pool does for requests that decode at the same time."""
        shared, own = case.num_shared // BLOCK_SIZE, -(-case.num_own // BLOCK_SIZE)
        n = case.num_requests
        tables = [
            [*range(shared), *(shared + block * n + index for block in range(own))]
            for index in range(n)
        ]
        return cls(tables, shared + n * own, SharedRun(tuple(range(n)), 0, shared))


class Clock:
    """Time of what a call computes: processor time of this process; on a GPU, wall time.

    Args:
        device: What computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"

    def seconds(self, call: Callable[[], object]) -> float:
        """Return what a call takes."""
        now = time.perf_counter if self._is_gpu else time.process_time
        self._wait()
        started = now()
        call()
        self._wait()
        return now() - started

    def _wait(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()


class Timed(NamedTuple):
    """What ways took, each round next to each other.

    Attributes:
        seconds: Way -> of each round, seconds per layer.
    """

    seconds: dict[str, list[float]]

    def best_s(self, way: str) -> float:
        """Return the shortest time."""
        return min(self.seconds[way])

    def ratio(self, way: str, other: str) -> float:
        """Return how many times longer a way takes than another, by the shortest times."""
        return self.best_s(way) / self.best_s(other)


class Ways:
    """The ways of a case, ready to be called.

    Args:
        case: What is attended to.
        device: Where.
        implementation: Of the paged and the cascade way: a name of kvway_kernels, or `auto`.
        max_dense_bytes: The contiguous way is left out where its copies are larger.
    """

    def __init__(
        self, case: Case, *, device: torch.device, implementation: str, max_dense_bytes: int
    ) -> None:
        self.case = case
        self._clock = Clock(device)
        self._device = device
        laid = Tables.of(case)
        n, heads = case.num_requests, case.heads
        requests = [RequestRows(1, case.num_shared + case.num_own, t) for t in laid.tables]
        self._plan = functools.partial(
            plan,
            requests,
            num_blocks=laid.num_blocks,
            block_size=BLOCK_SIZE,
            device=device,
            dtype=case.dtype,
            implementation=implementation,
        )
        run = (laid.run,) if n > 1 else ()
        self._plans = {"paged": self._plan(), "cascade": self._plan(shared=run)}
        end = case.num_shared + case.num_own
        self._rows = [
            TableRow(str(i), tuple(table), end - 1, end) for i, table in enumerate(laid.tables)
        ]
        self._table = torch.tensor(laid.tables, device=device)
        self._q = torch.randn(n, heads.num_heads, heads.head_dim, device=device).to(case.dtype)
        cache = (laid.num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        num_layers = self._num_layers(case.once_bytes)
        self._layers = [(self._random(cache), self._random(cache)) for _ in range(num_layers)]
        self._dense: list[tuple[Tensor, Tensor]] = []
        num_dense = self._num_layers(case.plain_bytes)
        if num_dense * case.plain_bytes <= max_dense_bytes:
            self._dense = [
                (self._gathered(k).contiguous(), self._gathered(v).contiguous())
                for k, v in (self._layers[i % num_layers] for i in range(num_dense))
            ]
        self.names = tuple(way for way in WAYS if way != "contiguous" or self._dense)
        self._turn = 0

    def attend(self, way: str) -> Tensor:
        """Return the attention of the next layer: [num_requests, num_heads, head_dim]."""
        self._turn += 1
        if way == "contiguous":
            return self._sdpa(*self._dense[self._turn % len(self._dense)])
        k, v = self._layers[self._turn % len(self._layers)]
        if way == "gather":
            return self._sdpa(self._gathered(k), self._gathered(v))
        scale = self.case.heads.head_dim**-0.5
        return cascade_attention(self._q, k, v, self._plans[way], scale=scale)[0]

    def time(self, *, rounds: int, budget_s: float) -> Timed:
        """Time all ways in rounds, in an order that turns; at least 3, then until the budget."""
        num_calls = MIN_LAYERS[self._device.type]
        found: dict[str, list[float]] = {way: [] for way in self.names}

        def calls(way: str) -> Callable[[], object]:
            return lambda: [self.attend(way) for _ in range(num_calls)]

        for way in self.names:
            self.attend(way)
        started = time.perf_counter()
        for index in range(rounds):
            if index >= 3 and time.perf_counter() - started > budget_s:
                break
            first = index % len(self.names)
            for way in (*self.names[first:], *self.names[:first]):
                found[way].append(self._clock.seconds(calls(way)) / num_calls)
        return Timed(found)

    def slowdown(self, costs: CascadeCosts, *, rounds: int, budget_s: float) -> float:
        """Return how many times longer a step takes that may cascade, where it does not pay.

        A step is planned and goes through some layers; the one that may cascade also looks for
        what is shared, and decides. Both are timed in turn, each first in every second pair, and
        the median of the pairs' ratios counts: at least 3 pairs, then until the budget.
        """
        groups = PrefixGroups(BLOCK_SIZE)

        def step(*, may_cascade: bool) -> None:
            runs: tuple[SharedRun, ...] = ()
            if may_cascade:
                found = paying(groups.update(self._rows), costs, block_size=BLOCK_SIZE)
                runs = tuple(SharedRun(*run) for run in found)
            self._plans["step"] = self._plan(shared=runs)
            for _ in range(STEP_LAYERS):
                self.attend("step")

        ratios = []
        step(may_cascade=True)
        started = time.perf_counter()
        for index in range(rounds):
            if index >= 3 and time.perf_counter() - started > budget_s:
                break
            taken = {
                way: self._clock.seconds(functools.partial(step, may_cascade=way))
                for way in ((True, False) if index % 2 else (False, True))
            }
            ratios.append(taken[True] / taken[False])
        return statistics.median(ratios)

    def planning_s(self, *, rounds: int) -> float:
        """Return the shortest time in which a step is planned that reads the shared run once."""
        run = self._plans["cascade"].shared

        def planned() -> None:
            self._plan(shared=run).units  # noqa: B018 (worked out when it is read)

        return min(self._clock.seconds(planned) for _ in range(rounds))

    def largest_error(self) -> float:
        """Return the largest difference between the ways on one layer."""
        outs = []
        for way in self.names:
            self._turn = -1  # attend takes layer 0
            outs.append(self.attend(way).float())
        return max(float((out - outs[0]).abs().max()) for out in outs)

    def _num_layers(self, layer_bytes: int) -> int:
        return max(MIN_LAYERS[self._device.type], -(-ROTATED_BYTES // layer_bytes))

    def _random(self, size: Sequence[int]) -> Tensor:
        return torch.randn(size, device=self._device, dtype=torch.float32).to(self.case.dtype)

    def _gathered(self, cache: Tensor) -> Tensor:
        """Return every request's keys or values: [num_requests, num_kv_heads, tokens, D]."""
        num_tokens = self.case.num_shared + self.case.num_own
        return cache[self._table].flatten(1, 2)[:, :num_tokens].transpose(1, 2)

    def _sdpa(self, k: Tensor, v: Tensor) -> Tensor:
        # Heads that share a key head are rows of one call: faster than enable_gqa.
        rows = self._q.view(len(self._q), k.shape[1], -1, k.shape[3])
        return scaled_dot_product_attention(rows, k, v).view(self._q.shape)


def rates(
    dtype: torch.dtype, device: torch.device, *, num_bytes: int = 2**28
) -> tuple[float, float]:
    """Measure what this machine can do at most: bytes read per second, operations per second.

    Args:
        dtype: Of the product.
        device: What reads and multiplies.
        num_bytes: To read; well above what caches hold.
    """
    clock = Clock(device)
    read = torch.full((num_bytes // 4,), 0.5, device=device)
    other = torch.full_like(read, 2.0)
    size = 4096 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    ways: Sequence[tuple[int, Callable[[], object]]] = (
        (read.nbytes, read.sum),
        (read.nbytes, read.max),
        (2 * read.nbytes, lambda: torch.dot(read, other)),
    )
    bytes_per_s = operations_per_s = 0.0
    for _ in range(7):
        for size_bytes, call in ways:
            bytes_per_s = max(bytes_per_s, size_bytes / clock.seconds(call))
        operations_per_s = max(operations_per_s, 2 * size**3 / clock.seconds(lambda: a @ a))
    return bytes_per_s, operations_per_s
