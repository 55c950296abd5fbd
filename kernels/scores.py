"""Scores by which blocks are chosen: MoBA's gate and MSA's index, and the choice itself.

Dot products and sums are taken in float64 and rounded once to float32 (float64 inputs stay
float64). A score then depends on its query and its keys alone, not on tile, batch, thread count or
on whether the query came in a prefill, a chunk or a decode step.

Legend: G key/value heads, H heads of the lists (query heads for MoBA, G for MSA), T queries,
L keys of the sequence, D head size, N blocks, K list places.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsify.kernels.layout import Sequence, block_count
from sparsify.kernels.means import SCRATCH_BYTES, block_chunks, by_block, mean_keys
from sparsify.kernels.ranking import best_blocks

__all__ = [
    "Chooser",
    "Scorer",
    "mean_keys",
    "moba_chooser",
    "moba_scorer",
    "msa_chooser",
    "msa_scorer",
]

Chooser = Callable[[int, int], Tensor]
"""`chooser(first, last)`: lists of queries first..last-1 of a sequence, int32 `[H, T, width]`."""

Scorer = Callable[[int, int], tuple[Tensor, Tensor]]
"""`scorer(first, last)`: float64 scores and the mask of candidates, both `[H, T, blocks]`."""

_MAX_ROWS = 256


def moba_chooser(
    sequence: Sequence,
    q_HTD: Tensor,
    k_GLD: Tensor,
    means_GND: Tensor | None,
    *,
    block_size: int,
    topk: int,
    width: int,
) -> Chooser:
    """Own block and the best topk-1 complete past blocks, for each query head."""
    heads, places = q_HTD.shape[0], topk - 1
    scorer = moba_scorer(sequence, q_HTD, k_GLD, means_GND, block_size) if places else None
    blocks = block_count(sequence.keys, block_size)
    step = _rows(heads * blocks * 48)
    precise = torch.float64 in (q_HTD.dtype, k_GLD.dtype)
    return _chooser(sequence, scorer, q_HTD, step, block_size, places, width, precise)


def msa_chooser(
    sequence: Sequence,
    iq_GTD: Tensor,
    ik_JLD: Tensor,
    *,
    block_size: int,
    topk: int,
    local: str,
    width: int,
) -> Chooser:
    """Own block and the best blocks by index score, for each key/value head.

    "inside": topk-1 of the blocks before the own one; "union": topk of all visible blocks.
    """
    union = local == "union"
    places = topk if union else topk - 1
    scorer = msa_scorer(sequence, iq_GTD, ik_JLD, block_size, own=union) if places else None
    blocks = block_count(sequence.keys, block_size)
    widest = max(min(block_size, sequence.keys) * 24, blocks * 48)
    step = _rows(iq_GTD.shape[0] * widest)
    precise = torch.float64 in (iq_GTD.dtype, ik_JLD.dtype)
    return _chooser(sequence, scorer, iq_GTD, step, block_size, places, width, precise)


def moba_scorer(
    sequence: Sequence,
    q_HTD: Tensor,
    k_GLD: Tensor,
    means_GND: Tensor | None,
    block_size: int,
) -> Scorer:
    """Gate q . mean key, without scale; candidates are the past blocks that hold a real key."""
    needed = _blocks_before(sequence, sequence.queries, block_size)
    if means_GND is None:
        means_GND = mean_keys(k_GLD[:, : needed * block_size], sequence.real, block_size)
    means_GND = means_GND[:, :needed].double()
    filled_N = _filled(sequence, block_size, needed, q_HTD.device)
    groups = k_GLD.shape[0]

    def scorer(first: int, last: int) -> tuple[Tensor, Tensor]:
        blocks = _blocks_before(sequence, last, block_size)
        q_GTD = q_HTD[:, first:last].double().reshape(groups, -1, q_HTD.shape[-1])
        gate = (q_GTD @ means_GND[:, :blocks].mT).view(q_HTD.shape[0], last - first, blocks)
        own_T = sequence.positions(first, last, q_HTD.device) // block_size
        numbers_N = torch.arange(blocks, device=q_HTD.device)
        candidate_TN = (numbers_N < own_T[:, None]) & filled_N[:blocks]
        return gate, candidate_TN.expand_as(gate)

    return scorer


def msa_scorer(
    sequence: Sequence, iq_GTD: Tensor, ik_JLD: Tensor, block_size: int, *, own: bool
) -> Scorer:
    """Best visible token; candidates are blocks with one, the own block only if `own`."""

    def scorer(first: int, last: int) -> tuple[Tensor, Tensor]:
        reach = sequence.visible_keys(last)
        blocks = block_count(reach, block_size)
        if not own:
            blocks = min(blocks, _blocks_before(sequence, last, block_size))
        iq_JRD = iq_GTD[:, first:last].double()
        iq_JRD = iq_JRD.reshape(ik_JLD.shape[0], -1, iq_GTD.shape[-1])
        p_T = sequence.positions(first, last, iq_GTD.device)
        shape = (iq_GTD.shape[0], last - first)
        scores, seen = [], []
        key_bytes = shape[0] * shape[1] * 24 + ik_JLD.shape[0] * ik_JLD.shape[2] * 8
        for begin, end in block_chunks(blocks, block_size * key_bytes):
            keys = slice(begin * block_size, min(end * block_size, reach))
            dots = (iq_JRD @ ik_JLD[:, keys].double().mT).view(*shape, -1)
            best, visible = _block_maxima(dots, sequence, p_T, keys, block_size)
            scores.append(best)
            seen.append(visible)
        if not scores:
            empty = iq_JRD.new_zeros(*shape, 0)
            return empty, empty.bool()
        candidate_TN = torch.cat(seen, -1)
        if not own:
            numbers_N = torch.arange(blocks, device=p_T.device)
            candidate_TN &= numbers_N < (p_T // block_size)[:, None]
        return torch.cat(scores, -1), candidate_TN.expand(*shape, blocks)

    return scorer


def _chooser(
    sequence: Sequence,
    scorer: Scorer | None,
    like_HTD: Tensor,
    step: int,
    block_size: int,
    places: int,
    width: int,
    precise: bool,
) -> Chooser:
    heads, device = like_HTD.shape[0], like_HTD.device

    def part(first: int, last: int) -> Tensor:
        own_T = sequence.positions(first, last, device) // block_size
        own_T = own_T.masked_fill((own_T < 0) | (own_T * block_size >= sequence.keys), -1)
        if scorer is None:
            scores = torch.zeros(heads, last - first, 0, device=device)
            candidate = scores.bool()
        else:
            scores, candidate = scorer(first, last)
            scores = scores if precise else scores.float()
        return best_blocks(scores, candidate, own_T, places, width)

    def chooser(first: int, last: int) -> Tensor:
        parts = [part(at, min(at + step, last)) for at in range(first, last, step)]
        if not parts:
            return torch.empty(heads, 0, width, dtype=torch.int32, device=device)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    return chooser


def _block_maxima(
    dots_GTC: Tensor, sequence: Sequence, p_T: Tensor, keys: slice, block_size: int
) -> tuple[Tensor, Tensor]:
    """Best visible key of each block `[G, T, N]`, and whether there is one `[T, N]`."""
    numbers_C = torch.arange(keys.start, keys.stop, device=p_T.device)
    visible_TC = numbers_C <= p_T[:, None]
    if sequence.real is not None:
        visible_TC &= sequence.real[keys]
    hidden = float("-inf")
    dots_GTC = dots_GTC.masked_fill_(~visible_TC, hidden)
    best = by_block(dots_GTC, block_size, hidden).amax(-1)
    return best, by_block(visible_TC, block_size, False).any(-1)


def _filled(sequence: Sequence, block_size: int, blocks: int, device: torch.device) -> Tensor:
    """Which of the first blocks hold at least one real key."""
    if sequence.real is None or blocks == 0:
        return torch.ones(blocks, dtype=torch.bool, device=device)
    real = sequence.real[: blocks * block_size]
    return by_block(real, block_size, False).any(-1)


def _blocks_before(sequence: Sequence, last: int, block_size: int) -> int:
    """Blocks that lie wholly before the own block of some query before number `last`."""
    own = (sequence.start + last - 1) // block_size
    return max(0, min(own, block_count(sequence.keys, block_size)))


def _rows(bytes_per_row: int) -> int:
    return max(1, min(_MAX_ROWS, SCRATCH_BYTES // max(1, bytes_per_row)))
