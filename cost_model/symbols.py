"""The quantities that the formulas are written in; the unit stands in every name.

Counts are per attention layer. Tokens are per sequence; `_bytes` of a tensor are per element.
"""

from __future__ import annotations

import sympy

__all__ = [
    "BATCH_SEQUENCES",
    "BLOCK_TOKENS",
    "CONTEXT_TOKENS",
    "HEAD_DIM",
    "HIDDEN_DIM",
    "INDEX_BYTES",
    "INDEX_DIM",
    "INDEX_KEY_HEADS",
    "INDEX_QUERY_HEADS",
    "KEY_BYTES",
    "KEY_TOKENS",
    "KV_HEADS",
    "NEW_TOKENS",
    "OUTPUT_BYTES",
    "PREFIX_TOKENS",
    "QUERY_BYTES",
    "QUERY_HEADS",
    "READ_BLOCKS",
    "TOPK_BLOCKS",
    "VALUE_BYTES",
    "VALUE_DIM",
    "WEIGHT_BYTES",
]


def _count(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def _size(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True)


BATCH_SEQUENCES = _count("batch_sequences")
NEW_TOKENS = _count("new_tokens")
PREFIX_TOKENS = sympy.Symbol("prefix_tokens", integer=True, nonnegative=True)
KEY_TOKENS = PREFIX_TOKENS + NEW_TOKENS  # keys of a sequence, no symbol of its own
CONTEXT_TOKENS = _count("context_tokens")  # of closed forms in one length

QUERY_HEADS = _count("query_heads")
KV_HEADS = _count("kv_heads")
HEAD_DIM = _count("head_dim")
VALUE_DIM = _count("value_dim")
HIDDEN_DIM = _count("hidden_dim")

BLOCK_TOKENS = _count("block_tokens")
TOPK_BLOCKS = _count("topk_blocks")  # the own block included
READ_BLOCKS = _count("read_blocks")  # topk, or one more when the own block is added to them
INDEX_QUERY_HEADS = _count("index_query_heads")
INDEX_KEY_HEADS = _count("index_key_heads")
INDEX_DIM = _count("index_dim")

QUERY_BYTES = _size("query_bytes")
KEY_BYTES = _size("key_bytes")
VALUE_BYTES = _size("value_bytes")
OUTPUT_BYTES = _size("output_bytes")
INDEX_BYTES = _size("index_bytes")
WEIGHT_BYTES = _size("weight_bytes")
