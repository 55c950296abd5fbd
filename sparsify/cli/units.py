"""Numbers as tables show them: three digits that mean something, and units in the headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsify.cost_model.times import TimeEstimate

__all__ = ["count", "gigabytes", "milliseconds", "source", "span", "time_range", "times"]


def milliseconds(ms: float) -> str:
    """A time in milliseconds with three digits: "0.0123", "12.3", "1,230"."""
    return _three(ms)


def time_range(time: TimeEstimate) -> str:
    """Low to high in milliseconds; "12.3-70.1", or one number where both look the same."""
    return span(time.low_ms, time.high_ms)


def source(time: TimeEstimate) -> str:
    """Where a time comes from. What only has a bound is shown as its range."""
    return "range" if time.source.value == "bound" else time.source.value


def span(low: float, high: float) -> str:
    """Two numbers of three digits, or one where both look the same."""
    first, last = _three(low), _three(high)
    return first if first == last else f"{first}-{last}"


def times(low: float, high: float) -> str:
    """A range of factors: "1.40-2.10x", "3.49-101x"."""
    first, last = (f"{factor:.2f}" if factor < 10 else _three(factor) for factor in (low, high))
    return f"{first}x" if first == last else f"{first}-{last}x"


def gigabytes(n_bytes: float) -> str:
    """Bytes in decimal GB."""
    return _three(n_bytes / 1e9)


def count(number: float) -> str:
    """A large count: "5.63e+14" with three digits, small ones whole."""
    return f"{number:,.0f}" if number < 1e5 else f"{number:.3g}".replace("e+", "e")


def _three(number: float) -> str:
    if number >= 100:
        return f"{float(f'{number:.3g}'):,.0f}"
    if number == 0:
        return "0"
    if number < 0.001:
        return f"{number:.2g}"
    digits = 1 if number >= 10 else 2 if number >= 1 else 3 if number >= 0.1 else 4
    return f"{number:.{digits}f}"
