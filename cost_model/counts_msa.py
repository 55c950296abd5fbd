"""MSA: an index scores every token, blocks are chosen per key/value head (arXiv 2606.13392).

The learned indexer has one shared index key and one index query per key/value head; the proxy takes
the mean of the group's queries, in float32, and the layer's own keys. Such queries take several
products each, so its index kernels are a family of their own; bounds count one. Prefill is
KV-outer: each chosen past block leaves a partial output, and the own block is attended while they
are combined. With fewer than `SHORT_QUERIES` queries it is Q-outer, bound by the L2 cache.
"""

from __future__ import annotations

from sympy import Expr, Max, Min, ceiling, floor

from sparsify.cost_model import symbols as s
from sparsify.cost_model.counts import TILE_ROWS, StageFormula
from sparsify.cost_model.counts_dense import attention_flops, kv_row_bytes, q_and_o_bytes
from sparsify.cost_model.pairs import EXACT, Pairs

__all__ = ["SHORT_QUERIES", "decode", "index_flops", "index_key_bytes", "prefill"]

# Below this many queries this package's kernels go query by query.
SHORT_QUERIES = 33
# Scores of few queries are shared out by segments of the keys, of so many blocks at least.
SEGMENT_BLOCKS = 16

_TOKENS = s.BATCH_SEQUENCES * s.NEW_TOKENS
_QUERIES = _TOKENS * s.QUERY_HEADS


def index_key_bytes() -> Expr:
    """The index keys of all tokens: the index cache of the learned indexer."""
    return s.BATCH_SEQUENCES * s.KEY_TOKENS * s.INDEX_KEY_HEADS * s.INDEX_DIM * s.INDEX_BYTES


def index_flops(pairs: Pairs = EXACT) -> Expr:
    """Every visible token is scored by every index query."""
    return 2 * s.BATCH_SEQUENCES * s.INDEX_QUERY_HEADS * s.INDEX_DIM * pairs.dense


def _index_query_bytes() -> Expr:
    return _TOKENS * s.INDEX_QUERY_HEADS * s.INDEX_DIM * s.INDEX_BYTES


def _block_score_bytes(pairs: Pairs) -> Expr:
    return 4 * s.BATCH_SEQUENCES * s.INDEX_QUERY_HEADS * pairs.visible_blocks


def _score_tiles() -> Expr:
    rows = ceiling(s.NEW_TOKENS * s.INDEX_QUERY_HEADS / TILE_ROWS)
    segments = floor(s.KEY_TOKENS / (SEGMENT_BLOCKS * s.BLOCK_TOKENS))
    return s.BATCH_SEQUENCES * rows * Max(1, segments)


def _make_index(learned: bool) -> StageFormula:
    """Index queries and keys: projections of the hidden state, or means of the queries."""
    if not learned:
        mean = s.KV_HEADS * s.HEAD_DIM * s.QUERY_BYTES
        read = s.QUERY_HEADS * s.HEAD_DIM * s.QUERY_BYTES
        return StageFormula("index queries", "copy", dram_bytes=_TOKENS * (read + mean))
    width = s.INDEX_DIM * (s.INDEX_QUERY_HEADS + s.INDEX_KEY_HEADS)
    activations = _TOKENS * (s.HIDDEN_DIM * s.QUERY_BYTES + width * s.INDEX_BYTES)
    return StageFormula(
        "index projections",
        "gemm",
        flops=2 * _TOKENS * s.HIDDEN_DIM * width,
        dram_bytes=s.HIDDEN_DIM * width * s.WEIGHT_BYTES + activations,
    )


def prefill(learned: bool, short: bool = False, pairs: Pairs = EXACT) -> tuple[StageFormula, ...]:
    """Index, scores, top-k, then KV-outer attention with a combine, or Q-outer when `short`."""
    scores = _block_score_bytes(pairs)
    head = (
        _make_index(learned),
        StageFormula(
            "index scores",
            "msa_index" if learned else "msa_proxy_index",
            flops=index_flops(pairs),
            dram_bytes=_index_query_bytes() + index_key_bytes() + scores,
            workspace_bytes=scores,
            tiles=_score_tiles(),
            on_index=learned,
        ),
        StageFormula(
            "top-k",
            "msa_topk",
            dram_bytes=scores + 4 * _TOKENS * s.KV_HEADS * s.READ_BLOCKS,
        ),
    )
    return head + (_q_outer(pairs) if short else _kv_outer(pairs))


def _kv_outer(pairs: Pairs) -> tuple[StageFormula, ...]:
    past = s.READ_BLOCKS - 1
    index = 16 * _TOKENS * past * s.KV_HEADS
    gathered = _TOKENS * past * q_and_o_bytes()
    # As the paper counts it: all blocks that are read.
    partial = _QUERIES * s.READ_BLOCKS * (s.VALUE_DIM * s.OUTPUT_BYTES + 4)
    return (
        StageFormula("reverse index", "reverse_index", dram_bytes=index, launches=3),
        StageFormula(
            "attention",
            "msa_attention",
            flops=attention_flops(pairs.attended),
            dram_bytes=s.BATCH_SEQUENCES * s.KEY_TOKENS * kv_row_bytes() + gathered,
            workspace_bytes=partial,
            tiles=ceiling(_QUERIES * s.READ_BLOCKS / TILE_ROWS),
        ),
        StageFormula(
            "combine",
            "msa_combine",
            dram_bytes=_QUERIES * (s.READ_BLOCKS * s.VALUE_DIM * s.OUTPUT_BYTES + 4 * past),
        ),
    )


def _q_outer(pairs: Pairs) -> tuple[StageFormula, ...]:
    read = s.NEW_TOKENS * s.READ_BLOCKS * s.BLOCK_TOKENS
    return (
        StageFormula(
            "attention",
            "msa_short_attention",
            flops=attention_flops(pairs.attended),
            dram_bytes=s.BATCH_SEQUENCES * Min(s.KEY_TOKENS, read) * kv_row_bytes()
            + _TOKENS * q_and_o_bytes(),
            l2_bytes=s.BATCH_SEQUENCES * pairs.attended * kv_row_bytes(),
        ),
    )


def decode(learned: bool, pairs: Pairs = EXACT) -> tuple[StageFormula, ...]:
    """The index cache is read whole, then the chosen blocks; split kernels and a merge each.

    Of few lists the attention ranks the blocks itself: a launch less, and a measured time of the
    attention holds what elsewhere is in that of the index.
    """
    read = s.NEW_TOKENS * s.READ_BLOCKS * s.BLOCK_TOKENS
    return (
        _make_index(learned),
        StageFormula(
            "index and top-k",
            "msa_decode_index" if learned else "msa_decode_proxy_index",
            flops=index_flops(pairs),
            dram_bytes=index_key_bytes(),
            launches=2,
            on_index=learned,
        ),
        StageFormula(
            "attention",
            "msa_decode_attention",
            flops=attention_flops(pairs.attended),
            dram_bytes=s.BATCH_SEQUENCES * Min(s.KEY_TOKENS, read) * kv_row_bytes()
            + _TOKENS * q_and_o_bytes(),
            launches=2,
        ),
    )
