"""The proxy indexer's tensors."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsify.kernels.proxy import proxy_index

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def tensors(dtype, heads=6, groups=2, length=9, size=8):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, length, heads, size, generator=generator, dtype=torch.float64)
    k = torch.randn(2, groups, length, size, generator=generator, dtype=torch.float64)
    return q.to(dtype).transpose(1, 2), k.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_are_means_of_their_group_and_keys_are_the_keys(dtype):
    q, k = tensors(dtype)
    iq, ik = proxy_index(q, k)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert iq.dtype == wide and ik is k
    for group in range(2):
        mean = q[:, 3 * group : 3 * group + 3].double().mean(1)
        torch.testing.assert_close(iq[:, group].double(), mean, rtol=1e-6, atol=1e-6)


def test_means_are_not_rounded_to_the_queries_dtype():
    q, k = tensors(torch.bfloat16)
    iq, _ = proxy_index(q, k)
    assert not torch.equal(iq, iq.bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_queries_are_never_held_in_float32(dtype):
    """Where the device sums wide by itself; on the CPU torch widens inside of the one operator."""
    q, k = tensors(dtype)
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            made.append((str(function), out.dtype, out.numel()))
            return out

    with Watch():
        proxy_index(q, k)
    wide = [numel for _, kind, numel in made if kind == torch.float32]
    assert wide and max(wide) == q.numel() // 3
