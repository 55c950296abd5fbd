"""Calls of MoBA's ops on a GPU, and their check against the reference in float64.

Kernels are compiled per shape, which costs more time than running them: most tests share the shape
of `base`, and lengths that 16 does not divide.
"""

from __future__ import annotations

import pytest
import torch

from sparsify.kernels import schemas
from sparsify.kernels.layout import Layout
from tests._util.parity import assert_attention, assert_lists, inputs

__all__ = [
    "BF16",
    "BLOCK",
    "DEVICE",
    "FP16",
    "FP32",
    "KEYS",
    "NEEDS_GPU",
    "SIZE",
    "TOPK",
    "attend",
    "base",
    "check",
    "choose",
    "layouts",
    "strided",
    "tensor",
]

DEVICE = "cuda"
BLOCK, TOPK = 128, 8
KEYS = 4611  # 37 blocks: more than the lists of the exact kernel would take at once
SIZE = 128
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# The marks of test files that run kernels on a GPU.
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("kernels_alone"),
]


def base(**sizes):
    """Tensors of the shape that most tests share."""
    given = {"heads": 4, "groups": 2, "keys": KEYS, "size": SIZE, "dtype": BF16} | sizes
    return inputs(**given, device=DEVICE)


def choose(x, block=BLOCK, topk=TOPK, **where):
    return schemas.moba_select(x.q, x.k, block_size=block, topk=topk, **where)


def attend(x, block=BLOCK, topk=TOPK, **options):
    return schemas.moba_attention(*x, block_size=block, topk=topk, **options)


def check(x, block=BLOCK, topk=TOPK, **where):
    """Choice and output of one call."""
    layout, lists = Layout(**where), choose(x, block, topk, **where)
    assert_lists(lists, x, block, topk, layout=layout)
    got = attend(x, block, topk, **where)
    assert_attention(got, lists, x, block, layout=layout)
    return got


def tensor(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def layouts():
    at = torch.arange(KEYS, device=DEVICE)
    borders = [0, 700, 700, 1801, KEYS - 40, KEYS]
    return {
        "lengths": {
            "kv_len": tensor([KEYS, 3003]),
            "q_start": tensor([KEYS - 650, 2000]),
            "block_origin": tensor([0, 77]),
        },
        "documents": {"cu_seqlens_q": tensor(borders)},
        "left padding": {"key_mask": at[None] >= tensor([[0], [333]])},
        "holes": {"key_mask": (at % 301 > 30)[None].repeat(2, 1)},
    }


def strided(name, x):
    """The same numbers laid out otherwise."""
    q, k, v = x
    if name == "transposed":  # as projections leave them
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in x)
    elif name == "sliced":  # parts of one projection
        parts = [t.repeat_interleave(4 // t.shape[1], 1) for t in x]
        every = torch.stack(parts, 3).flatten(3)
        size = q.shape[-1]
        q = every[..., :size]
        k, v = every[:, ::2, :, size : 2 * size], every[:, ::2, :, 2 * size :]
    elif name == "offset":  # not aligned
        q, k, v = (unaligned(t) for t in x)
    elif name == "keys across":  # the head axis is not the innermost
        k, v = k.mT.contiguous().mT, v.mT.contiguous().mT
    return type(x)(q, k, v)


def unaligned(t):
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
    return buffer.view(t.shape).copy_(t)
