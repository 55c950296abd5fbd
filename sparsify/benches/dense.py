"""Dense attention by torch's own kernels: what sparse attention has to beat.

Legend: B batch, H query heads, G key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from sparsify.timing import Run, Timing

__all__ = ["BACKENDS", "best", "dense_call", "dense_times"]

# FlashAttention-2 and cuDNN on a GPU; on a CPU the first is torch's fused kernel.
BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
# What a GPU has for float32.
FLOAT32 = {"sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION}
LOGGER = logging.getLogger("sparsify")


def dense_call(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, backend: SDPBackend) -> Run:
    """Causal attention by one backend, the queries at the end of the keys: one alone sees all of
    them. With fewer queries than keys FlashAttention is the one that can."""
    grouped = q_BHTD.shape[1] != k_BGSD.shape[1]
    queries, keys = q_BHTD.shape[2], k_BGSD.shape[2]
    mask = causal_lower_right(queries, keys) if 1 < queries < keys else None
    causal = queries > 1 and mask is None

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q_BHTD, k_BGSD, v_BGSD, attn_mask=mask, is_causal=causal, enable_gqa=grouped
            )

    return run


def dense_times(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    timer: Callable[[Run], Timing],
    names: Collection[str] | None = None,
) -> dict[str, Timing]:
    """Times by backend, of all or of those named; one that cannot run the call is left out."""
    found = {}
    chunk = 1 < q_BHTD.shape[2] < k_BGSD.shape[2]
    for name, backend in _backends(q_BHTD).items():
        if chunk and backend is not SDPBackend.FLASH_ATTENTION:
            continue  # another would be given a mask in memory, or none
        if names is not None and name not in names:
            continue
        try:
            found[name] = timer(dense_call(q_BHTD, k_BGSD, v_BGSD, backend))
        except RuntimeError as error:  # out of memory is one
            LOGGER.info("%s does not run this call: %s", name, _first_line(error))
    return found


def _backends(q_BHTD: Tensor) -> dict[str, SDPBackend]:
    if q_BHTD.device.type == "cpu":
        return {"sdpa_flash": SDPBackend.FLASH_ATTENTION}
    return FLOAT32 if q_BHTD.dtype == torch.float32 else BACKENDS


def best(times: dict[str, Timing]) -> str | None:
    """The name of the fastest."""
    return min(times, key=lambda name: times[name].median_ms, default=None)


def _first_line(error: Any) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
