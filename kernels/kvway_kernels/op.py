"""`torch.ops.kvway.cascade_attention`: attention as one operation of a compiled model.

A compiled model must not be compiled anew when the plan changes, and a plan is no tensor: so the
operation takes `plan.key`, a tensor that names it. Importing this module registers it.

    out, lse = torch.ops.kvway.cascade_attention(q, k_cache, v_cache, step.key, scale)
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from kvway_kernels.api import cascade_attention
from kvway_kernels.plan import live_plan


@library.custom_op("kvway::cascade_attention", mutates_args=())
def cascade_attention_op(  # noqa: PLR0913, PLR0917 (an operation has no keywords of its own)
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    scale: float,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as `cascade_attention`, by the plan that `key` names.

    Args:
        q: the queries.
        k_cache: one layer's keys.
        v_cache: its values.
        key: `PagedPlan.key`. The plan must be alive when this runs.
        scale: factor on the scores.
        softcap: scores become softcap * tanh(score / softcap).
        k_scale: of quantised keys.
        v_scale: of quantised values.

    Returns:
        out: [like q], contiguous.
        lse: [T, Hq] float32, nats.

    Raises:
        KeyError: no such plan is alive.
        ValueError: as `cascade_attention`.
    """
    out, lse = cascade_attention(
        q,
        k_cache,
        v_cache,
        live_plan(int(key)),
        scale=scale,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return out.contiguous(), lse.contiguous()


@cascade_attention_op.register_fake
def _(  # noqa: PLR0913, PLR0917
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    scale: float,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    del k_cache, v_cache, key, scale, softcap, k_scale, v_scale
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
