"""Recorded lists of blocks: by site, sequence, head and position, in memory and in a file.

Legend: N sequences, H heads, P positions, K list places.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify.errors import ArtefactError, UsageError

__all__ = ["Selection", "SiteDiff"]

_FORMAT = 1
_UNREADABLE = "{} is not a readable selection file ({})."


class SiteDiff(NamedTuple):
    """Comparison of one site: rows that differ, rows compared, rows only one side holds."""

    differing: int
    total: int
    unmatched: int


class _Piece(NamedTuple):
    sequence: int
    start: int
    lists_HTK: Tensor


@dataclass
class _Site:
    """Pieces as they were recorded, put together when they are read."""

    block_size: int
    heads: int
    pieces: list[_Piece] = field(default_factory=list)
    _read: tuple[Tensor, Tensor] | None = None

    def add(self, piece: _Piece) -> None:
        """One more piece; it replaces the rows it shares with earlier ones."""
        self.pieces.append(piece)
        self._read = None

    def merged(self) -> tuple[Tensor, Tensor]:
        """Lists `[N, H, P, K]` and which rows are known `[N, P]`; not to be written to."""
        if self._read is None:
            self._read = self._merge()
        return self._read

    def _merge(self) -> tuple[Tensor, Tensor]:
        blocks, known = self._empty()
        for sequence, start, lists in self.pieces:
            rows = slice(start, start + lists.shape[1])
            blocks[sequence, :, rows] = -1
            blocks[sequence, :, rows, : lists.shape[2]] = lists
            known[sequence, rows] = True
        if len(self.pieces) > len(blocks):
            self.pieces = _whole(blocks, known)
        return blocks, known

    def _empty(self) -> tuple[Tensor, Tensor]:
        count = max((p.sequence + 1 for p in self.pieces), default=0)
        length = max((p.start + p.lists_HTK.shape[1] for p in self.pieces), default=0)
        width = max((p.lists_HTK.shape[2] for p in self.pieces), default=0)
        shape = (count, self.heads, length, width)
        blocks = torch.full(shape, -1, dtype=torch.int32, device="cpu")
        return blocks, torch.zeros(count, length, dtype=torch.bool, device="cpu")


def _whole(blocks_NHPK: Tensor, known_NP: Tensor) -> list[_Piece]:
    """The fewest pieces that say the same."""
    pieces = []
    for sequence, known in enumerate(known_NP.tolist()):
        start = 0
        while start < len(known):
            if not known[start]:
                start += 1
                continue
            end = known.index(False, start) if False in known[start:] else len(known)
            pieces.append(_Piece(sequence, start, blocks_NHPK[sequence, :, start:end]))
            start = end
    return pieces


class Selection:
    """Blocks chosen at every site, for every sequence, head and position."""

    def __init__(self) -> None:
        self._sites: dict[str, _Site] = {}

    def sites(self) -> list[str]:
        """Names of the sites, in the order of their first record."""
        return list(self._sites)

    def blocks(self, site: str) -> Tensor:
        """Lists of one site, int32 `[N, H, P, K]`, ascending, -1 behind and for unknown rows."""
        return self._site(site).merged()[0].clone()

    def known(self, site: str) -> Tensor:
        """Which rows of one site were recorded, bool `[N, P]`."""
        return self._site(site).merged()[1].clone()

    def block_size(self, site: str) -> int:
        """Block size that the numbers of one site count in."""
        return self._site(site).block_size

    def diff(self, other: Selection) -> dict[str, SiteDiff]:
        """Per site, how many rows (one head at one position) differ from `other`."""
        names = dict.fromkeys([*self.sites(), *other.sites()])
        return {name: _site_diff(self._sites.get(name), other._sites.get(name)) for name in names}

    def add(self, site: str, block_size: int, sequence: int, start: int, lists_HTK: Tensor) -> None:
        """Record lists of consecutive positions; positions below 0 have no key and are left out.

        Raises:
            UsageError: if the site was recorded with another head count or block size.
        """
        heads = lists_HTK.shape[0]
        known = self._sites.setdefault(site, _Site(block_size, heads))
        _must_agree(site, known, block_size, heads)
        skip = min(max(0, -start), lists_HTK.shape[1])
        if skip < lists_HTK.shape[1]:
            copy = lists_HTK[:, skip:].to(device="cpu", dtype=torch.int32, copy=True)
            known.add(_Piece(sequence, start + skip, copy))

    def rows(
        self, site: str, block_size: int, heads: int, sequence: int, start: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """Lists of `count` positions from `start` on, `[H, count, K]`, and which are known.

        Raises:
            UsageError: if there is no such site, or it has another head count or block size.
        """
        found = self._site(site)
        _must_agree(site, found, block_size, heads)
        blocks, known = found.merged()
        out = torch.full((heads, count, blocks.shape[-1]), -1, dtype=torch.int32, device="cpu")
        seen = torch.zeros(count, dtype=torch.bool, device="cpu")
        low, high = max(start, 0), min(start + count, known.shape[1])
        if sequence < len(known) and low < high:
            out[:, low - start : high - start] = blocks[sequence, :, low:high]
            seen[low - start : high - start] = known[sequence, low:high]
        return out, seen

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a `.npz` file, first beside it and then renamed; nothing in it is pickled."""
        import numpy as np

        arrays: dict[str, Any] = {"format": np.array(_FORMAT)}
        arrays["sites"] = np.array(self.sites(), dtype=np.str_)
        for number, found in enumerate(self._sites.values()):
            blocks, known = found.merged()
            arrays[f"blocks_{number}"] = blocks.numpy()
            arrays[f"known_{number}"] = known.numpy()
            arrays[f"block_size_{number}"] = np.array(found.block_size)
        target = Path(path)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez_compressed(file, **arrays)
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Selection:
        """Read what `save` wrote.

        Raises:
            UsageError: if the file is missing.
            ArtefactError: if it is damaged, or not a selection.
        """
        import zipfile

        import numpy as np

        selection = cls()
        try:
            with np.load(path, allow_pickle=False) as arrays:
                selection._sites = _read_sites(arrays)
        except FileNotFoundError:
            raise UsageError(f"There is no selection file {os.fspath(path)}.") from None
        except (LookupError, OSError, EOFError, TypeError, AttributeError, ValueError) as error:
            raise ArtefactError(_UNREADABLE.format(os.fspath(path), error)) from None
        except zipfile.BadZipFile as error:
            raise ArtefactError(_UNREADABLE.format(os.fspath(path), error)) from None
        return selection

    def _site(self, name: str) -> _Site:
        if name not in self._sites:
            known = ", ".join(self._sites) or "none"
            raise UsageError(f"The selection holds nothing for {name!r}; it knows: {known}.")
        return self._sites[name]


def _read_sites(arrays: Any) -> dict[str, _Site]:
    """The sites of an opened file."""
    if int(arrays["format"]) != _FORMAT:
        raise ValueError(f"format {int(arrays['format'])}, this version reads {_FORMAT}")
    sites = {}
    for number, name in enumerate(arrays["sites"].tolist()):
        blocks = torch.from_numpy(arrays[f"blocks_{number}"]).to(torch.int32)
        known = torch.from_numpy(arrays[f"known_{number}"]).to(torch.bool)
        if blocks.dim() != 4 or known.shape != blocks.shape[::2]:
            raise ValueError(f"lists of {name!r} have shape {list(blocks.shape)}")
        size = int(arrays[f"block_size_{number}"])
        sites[str(name)] = _Site(size, blocks.shape[1], _whole(blocks, known))
    return sites


def _must_agree(name: str, found: _Site, block_size: int, heads: int) -> None:
    if found.block_size != block_size:
        raise UsageError(
            f"The selection of {name!r} counts in blocks of {found.block_size}, "
            f"the call in blocks of {block_size}."
        )
    if found.heads != heads:
        raise UsageError(
            f"The selection of {name!r} is for {found.heads} heads, the call needs {heads}."
        )


def _site_diff(one: _Site | None, two: _Site | None) -> SiteDiff:
    if one is None or two is None:
        held = one or two
        rows = 0 if held is None else int(held.merged()[1].sum()) * held.heads
        return SiteDiff(0, 0, rows)
    (a, known_a), (b, known_b) = one.merged(), two.merged()
    if a.shape[1] != b.shape[1]:
        raise UsageError(f"Lists of {a.shape[1]} heads cannot be compared with {b.shape[1]} heads.")
    count, length = max(len(a), len(b)), max(a.shape[2], b.shape[2])
    width = max(a.shape[3], b.shape[3])
    a, b = (_grown(x, (count, a.shape[1], length, width), -1) for x in (a, b))
    known_a, known_b = (_grown(x, (count, length), 0) for x in (known_a, known_b))
    both = known_a & known_b
    differs = (a != b).any(-1) & both[:, None]
    unmatched = int((known_a ^ known_b).sum()) * a.shape[1]
    return SiteDiff(int(differs.sum()), int(both.sum()) * a.shape[1], unmatched)


def _grown(x: Tensor, shape: tuple[int, ...], fill: int) -> Tensor:
    out = x.new_full(shape, fill)
    out[tuple(slice(0, n) for n in x.shape)] = x
    return out
