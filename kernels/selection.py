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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.errors import UsageError
from sparsify.kernels.layout import Sequence
from sparsify.kernels.recorded import Selection, SiteDiff

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
