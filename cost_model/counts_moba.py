"""MoBA: gate by block means, then attention over the chosen blocks (arXiv 2502.13189).

Prefill is KV-outer (FlashMoBA, arXiv 2511.11571): queries are gathered per key block, each chosen
past block leaves a partial output, and the own block is attended while they are combined.
"""

from __future__ import annotations

from sympy import Expr, Min, ceiling

from sparsify.cost_model import symbols as s
from sparsify.cost_model.counts import TILE_ROWS, StageFormula
from sparsify.cost_model.counts_dense import attention_flops, kv_row_bytes, q_and_o_bytes
from sparsify.cost_model.pairs import EXACT, Pairs

__all__ = ["decode", "gate_flops", "means_bytes", "prefill", "read_in_decode"]

_BLOCKS = ceiling(s.KEY_TOKENS / s.BLOCK_TOKENS)
_QUERIES = s.BATCH_SEQUENCES * s.NEW_TOKENS * s.QUERY_HEADS
_PAST = s.TOPK_BLOCKS - 1


def means_bytes() -> Expr:
    """The mean key of every block, which decode keeps beside the cache."""
    return s.BATCH_SEQUENCES * _BLOCKS * s.KV_HEADS * s.HEAD_DIM * s.KEY_BYTES


def gate_flops(pairs: Pairs) -> Expr:
    """Every query head scores the mean key of every complete past block."""
    return 2 * s.BATCH_SEQUENCES * s.QUERY_HEADS * s.HEAD_DIM * pairs.past_blocks


def prefill(pairs: Pairs = EXACT) -> tuple[StageFormula, ...]:
    """Block means, gate with top-k, reverse index, KV-outer attention, combine."""
    return (
        StageFormula(
            "block means",
            "moba_means",
            dram_bytes=s.BATCH_SEQUENCES * s.KEY_TOKENS * s.KV_HEADS * s.HEAD_DIM * s.KEY_BYTES
            + means_bytes(),
        ),
        StageFormula(
            "gate and top-k",
            "moba_gate",
            flops=gate_flops(pairs),
            dram_bytes=_QUERIES * (s.HEAD_DIM * s.QUERY_BYTES + 4 * s.TOPK_BLOCKS) + means_bytes(),
            tiles=s.BATCH_SEQUENCES * s.QUERY_HEADS * ceiling(s.NEW_TOKENS / TILE_ROWS),
        ),
        StageFormula(
            "reverse index", "reverse_index", dram_bytes=16 * _QUERIES * _PAST, launches=3
        ),
        StageFormula(
            "attention",
            "moba_attention",
            flops=attention_flops(pairs.attended),
            dram_bytes=s.BATCH_SEQUENCES * s.KEY_TOKENS * kv_row_bytes()
            + _QUERIES * _PAST * (s.HEAD_DIM * s.QUERY_BYTES + s.VALUE_DIM * s.OUTPUT_BYTES),
            workspace_bytes=_partial_bytes(),
            tiles=ceiling(_QUERIES * s.TOPK_BLOCKS / TILE_ROWS),
        ),
        StageFormula(
            "combine",
            "combine",
            dram_bytes=_QUERIES * (s.TOPK_BLOCKS * s.VALUE_DIM * s.OUTPUT_BYTES + 4 * _PAST),
        ),
    )


def _partial_bytes() -> Expr:
    """An output and a float32 log-sum-exp for every query, head and chosen past block."""
    return _QUERIES * _PAST * (s.VALUE_DIM * s.OUTPUT_BYTES + 4)


def read_in_decode() -> Expr:
    """Blocks of one key/value head that the query heads of its group read together.

    Each head chooses for itself; for choices that do not depend on each other the union of
    `group` heads has n * (1 - (1 - k/n)^group) blocks of n. At most all n.
    """
    chosen = Min(1, s.TOPK_BLOCKS / _BLOCKS)
    return _BLOCKS * (1 - (1 - chosen) ** (s.QUERY_HEADS / s.KV_HEADS))


def decode(pairs: Pairs = EXACT) -> tuple[StageFormula, ...]:
    """Gate over the cached means, then the union of the chosen blocks of each group."""
    return (
        StageFormula(
            "gate and top-k",
            "moba_decode_gate",
            flops=gate_flops(pairs),
            dram_bytes=means_bytes(),
            launches=2,
        ),
        StageFormula(
            "attention",
            "moba_decode_attention",
            flops=attention_flops(pairs.attended),
            dram_bytes=s.BATCH_SEQUENCES
            * (
                Min(s.KEY_TOKENS, s.BLOCK_TOKENS * read_in_decode()) * kv_row_bytes()
                + s.NEW_TOKENS * q_and_o_bytes()
            ),
            launches=2,
        ),
    )
