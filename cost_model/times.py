"""A time and where it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ZERO_TIME", "Source", "TimeEstimate"]


class Source(StrEnum):
    """What stands behind a number, the weakest first.

    `bound`: peaks of the GPU's sheet; nothing is faster. `calibrated`: the bound and efficiencies
    measured on this GPU. `measured`: a run of this very thing.
    """

    BOUND = "bound"
    CALIBRATED = "calibrated"
    MEASURED = "measured"


_STRENGTH = list(Source)


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """A time in milliseconds: the bound, and the range in which it is expected.

    `expected_ms` is what is compared and planned with. With the source `bound` it is only the
    geometric middle of the range, so `ms`, the number to show, is the bound.
    """

    bound_ms: float
    low_ms: float
    expected_ms: float
    high_ms: float
    source: Source

    @property
    def ms(self) -> float:
        """The number that `source` speaks of."""
        return self.bound_ms if self.source is Source.BOUND else self.expected_ms

    def __add__(self, other: TimeEstimate) -> TimeEstimate:
        """One after the other; the sum is as well founded as its weaker part."""
        if not self.high_ms or not other.high_ms:
            return self if self.high_ms else other
        return TimeEstimate(
            self.bound_ms + other.bound_ms,
            self.low_ms + other.low_ms,
            self.expected_ms + other.expected_ms,
            self.high_ms + other.high_ms,
            min(self.source, other.source, key=_STRENGTH.index),
        )

    def __mul__(self, factor: float) -> TimeEstimate:
        """So many times over."""
        return TimeEstimate(
            self.bound_ms * factor,
            self.low_ms * factor,
            self.expected_ms * factor,
            self.high_ms * factor,
            self.source,
        )

    __rmul__ = __mul__

    @classmethod
    def total(cls, times: Iterable[TimeEstimate]) -> TimeEstimate:
        """One after the other."""
        return sum(times, start=ZERO_TIME)


ZERO_TIME = TimeEstimate(0.0, 0.0, 0.0, 0.0, Source.MEASURED)
