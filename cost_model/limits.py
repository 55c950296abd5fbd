"""What a method can gain at most, however long the context and however good its kernels.

Selecting costs something for every key: index products in prefill and training, index keys in
decode. Dense attention over that is a limit (`published.flop_limit` is the prefill one in closed
form).
"""

from __future__ import annotations

import math

from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.roofline import product_flops_per_s
from sparsify.cost_model.workload import AttentionShape, ElementBytes, Phase

__all__ = ["speedup_limit"]


def speedup_limit(
    configuration: Configuration,
    shape: AttentionShape,
    phase: Phase,
    gpu: Gpu,
    element_bytes: ElementBytes,
) -> float:
    """The limit of the speed-up over dense attention; infinite for dense itself.

    Llama-3.1-8B in prefill: 8 for MSA with a learned index of 128, and 8 with the proxy; in
    training 28, since the backward pass scores the chosen blocks only.
    """
    if not configuration.sparse:
        return math.inf
    if phase is Phase.DECODE:
        return _read_limit(configuration, shape, element_bytes)
    forward = _product_limit(configuration, shape, gpu, element_bytes)
    return forward * _passes(shape) if phase is Phase.TRAINING else forward


def _product_limit(
    configuration: Configuration, shape: AttentionShape, gpu: Gpu, element_bytes: ElementBytes
) -> float:
    dense = shape.q_heads * (shape.head_dim + shape.value_dim)
    if configuration.method == "moba":
        return dense * configuration.block_size / (shape.q_heads * shape.head_dim)
    index = shape.kv_heads * (configuration.index_dim or shape.head_dim)
    learned = configuration.indexer == "learned"
    index_bytes = element_bytes.index if learned else element_bytes.key
    index_rate = product_flops_per_s(index_bytes, gpu)
    return dense / index * index_rate / product_flops_per_s(element_bytes.key, gpu)


def _passes(shape: AttentionShape) -> float:
    """Products of a dense forward and backward pass over those of the forward pass."""
    forward = shape.head_dim + shape.value_dim
    return (forward + 3 * shape.head_dim + 2 * shape.value_dim) / forward


def _read_limit(
    configuration: Configuration, shape: AttentionShape, element_bytes: ElementBytes
) -> float:
    """Bytes of keys and values over those that selecting reads, per cached token."""
    if configuration.decode == "dense":
        return 1.0
    keys = shape.kv_heads * shape.head_dim * element_bytes.key
    rows = keys + shape.kv_heads * shape.value_dim * element_bytes.value
    if configuration.method == "moba":
        return rows * configuration.block_size / keys
    if configuration.indexer == "learned":
        return rows / ((configuration.index_dim or shape.head_dim) * element_bytes.index)
    return rows / keys
