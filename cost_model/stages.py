"""Which stages a configuration runs in a call, and what it keeps in memory between calls."""

from __future__ import annotations

import functools
import itertools

import sympy

from sparsify.cost_model import (
    counts_dense,
    counts_moba,
    counts_msa,
    counts_training,
)
from sparsify.cost_model import symbols as s
from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.counts import StageFormula
from sparsify.cost_model.pairs import EXACT, Pairs
from sparsify.cost_model.workload import Phase, Workload

__all__ = [
    "cache_write_bytes",
    "index_cache_bytes",
    "known_families",
    "kv_cache_bytes",
    "runs_sparse",
    "stage_formulas",
]

Stages = tuple[StageFormula, ...]

# What only serves the choice of blocks; with the own block alone there is nothing to choose.
CHOOSING = frozenset(
    [
        "copy",
        "gemm",
        "moba_decode_gate",
        "moba_gate",
        "moba_means",
        "msa_decode_index",
        "msa_decode_proxy_index",
        "msa_index",
        "msa_index_loss",
        "msa_proxy_index",
        "msa_topk",
        "reverse_index",
    ]
)


def runs_sparse(configuration: Configuration, workload: Workload) -> bool:
    """Whether the call leaves anything out: `decode: dense` turns a decode step dense."""
    dense_step = workload.phase is Phase.DECODE and configuration.decode == "dense"
    return configuration.sparse and not dense_step


def stage_formulas(
    configuration: Configuration, workload: Workload, pairs: Pairs = EXACT
) -> Stages:
    """The stages of one attention layer, in order."""
    sparse = runs_sparse(configuration, workload)
    short = workload.new_tokens < counts_msa.SHORT_QUERIES
    stages = _formulas(
        configuration.method if sparse else "dense",
        configuration.indexer == "learned",
        workload.phase,
        short,
        pairs,
    )
    if configuration.topk == 1 and configuration.local == "inside":
        return tuple(stage for stage in stages if stage.family not in CHOOSING)
    return stages


@functools.lru_cache(maxsize=64)
def _formulas(method: str, learned: bool, phase: Phase, short: bool, pairs: Pairs) -> Stages:
    forward = _decode if phase is Phase.DECODE else _prefill
    stages = forward(method, learned, short, pairs)
    if phase is Phase.TRAINING:
        stages += _backward(method, learned, pairs)
    return stages


def _prefill(method: str, learned: bool, short: bool, pairs: Pairs) -> Stages:
    if method == "dense":
        return counts_dense.prefill(pairs)
    if method == "moba":
        return counts_moba.prefill(pairs)
    return counts_msa.prefill(learned, short, pairs)


def _decode(method: str, learned: bool, short: bool, pairs: Pairs) -> Stages:
    if method == "dense":
        return counts_dense.decode(pairs)
    if method == "moba":
        return counts_moba.decode(pairs)
    return counts_msa.decode(learned, pairs)


def _backward(method: str, learned: bool, pairs: Pairs) -> Stages:
    if method == "dense":
        return (counts_training.backward("dense_backward", pairs.dense, sympy.Integer(1)),)
    stages = (counts_training.backward(f"{method}_backward", pairs.attended, s.READ_BLOCKS),)
    return (*stages, counts_training.index_loss(pairs)) if learned else stages


@functools.cache
def known_families() -> frozenset[str]:
    """The families of all stages there are."""
    cases = itertools.product(("dense", "moba", "msa"), (True, False), Phase, (True, False))
    every = (
        _formulas(method, learned and method == "msa", phase, short, EXACT)
        for method, learned, phase, short in cases
    )
    return frozenset(stage.family for stages in every for stage in stages)


def kv_cache_bytes() -> sympy.Expr:
    """Keys and values of all tokens, for one layer."""
    return s.BATCH_SEQUENCES * s.KEY_TOKENS * counts_dense.kv_row_bytes()


def index_cache_bytes(configuration: Configuration) -> sympy.Expr:
    """What decode keeps beside the KV cache: index keys, or the means of the blocks."""
    if configuration.method == "msa" and configuration.indexer == "learned":
        return counts_msa.index_key_bytes()
    if configuration.method == "moba" and configuration.decode == "sparse":
        return counts_moba.means_bytes()
    return sympy.Integer(0)


def cache_write_bytes(configuration: Configuration) -> sympy.Expr:
    """What a call adds to the caches of one layer; the projections before it write it."""
    kv = s.BATCH_SEQUENCES * s.NEW_TOKENS * counts_dense.kv_row_bytes()
    index = index_cache_bytes(configuration)
    return (
        kv
        + index
        - index.xreplace({s.PREFIX_TOKENS: sympy.Integer(0), s.NEW_TOKENS: s.PREFIX_TOKENS})
    )
