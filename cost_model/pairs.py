"""Formulas for pairs: query-key scores of one query head in one sequence.

Three readings of the same quantities:

* `EXACT`: true for every length, prefix and block (floors); what the counts use.
* `ALIGNED`: a whole prefill of a multiple of the block, at least top-k blocks long; polynomials
  that equal the exact numbers there, so they can be differentiated and solved.
* `LEADING`: the leading terms only, as the MSA paper counts (arXiv 2606.13392, eq. 12): an average
  of N/2 visible keys, and k * b attended keys for every query.

The integers of `sparsify.pair_counts` are the same exact numbers; a test holds both equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from sympy import Expr, Max, Min, Rational, floor

from sparsify.cost_model.symbols import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    KEY_TOKENS,
    NEW_TOKENS,
    PREFIX_TOKENS,
    READ_BLOCKS,
)

__all__ = ["ALIGNED", "EXACT", "LEADING", "Pairs"]

_HALF = Rational(1, 2)


@dataclass(frozen=True)
class Pairs:
    """Numbers of pairs, as formulas.

    `dense`: all visible keys. `attended`: keys of the blocks that are read. `past_blocks`: pairs of
    a query and a complete past block. `visible_blocks`: those and the own block.
    """

    dense: Expr
    attended: Expr
    past_blocks: Expr

    @property
    def visible_blocks(self) -> Expr:
        """Pairs of a query and a block of which it sees anything."""
        return self.past_blocks + NEW_TOKENS


def _between(before: Expr, end: sympy.Symbol) -> Expr:
    """The sum over the new tokens, from the sum over all positions before `end`."""
    return before.subs(end, KEY_TOKENS) - before.subs(end, PREFIX_TOKENS)


def _exact() -> Pairs:
    end = sympy.Symbol("end_tokens", integer=True, nonnegative=True)
    block, past = BLOCK_TOKENS, READ_BLOCKS - 1
    whole = floor(end / block)
    rest = end - whole * block
    within = Min(past, whole)  # whole blocks whose queries read every past block
    past_of_whole = within * (within - 1) * _HALF + Max(whole - past, 0) * past
    own = whole * block * (block + 1) * _HALF + rest * (rest + 1) * _HALF
    attended = own + past_of_whole * block**2 + rest * within * block
    past_blocks = block * whole * (whole - 1) * _HALF + rest * whole
    dense = NEW_TOKENS * PREFIX_TOKENS + NEW_TOKENS * (NEW_TOKENS + 1) * _HALF
    return Pairs(dense, _between(attended, end), _between(past_blocks, end))


def _aligned() -> Pairs:
    n, block, read = CONTEXT_TOKENS, BLOCK_TOKENS, READ_BLOCKS
    budget = read * block
    attended = n * budget - budget**2 * _HALF - n * (block - 1) * _HALF + read * block**2 * _HALF
    return Pairs(
        dense=n * (n + 1) * _HALF,
        attended=sympy.expand(attended),
        past_blocks=sympy.expand(n * (n / block - 1) * _HALF),
    )


def _leading() -> Pairs:
    n = CONTEXT_TOKENS
    return Pairs(
        dense=n**2 * _HALF,
        attended=n * READ_BLOCKS * BLOCK_TOKENS,
        past_blocks=n**2 * _HALF / BLOCK_TOKENS,
    )


EXACT = _exact()
ALIGNED = _aligned()
LEADING = _leading()
