"""Recording which blocks every query attended, and attending with a recorded choice.

    with record_selection() as chosen:
        model(tokens)
    with replay_selection(chosen):
        other_model(tokens)

Both are honoured by every implementation of the ops, inside the fused ones too. A recorded row is
known by its site (the attention call), its sequence and its position counted from the first key of
block 0. So what one whole prefill recorded serves chunks and single decode steps, and the other way
round; a later record of a row replaces an earlier one.

Sites are named by `site`; without a name they are numbered "call:0", "call:1", ... from the start
of each `with`, so an unnamed record covers one forward pass. Both contexts act on the whole
process, because backward passes and recomputation may run in threads of their own.

Legend: N sequences, H heads, P positions, K list places.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify.errors import ArtefactError, UsageError
from sparsify.kernels.layout import Sequence

__all__ = [
    "Call",
    "Replayed",
    "Selection",
    "SiteDiff",
    "begin_call",
    "current_replay",
    "is_active",
    "record_selection",
    "replay_selection",
    "resume",
    "resumed",
    "site",
]

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


@dataclass(eq=False)
class _Context:
    selection: Selection
    replays: bool
    calls: int = 0


class Replayed(NamedTuple):
    """A selection and the site it is replayed at."""

    selection: Selection
    site: str


_ACTIVE: list[_Context] = []
_SITE: ContextVar[str | None] = ContextVar("sparsify_site", default=None)
_RESUMED: ContextVar[Replayed | None] = ContextVar("sparsify_resumed", default=None)


class site:
    """Name the attention calls made inside the `with`, e.g. "model.layers.7.self_attn#0".

    Does nothing while a graph is being captured: a compiled graph has no names, its calls are
    numbered.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._token: Token[str | None] | None = None

    def __enter__(self) -> site:
        if not torch.compiler.is_compiling():
            self._token = _SITE.set(self.key)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._token is not None:
            _SITE.reset(self._token)
            self._token = None


@contextmanager
def record_selection() -> Iterator[Selection]:
    """Record the blocks chosen by every op called inside the `with`; yields the `Selection`."""
    selection = Selection()
    with _active(_Context(selection, replays=False)):
        yield selection


@contextmanager
def replay_selection(selection: Selection) -> Iterator[Selection]:
    """Attend with the recorded blocks instead of choosing.

    Inside the `with` an op raises UsageError where it needs a row that was not recorded (a row
    without visible keys needs none), or where the lists do not fit the call.
    """
    with _active(_Context(selection, replays=True)):
        yield selection


@contextmanager
def _active(context: _Context) -> Iterator[None]:
    _ACTIVE.append(context)
    try:
        yield
    finally:
        _ACTIVE.remove(context)


def is_active() -> bool:
    """Whether selections are being recorded or replayed."""
    return bool(_ACTIVE)


Lists = Callable[[int, int], Tensor]


class Call(NamedTuple):
    """What one op call records to and replays from."""

    block_size: int
    recorders: tuple[Replayed, ...]
    replayed: Replayed | None

    def wrap(self, sequence: Sequence, heads: int, width: int, make: Callable[[], Lists]) -> Lists:
        """What chooses for one sequence: what `make` gives, or recorded lists; recorded if asked.

        Replayed lists are on the CPU.
        """
        if self.replayed is None:
            source = make()
        else:
            source = _replayer(self.replayed, self.block_size, sequence, heads, width)

        def lists(first: int, last: int) -> Tensor:
            lists_HTK = source(first, last)
            for target, name in self.recorders:
                start = sequence.start + first
                target.add(name, self.block_size, sequence.index, start, lists_HTK)
            return lists_HTK

        return lists if self.recorders else source


def begin_call(block_size: int) -> Call:
    """Called once by every op that chooses blocks, before it does."""
    recorders, replayed = [], None
    for context in _ACTIVE:
        name = _SITE.get()
        if name is None:
            name = f"call:{context.calls}"
            context.calls += 1
        if context.replays:
            replayed = Replayed(context.selection, name)
        else:
            recorders.append(Replayed(context.selection, name))
    return Call(block_size, tuple(recorders), replayed)


def current_replay() -> Replayed | None:
    """What the op called last in this place replayed: kept for its backward pass."""
    for context in reversed(_ACTIVE):
        if context.replays:
            return Replayed(context.selection, _SITE.get() or f"call:{context.calls - 1}")
    return None


@contextmanager
def resume(replayed: Replayed | None) -> Iterator[None]:
    """Backward passes run inside this, with what `current_replay` gave in the forward pass."""
    token = _RESUMED.set(replayed)
    try:
        yield
    finally:
        _RESUMED.reset(token)


def resumed(block_size: int) -> Call:
    """The call that a backward op repeats: it records nothing and counts as no call."""
    return Call(block_size, (), _RESUMED.get())


def _replayer(
    replayed: Replayed, block_size: int, sequence: Sequence, heads: int, width: int
) -> Lists:
    def lists(first: int, last: int) -> Tensor:
        start = sequence.start + first
        lists_HTK, known_T = replayed.selection.rows(
            replayed.site, block_size, heads, sequence.index, start, last - first
        )
        _must_be_known(replayed.site, sequence, first, known_T)
        if lists_HTK.shape[-1] > width and bool((lists_HTK[..., width:] >= 0).any()):
            raise UsageError(
                f"The selection of {replayed.site!r} has more than {width} blocks in a row, "
                "which is all the call has room for."
            )
        lists_HTK = lists_HTK[..., :width]
        pad = (0, width - lists_HTK.shape[-1])
        return torch.nn.functional.pad(lists_HTK, pad, value=-1)

    return lists


def _must_be_known(name: str, sequence: Sequence, first: int, known_T: Tensor) -> None:
    positions = torch.arange(first, first + len(known_T), device="cpu") + sequence.start
    opens = 0
    if sequence.real is not None:
        real = torch.nonzero(sequence.real.cpu())
        opens = int(real[0]) if real.numel() else sequence.keys
    needed = (positions >= opens) if sequence.keys > opens else torch.zeros_like(known_T)
    missing = needed & ~known_T
    if bool(missing.any()):
        at = int(positions[missing][0])
        raise UsageError(
            f"The selection of {name!r} has no row for position {at} of sequence {sequence.index}."
        )
