"""Ratios and lengths in closed form, as the papers state them; all differentiable and solvable.

Sources: MSA, arXiv 2606.13392 (eq. 12 and the text on input and output); MoBA, arXiv 2502.13189;
NSA, arXiv 2502.11089, table 4. The FLOPs counted are those of the papers: index or gate, and the
attention itself; projections, top-k and combine are left out (the stages in `counts_*` have them).
"""

from __future__ import annotations

import sympy
from sympy import Expr, Rational

from sparsify.cost_model import symbols as s
from sparsify.cost_model.counts_dense import attention_flops, kv_row_bytes
from sparsify.cost_model.counts_moba import gate_flops
from sparsify.cost_model.counts_msa import index_flops
from sparsify.cost_model.pairs import LEADING, Pairs

__all__ = [
    "EFFICIENCY_RATIO_ATTENTION",
    "EFFICIENCY_RATIO_INDEX",
    "crossover",
    "decode_byte_ratio",
    "flop_crossover",
    "flop_limit",
    "flop_ratio",
    "index_cache_share",
    "kv_outer_intensity",
    "moba_sparsity",
    "nsa_decode_tokens",
    "sparse_flops",
]

# Achieved rate of dense attention over that of the sparse kernels: rho_m and rho_i.
EFFICIENCY_RATIO_ATTENTION = sympy.Symbol("efficiency_ratio_attention", positive=True)
EFFICIENCY_RATIO_INDEX = sympy.Symbol("efficiency_ratio_index", positive=True)

_N, _BUDGET = s.CONTEXT_TOKENS, s.TOPK_BLOCKS * s.BLOCK_TOKENS


def _selection_flops(method: str, pairs: Pairs) -> Expr:
    if method == "msa":
        return index_flops(pairs)
    return gate_flops(pairs)


def sparse_flops(method: str, pairs: Pairs = LEADING) -> Expr:
    """Index or gate, and attention, of a whole prefill; FLOP."""
    attended = pairs.attended.subs(s.READ_BLOCKS, s.TOPK_BLOCKS)
    return _selection_flops(method, pairs) + attention_flops(attended)


def flop_ratio(method: str, pairs: Pairs = LEADING) -> Expr:
    """Dense over sparse FLOPs of a whole prefill, as a function of the context."""
    return sympy.cancel(attention_flops(pairs.dense) / sparse_flops(method, pairs))


def flop_limit(method: str) -> Expr:
    """What `flop_ratio` tends to for long contexts: 2 * group * head_dim / index_dim for MSA with
    equal head sizes, 2 * block for MoBA."""
    dense = attention_flops(LEADING.dense)
    return sympy.cancel(dense / _selection_flops(method, LEADING))


def flop_crossover(method: str) -> Expr:
    """Tokens above which the sparse FLOPs are fewer, by the leading terms."""
    equal = sympy.Eq(attention_flops(LEADING.dense), sparse_flops(method))
    (found,) = sympy.solve(equal, _N)
    return sympy.simplify(found)


def crossover(method: str) -> Expr:
    """Tokens above which sparse is faster when its kernels run at other rates than dense.

    2 k b rho_m / (1 - rho_i lambda), lambda being the cost of an index pair over that of a pair of
    attention. There is no crossover when rho_i * lambda reaches 1: the value is then negative or
    infinite.
    """
    index_cost = 1 / flop_limit(method)
    return 2 * _BUDGET * EFFICIENCY_RATIO_ATTENTION / (1 - EFFICIENCY_RATIO_INDEX * index_cost)


def decode_byte_ratio() -> Expr:
    """Dense over MSA cache bytes of a decode step: all keys and values against the index keys and
    the chosen blocks."""
    row = kv_row_bytes()
    index = s.INDEX_KEY_HEADS * s.INDEX_DIM * s.INDEX_BYTES
    return row * _N / (index * _N + row * _BUDGET)


def index_cache_share() -> Expr:
    """Bytes of the index cache over those of the KV cache."""
    return s.INDEX_KEY_HEADS * s.INDEX_DIM * s.INDEX_BYTES / kv_row_bytes()


def kv_outer_intensity() -> Expr:
    """FLOP per byte of MSA's KV-outer attention with its combine, keys and values left out, for
    equal head sizes in two-byte elements: 4 k b / (6 k + 2)."""
    return 4 * _BUDGET / (6 * s.TOPK_BLOCKS + 2)


def moba_sparsity() -> Expr:
    """MoBA's own measure, 1 - k b / N. It is not causal: the FLOP ratio is not its inverse."""
    return 1 - _BUDGET / _N


def nsa_decode_tokens() -> Expr:
    """Tokens that a decode step of NSA reads: compressed, selected and sliding ones."""
    return _N * Rational(1, 16) + 16 * 64 + 512
