"""MSA's choice of blocks: what the index kernels are started with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from sparsify.kernels import tiling
from sparsify.kernels.gpus import gluon, processors
from sparsify.kernels.placement import Placement
from sparsify.kernels.select import descriptors, msa_tiles
from sparsify.kernels.select.msa_scores import msa_scores_fwd_kernel
from sparsify.kernels.select.msa_tiles import HOPPER_SCORES, ROW_STEP, Path, padded_rows, path
from sparsify.kernels.select.msa_topk import (
    msa_best_fwd_kernel,
    msa_choice_fwd_kernel,
    msa_exact_fwd_kernel,
)
from sparsify.kernels.tiling import MOST_PROGRAMS, padded

__all__ = ["Index", "Path", "path"]

WORKSPACE_BYTES = 2 << 30
_SHARE = 4  # scores take one part in so many of the workspace
_QUERY_STEP = 64
_MOST_ELEMENTS = 1 << 30  # offsets within one list of scores are 32-bit
_MOST_ROWS = 1 << 22
_TOPK_ROWS = 128  # rows of a program that keeps lists in registers: a thread each
_TOPK_PROGRAMS = 8  # programs of it that a multiprocessor should have
_MOST_SEGMENTS = 16
_SEGMENT_STEP = 16
_MOST_KEPT = 16


class _Part(NamedTuple):
    """Lists of one launch: `lists` row lists from number `z` on, each of `heads` heads from `head`
    on. A row list belongs to one head of the keys, of which a batch row has `of_batch`."""

    z: int
    lists: int
    head: int
    heads: int
    of_batch: int


class _Chunk(NamedTuple):
    """Some queries of a part; `blocks` may be chosen by the last of them."""

    part: _Part
    first: int
    queries: int
    blocks: int

    @property
    def rows(self) -> int:
        return self.queries * self.part.heads


class Index:
    """The best blocks of every query and key/value head by index score, in slices.

    A block's score is the largest product of its visible keys. With local="inside" the best
    `topk - 1` past blocks are chosen, with "union" the best `topk` of all visible ones; the own
    block is always attended and never listed, so in a union it may take a place of the list.

    `chosen` is the number of blocks of a list at most, `width` the number of its places; those
    behind the chosen blocks hold -1. `path` is the score kernel in use.

    Args:
        iq: index queries `[B, G, T, I]`.
        ik: index keys `[B, 1 or G, S, I]`, one head for all or one for each. Those of 16 bits stay
            as they are, whatever dtype the queries have.
        placement: where queries and blocks lie.
        block_size, topk, local: as in `sparsify.kernels.schemas.msa_select`.
        workspace_bytes: scores take a quarter of it at most, unless 64 queries need more.
        force: the score kernel to take instead of what `path` says.

    Raises:
        ValueError: if the kernel that is forced does not fit.
    """

    def __init__(
        self,
        iq: Tensor,
        ik: Tensor,
        placement: Placement,
        block_size: int,
        topk: int,
        local: str = "inside",
        *,
        workspace_bytes: int | None = None,
        force: Path | None = None,
    ) -> None:
        self.placement, self.block_size, self.union = placement, block_size, local == "union"
        blocks = placement.blocks
        self.ranked = min(topk, blocks) if self.union else min(topk - 1, max(blocks - 1, 0))
        self.chosen = min(self.ranked, max(blocks - 1, 0))
        self.width = padded(max(self.chosen, 1), 4)
        self.together = ik.shape[1] == 1  # the scores of all groups are made at once
        self.budget = (WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes) // _SHARE
        self.iq, self.ik = msa_tiles.of_one_kind(iq, ik)
        self.terms = msa_tiles.terms_of(self.iq, self.ik)
        self.path: Path = force or path(self.iq, self.ik, placement, block_size)
        if force == "gluon" and not msa_tiles.fits_gluon(self.iq, self.ik, placement, block_size):
            raise ValueError("The Gluon kernel scores plain calls with blocks of 128 keys alone.")
        self.keys = gluon(HOPPER_SCORES).keys_of(self.ik) if self.path == "gluon" else None
        self.mask = None if placement.key_mask is None else placement.key_mask.contiguous()
        self.descriptors: dict[int, object] = {}

    def all_rows(self) -> Tensor:
        """Lists of all groups and queries, `[B, G, T, W]`."""
        batch, groups, q_len = self.iq.shape[:3]
        past, _ = self.rows(0, batch * groups, 0, q_len)
        return past.view(batch, groups, q_len, self.width)

    def rows(self, group: int, groups: int, first: int, count: int) -> tuple[Tensor, None]:
        """Past blocks `[groups, count, W]`, ascending; the own block is not among them.

        Args:
            group, groups: the slice of the groups of all batch rows, counted through.
            first, count: the slice of the queries.
        """
        idx = self.iq.new_empty((groups, count, self.width), dtype=torch.int32)
        if not self.chosen or not groups or not count or not self.ik.shape[2]:
            return idx.fill_(-1), None
        at = 0
        for part in self._parts(group, groups, first + count):
            past = idx[at : at + part.lists * part.heads]
            for chunk in self._chunks(part, first, count):
                begin = chunk.first - first
                self._choose(past[:, begin : begin + chunk.queries], chunk)
            at += len(past)
        return idx, None

    def _parts(self, group: int, groups: int, last: int) -> Iterator[_Part]:
        """The slice of groups as row lists, as many at once as leave room for some queries."""
        heads, shared = self.iq.shape[1], self.ik.shape[1] == 1
        whole = not shared or (group % heads == 0 and groups % heads == 0)
        rows, of_batch = (heads, 1) if shared else (1, heads)
        if whole:
            list_bytes = 4 * padded_rows(rows * _QUERY_STEP) * self._blocks(last)
            step = max(1, min(self.budget // max(list_bytes, 1), MOST_PROGRAMS))
            begin, end = group // rows, (group + groups) // rows
            for z in range(begin, end, step):
                yield _Part(z, min(step, end - z), 0, rows, of_batch)
            return
        end = group + groups
        while group < end:  # rows of a list are some heads of one batch row
            row, head = divmod(group, heads)
            some = min(heads - head, end - group)
            yield _Part(row, 1, head, some, 1)
            group += some

    def _chunks(self, part: _Part, first: int, count: int) -> Iterator[_Chunk]:
        """Queries of a part, cut so that the scores of a chunk stay within the budget."""
        column = max(self._blocks(first + count), 1)
        most = min(self.budget // (4 * column * part.lists), _MOST_ELEMENTS // column, _MOST_ROWS)
        step = max(most // ROW_STEP * ROW_STEP // (part.heads * _QUERY_STEP), 1) * _QUERY_STEP
        chunks = triton.cdiv(count, step)  # of about equal size
        step = triton.cdiv(count, chunks * _QUERY_STEP) * _QUERY_STEP
        for begin in range(first, first + count, step):
            some = min(step, first + count - begin)
            yield _Chunk(part, begin, some, self._blocks(begin + some))

    def _blocks(self, last: int) -> int:
        """Blocks that may be chosen by the queries before number `last`."""
        if not self.placement.plain:
            return self.placement.blocks
        slot = self.placement.start + last - 1
        return slot // self.block_size + self.union if slot >= 0 else 0

    def _choose(self, past: Tensor, chunk: _Chunk) -> None:
        if not chunk.blocks:
            past.fill_(-1)
            return
        shape = (chunk.part.lists, chunk.blocks, padded_rows(chunk.rows))
        scores = self.iq.new_empty(shape, dtype=torch.int32)
        if self.path == "gluon":
            self._score_by_gluon(scores, chunk)
        if self.path == "triton" or self.union:
            self._score(scores, chunk, own_alone=self.path == "gluon")
        if self.ranked <= _MOST_KEPT:
            self._rank(past, scores, chunk)
        else:
            self._rank_exactly(past, scores, chunk)

    def _score(self, scores: Tensor, chunk: _Chunk, *, own_alone: bool) -> None:
        placement, size = self.placement, self.iq.shape[-1]
        item, shared = self.ik.element_size(), tiling.shared_bytes(self.iq.device)
        tiles = msa_tiles.score_tiles(
            size, item, self.block_size, chunk.rows, placement.plain, shared, self.terms
        )
        row_tiles, units = triton.cdiv(chunk.rows, tiles.rows), triton.cdiv(chunk.blocks, tiles.per)
        resident = 1 if tiles.rows * self.terms > 128 else 2
        splits = 1
        if not own_alone:
            splits = msa_tiles.splits(
                row_tiles * chunk.part.lists, units * tiles.parts, self._processors() * resident
            )
        per_split = triton.cdiv(units, splits)
        by_tma = msa_tiles.fits_tma(self.ik, placement, self.block_size, tiles)
        msa_scores_fwd_kernel[(row_tiles, triton.cdiv(units, per_split), chunk.part.lists)](
            self.iq,
            self._descriptor(tiles.columns) if by_tma else self.ik,
            scores,
            placement.first_BT,
            placement.end_BT,
            placement.own_BT,
            placement.hi_BT,
            placement.slot_BN,
            placement.keys_BN,
            self.mask,
            *self.iq.stride(),
            *self.ik.stride(),
            self.iq.shape[2],
            self.ik.shape[2],
            placement.blocks,
            placement.start,
            chunk.first,
            chunk.queries,
            chunk.part.z,
            chunk.part.head,
            chunk.blocks,
            scores.shape[2],
            per_split * tiles.parts,
            OF_BATCH=chunk.part.of_batch,
            HEADS=chunk.part.heads,
            BLOCK=self.block_size,
            D=size,
            DP=msa_tiles.padded_size(size, item),
            M=tiles.rows,
            TILE_N=tiles.columns,
            PER=tiles.per,
            PARTS=tiles.parts,
            STAGES=tiles.stages,
            PLAIN=placement.plain,
            MASKED=self.mask is not None,
            UNION=self.union,
            OWN_ALONE=own_alone,
            BY_TMA=by_tma,
            EXACT_DOT=self.ik.dtype == torch.float32,
            TERMS=self.terms,
            num_warps=tiles.warps,
        )

    def _score_by_gluon(self, scores: Tensor, chunk: _Chunk) -> None:
        assert self.keys is not None
        hopper = gluon(HOPPER_SCORES)
        row_tiles = triton.cdiv(chunk.rows, hopper.tile_rows(self.terms))
        splits = msa_tiles.splits(row_tiles * chunk.part.lists, chunk.blocks, self._processors())
        segment = triton.cdiv(chunk.blocks, splits)
        grid = (row_tiles, triton.cdiv(chunk.blocks, segment), chunk.part.lists)
        hopper.msa_scores_hopper_fwd_kernel[grid](
            self.iq,
            self.keys.descriptor,
            scores,
            *self.iq.stride(),
            *self.keys[1:],
            self.placement.start,
            chunk.first,
            chunk.queries,
            chunk.part.z,
            chunk.part.head,
            chunk.blocks,
            scores.shape[2],
            segment,
            OF_BATCH=chunk.part.of_batch,
            HEADS=chunk.part.heads,
            **hopper.constants(self.iq, self.ik, self.terms),
        )

    def _rank(self, past: Tensor, scores: Tensor, chunk: _Chunk) -> None:
        kept = 8 if self.ranked <= 8 else 16
        row_tiles = triton.cdiv(chunk.rows, _TOPK_ROWS)
        wanted = triton.cdiv(_TOPK_PROGRAMS * self._processors(), row_tiles * chunk.part.lists)
        most = triton.cdiv(chunk.blocks, 2 * _SEGMENT_STEP)
        segments = max(1, min(wanted, most, _MOST_SEGMENTS))
        segment = triton.cdiv(chunk.blocks, segments * _SEGMENT_STEP) * _SEGMENT_STEP
        segments = triton.cdiv(chunk.blocks, segment)
        best = scores.new_empty(chunk.part.lists, segments, kept, scores.shape[2])
        grid = (row_tiles, segments, chunk.part.lists)
        sizes = self._sizes(chunk) | {"R": _TOPK_ROWS, "KEPT": kept, "num_warps": 4}
        where = self._where(chunk, scores)
        msa_best_fwd_kernel[grid](scores, best, *where, segment, **sizes)
        msa_choice_fwd_kernel[grid](
            scores,
            best,
            past,
            *where,
            segment,
            past.stride(0),
            **sizes,
            RANKED=self.ranked,
            WIDTH=self.width,
        )

    def _rank_exactly(self, past: Tensor, scores: Tensor, chunk: _Chunk) -> None:
        length = padded(self.ranked)
        rows, columns = (32 if length <= 64 else 16), max(32, length)
        msa_exact_fwd_kernel[(triton.cdiv(chunk.rows, rows), 1, chunk.part.lists)](
            scores,
            past,
            *self._where(chunk, scores),
            past.stride(0),
            **self._sizes(chunk),
            M=rows,
            TILE_N=columns,
            RANKED=self.ranked,
            LENGTH=length,
            WIDTH=self.width,
            num_warps=8 if columns >= 128 else 4,
        )

    def _where(self, chunk: _Chunk, scores: Tensor) -> tuple[object, ...]:
        placement = self.placement
        return (
            placement.first_BT,
            placement.end_BT,
            placement.own_BT,
            self.iq.shape[2],
            placement.blocks,
            placement.start,
            chunk.first,
            chunk.queries,
            chunk.part.z,
            chunk.blocks,
            scores.shape[2],
        )

    def _sizes(self, chunk: _Chunk) -> dict[str, object]:
        return {
            "OF_BATCH": chunk.part.of_batch,
            "HEADS": chunk.part.heads,
            "BLOCK": self.block_size,
            "PLAIN": self.placement.plain,
            "UNION": self.union,
        }

    def _processors(self) -> int:
        return processors(self.iq.device)

    def _descriptor(self, columns: int) -> object:
        if columns not in self.descriptors:
            self.descriptors[columns] = descriptors.tiles(self.ik, columns)
        return self.descriptors[columns]
