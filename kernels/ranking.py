"""The rule by which blocks are chosen, written once.

A block ranks by its score, equal scores by the lower block number, NaN below everything. Whether a
block may be chosen at all is a mask of its own, and the block a query stands in is placed by
construction, so no score can keep it out or let another one in.

Legend: R heads, T queries, N blocks, K list places.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["best_blocks", "order_keys", "ranked"]


def order_keys(scores: Tensor, candidate: Tensor) -> Tensor:
    """Integers that sort as the rule says: no candidate, then NaN, then -inf .. +inf.

    float32 scores give int32, float64 scores int64; +0 and -0 are one value.
    """
    dtype = torch.int32 if scores.dtype == torch.float32 else torch.int64
    info = torch.iinfo(dtype)
    bits = (scores + 0.0).view(dtype)
    keys = bits ^ ((bits >> (info.bits - 1)) & info.max)
    keys = keys.masked_fill(scores.isnan(), info.min + 1)
    return keys.masked_fill(~candidate, info.min)


def ranked(scores: Tensor, candidate: Tensor) -> Tensor:
    """Block numbers from best to worst, int64, the shape of `scores`; non-candidates come last."""
    keys = order_keys(scores, candidate)
    return keys.sort(dim=-1, descending=True, stable=True).indices


def best_blocks(
    scores_RTN: Tensor, candidate_RTN: Tensor, own_T: Tensor, places: int, width: int
) -> Tensor:
    """Own block and the best `places` candidates, ascending, -1 behind.

    Args:
        scores_RTN: float32 or float64.
        candidate_RTN: bool, which blocks may be chosen by score (may include the own one).
        own_T: int64, the block each query stands in; -1 where there is none.
        places: how many blocks are chosen by score.
        width: length of the lists.

    Returns:
        int32 `[R, T, width]`.
    """
    blocks = scores_RTN.shape[-1]
    none = torch.iinfo(torch.int32).max
    if places >= blocks:
        chosen = torch.arange(blocks, device=own_T.device).expand_as(scores_RTN)
        valid = candidate_RTN
    else:
        chosen = ranked(scores_RTN, candidate_RTN)[..., :places]
        valid = candidate_RTN.gather(-1, chosen)
    own_RT1 = own_T[:, None].expand(*scores_RTN.shape[:2], 1)
    chosen = chosen.masked_fill(~valid | (chosen == own_RT1), none)
    lists = torch.cat([chosen, own_RT1.masked_fill(own_RT1 < 0, none)], -1)
    lists = lists.sort(-1).values[..., :width]
    lists = lists.masked_fill(lists == none, -1).to(torch.int32)
    return torch.nn.functional.pad(lists, (0, width - lists.shape[-1]), value=-1)
