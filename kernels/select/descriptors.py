"""Descriptors by which the tensor memory accelerator fetches tiles of keys, values and queries."""

from __future__ import annotations

from torch import Tensor

__all__ = ["swizzled", "tiles"]


def tiles(x: Tensor, rows: int) -> object:
    """Tiles of `rows` rows of one head of `x`, which is `[B, H, T, D]`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, x.shape[3]])


def swizzled(x: Tensor, box: list[int]) -> object:
    """Boxes of two-byte elements as Gluon fetches them, swizzled as products read them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)
