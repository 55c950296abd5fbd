"""Mean key of every block.

Legend: R rows of a tile, D key size.
"""

import triton
import triton.language as tl

__all__ = ["block_means_fwd_kernel"]


@triton.jit(do_not_specialize=["S", "N", "groups"])
def block_means_fwd_kernel(
    k_ptr, means_ptr, slot_ptr, keys_ptr, mask_ptr,
    stride_kb, stride_kg, stride_ks, stride_kd,
    S, N, groups,
    BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr, STAGES: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sum over the real keys in float32, divided by their number, rounded to the key dtype."""
    c, head = tl.program_id(0) % N, tl.program_id(0) // N
    b, g = (head // groups).to(tl.int64), (head % groups).to(tl.int64)
    if PLAIN:
        slot = c * BLOCK
        keys = tl.minimum(S - slot, BLOCK)
    else:
        slot = tl.load(slot_ptr + b * N + c)
        keys = tl.load(keys_ptr + b * N + c)
    r_R, d_D = tl.arange(0, R), tl.arange(0, DP)
    sum_RD = tl.zeros([R, DP], tl.float32)
    count_R = tl.zeros([R], tl.int32)
    base = k_ptr + b * stride_kb + g * stride_kg
    for begin in tl.range(0, BLOCK, R, num_stages=STAGES):
        j_R = begin + r_R
        real_R = j_R < keys
        if MASKED:
            real_R = real_R & (tl.load(mask_ptr + b * S + slot + j_R, mask=real_R, other=0) != 0)
        row = (slot + j_R).to(tl.int64)[:, None] * stride_ks
        x_RD = tl.load(
            base + row + d_D[None, :] * stride_kd,
            mask=real_R[:, None] & (d_D < D)[None, :],
            other=0.0,
        )
        sum_RD += x_RD.to(tl.float32)
        count_R += real_R.to(tl.int32)
    count = tl.maximum(tl.sum(count_R, 0), 1).to(tl.float32)
    mean_D = (tl.sum(sum_RD, 0) / count).to(means_ptr.dtype.element_ty)
    row = (b * groups + g) * N + c
    tl.store(means_ptr + row * D + d_D, mean_D, mask=d_D < D)
