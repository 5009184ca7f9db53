"""The specification: attention over a paged cache in eager float32, one row at a time.

Clear, not fast. Everything else in this package is tested against it, and it is tested against
float64. It knows nothing of shared runs: they change how keys are read, never the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvway_kernels.quant import KV, Quantised, dequantise
from kvway_kernels.rows import RequestRows


def paged_attention(  # noqa: PLR0913
    q: Tensor,
    k_cache: KV,
    v_cache: KV,
    requests: Sequence[RequestRows],
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attend each row to its request's keys up to its own, in `dtype`.

    Shapes: q [num_rows, num_heads, head_dim]; k_cache, v_cache [num_blocks, block_size,
    num_kv_heads, head_dim]; out as q; lse [num_rows, num_heads].

    Args:
        q: the queries.
        k_cache: the keys; quantised ones are dequantised in float32.
        v_cache: the values.
        requests: who owns which rows, and where their keys are.
        scale: factor on the scores.
        softcap: scores become softcap * tanh(score / softcap).
        window: a row sees only so many last keys, its own included.
        dtype: what is computed in.

    Returns:
        out: the attention, in `dtype`; zero in rows behind the requests'.
        lse: natural logarithm of the sum of the exponentiated scores, in `dtype`; -inf there.
    """
    out = torch.zeros_like(q, dtype=dtype)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=dtype)
    row = 0
    for request in requests:
        k = _gather(k_cache, request, dtype)
        v = _gather(v_cache, request, dtype)
        for end in range(request.num_keys - request.num_queries + 1, request.num_keys + 1):
            seen = slice(0 if window is None else max(0, end - window), end)
            out[row], lse[row] = attention(
                q[row].to(dtype), k[seen], v[seen], scale, softcap=softcap
            )
            row += 1
    return out, lse


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend one row to all the given keys; with no keys at all the result is (0, -inf).

    Shapes: q [num_heads, head_dim]; k, v [num_keys, num_kv_heads, head_dim]; out as q;
    lse [num_heads].
    """
    num_heads, num_kv_heads = q.shape[0], k.shape[1]
    k = k.repeat_interleave(num_heads // num_kv_heads, dim=1)
    v = v.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("hd,khd->hk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    lse = torch.logsumexp(scores, dim=1)
    if not len(k):
        return torch.zeros_like(q), lse
    return torch.einsum("hk,khd->hd", torch.exp(scores - lse[:, None]), v), lse


def _gather(cache: KV, request: RequestRows, dtype: torch.dtype) -> Tensor:
    block_size = cache.shape[1]
    if isinstance(cache, Quantised):
        blocks = torch.tensor(request.block_table[: -(-request.num_keys // block_size)])
        numbers = dequantise(cache.taken(blocks.to(cache.data.device)), dtype)
        return numbers.flatten(0, 1)[: request.num_keys]
    tokens = [
        cache[request.block_table[position // block_size], position % block_size]
        for position in range(request.num_keys)
    ]
    return torch.stack(tokens).to(dtype)


def _main() -> None:
    """Print what the rows of a small step see, and their log-sum-exp, which counts the keys."""
    q, cache = torch.zeros(4, 1, 4), torch.zeros(4, 4, 1, 4)  # all scores are zero
    requests = (RequestRows(3, 7, [2, 0]), RequestRows(1, 5, [3, 1]))
    print("window   request   row   e^lse: keys that it sees")  # noqa: T201
    for window in (None, 4):
        _, lse = paged_attention(q, cache, cache, requests, scale=1.0, window=window)
        seen = iter(lse[:, 0].exp().round().int().tolist())
        for index, request in enumerate(requests):
            for row in range(request.num_queries):
                print(f"{window!s:6}   {index:7}   {row:3}   {'#' * next(seen)}")  # noqa: T201


if __name__ == "__main__":
    _main()
