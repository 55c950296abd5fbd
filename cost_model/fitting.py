"""Efficiencies from measured times: time = overhead + sum over families of bound / efficiency.

The unknowns 1/efficiency and the overhead are not negative, and errors count relative to the
measured time, so that short and long runs weigh the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["OVERHEAD", "Fit", "Row", "fit", "halves"]

OVERHEAD = "overhead"


@dataclass(frozen=True)
class Row:
    """One measured run: the bound of every family in it, and the time; both in milliseconds."""

    bounds_ms: Mapping[str, float]
    measured_ms: float
    label: str = ""


@dataclass(frozen=True)
class Fit:
    """Fitted factors on the bounds of the families (1/efficiency), and the overhead in ms."""

    factors: Mapping[str, float]

    @property
    def overhead_ms(self) -> float:
        """Time that does not depend on the size."""
        return self.factors.get(OVERHEAD, 0.0)

    def efficiency(self, family: str) -> float | None:
        """Share of the bound that the family reaches; None if its time was fitted as nothing."""
        factor = self.factors.get(family, 0.0)
        return 1 / factor if factor > 0 else None

    def predict_ms(self, bounds_ms: Mapping[str, float]) -> float:
        """The time of a run."""
        known = {OVERHEAD: 1.0, **bounds_ms}
        return sum(factor * known.get(name, 0.0) for name, factor in self.factors.items())

    def errors(self, rows: Sequence[Row]) -> list[float]:
        """Relative errors of the predictions, signed."""
        return [self.predict_ms(row.bounds_ms) / row.measured_ms - 1 for row in rows]

    def mean_error(self, rows: Sequence[Row]) -> float:
        """Mean absolute relative error (MAPE as a fraction)."""
        return float(np.mean(np.abs(self.errors(rows))))


def fit(rows: Sequence[Row]) -> Fit:
    """The non-negative factors with the least relative squared error.

    Raises:
        ValueError: no rows, or a measured time that is not positive.
    """
    if not rows or min(row.measured_ms for row in rows) <= 0:
        raise ValueError("a fit needs rows with positive times")
    names = [OVERHEAD, *sorted({name for row in rows for name in row.bounds_ms})]
    table = np.array(
        [[{OVERHEAD: 1.0, **row.bounds_ms}.get(name, 0.0) for name in names] for row in rows]
    )
    relative = table / np.array([[row.measured_ms] for row in rows])
    factors = _non_negative_least_squares(relative, np.ones(len(rows)))
    return Fit(dict(zip(names, map(float, factors), strict=True)))


def _non_negative_least_squares(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Exact: the best of all subsets of unknowns whose plain solution is not negative."""
    count = table.shape[1]
    best, least = np.zeros(count), float(wanted @ wanted)
    for size in range(1, min(count, len(table)) + 1):
        for subset in map(list, itertools.combinations(range(count), size)):
            part, *_ = np.linalg.lstsq(table[:, subset], wanted, rcond=None)
            miss = table[:, subset] @ part - wanted
            if (part >= 0).all() and miss @ miss < least - 1e-15:
                least = float(miss @ miss)
                best = np.zeros(count)
                best[subset] = part
    return best


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Every other row, for a fit and for its test."""
    return list(rows[::2]), list(rows[1::2])
