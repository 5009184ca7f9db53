"""The two kernels: partial attention of one unit, and the merge of a row's partial results.

Both are written so that what they must not read is not loaded at all, instead of being multiplied
by zero: whatever an unused slot holds, NaN included, has no effect.
"""

# Triton gives the parameters their types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202, D417, PLR0913, PLR0915, PLR0917

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    """Hyperbolic tangent to a few units of the last place, also near 0, where 1 - exp cancels."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))
    e = tl.exp2(tl.abs(x) * (-2 * _LOG2_E))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.15, near, tl.where(x < 0, -far, far))


@triton.jit
def partial_attention(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    units,
    rows,
    bounds,
    blocks,
    slots,
    part_out,
    part_lse,
    scale,
    softcap,
    q_row_stride,
    q_head_stride,
    k_block_stride,
    k_token_stride,
    k_head_stride,
    v_block_stride,
    v_token_stride,
    v_head_stride,
    k_scale_block_stride,
    k_scale_token_stride,
    v_scale_block_stride,
    v_scale_token_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
):
    """Attend the pairs of one unit's tile to its keys: grid [units x key heads].

    The softmax is computed online, in float32 and to base 2 (FlashAttention, arXiv 2205.14135);
    the log-sum-exp that is stored is natural. A pair that sees none of the keys gives (0, -inf).

    Float32 operands are multiplied as three tf32 products each (3xTF32), near float32's accuracy,
    since plain float32 products find no place in the registers. Scales of quantised blocks are
    factors of scores and of probabilities: keys and
    values are multiplied as the codes that they are, exact in every type.

    Args:
        q: [T, Hq, D], rows and heads strided.
        k_cache: [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, D], all but D strided; v_cache likewise.
        v_cache: the values.
        k_scale: [num_blocks, BLOCK_SIZE, NUM_KV_HEADS] where IS_QUANTISED, else None; v_scale too.
        v_scale: of the values.
        units: see `Units`, as the next four.
        rows: row of each unit's rows.
        bounds: what each row sees of its private keys.
        blocks: block ids.
        slots: where each row's result goes.
        part_out: float32 [num_slots, Hq, D].
        part_lse: float32 [num_slots, Hq].
        scale: factor on the scores.
        softcap: scores become softcap * tanh(score / softcap), where HAS_SOFTCAP.
        NUM_PAIRS: pairs in the tile.
        NUM_KEYS: keys per iteration.
    """
    unit = units + (tl.program_id(0) // NUM_KV_HEADS) * 8
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row_start = tl.load(unit)
    num_rows = tl.load(unit + 1)
    first_pair = tl.load(unit + 2)
    block_start = tl.load(unit + 3)
    first_key = tl.load(unit + 4)
    end_key = tl.load(unit + 5)
    slot_start = tl.load(unit + 6)
    is_open = tl.load(unit + 7) != 0

    pair = first_pair + tl.arange(0, NUM_PAIRS)
    is_pair = pair < num_rows * GROUP
    row_of = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    dim = tl.arange(0, PADDED_DIM)
    row = tl.load(rows + row_start + row_of, mask=is_pair, other=0)
    begin = tl.load(bounds + row * 2, mask=is_pair & (not is_open), other=0)
    end = tl.load(bounds + row * 2 + 1, mask=is_pair & (not is_open), other=end_key)
    end = tl.where(is_pair, end, 0)
    q_at = row.to(tl.int64) * q_row_stride + head * q_head_stride
    pair_mask = is_pair[:, None] & (dim < HEAD_DIM)[None, :]
    queries = tl.load(q + q_at[:, None] + dim[None, :], mask=pair_mask, other=0.0)
    if DOT_IN_FLOAT32:
        queries = queries.to(tl.float32)

    # Keys that no pair of this tile sees are skipped, by whole iterations.
    last = tl.minimum(end_key, tl.max(end, 0))
    skipped = tl.maximum(tl.min(tl.where(is_pair, begin, end_key), 0) - first_key, 0)
    start = first_key + skipped // NUM_KEYS * NUM_KEYS

    largest = tl.full([NUM_PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([NUM_PAIRS], tl.float32)
    acc = tl.zeros([NUM_PAIRS, PADDED_DIM], tl.float32)
    for at in range(start, last, NUM_KEYS):
        key = at + tl.arange(0, NUM_KEYS)
        is_key = key < last
        block = tl.load(blocks + block_start + key // BLOCK_SIZE, mask=is_key, other=0)
        block = block.to(tl.int64)
        token = key % BLOCK_SIZE
        key_mask = is_key[:, None]
        if HEAD_DIM != PADDED_DIM:
            key_mask = key_mask & (dim < HEAD_DIM)[None, :]

        k_at = block * k_block_stride + token * k_token_stride + kv_head * k_head_stride
        keys = tl.load(k_cache + k_at[:, None] + dim[None, :], mask=key_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="tf32x3")
        if IS_QUANTISED:
            ks_at = block * k_scale_block_stride + token * k_scale_token_stride + kv_head
            scores *= tl.load(k_scale + ks_at, mask=is_key, other=0.0).to(tl.float32)[None, :]
        if HAS_SOFTCAP:
            scores = softcap * _tanh(scores * (scale / softcap)) * _LOG2_E
        else:
            scores *= scale * _LOG2_E
        is_seen = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        scores = tl.where(is_seen & is_key[None, :], scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        if IS_QUANTISED:
            vs_at = block * v_scale_block_stride + token * v_scale_token_stride + kv_head
            weights *= tl.load(v_scale + vs_at, mask=is_key, other=0.0).to(tl.float32)[None, :]
        v_at = block * v_block_stride + token * v_token_stride + kv_head * v_head_stride
        values = tl.load(v_cache + v_at[:, None] + dim[None, :], mask=key_mask, other=0.0)
        values = values.to(queries.dtype)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(queries.dtype), values, acc, input_precision="tf32x3")
        largest = new_largest

    is_any = total != 0  # also where it is NaN, which must show
    acc = tl.where(is_any[:, None], acc / tl.where(is_any, total, 1.0)[:, None], 0.0)
    lse = tl.where(is_any, (largest + tl.log2(tl.where(is_any, total, 1.0))) * _LN_2, largest)
    slot = tl.load(slots + slot_start + row_of, mask=is_pair, other=0)
    at = slot.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    tl.store(part_lse + at, lse, mask=is_pair)
    tl.store(part_out + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=pair_mask)


@triton.jit
def merge(
    part_out,
    part_lse,
    row_slots,
    out,
    lse,
    out_row_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
):
    """Merge the partial results of one row and head, in the order of its slots: grid [T x Hq].

    With m the largest lse: out = sum exp(lse_i - m) out_i / sum exp(lse_i - m), and lse = m + log
    of that sum. A slot with lse = -inf is absent, whatever its `out` holds; where all are, the
    result is (0, -inf).

    Args:
        part_out: float32 [num_slots, NUM_HEADS, D].
        part_lse: float32 [num_slots, NUM_HEADS].
        row_slots: where each row's slots begin and end.
        out: [T, NUM_HEADS, D], rows and heads strided; its dtype is what is rounded to.
        lse: float32 [T, NUM_HEADS].
        NUM_SLOTS: slots per iteration.
    """
    row = tl.program_id(0) // NUM_HEADS
    head = tl.program_id(0) % NUM_HEADS
    first = tl.load(row_slots + row)
    end = tl.load(row_slots + row + 1)
    dim = tl.arange(0, PADDED_DIM)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for slot in range(first, end, NUM_SLOTS):
        at = slot + tl.arange(0, NUM_SLOTS)
        is_slot = at < end
        at = at.to(tl.int64) * NUM_HEADS + head
        parts = tl.load(part_lse + at, mask=is_slot, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(parts, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2((parts - base) * _LOG2_E)
        shrink = tl.exp2((largest - base) * _LOG2_E)
        mask = (weights != 0)[:, None] & (dim < HEAD_DIM)[None, :]
        values = tl.load(part_out + at[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
        largest = new_largest
    is_any = total != 0
    divisor = tl.where(is_any, total, 1.0)
    at = row.to(tl.int64) * out_row_stride + head * out_head_stride
    merged = acc / divisor
    tl.store(out + at + dim, merged.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
    result = largest + tl.log2(divisor) * _LN_2
    tl.store(lse + row.to(tl.int64) * NUM_HEADS + head + tl.arange(0, 1), result)
