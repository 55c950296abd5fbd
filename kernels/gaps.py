"""How close the choice of blocks was: the gap at the last place, against what rounding can move.

Two right implementations may choose differently only where the gap is below the bound.

Legend: B batch, G key/value heads, H query heads, T queries, D head size, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.kernels.layout import Layout, Sequence, gather_pages, sequences
from sparsify.kernels.means import mean_keys
from sparsify.kernels.scores import Scorer, moba_scorer, msa_scorer

__all__ = ["Gaps", "moba_gaps", "msa_gaps"]

_STEP = 256
# Terms in float16 lose of a query what is below 2**-39 of its largest number; in float32's units.
_LOST = 2.0**-15
_NO_LAYOUT = Layout()


class Gaps(NamedTuple):
    """Per row, float64 `[B, heads of the lists, T]`.

    gap: score of the last chosen block less that of the best one left out; inf if none was.
    bound: the most by which rounding may move that difference.
    """

    gap: Tensor
    bound: Tensor

    def close(self) -> Tensor:
        """Rows in which rounding may change the choice, bool."""
        return self.gap <= self.bound


def moba_gaps(
    q: Tensor,
    k: Tensor,
    layout: Layout = _NO_LAYOUT,
    block_means: Tensor | None = None,
    *,
    block_size: int,
    topk: int,
) -> Gaps:
    """Gaps of `moba_select`. The bound holds the rounding of the gate and one ulp of the means.

    Arguments as for the op; scores are recomputed in float64.
    """
    k = gather_pages(k, layout.page_table)
    ulp = torch.finfo(k.dtype).eps

    def scorers(sequence: Sequence) -> tuple[Scorer, Scorer]:
        q_HTD, k_GLD = sequence.take_queries(q), sequence.take_keys(k)
        if block_means is None:
            means_GND = mean_keys(k_GLD, sequence.real, block_size)
        else:
            means_GND = block_means[sequence.batch]
        score = moba_scorer(sequence, q_HTD, k_GLD, means_GND, block_size)
        return score, moba_scorer(sequence, q_HTD.abs(), k_GLD, means_GND.abs(), block_size)

    factor = 2 * (_unit(q.dtype) * (q.shape[-1] + 2) + ulp)
    return _gaps(q, k.shape[2], layout, scorers, topk - 1, factor)


def msa_gaps(
    iq: Tensor,
    ik: Tensor,
    layout: Layout = _NO_LAYOUT,
    *,
    block_size: int,
    topk: int,
    local: str = "inside",
) -> Gaps:
    """Gaps of `msa_select`. The bound holds the rounding of the index scores.

    Arguments as for the op; scores are recomputed in float64.
    """
    ik = gather_pages(ik, layout.page_table)
    union = local == "union"

    def scorers(sequence: Sequence) -> tuple[Scorer, Scorer]:
        iq_GTD, ik_JLD = sequence.take_queries(iq), sequence.take_keys(ik)
        score = msa_scorer(sequence, iq_GTD, ik_JLD, block_size, own=union)
        sizes = _magnitude(iq_GTD), _magnitude(ik_JLD)
        if (iq.dtype, ik.dtype) == (torch.float32, torch.float16):
            largest = sizes[0].masked_fill(sizes[0].isinf(), 0.0).amax(-1, keepdim=True)
            sizes = sizes[0] + _LOST * largest, sizes[1]
        weight = msa_scorer(sequence, *sizes, block_size, own=union)
        return score, weight

    precise = torch.float64 in (iq.dtype, ik.dtype)
    # Sums of several terms of a query, see `select.query_terms`, round twice more at most.
    factor = 2 * _unit(torch.float64 if precise else torch.float32) * (iq.shape[-1] + 4)
    return _gaps(iq, ik.shape[2], layout, scorers, topk if union else topk - 1, factor)


def _gaps(
    q: Tensor,
    slots: int,
    layout: Layout,
    scorers: Callable[[Sequence], tuple[Scorer, Scorer]],
    places: int,
    factor: float,
) -> Gaps:
    gap = torch.full(q.shape[:3], float("inf"), dtype=torch.float64, device=q.device)
    bound = torch.zeros_like(gap)
    for sequence in sequences(q.shape[0], q.shape[2], slots, layout):
        if places == 0 or sequence.keys == 0:
            continue
        score, weight = scorers(sequence)
        for first in range(0, sequence.queries, _STEP):
            last = min(first + _STEP, sequence.queries)
            at = (slice(None), slice(first, last))
            sequence.take_queries(gap)[at] = _gap(*score(first, last), places)
            sizes, candidate = weight(first, last)
            if sizes.shape[-1]:
                largest = sizes.masked_fill(~candidate, 0.0).amax(-1)
                sequence.take_queries(bound)[at] = largest * factor
    return Gaps(gap, bound)


def _gap(scores: Tensor, candidate: Tensor, places: int) -> Tensor:
    """Difference of the scores at the last place and the one behind, inf without both."""
    if scores.shape[-1] <= places:
        return torch.full(scores.shape[:-1], float("inf"), dtype=scores.dtype, device=scores.device)
    hidden = float("-inf")
    ranked = scores.masked_fill(scores.isnan() | ~candidate, hidden)
    ranked = ranked.sort(-1, descending=True).values
    gap = ranked[..., places - 1] - ranked[..., places]
    left_out = candidate.sum(-1) > places
    return gap.nan_to_num(nan=0.0, posinf=float("inf")).masked_fill(~left_out, float("inf"))


def _magnitude(x: Tensor) -> Tensor:
    return x.abs() if x.element_size() > 1 else x.float().abs()  # CUDA has no abs of float8


def _unit(dtype: torch.dtype) -> float:
    """Rounding unit of scores: float32, or float64 for float64."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
