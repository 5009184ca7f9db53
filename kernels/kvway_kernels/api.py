"""The operations, one public function each.

Shapes use one alphabet: T query rows of a step, Hq query heads, Hkv key/value heads (Hq is a
multiple of Hkv), D head size, P partial results. A cache is [num_blocks, block_size, Hkv, D]; the
slot of a token is `block_id * block_size + offset`. Log-sum-exp (lse) is in nats, float32.

A cache may be quantised (see `quant`): then it holds codes of int8 or float8_e4m3fn, only a block
of it is contiguous, and its scales, bfloat16 [num_blocks, block_size, Hkv], are given beside it.

    step = plan(requests, num_blocks=..., block_size=..., shared=...)      once per step
    write_kv(k_cache, v_cache, k, v, step)                                 per layer
    out = paged_attention(q, k_cache, v_cache, step, scale=...)            per layer
    out, lse = cascade_attention(...)                                      the same, with lse
"""

from __future__ import annotations

from torch import Tensor

from kvway_kernels import native, reference, sdpa
from kvway_kernels.choice import HEAD_STEP, IMPLEMENTATIONS, chosen
from kvway_kernels.merging import merge_states
from kvway_kernels.plan import PagedPlan, plan
from kvway_kernels.quant import DTYPES, KV, SCALE_DTYPE, Quantised, store
from kvway_kernels.rows import RequestRows, SharedRun

__all__ = [
    "HEAD_STEP",
    "IMPLEMENTATIONS",
    "PagedPlan",
    "RequestRows",
    "SharedRun",
    "cascade_attention",
    "chosen",
    "merge_states",
    "paged_attention",
    "plan",
    "write_kv",
]


def write_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    step: PagedPlan,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Store the keys and values of a step's rows in their slots; every other slot is untouched.

    Shapes: k_cache, v_cache [num_blocks, block_size, Hkv, D], contiguous; k, v [>= T, Hkv, D], of
    the caches' dtype and device, or of any floating dtype where these are quantised. Rows behind
    the first T are ignored.

    Args:
        k_cache: one layer's keys.
        v_cache: its values.
        k: the rows' keys.
        v: their values.
        step: where they go.
        k_scale: of quantised keys.
        v_scale: of quantised values.

    Mutates:
        k_cache, v_cache, k_scale, v_scale: the slots of `step.slot_mapping`.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    keys, values = _checked(k_cache, v_cache, step, k_scale, v_scale)
    for name, rows, cache in (("k", k, keys), ("v", v, values)):
        if rows.shape[1:] != cache.shape[2:] or len(rows) < step.num_rows:
            raise ValueError(
                f"{name} is {list(rows.shape)}: expected at least {step.num_rows} rows of "
                f"{list(cache.shape[2:])}"
            )
        if isinstance(cache, Quantised):
            store(cache, rows[: step.num_rows], step.slot_mapping)
            continue
        if rows.dtype != cache.dtype:
            raise ValueError(f"{name} is {rows.dtype}, its cache {cache.dtype}")
        slots = cache.view(-1, *rows.shape[1:])
        slots.index_copy_(0, step.slot_mapping, rows[: step.num_rows])


def paged_attention(  # noqa: PLR0913
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: PagedPlan,
    *,
    scale: float,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attend each row to its request's keys up to its own token, which `write_kv` has stored.

    The same as `cascade_attention`, for those who need no lse.

    Returns:
        [like q]: the attention; rows behind the first T are zero.
    """
    return cascade_attention(
        q,
        k_cache,
        v_cache,
        step,
        scale=scale,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
    )[0]


def cascade_attention(  # noqa: PLR0913
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: PagedPlan,
    *,
    scale: float,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each row to its request's keys up to its own token, which `write_kv` has stored.

    Prefill chunks, continued prefills and decode rows of any lengths mix in one step. Keys of the
    plan's shared runs are read once for all members; the result is the same within rounding. Only
    slots that belong to a request are read for it: what other slots hold, NaN included, has no
    effect.

    Shapes: q [>= T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D], contiguous and of
    q's dtype, or quantised.

    Args:
        q: the queries.
        k_cache: one layer's keys.
        v_cache: its values.
        step: who owns which rows, where their keys are, and which of them are shared.
        scale: factor on the scores before the softmax.
        softcap: scores become softcap * tanh(score / softcap) before the softmax. None: as they
            are.
        k_scale: of quantised keys.
        v_scale: of quantised values.

    Returns:
        out: [like q], the attention; rows behind the first T are zero.
        lse: [>= T, Hq] float32, nats: log of the sum of a row's exponentiated scores; -inf behind
            the first T.

    Raises:
        ValueError: a shape or dtype does not fit, the soft cap is not above zero, or the plan's
            implementation does not read quantised caches.
    """
    keys, values = _checked(k_cache, v_cache, step, k_scale, v_scale)
    num_kv_heads, head_dim = k_cache.shape[2:]
    is_grouped = q.ndim == 3 and q.shape[2] == head_dim and q.shape[1] % num_kv_heads == 0
    if not is_grouped or len(q) < step.num_rows:
        raise ValueError(
            f"q is {list(q.shape)}: expected at least {step.num_rows} rows of a multiple of "
            f"{num_kv_heads} heads of size {head_dim}"
        )
    if q.dtype != k_cache.dtype and k_scale is None:
        raise ValueError(f"q is {q.dtype}, the caches {k_cache.dtype}")
    is_quantised = isinstance(keys, Quantised)
    if is_quantised and step.implementation == "compiled" and not native.can_attend(q, keys):
        raise ValueError(
            "the step is planned for 'compiled', which does not read quantised caches with heads "
            f"of {head_dim} and queries of {q.dtype} on {q.device.type}: plan it for sdpa"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}: expected above 0, or None")
    if step.implementation == "reference":
        out, lse = reference.paged_attention(
            q, keys, values, step.requests, scale=scale, softcap=softcap, window=step.window
        )
        return out.to(q.dtype), lse
    if step.implementation == "triton":
        from kvway_kernels.triton.attention import attend  # needs the package triton

        return attend(
            q,
            k_cache,
            v_cache,
            step,
            scale=scale,
            softcap=softcap,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    return sdpa.attend(q, keys, values, step, scale=scale, softcap=softcap)


def _checked(
    k_cache: Tensor,
    v_cache: Tensor,
    step: PagedPlan,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[KV, KV]:
    """Return the caches, with their scales where they are quantised."""
    _check_cache(k_cache, v_cache, step)
    if k_scale is None and v_scale is None and k_cache.dtype not in DTYPES.values():
        if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
            raise ValueError("the caches are not contiguous")
        return k_cache, v_cache
    for name, cache, scale in (("k", k_cache, k_scale), ("v", v_cache, v_scale)):
        if cache.dtype not in DTYPES.values() or scale is None:
            raise ValueError(
                f"{name}_cache is {cache.dtype} and {name}_scale "
                f"{None if scale is None else scale.dtype}: expected scales with "
                f"{' or '.join(map(str, DTYPES.values()))}, and only with these"
            )
        if scale.shape != cache.shape[:3] or scale.dtype != SCALE_DTYPE:
            raise ValueError(
                f"{name}_scale is {scale.dtype} {list(scale.shape)}: expected {SCALE_DTYPE} "
                f"{list(cache.shape[:3])}"
            )
        if not (cache[0].is_contiguous() and scale[0].is_contiguous()):
            raise ValueError(f"a block of {name}_cache or of {name}_scale is not contiguous")
    assert k_scale is not None and v_scale is not None  # noqa: PT018, S101 (just checked)
    return Quantised(k_cache, k_scale), Quantised(v_cache, v_scale)


def _check_cache(k_cache: Tensor, v_cache: Tensor, step: PagedPlan) -> None:
    if k_cache.shape != v_cache.shape or k_cache.ndim != 4:
        raise ValueError(
            f"the caches are {list(k_cache.shape)} and {list(v_cache.shape)}: expected two of "
            "[num_blocks, block_size, Hkv, D]"
        )
    if tuple(k_cache.shape[:2]) != (step.num_blocks, step.block_size):
        raise ValueError(
            f"the caches hold {k_cache.shape[0]} blocks of {k_cache.shape[1]}, the step was "
            f"planned for {step.num_blocks} of {step.block_size}"
        )
