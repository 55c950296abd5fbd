"""FLOPs and bytes of every stage of an attention layer, as formulas and as exact numbers.

A stage is one kernel, or a few that belong together. Multiply-add counts as two FLOPs; softmax,
max-pooling and comparisons are not counted, as in the papers. `dram_bytes` is the traffic that
cannot be avoided, `l2_bytes` what a kernel re-reads through the L2 cache.

The stages of each method are in `counts_dense`, `counts_moba`, `counts_msa` and `counts_training`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy
from sympy.printing.pycode import PythonCodePrinter

from sparsify.cost_model import symbols as s
from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.workload import AttentionShape, ElementBytes, Workload

__all__ = ["StageCounts", "StageFormula", "counted", "values_of"]

# Rows of queries that one thread block takes, in every public kernel for long contexts.
TILE_ROWS = 128

ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class StageFormula:
    """One stage, for all sequences of the batch.

    Args:
        name: for people; `family` names the kernels that share an efficiency.
        flops: tensor-core work, FLOP; `on_index` when its operands are the index tensors.
        dram_bytes, l2_bytes: traffic in bytes.
        workspace_bytes: memory that lives only during the call.
        launches: kernels started.
        tiles: thread blocks that share the work; None when it divides freely.
    """

    name: str
    family: str
    flops: sympy.Expr = ZERO
    dram_bytes: sympy.Expr = ZERO
    l2_bytes: sympy.Expr = ZERO
    workspace_bytes: sympy.Expr = ZERO
    launches: int = 1
    tiles: sympy.Expr | None = None
    on_index: bool = False


@dataclass(frozen=True, slots=True)
class StageCounts:
    """The numbers of a stage: FLOP, bytes, kernels, thread blocks."""

    name: str
    family: str
    flops: int
    dram_bytes: int
    l2_bytes: int
    workspace_bytes: int
    launches: int
    tiles: int | None
    on_index: bool


Values = Mapping[sympy.Symbol, Any]


def values_of(
    shape: AttentionShape,
    workload: Workload,
    configuration: Configuration,
    element_bytes: ElementBytes,
    hidden_size: int | None = None,
) -> dict[sympy.Symbol, Any]:
    """What the symbols stand for in one call."""
    # No more blocks are chosen than there are: counted beyond that, a short call would have a bound
    # that kernels can beat.
    blocks = math.ceil(workload.context_tokens / (configuration.block_size or 1))
    topk = min(configuration.topk, blocks)
    read = min(configuration.topk + (configuration.local == "union"), blocks)
    learned = configuration.indexer == "learned"
    return {
        s.BATCH_SEQUENCES: workload.batch,
        s.NEW_TOKENS: workload.new_tokens,
        s.PREFIX_TOKENS: workload.prefix_tokens,
        s.CONTEXT_TOKENS: workload.context_tokens,
        s.QUERY_HEADS: shape.q_heads,
        s.KV_HEADS: shape.kv_heads,
        s.HEAD_DIM: shape.head_dim,
        s.VALUE_DIM: shape.value_dim,
        s.HIDDEN_DIM: hidden_size or 0,
        s.BLOCK_TOKENS: configuration.block_size or 1,
        s.TOPK_BLOCKS: topk or 1,
        s.READ_BLOCKS: read or 1,
        s.INDEX_QUERY_HEADS: shape.kv_heads,
        s.INDEX_KEY_HEADS: 1 if learned else shape.kv_heads,
        s.INDEX_DIM: configuration.index_dim or shape.head_dim,
        s.QUERY_BYTES: element_bytes.query,
        s.KEY_BYTES: element_bytes.key,
        s.VALUE_BYTES: element_bytes.value,
        s.OUTPUT_BYTES: element_bytes.output,
        # The proxy scores with the layer's own keys, so it has no cheaper index.
        s.INDEX_BYTES: element_bytes.index if learned else element_bytes.key,
        s.WEIGHT_BYTES: element_bytes.weight,
    }


def counted(formula: StageFormula, values: Values) -> StageCounts:
    """The numbers of a stage, exact: integers, bytes of broken elements rounded up."""

    def number(part: sympy.Expr) -> int:
        return math.ceil(exact(part, values))

    return StageCounts(
        name=formula.name,
        family=formula.family,
        flops=number(formula.flops),
        dram_bytes=number(formula.dram_bytes),
        l2_bytes=number(formula.l2_bytes),
        workspace_bytes=number(formula.workspace_bytes),
        launches=formula.launches,
        tiles=None if formula.tiles is None else number(formula.tiles),
        on_index=formula.on_index,
    )


def exact(formula: sympy.Expr, values: Values) -> Fraction:
    """The value of a formula as a fraction; floats would round counts beyond 2^53."""
    names, function = _compiled(formula)
    number = function(*(Fraction(values[name]) for name in names))
    return Fraction(number)


class _FractionPrinter(PythonCodePrinter):  # type: ignore[misc]
    """Python source in which no number is a float."""

    def _print_Rational(self, expr: Any) -> str:
        return f"Fraction({expr.p}, {expr.q})"


@functools.lru_cache(maxsize=512)
def _compiled(formula: sympy.Expr) -> tuple[tuple[sympy.Symbol, ...], Any]:
    names = tuple(sorted(formula.free_symbols, key=str))
    printer = _FractionPrinter({"fully_qualified_modules": False})
    return names, sympy.lambdify(
        names, formula, modules=[{"Fraction": Fraction}, "math"], printer=printer
    )
