"""The backward pass, and the KL term that teaches a learned indexer.

FLOPs as in MSA's training benchmark (MiniMax-AI/MSA, benchmarks/training/msa_v1): five products of
the attended pairs, three over head_dim and two over value_dim; the selection has no gradient. The
forward pass is not computed again (no activation checkpointing).
"""

from __future__ import annotations

from sympy import Expr

from sparsify.cost_model import symbols as s
from sparsify.cost_model.counts import StageFormula
from sparsify.cost_model.counts_dense import kv_row_bytes, q_and_o_bytes
from sparsify.cost_model.pairs import EXACT, Pairs

__all__ = ["backward", "backward_flops", "index_loss", "index_loss_flops"]


def backward_flops(pairs: Expr) -> Expr:
    """Scores again, then the gradients of values, probabilities, queries and keys."""
    width = 3 * s.HEAD_DIM + 2 * s.VALUE_DIM
    return 2 * s.BATCH_SEQUENCES * s.QUERY_HEADS * width * pairs


def index_loss_flops(pairs: Expr) -> Expr:
    """Teacher and student scores of the attended pairs, and the student's gradients."""
    width = s.HEAD_DIM * s.QUERY_HEADS + 3 * s.INDEX_DIM * s.INDEX_QUERY_HEADS
    return 2 * s.BATCH_SEQUENCES * width * pairs


def backward(family: str, pairs: Expr, reads: Expr) -> StageFormula:
    """Gradients of q, k and v.

    Args:
        pairs: the pairs that the forward pass computed.
        reads: how often each query is gathered: 1, or the number of blocks that it reads.
    """
    tokens = s.BATCH_SEQUENCES * s.NEW_TOKENS
    keys = 2 * s.BATCH_SEQUENCES * s.KEY_TOKENS * kv_row_bytes()
    return StageFormula(
        "backward",
        family,
        flops=backward_flops(pairs),
        # Queries and output gradients are gathered, query gradients added in float32.
        dram_bytes=keys + tokens * reads * (q_and_o_bytes() + 4 * s.QUERY_HEADS * s.HEAD_DIM),
        launches=2,
    )


def index_loss(pairs: Pairs = EXACT) -> StageFormula:
    """KL divergence of the index scores from the attention of the chosen blocks, with gradients."""
    tokens = s.BATCH_SEQUENCES * s.NEW_TOKENS
    gathered = tokens * s.READ_BLOCKS * s.INDEX_QUERY_HEADS * s.INDEX_DIM * (s.INDEX_BYTES + 4)
    return StageFormula(
        "index loss", "msa_index_loss", flops=index_loss_flops(pairs.attended), dram_bytes=gathered
    )
