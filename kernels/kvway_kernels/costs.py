"""What attention costs on this machine, by a few timed steps: whether a shared run pays.

One layer of a decode step with n requests, P tokens that all of them share and S of their own
takes, in seconds:

    alone      call + n request + n (P + S) paged_key                      no shared run
    together   call + n request + n S paged_key
               + run + P run_key + n P run_pair + n merge                  one shared run

    python -m kvway_kernels.costs        measures this machine, and prints from where on it pays
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvway_kernels.api import PagedPlan, RequestRows, SharedRun, cascade_attention, chosen, plan
from kvway_kernels.quant import DTYPES, SCALE_DTYPE

BUDGET_S: Final = 1.2
"""Rounds of timed steps begin no later than this."""

_MIN_ROUNDS: Final = 2
_MAX_ROUNDS: Final = 15

_BLOCK_SIZE: Final = 16
_NUM_OWN: Final = 32
"""Tokens of its own that each request has."""

_SHAPES: Final = (
    *((2, tokens) for tokens in (128, 512, 1024)),
    *((6, tokens) for tokens in (128, 512, 1024)),
    *((16, tokens) for tokens in (128, 384)),
)
"""Requests, and tokens that they share: around where it begins to pay."""

_CACHED_BYTES: Final = 96 * 2**20
"""Of keys and values that are gone through before a layer's turn comes again, as in a model: what
is timed must not lie in the processor's cache."""


class HeadShape(NamedTuple):
    """Heads of one layer.

    Attributes:
        num_heads: of queries.
        num_kv_heads: of keys and values.
        head_dim: size of each.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What a layer's attention costs, all heads, seconds. None is below zero.

    Attributes:
        paged_key: a key of one decode row, read through its block table.
        run: a shared run, whatever its size.
        run_key: each key of a run.
        run_pair: each key of a run, for each member.
        merge: each member of a run: its two partial results become one.
    """

    paged_key: float
    run: float
    run_key: float
    run_pair: float
    merge: float

    def saved_s(self, num_members: int, num_tokens: int) -> float:
        """Return what one pass over shared keys saves; below zero where it costs."""
        together = self.run + num_members * self.merge
        together += num_tokens * (self.run_key + num_members * self.run_pair)
        return num_members * num_tokens * self.paged_key - together


class Sample(NamedTuple):
    """One kind of step, timed without and with a shared run.

    Attributes:
        num_requests: of one row each.
        num_tokens: that all of them share.
        num_own: tokens that each has to itself.
        alone_s: what a layer takes when each reads all of its keys.
        together_s: what it takes when the shared ones are read once.
    """

    num_requests: int
    num_tokens: int
    num_own: int
    alone_s: float
    together_s: float


def calibrate(
    shape: HeadShape,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    implementation: str = "auto",
    budget_s: float = BUDGET_S,
) -> Costs:
    """Measure what attention costs here: in under 2 s on an idle machine, beside compiling.

    Each kind of step is timed several times and the shortest counts, so that what else runs on the
    machine matters little. The blocks of tables and runs are scattered: runs whose blocks follow
    each other cost less. The budget ends no round, and two are always timed; what is compiled at
    first use is not in it. An engine that has run a step has compiled what is timed here.

    Args:
        shape: heads of the model's layers.
        dtype: of queries, and of keys and values that are not quantised.
        kv_dtype: of the codes of quantised keys and values; None: they are as the queries.
        device: where they are.
        implementation: what will run.
        budget_s: when the last round of timed steps may begin.

    Raises:
        ValueError: the implementation cannot run on the device.
    """
    name, _ = chosen(implementation, device=device)
    with torch.inference_mode():
        steps = _Steps(
            shape,
            dtype=dtype,
            kv_dtype=dtype if kv_dtype is None else kv_dtype,
            device=torch.device(device),
            implementation=name,
        )
        return fit(steps.samples(budget_s))


def fit(samples: Sequence[Sample]) -> Costs:
    """Return the costs that explain timed steps best, by relative least squares.

    A cost that would be below zero is zero. Where the fit promises a gain for a step that was
    measured to be no gain, `run` is raised until it does not.

    Raises:
        ValueError: there are no samples, or a time is not above zero and finite.
    """
    if not samples:
        raise ValueError("no step was timed: expected at least one")
    rows, times = [], []
    for n, tokens, own, alone_s, together_s in samples:
        if not (0 < alone_s < math.inf and 0 < together_s < math.inf):
            raise ValueError(f"steps took {alone_s} and {together_s} s: expected finite, above 0")
        rows.append((1.0, n, n * (tokens + own), 0.0, 0.0, 0.0, 0.0))
        rows.append((1.0, n, n * own, 1.0, tokens, n * tokens, n))
        times += [alone_s, together_s]
    _, _, *found = _least_squares(rows, times)
    costs = Costs(*found)
    promised = [costs.saved_s(s[0], s[1]) for s in samples if s.together_s >= s.alone_s]
    lacking = max([0.0, *promised])
    return Costs(costs.paged_key, costs.run + lacking, *astuple(costs)[2:])


def _least_squares(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Return the factors, none below zero, that make rows give times best in proportion."""
    seconds = torch.tensor(times, dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64) / seconds[:, None]
    sizes = matrix.norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny)
    columns = list(range(matrix.shape[1]))
    ones = torch.ones(len(seconds), 1, dtype=torch.float64)
    factors = [0.0] * matrix.shape[1]
    while columns:
        scaled = matrix[:, columns] / sizes[columns]
        found = torch.linalg.lstsq(scaled, ones, driver="gelsd").solution[:, 0]
        if bool((found >= 0).all()):
            for column, value in zip(columns, (found / sizes[columns]).tolist(), strict=True):
                factors[column] = value
            break
        del columns[int(found.argmin())]
    return factors


class _Steps:
    """Decode steps on caches that are large enough, ready to be timed."""

    def __init__(
        self,
        shape: HeadShape,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        implementation: str,
    ) -> None:
        most, longest = (max(sizes) for sizes in zip(*_SHAPES, strict=True))
        own_blocks, shared_blocks = _NUM_OWN // _BLOCK_SIZE, longest // _BLOCK_SIZE
        num_blocks = shared_blocks + most * own_blocks
        size = (num_blocks, _BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        layer_bytes = 2 * math.prod(size) * kv_dtype.itemsize
        # As a model's are: a graph that is made for tensors of inference mode is another one.
        with torch.inference_mode(mode=False):
            self._caches = [
                (
                    torch.full(size, 1.0, device=device).to(kv_dtype),
                    torch.full(size, 1.0, device=device).to(kv_dtype),
                )
                for _ in range(max(2, -(-_CACHED_BYTES // layer_bytes)))
            ]
            self._scales: Tensor | None = None
            if kv_dtype in DTYPES.values():
                self._scales = torch.full(size[:3], 0.5, dtype=SCALE_DTYPE, device=device)
        self._turn = 0
        self._device = device
        self._scale = shape.head_dim**-0.5
        # Every second block first: no two of a table follow each other.
        ids = [*range(0, num_blocks, 2), *range(1, num_blocks, 2)]
        shared, own = ids[:shared_blocks], ids[shared_blocks:]
        self._timed: list[tuple[Tensor, PagedPlan, PagedPlan]] = []
        for n, tokens in _SHAPES:
            used = tokens // _BLOCK_SIZE
            requests = [
                RequestRows(
                    1,
                    tokens + _NUM_OWN,
                    [*shared[:used], *own[i * own_blocks : (i + 1) * own_blocks]],
                )
                for i in range(n)
            ]
            alone, together = (
                plan(
                    requests,
                    num_blocks=num_blocks,
                    block_size=_BLOCK_SIZE,
                    device=device,
                    dtype=dtype,
                    shared=runs,
                    implementation=implementation,
                )
                for runs in ((), (SharedRun(tuple(range(n)), 0, used),))
            )
            q = torch.full((n, shape.num_heads, shape.head_dim), 0.5, dtype=dtype, device=device)
            self._timed.append((q, alone, together))

    def samples(self, budget_s: float) -> list[Sample]:
        """Time every step in rounds; return the shortest times."""
        q, *plans = self._timed[0]
        for step in plans:
            self._seconds(q, step)  # compiles what is compiled at first use
        best = [[math.inf, math.inf] for _ in self._timed]
        started = time.perf_counter()
        for index in range(_MAX_ROUNDS):
            if index >= _MIN_ROUNDS and time.perf_counter() - started >= budget_s:
                break
            for times, (q, *plans) in zip(best, self._timed, strict=True):
                for way, step in enumerate(plans):
                    times[way] = min(times[way], self._seconds(q, step))
        return [
            Sample(n, tokens, _NUM_OWN, *times)
            for (n, tokens), times in zip(_SHAPES, best, strict=True)
        ]

    def _seconds(self, q: Tensor, step: PagedPlan) -> float:
        self._turn = (self._turn + 1) % len(self._caches)
        k_cache, v_cache = self._caches[self._turn]
        wait: Callable[[], object] = lambda: None  # noqa: E731
        if self._device.type == "cuda":
            wait = torch.cuda.synchronize
        wait()
        started = time.perf_counter()
        cascade_attention(
            q,
            k_cache,
            v_cache,
            step,
            scale=self._scale,
            k_scale=self._scales,
            v_scale=self._scales,
        )
        wait()
        return time.perf_counter() - started


def _print(shape: HeadShape, dtype: torch.dtype, device: str) -> None:
    name, reason = chosen("auto", device=device, dtype=dtype, head_dim=shape.head_dim)
    started = time.perf_counter()
    costs = calibrate(shape, dtype=dtype, device=device, implementation=name)
    seconds = time.perf_counter() - started
    print(f"{shape}, {dtype}, {device}, {name} ({reason}); measured in {seconds:.1f} s")  # noqa: T201
    print(f"{costs}")  # noqa: T201
    print("tokens that must be shared, by requests:")  # noqa: T201
    for n in (2, 4, 8, 16, 32, 64):
        sizes = range(_BLOCK_SIZE, 2**17, _BLOCK_SIZE)
        least = next((tokens for tokens in sizes if costs.saved_s(n, tokens) > 0), None)
        print(f"  {n:3}  {'never' if least is None else least}")  # noqa: T201


if __name__ == "__main__":
    for head_shape in (HeadShape(9, 3, 64), HeadShape(32, 8, 128)):
        _print(head_shape, torch.float32, "cuda" if torch.cuda.is_available() else "cpu")
