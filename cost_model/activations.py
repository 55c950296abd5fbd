"""Passes over activations between products: norms, residuals, rotary embedding, gates.

Fused into their neighbours they cost next to nothing; run one by one, as PyTorch does without a
compiler, each reads and writes device memory. So they widen a range and move nothing else.
"""

from __future__ import annotations

from sparsify.cost_model.model_shape import LayerShape

__all__ = ["most_activation_bytes"]

# Bytes per number in two-byte elements, counted on the operations of transformers' Llama.
NORM_BYTES = 36  # to float32, square, mean, scale, back, weight
RESIDUAL_BYTES = 6
ROTARY_BYTES = 20  # two products, a half turned and put together, a sum; of queries and keys
OUTPUT_BYTES = 4  # heads put side by side
GATE_BYTES = 10  # activation and product, of each of the three matrices' width
NORMS = 2
GATED_MATRICES = 3


def most_activation_bytes(layer: LayerShape, hidden_size: int, degree: int) -> float:
    """Bytes per token on one of `degree` GPUs when every pass runs by itself.

    Norms and residuals are not split over GPUs. An MLP without a gate is taken for one of as many
    weights with it.
    """
    whole = hidden_size * NORMS * (NORM_BYTES + RESIDUAL_BYTES)
    split = GATE_BYTES * layer.mlp_params_active / (GATED_MATRICES * hidden_size)
    if layer.attention is not None:
        heads = layer.attention
        split += ROTARY_BYTES * (heads.q_heads + heads.kv_heads) * heads.head_dim
        split += OUTPUT_BYTES * heads.q_heads * heads.value_dim
    return whole + split / degree
