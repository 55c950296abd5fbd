"""Measures which tiles are the fastest for a call; never unless it is asked to.

`sparsify bench --tune` asks for one shape. Under SPARSIFY_AUTOTUNE the first call of a shape asks,
and tunes with its own tensors: `in_request`. Either way the device is waited for, and kernels are
compiled for every candidate.

A stage is timed on one slice of the call, with the blocks that the call chooses. What differs from
the default tiles' result by more than rounding is out, and a candidate has to be faster by 2%,
twice: among many, the fastest is often just lucky.

Legend: L lists, T queries, K places of a list, H heads that share it, V value size.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from sparsify.errors import SparsifyError
from sparsify.kernels import tiling, tuned
from sparsify.kernels.attend import forward
from sparsify.kernels.attend.candidates import ATTENTION, COMBINE, combines, lengths, shapes
from sparsify.kernels.attend.cutting import Chooser, Parts, Shape
from sparsify.kernels.placement import Placement
from sparsify.kernels.tiling import AttentionTiles
from sparsify.kernels.tuned import Sizes

__all__ = [
    "GAIN",
    "Timer",
    "Trial",
    "TunedSlice",
    "Tuning",
    "choose",
    "in_request",
    "sizes_of",
    "tune",
]

GAIN = 0.98  # a candidate's time over the default's, at most
LEAST_QUERIES = 1024  # fewer leave tiles half empty, and say nothing of longer calls
_SAMPLED = 8192  # rows of which results are compared
_REPEATS = 9
_FLUSHED = 1 << 28  # more than twice the L2 cache of any GPU
_BUSY = 16  # times that much keeps the device busy while the launches of a call queue up
_LOCK = threading.Lock()
_CUDA: Any = torch.cuda  # torch has no types for events
_log = logging.getLogger(__name__)

Run = Callable[[], object]
Timer = Callable[[Run], float]
"""Milliseconds of a call."""
Say = Callable[[str], None]


class Trial(NamedTuple):
    """One candidate of a stage; `ms` is None where it is out, and `why` says so."""

    stage: str
    tiles: AttentionTiles
    ms: float | None
    why: str = ""


class Tuning(NamedTuple):
    """The tiles that are to be used, those of `tiling`, and what was tried, in this order."""

    tiles: AttentionTiles
    default: AttentionTiles
    trials: tuple[Trial, ...]

    def times_ms(self) -> tuple[float, float]:
        """Times of both stages together with the default tiles and with the chosen ones."""
        return self._sum(self.default), self._sum(self.tiles)

    def _sum(self, tiles: AttentionTiles) -> float:
        total = 0.0
        for stage in dict.fromkeys(trial.stage for trial in self.trials):
            mine = [x.ms for x in self.trials if x.stage == stage and _of(stage, x.tiles, tiles)]
            total += min(ms for ms in mine if ms is not None)
        return total


class _Differs(Exception):
    """A result is not the default tiles'."""


_STAGES = {"attention": ATTENTION, "combine": COMBINE}


def _of(stage: str, one: AttentionTiles, other: AttentionTiles) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _STAGES[stage])


def sizes_of(shape: Shape, item_bytes: int) -> Sizes:
    """What the tiles of a call are kept under."""
    return Sizes(shape.block, shape.head_dim, shape.value_dim, item_bytes, shape.share)


class TunedSlice:
    """One slice of a call, whose blocks are chosen once; its stages run with any tiles.

    `out` and `lse` are the call's own results, which are written over.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        placement: Placement,
        shape: Shape,
        chooser: Chooser,
        workspace_bytes: int,
        results: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.tensors, self.placement, self.shape = (q, k, v), placement, shape
        self.chosen = chooser.chosen
        self.part = next(iter(forward.slices(q, v, chooser, workspace_bytes, shape.share)))
        self.idx, self.own = chooser.rows(*self.part)
        self.out, self.lse = results or forward.outputs(q, v)
        self.device, self.sizes = q.device, sizes_of(shape, q.element_size())
        lists, count = self.idx.shape[:2]
        # Odd, so that rows of all places in a tile are compared.
        self.step = max(lists * count // _SAMPLED, 1) | 1

    @property
    def free(self) -> str:
        """What tiles decide of past blocks: "all", "chunk" or "none", by the kernel that runs."""
        way = forward.path(*self.tensors, self.placement, self.shape)
        return {"large gluon": "none", "shared gluon": "chunk", "triton": "all"}[way]

    def attend(self, tiles: AttentionTiles) -> Parts:
        """Past blocks of the slice."""
        shape = self.shape._replace(tiles=tiles)
        return forward.by_block(
            *self.tensors, self.idx, self.placement, shape, self.part, self.chosen
        )

    def combine(self, tiles: AttentionTiles, parts: Parts) -> None:
        """Own blocks of the slice, and both together."""
        q, k, v = self.tensors
        forward.combine(
            q,
            k,
            v,
            self.idx,
            self.own,
            parts,
            self.out,
            self.lse,
            self.placement,
            self.shape._replace(tiles=tiles),
            self.part,
            self.chosen,
        )

    def sample_of_parts(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, maxima and sums of some rows, zero where a list has no block."""
        there_LTK = self.idx[:, :: self.step, : self.chosen] >= 0
        out_LTKHV = parts.out[:, :: self.step]
        stats = parts.stats[:, :: self.step, : self.chosen]
        top_LTKH, sum_LTKH = stats[..., 0, :], stats[..., 1, :]
        shown = [(x, there_LTK[..., None]) for x in (top_LTKH, sum_LTKH)]
        top, total = (torch.where(there, x, 0.0) for x, there in shown)
        return torch.where(there_LTK[..., None, None], out_LTKHV, 0.0), top, total

    def sample_of_results(self) -> tuple[Tensor, Tensor]:
        """Outputs and logarithms of sums of some rows."""
        out, lse = (x[:, :: self.step].clone() for x in self._results())
        return out, lse

    def spoil(self) -> None:
        """What a candidate leaves out shall not be found where another one left it."""
        for x in self._results():
            x.fill_(float("nan"))

    def _results(self) -> list[Tensor]:
        part, share = self.part, self.shape.share
        heads = slice(part.first_list * share, (part.first_list + part.lists) * share)
        rows = slice(part.first, part.first + part.queries)
        return [x.flatten(0, 1)[heads, rows] for x in (self.out, self.lse)]


def tune(call: TunedSlice, timer: Timer, say: Say = lambda _: None) -> Tuning:
    """Measure candidates for past blocks, then for own blocks and what brings both together.

    Args:
        timer: times a call without arguments, in milliseconds.
        say: is told what is measured.
    """
    default = tuned.untuned(call.device, call.sizes)
    tiles, trials = _attention(call, default, timer, say)
    tiles, more = _combine(call, tiles, timer, say)
    return Tuning(tiles, default, (*trials, *more))


def _attention(
    call: TunedSlice, default: AttentionTiles, timer: Timer, say: Say
) -> tuple[AttentionTiles, list[Trial]]:
    wanted: list[tuple[Tensor, ...]] = []

    def measure(tiles: AttentionTiles) -> float:
        say(f"attention, {_shown('attention', tiles)}")
        parts = call.attend(tiles)
        found = call.sample_of_parts(parts)
        for x in parts:
            x.fill_(float("nan"))
        if not wanted:
            wanted.append(found)
        if not _same_parts(found, wanted[0], call):
            raise _Differs("its result is another one")
        del parts
        return timer(lambda: call.attend(tiles))

    fitting = _fitting(call, default, shapes(default, call.sizes)) if call.free == "all" else []
    tiles, trials = choose("attention", default, fitting, measure)
    longer = _fitting(call, tiles, lengths(tiles)) if call.free != "none" else []
    if not longer:
        return tiles, trials
    tiles, more = choose("attention", tiles, longer, measure)
    return tiles, trials + more[1:]


def _combine(
    call: TunedSlice, default: AttentionTiles, timer: Timer, say: Say
) -> tuple[AttentionTiles, list[Trial]]:
    parts = call.attend(default)
    wanted: list[tuple[Tensor, ...]] = []

    def measure(tiles: AttentionTiles) -> float:
        say(f"combine, {_shown('combine', tiles)}")
        call.spoil()
        call.combine(tiles, parts)
        found = call.sample_of_results()
        if not wanted:
            wanted.append(found)
        if not _same_results(found, wanted[0], call):
            raise _Differs("its result is another one")
        return timer(lambda: call.combine(tiles, parts))

    fitting = _fitting(call, default, combines(default))
    return choose("combine", default, fitting, measure)


def choose(
    stage: str,
    default: AttentionTiles,
    candidates: list[AttentionTiles],
    measure: Callable[[AttentionTiles], float],
) -> tuple[AttentionTiles, list[Trial]]:
    """The fastest of the candidates if it is faster than the default, which is the first trial.

    Candidates that fail are passed over; the default must not.
    """
    trials = [Trial(stage, default, measure(default))]
    for tiles in candidates:
        try:
            trials.append(Trial(stage, tiles, measure(tiles)))
        except (TritonError, RuntimeError, _Differs) as error:
            why = next(iter(str(error).splitlines()), "") or type(error).__name__
            _log.debug("%s with %s is out: %s", stage, _shown(stage, tiles), why)
            trials.append(Trial(stage, tiles, None, why))
    best = min((x for x in trials if x.ms is not None), key=lambda x: x.ms or 0.0)
    first = trials[0].ms or 0.0
    if best.tiles == default or (best.ms or 0.0) > GAIN * first:
        return default, trials
    again, default_again = measure(best.tiles), measure(default)
    return best.tiles if again <= GAIN * default_again else default, trials


def _fitting(
    call: TunedSlice, default: AttentionTiles, candidates: Iterable[AttentionTiles]
) -> list[AttentionTiles]:
    """Candidates that fit, but the default."""
    shared = tiling.shared_bytes(call.device)
    found = [x for x in candidates if tuned.misfit(x, call.sizes, shared) is None]
    return [x for x in found if x != default]


def _shown(stage: str, tiles: AttentionTiles) -> str:
    told = {name: getattr(tiles, name) for name in _STAGES[stage]}
    return " ".join(f"{name} {value}" for name, value in told.items() if value is not None)


def _tolerance(call: TunedSlice) -> float:
    """The rounding of a result: that of its dtype, or of sums in float32."""
    terms = max(call.sizes.head_dim, call.sizes.block)
    return max(torch.finfo(call.out.dtype).eps, terms * torch.finfo(torch.float32).eps)


def _same_parts(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], call: TunedSlice) -> bool:
    (out, top, total), (out_2, top_2, total_2) = found, wanted
    most = _tolerance(call)
    higher = torch.where(_equal(top, top_2), 0.0, top - top_2)
    weight = total * torch.exp2(higher * call.shape.scale_log2)
    alike = _equal(total, total_2) | ((weight - total_2).abs() <= most * total_2)
    return bool(alike.all()) and _is_near(out, out_2, most)


def _same_results(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], call: TunedSlice) -> bool:
    (out, lse), (out_2, lse_2) = found, wanted
    most = _tolerance(call)
    alike = _equal(lse, lse_2) | ((lse - lse_2).abs() <= most * (1.0 + lse_2.abs()))
    return bool(alike.all()) and _is_near(out, out_2, most)


def _equal(x: Tensor, wanted: Tensor) -> Tensor:
    """Where numbers are the same; NaN equals NaN."""
    return (x == wanted) | (x.isnan() & wanted.isnan())


def _is_near(x: Tensor, wanted: Tensor, most: float) -> bool:
    """Whether a tensor is near another one as a whole; each number has its own rounding."""
    x, wanted = x.float(), wanted.float()
    apart = torch.where(_equal(x, wanted), 0.0, x - wanted).norm()
    return bool(apart <= most * torch.where(wanted.isfinite(), wanted, 0.0).norm())


def in_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    placement: Placement,
    shape: Shape,
    chooser: Chooser,
    workspace_bytes: int,
    results: tuple[Tensor, Tensor],
) -> Shape:
    """The shape of a call with tiles that are measured, now if nobody did before.

    Not while a CUDA graph is captured or a program traced, and not by calls that are too short to
    tell; these run with the tiles that are in force. A call never fails for what tuning it failed
    for: it is told as a warning, and the default tiles stay.
    """
    sizes = sizes_of(shape, q.element_size())
    if not _tells(q, placement, chooser) or tuned.is_measured(q.device, sizes):
        return shape
    with _LOCK:
        if not tuned.is_measured(q.device, sizes):
            call = (q, k, v, placement, shape, chooser, workspace_bytes, results)
            _tune_and_keep(call, sizes)
    return shape._replace(tiles=tuned.attention_tiles(q.device, sizes))


def _tells(q: Tensor, placement: Placement, chooser: Chooser) -> bool:
    """Whether a call can be tuned with."""
    if q.device.type != "cuda" or q.shape[2] < LEAST_QUERIES:
        return False
    if not chooser.chosen or placement.blocks < 2 or torch.compiler.is_compiling():
        return False
    return not torch.cuda.is_current_stream_capturing()


def _tune_and_keep(call: tuple[Any, ...], sizes: Sizes) -> None:
    q, chooser = call[0], call[5]
    try:
        found = tune(TunedSlice(*call), _event_ms)
    except (TritonError, RuntimeError, _Differs) as error:
        _log.warning("tiles were not measured, the default ones stay: %s", error)
        tuned.keep(q.device, sizes, tuned.untuned(q.device, sizes))
        return
    tuned.keep(q.device, sizes, found.tiles)
    try:
        tuned.save(q.device, sizes, found.tiles, how(found, q.shape[2], chooser.chosen))
    except SparsifyError as error:
        _log.warning("measured tiles hold for this process only: %s", error)


def how(found: Tuning, queries: int, chosen: int) -> str:
    """How tiles were measured, for people who read the file."""
    before, after = found.times_ms()
    return (
        f"{queries} queries, {chosen} past blocks each: {after:.4g} ms, {before:.4g} ms by default"
    )


def _event_ms(run: Run) -> float:
    """The median of a few calls between events. Before each, the L2 cache is written over often
    enough for the launches to queue up behind."""
    flush = torch.empty(_FLUSHED, dtype=torch.int8, device="cuda")
    samples = []
    for _ in range(_REPEATS):
        begin, end = (_CUDA.Event(enable_timing=True) for _ in range(2))
        for _ in range(_BUSY):
            flush.zero_()
        begin.record()
        run()
        end.record()
        samples.append((begin, end))
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in samples))
