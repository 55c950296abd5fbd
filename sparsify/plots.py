"""Pictures of estimates: time of attention and speed-up of the whole model against the context.

Needs matplotlib (the extra `plot`), which is imported only when something is drawn.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparsify.errors import MissingExtraError, UsageError
from sparsify.files import check_target, output_file

__all__ = ["SUFFIXES", "CostCurves", "CurvePoint", "Range", "check_plot", "draw_costs", "tokens"]

SUFFIXES = (".png", ".svg", ".pdf")
PLOT_EXTRA = 'Run: pip install "sparsify-attention[plot]"'
# Colours that colour-blind people tell apart (Okabe and Ito).
DENSE, SPARSE, SHARE, MARK = "#0072B2", "#D55E00", "#5B5B5B", "#222222"
DOTS_PER_INCH = 144
LEGEND_WIDTH, SOURCE_WIDTH = 52, 190
MOST_TICKS = 13
WHOLE_RANGE = "also norms and activations, fused or not"


@dataclass(frozen=True, slots=True)
class Range:
    """A number and what it may be instead; all three are equal where there is no range."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """All that is drawn at one context. Times in milliseconds, `attention_share` from 0 to 1."""

    context_tokens: int
    dense_ms: Range
    sparse_ms: Range
    speedup: Range
    attention_share: float


@dataclass(frozen=True, slots=True)
class CostCurves:
    """One picture: a model on a GPU in a phase, dense against one sparse configuration.

    `crossover_tokens` is the smallest context from which sparse attention is faster, None if it
    never is; `full_tokens` the smallest context that does not fit the GPU's memory, None if all do.
    `asked_tokens` are the contexts of the table, marked on the curve. `range_means` says what a
    shaded range is, `source` where the numbers come from.
    """

    model: str
    gpu: str
    phase: str
    batch: int
    configuration: str
    points: Sequence[CurvePoint]
    crossover_tokens: int | None
    full_tokens: int | None
    asked_tokens: Sequence[int]
    layers: int
    sparse_layers: int
    range_means: str
    source: str


def check_plot(target: str | Path, *, force: bool = False) -> None:
    """Refuse a picture that could not be written, before any work.

    Raises:
        UsageError: an ending other than .png, .svg or .pdf, or a target as `check_target` refuses.
        MissingExtraError: matplotlib is not installed.
    """
    if Path(target).suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"The plot {str(target)!r} would be of no known kind; its name must end in "
            f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}."
        )
    check_target(target, force=force, directory=False)
    _figure_class()


def draw_costs(curves: CostCurves, target: str | Path, *, force: bool = False) -> None:
    """Write the picture: times on the left, the effect on the whole model on the right.

    Raises:
        UsageError, MissingExtraError: as `check_plot`.
    """
    check_plot(target, force=force)
    figure = _figure_class()(figsize=(13, 6.4), dpi=DOTS_PER_INCH, layout="constrained")
    times, whole = figure.subplots(1, 2)
    _draw_times(times, curves)
    _draw_whole(whole, curves)
    figure.suptitle(_title(curves), fontsize=13.5, fontweight="bold")
    source = textwrap.fill(curves.source, SOURCE_WIDTH)
    figure.supxlabel(source, fontsize=8.5, color=SHARE)
    _save(figure, target, force)


def _save(figure: Any, target: str | Path, force: bool) -> None:
    import matplotlib

    kind = Path(target).suffix.lower().lstrip(".")
    readable = {"svg.fonttype": "none", "pdf.fonttype": 42}  # text stays text
    with matplotlib.rc_context(readable), output_file(target, force=force) as temporary:
        figure.savefig(temporary, format=kind)


def tokens(count: float) -> str:
    """A context as the command line takes it: "32k", "1m", or the plain number."""
    number = round(count)
    for size, letter in ((1 << 20, "m"), (1 << 10, "k")):
        if number >= size and number % size == 0:
            return f"{number // size}{letter}"
    return f"{number:,}"


def duration(milliseconds: float) -> str:
    """A round time for an axis: "10 ms", "1 s", "20 us"."""
    if milliseconds >= 1000:
        seconds = milliseconds / 1000
        return f"{seconds:,.0f} s" if seconds >= 1000 else f"{seconds:g} s"
    return f"{milliseconds:g} ms" if milliseconds >= 0.1 else f"{milliseconds * 1000:.3g} us"


def factor(number: float) -> str:
    """A factor with digits that mean something: "1.43x", "14.3x", "1,640x"."""
    if number >= 100:
        return f"{float(f'{number:.3g}'):,.0f}x"
    return f"{number:.2f}x" if number < 10 else f"{number:.1f}x"


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(
            "matplotlib, which draws plots, is not installed.", PLOT_EXTRA
        ) from None
    return Figure


def _title(curves: CostCurves) -> str:
    batch = "" if curves.batch == 1 else f", batch {curves.batch}"
    return (
        f"{curves.model} on {curves.gpu}, {curves.phase}{batch}: "
        f"dense attention against {curves.configuration}"
    )


def _draw_times(axes: Any, curves: CostCurves) -> None:
    contexts = [point.context_tokens for point in curves.points]
    dense = [point.dense_ms for point in curves.points]
    sparse = [point.sparse_ms for point in curves.points]
    shown = _draw_range(axes, contexts, dense, DENSE, "dense attention")
    shown += _draw_range(axes, contexts, sparse, SPARSE, curves.configuration)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: duration(value))
    every = (*dense, *sparse)  # with room for the legend above, and for what is said below
    axes.set_ylim(0.12 * min(r.low for r in every), 20 * max(r.high for r in every))
    layers = "one layer" if curves.layers == 1 else f"all {curves.layers} layers"
    if curves.sparse_layers < curves.layers:
        layers += f" ({curves.sparse_layers} of them sparse)"
    axes.set_title(f"Attention of {layers}, without the rest of the model", fontsize=11)
    axes.set_ylabel("time")
    _contexts_axis(axes, curves)
    _mark_crossover(axes, curves)
    _legend(axes, shown + _mark_full(axes, curves), sparse, curves.range_means)


def _draw_range(
    axes: Any, contexts: Sequence[int], ranges: Sequence[Range], colour: str, label: str
) -> list[Any]:
    """The expected line over its shaded range."""
    shaded = any(r.low < r.high for r in ranges)
    if shaded:
        lows, highs = [r.low for r in ranges], [r.high for r in ranges]
        axes.fill_between(contexts, lows, highs, color=colour, alpha=0.18, lw=0)
    lines = axes.plot(contexts, [r.expected for r in ranges], color=colour, lw=2.2, label=label)
    return list(lines)


def _legend(axes: Any, shown: list[Any], ranges: Sequence[Range], means: str) -> None:
    from matplotlib.patches import Patch

    if any(r.low < r.high for r in ranges):
        label = textwrap.fill(means, LEGEND_WIDTH)
        shown = [*shown, Patch(color=SPARSE, alpha=0.25, lw=0, label=label)]
    axes.legend(handles=shown, loc="upper left", fontsize=9, framealpha=1)


def _mark_full(axes: Any, curves: CostCurves) -> list[Any]:
    """Grey for the contexts that do not fit the GPU's memory."""
    last = curves.points[-1].context_tokens
    if curves.full_tokens is None or curves.full_tokens >= last:
        return []
    label = "grey: weights and caches exceed the GPU's memory"
    return [axes.axvspan(curves.full_tokens, last, color="#ececec", lw=0, zorder=0, label=label)]


def _mark_crossover(axes: Any, curves: CostCurves) -> None:
    first, last = curves.points[0].context_tokens, curves.points[-1].context_tokens
    cross = curves.crossover_tokens
    if not curves.sparse_layers:
        text = f"{curves.configuration} keeps all attention dense here: both lines are one"
    elif cross is None or cross > last:
        text = "no crossover: expected to be slower than dense at every context shown"
    elif cross <= first:
        text = "expected to be faster than dense at every context shown"
    else:
        axes.axvline(cross, color=MARK, ls="--", lw=1, zorder=1)
        axes.plot([cross], [_dense_at(curves, cross)], "o", color=MARK, ms=6, zorder=5)
        early = cross**2 < first * last
        axes.annotate(
            f"crossover at {cross:,} tokens:\nsparse is expected to be\nfaster from there on",
            (cross, 0.03),
            xycoords=axes.get_xaxis_transform(),
            xytext=(6 if early else -6, 0),
            textcoords="offset points",
            ha="left" if early else "right",
            fontsize=9.5,
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.0},
        )
        return
    axes.text(0.98, 0.03, text, transform=axes.transAxes, ha="right", fontsize=9.5)


def _dense_at(curves: CostCurves, context: int) -> float:
    """Dense time at a context, on the line that is drawn between its neighbours."""
    for a, b in pairwise(curves.points):
        if a.context_tokens <= context <= b.context_tokens:
            whole = math.log(b.context_tokens / a.context_tokens)
            share = math.log(context / a.context_tokens) / whole
            return float(a.dense_ms.expected ** (1 - share) * b.dense_ms.expected**share)
    return curves.points[-1].dense_ms.expected


def _draw_whole(axes: Any, curves: CostCurves) -> None:
    contexts = [point.context_tokens for point in curves.points]
    speedups = [point.speedup for point in curves.points]
    label = "speed-up of the whole model (left axis)"
    shown = _draw_range(axes, contexts, speedups, SPARSE, label)
    axes.axhline(1, color=MARK, lw=0.9)
    room = _headroom(speedups)
    axes.set_ylim(0, room * max(1.0, *(r.high for r in speedups)))
    axes.set_ylabel("end-to-end speed-up: dense time / sparse time (1 = no change)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}x")
    axes.set_title("The whole model", fontsize=11)
    shown += _draw_share(axes, curves, room)
    _label_asked(axes, curves)
    _contexts_axis(axes, curves)
    _legend(axes, shown, speedups, f"{curves.range_means}; {WHOLE_RANGE}")


def _headroom(speedups: Sequence[Range]) -> float:
    """Height of the axis over its highest value: more where the legend's half is as high."""
    highest = max(1.0, *(r.high for r in speedups))
    left = speedups[: len(speedups) // 2 + 1]
    return 1.25 if max(1.0, *(r.high for r in left)) < 0.75 * highest else 1.5


def _draw_share(axes: Any, curves: CostCurves, room: float) -> list[Any]:
    share = axes.twinx()
    _mark_full(share, curves)  # it lies below the other axes
    contexts = [point.context_tokens for point in curves.points]
    percents = [100 * point.attention_share for point in curves.points]
    label = "attention's share of the dense model (right axis)"
    lines = share.plot(contexts, percents, color=SHARE, lw=1.6, ls=":", label=label)
    share.set_ylim(0, 100 * room)
    share.set_yticks(range(0, 101, 20), [f"{percent}%" for percent in range(0, 101, 20)])
    share.set_ylabel("attention's share of the dense model's time", color=SHARE)
    share.tick_params(axis="y", colors=SHARE)
    axes.set_zorder(share.get_zorder() + 1)  # so that its labels and legend cover the dotted line
    axes.patch.set_visible(False)
    return list(lines)


def _label_asked(axes: Any, curves: CostCurves) -> None:
    """The numbers of the table on the line of the speed-up."""
    for point in curves.points:
        if point.context_tokens not in curves.asked_tokens:
            continue
        at = (point.context_tokens, point.speedup.expected)
        inside, beside = 0, "center"
        if point.context_tokens == curves.points[-1].context_tokens:
            inside, beside = -8, "right"
        elif point.context_tokens == curves.points[0].context_tokens:
            inside, beside = 8, "left"
        axes.plot(*[[part] for part in at], "o", color=SPARSE, ms=6, zorder=5, clip_on=False)
        axes.annotate(
            factor(point.speedup.expected),
            at,
            xytext=(inside, 9),
            textcoords="offset points",
            ha=beside,
            fontsize=9.5,
            fontweight="bold",
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.0},
        )


def _contexts_axis(axes: Any, curves: CostCurves) -> None:
    first, last = curves.points[0].context_tokens, curves.points[-1].context_tokens
    axes.set_xscale("log", base=2)
    axes.set_xlim(first, last)
    powers = [1 << n for n in range(40) if first <= 1 << n <= last]
    every = -(-len(powers) // MOST_TICKS)  # more labels would overlap
    powers = powers[::every]
    axes.set_xticks(powers, [tokens(n) for n in powers])
    axes.xaxis.set_minor_locator(_no_ticks())
    axes.set_xlabel("context (tokens; 1k = 1,024)")
    axes.grid(True, which="major", color="#dddddd", lw=0.7)
    axes.set_axisbelow(True)


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
