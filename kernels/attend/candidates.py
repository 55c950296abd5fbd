"""Tiles that tuning tries: those that were fast somewhere, for each kind of kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sparsify.kernels.tiling import AttentionTiles, span
from sparsify.kernels.tuned import Sizes

__all__ = ["ATTENTION", "COMBINE", "combines", "lengths", "shapes"]

# Fields that past blocks depend on, and those of the combine kernel.
ATTENTION = ("rows", "columns", "warps", "stages", "chunk", "max_registers")
COMBINE = ("combine_rows", "combine_columns", "combine_warps", "combine_stages", "merge_stages")

# Rows, columns, warps, stages and registers.
_LARGE = (
    (64, 64, 4, 3, None),
    (64, 64, 4, 2, None),
    (64, 32, 4, 4, None),
    (64, 32, 4, 2, None),
    (64, 128, 4, 2, None),
    (128, 64, 8, 3, None),
    (128, 64, 8, 2, None),
    (128, 64, 8, 2, 128),
    (128, 128, 8, 2, None),
    (128, 32, 8, 4, None),
)
_EXACT = (
    (16, 32, 4, 1, None),
    (32, 32, 4, 2, None),
    (32, 64, 4, 1, None),
    (64, 32, 4, 1, None),
    (64, 32, 8, 1, None),
)
# Rows, columns, warps and stages of both loops.
_COMBINES = (
    (64, 64, 4, 3, 2),
    (64, 64, 4, 2, 3),
    (64, 64, 4, 2, 2),
    (64, 64, 4, 3, 4),
    (64, 32, 4, 3, 3),
    (32, 64, 4, 3, 3),
    (128, 64, 8, 3, 3),
    (128, 64, 8, 2, 2),
    (64, 128, 8, 2, 2),
)
_EXACT_COMBINES = (
    (16, 32, 4, 1, 1),
    (32, 32, 4, 2, 2),
    (32, 64, 4, 1, 1),
    (64, 32, 4, 1, 1),
    (64, 32, 8, 1, 1),
)


def shapes(default: AttentionTiles, sizes: Sizes) -> Iterator[AttentionTiles]:
    """Candidates for past blocks."""
    heads = span(sizes.heads_per_list)
    if default.small:
        depths = (1,) if heads == 1 else (1, 2, 3, 4)
        for rows, warps in ((64, 4), (64, 8), (128, 4), (128, 8), (32, 4)):
            for stages in depths:
                yield replace(default, rows=rows, warps=warps, stages=stages)
        return
    for rows, columns, warps, stages, registers in _LARGE if sizes.item_bytes <= 2 else _EXACT:
        tile = replace(default, rows=rows, columns=columns, warps=warps, stages=stages)
        yield replace(tile, chunk=rows // heads, max_registers=registers)


def lengths(default: AttentionTiles) -> Iterator[AttentionTiles]:
    """Candidates for the entries of a work item; one of the large kernel is a tile."""
    if default.small:
        for factor in (1, 2, 8, 16):
            yield replace(default, chunk=max(default.chunk * factor // 4, 1))


def combines(default: AttentionTiles) -> Iterator[AttentionTiles]:
    """Candidates for the combine kernel: where its tiles are as small as those of float32, so are
    the candidates."""
    for given in _COMBINES if default.combine_rows > 32 else _EXACT_COMBINES:
        fields = dict(zip(COMBINE, given, strict=True))
        yield replace(default, **fields)  # type: ignore[arg-type]
