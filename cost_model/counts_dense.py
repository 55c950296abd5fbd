"""Dense causal attention: one kernel (FlashAttention, arXiv 2205.14135), prefill or decode."""

from __future__ import annotations

from sympy import Expr, ceiling

from sparsify.cost_model import symbols as s
from sparsify.cost_model.counts import TILE_ROWS, StageFormula
from sparsify.cost_model.pairs import EXACT, Pairs

__all__ = ["attention_flops", "decode", "kv_row_bytes", "prefill", "q_and_o_bytes"]


def attention_flops(pairs: Expr) -> Expr:
    """Both products, for all query heads."""
    return 2 * s.BATCH_SEQUENCES * s.QUERY_HEADS * (s.HEAD_DIM + s.VALUE_DIM) * pairs


def kv_row_bytes() -> Expr:
    """Bytes of the keys and values of one token."""
    return s.KV_HEADS * (s.HEAD_DIM * s.KEY_BYTES + s.VALUE_DIM * s.VALUE_BYTES)


def q_and_o_bytes() -> Expr:
    """Bytes of the queries and outputs of one token."""
    return s.QUERY_HEADS * (s.HEAD_DIM * s.QUERY_BYTES + s.VALUE_DIM * s.OUTPUT_BYTES)


def _all_kv_bytes() -> Expr:
    return s.BATCH_SEQUENCES * s.KEY_TOKENS * kv_row_bytes()


def prefill(pairs: Pairs = EXACT) -> tuple[StageFormula, ...]:
    """Queries of a whole text or of a chunk; keys and values are re-read from the L2 cache."""
    return (
        StageFormula(
            name="attention",
            family="dense_prefill",
            flops=attention_flops(pairs.dense),
            dram_bytes=s.BATCH_SEQUENCES * s.NEW_TOKENS * q_and_o_bytes() + _all_kv_bytes(),
            tiles=s.BATCH_SEQUENCES * s.QUERY_HEADS * ceiling(s.NEW_TOKENS / TILE_ROWS),
        ),
    )


def decode(pairs: Pairs = EXACT) -> tuple[StageFormula, ...]:
    """The whole cache is read once for each new token of each sequence, or few new tokens."""
    return (
        StageFormula(
            name="attention",
            family="dense_decode",
            flops=attention_flops(pairs.dense),
            dram_bytes=s.BATCH_SEQUENCES * s.NEW_TOKENS * q_and_o_bytes() + _all_kv_bytes(),
        ),
    )
