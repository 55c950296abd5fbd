"""Which kernel scores MSA's blocks, by which tiles, and into how many segments keys are cut."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparsify.kernels.gpus import capability, gluon, is_bulk
from sparsify.kernels.placement import Placement
from sparsify.kernels.tiling import HOPPER_SHARED, padded

__all__ = [
    "HOPPER_SCORES",
    "ROW_STEP",
    "Path",
    "ScoreTiles",
    "fits_gluon",
    "fits_tma",
    "of_one_kind",
    "padded_rows",
    "padded_size",
    "path",
    "score_tiles",
    "splits",
    "terms_of",
]

Path = Literal["gluon", "triton"]

HOPPER_SCORES = "sparsify.kernels.select.msa_scores_hopper"
ROW_STEP = 256  # rows of scores come in multiples of this, which every tile divides
_FEW_ROWS = 64
_SPLIT_STEPS = 16  # tiles that one program of the scores walks, at least
_START_STEPS = 2  # tiles that the start of a program costs, about
_SLACK = 1.04  # more programs are better, if they cost no more than this
_FP8 = torch.float8_e4m3fn
_TERMS = {torch.bfloat16: 3, torch.float16: 2}


class ScoreTiles(NamedTuple):
    """Tiles of the score kernel: `per` blocks fill one, or `parts` of them a block."""

    rows: int
    columns: int
    warps: int
    stages: int
    per: int
    parts: int


def path(iq: Tensor, ik: Tensor, placement: Placement, block_size: int) -> Path:
    """Which kernel scores: "gluon" where its tiles fit a Hopper GPU, "triton" elsewhere."""
    hopper_gpu = capability(iq.device) == (9, 0)
    few = iq.shape[1] * iq.shape[2] <= _FEW_ROWS
    fits = hopper_gpu and not few and fits_gluon(iq, ik, placement, block_size)
    return "gluon" if fits else "triton"


def of_one_kind(iq: Tensor, ik: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys in one dtype that the GPU can multiply, or queries in float32 and keys of 16
    bits, see `terms_of`; no value changes."""
    if iq.dtype != ik.dtype:
        if ik.dtype not in _TERMS:
            return iq.float(), ik.float()
        return iq.to(ik.dtype if iq.dtype == _FP8 else torch.float32), ik
    old = (capability(iq.device) or (0, 0)) < (8, 9)
    if iq.dtype == _FP8 and iq.device.type == "cuda" and old:
        return iq.half(), ik.half()
    return iq, ik


def terms_of(iq: Tensor, ik: Tensor) -> int:
    """Terms in the keys' dtype whose sum is a query, see `query_terms`; 1: it is one by itself, or
    has no such terms."""
    as_it_is = iq.dtype in (ik.dtype, _FP8)
    return 1 if as_it_is else _TERMS.get(ik.dtype, 1)


def fits_gluon(iq: Tensor, ik: Tensor, placement: Placement, block_size: int) -> bool:
    """Whether the tiles of the Gluon kernel fit a call."""
    hopper = gluon(HOPPER_SCORES)
    if hopper is None or not placement.plain:
        return False
    of_terms = iq.dtype == torch.float32 and ik.dtype in _TERMS
    if block_size != hopper.BLOCK or not (iq.dtype == ik.dtype or of_terms):
        return False
    return iq.shape[-1] in (64, 128) and bool(hopper.is_matrix(ik))


def padded_rows(rows: int) -> int:
    """Rows that a list of scores has room for."""
    return -(-rows // ROW_STEP) * ROW_STEP


def padded_size(size: int, item: int) -> int:
    """Size of a query in a tile; tensor cores take so many bytes at least."""
    return padded(size, 32 if item == 1 else 16)


@functools.cache
def score_tiles(
    size: int, item: int, block: int, rows: int, plain: bool, shared: int, terms: int = 1
) -> ScoreTiles:
    """Tiles of the score kernel, measured on an H200 for size 128; others follow from what fits.

    Tiles of 64 rows and of more give the same bits: so many rows take the same instructions.

    Args:
        size, item: of an index key, and the bytes of its numbers.
        block, rows: keys of a block, and rows that there are.
        plain: whether no layout needs masks.
        shared: bytes of shared memory.
        terms: of a query, in the keys' dtype.
    """
    row_bytes, few = padded_size(size, item) * item, rows <= _FEW_ROWS
    hopper = shared >= HOPPER_SHARED
    if item == 4:
        m, n, warps, stages = 32, 32, 4, 1
    elif terms > 1:
        m, n, warps, stages = _tiles_of_terms(row_bytes, few, plain, hopper)
    elif row_bytes > 256:
        m, n, warps, stages = 64 if few else 128, 64, 4, 3
    elif not plain:  # masks need registers of their own
        m, n, warps, stages = 64 if few else 128, 64, 4 if few else 8, 3
    elif item == 1 or few or not hopper:
        m, n, warps, stages = 64 if few else 128, 128, 4 if item == 1 or few else 8, 3
    else:
        m, n, warps, stages = 256, 128, 8, 3
    query_rows = m * terms if hopper else m  # elsewhere registers hold the other terms
    while stages > 1 and (query_rows + stages * n) * row_bytes > shared:
        stages -= 1
    while n > 32 and (query_rows + n) * row_bytes > shared:
        n //= 2
    per_block = min(padded(block, 1), n)
    return ScoreTiles(m, n, warps, stages, n // per_block, _cdiv(block, n))


def _tiles_of_terms(
    row_bytes: int, few: bool, plain: bool, hopper: bool
) -> tuple[int, int, int, int]:
    """Rows, columns, warps and stages where all terms of a tile of queries have to fit. A product
    of several terms takes long enough for the next tile of keys to come meanwhile."""
    if row_bytes > 256:
        return (64, 64, 8, 2) if hopper else (32, 64, 4, 2)
    if few or not hopper:
        return 64, 128 if plain else 64, 4, 2
    return 128, 128 if plain else 64, 8, 2


@functools.cache
def splits(tiles: int, steps: int, slots: int) -> int:
    """Into how many segments the keys are cut: enough programs for all `slots`, and no round of
    them left half empty."""
    most = max(1, steps // _SPLIT_STEPS)
    costs = {}
    for rounds in range(1, 9):
        pieces = min(max(1, rounds * slots // tiles), most)
        each = _cdiv(steps, pieces) + _START_STEPS
        costs[pieces] = _cdiv(tiles * pieces, slots) * each
    least = min(costs.values())
    return max(pieces for pieces, cost in costs.items() if cost <= _SLACK * least)


def fits_tma(ik: Tensor, placement: Placement, block: int, tiles: ScoreTiles) -> bool:
    """Whether keys can be fetched by the tensor memory accelerator: sm_90 or newer, aligned
    strides, tiles without columns that belong to no block."""
    size, item = ik.shape[-1], ik.element_size()
    if (capability(ik.device) or (0, 0))[0] < 9 or item == 4:
        return False
    whole = placement.plain and block * tiles.per == tiles.columns * tiles.parts
    return whole and is_bulk(ik) and padded_size(size, item) == size


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
