"""Measured efficiencies of kernel families on one GPU: the file's format and its reader.

A calibration is a JSON file::

    {"schema": 1, "gpu": "H200-SXM-141GB", "date": "2026-11-30",
     "software": {"torch": "2.11.0+cu130", ...}, "source": "how it was measured",
     "families": [{"family": "dense_prefill", "kernel": "FlashAttention-3", "dtype": "bf16",
                   "group_size": null, "block_size": null, "efficiency": 0.66, "overhead_us": 12.0,
                   "error": 0.03, "points": 17, "contexts": [8192, 1048576]}, ...]}

`efficiency` is the share of the roofline (`StageBound.kernel_ms`, with its factors for waves and
imbalance) that the kernels reach, `overhead_us` the time that does not depend on the size, and
`error` the mean relative error on measurements that the fit did not see. What was measured for one
GQA group size says nothing of another (M rows of a tile, L2 traffic): an entry with a `group_size`
serves that one only, null serves all. Block sizes between two calibrated ones are interpolated.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.stages import known_families
from sparsify.documents import read_document
from sparsify.errors import UsageError
from sparsify.fields import FrozenModel, PositiveInt, fault

__all__ = [
    "SCHEMA",
    "Calibration",
    "FamilyEfficiency",
    "calibration_for",
    "load_calibration",
    "packaged_calibration",
]

SCHEMA = 1
# A little above 1: caches serve what the bound charges to DRAM.
LEAST_EFFICIENT, MOST_EFFICIENT = 1e-4, 1.25
# More than these are slips of units.
MOST_OVERHEAD_US, MOST_ERROR = 1e6, 10.0
# How far beyond the calibrated blocks an entry is still used.
NEAR = 2.0


def _efficiency(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not LEAST_EFFICIENT <= value <= MOST_EFFICIENT:
        raise fault(f"is {value!r}; expected a number from {LEAST_EFFICIENT:g} to {MOST_EFFICIENT}")
    return float(value)


def _family(value: Any) -> str:
    if not isinstance(value, str) or value not in known_families():
        raise fault(f"is {value!r}; expected one of {', '.join(sorted(known_families()))}")
    return value


def _up_to(most: float) -> BeforeValidator:
    def check(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= most:
            raise fault(f"is {value!r}; expected a number from 0 to {most:,g}")
        return float(value)

    return BeforeValidator(check)


class FamilyEfficiency(FrozenModel):
    """What one kernel family reaches; see the module's text."""

    family: Annotated[str, BeforeValidator(_family)]
    kernel: str = ""
    dtype: Literal["bf16", "fp8"] = "bf16"
    group_size: PositiveInt | None = None
    block_size: PositiveInt | None = None
    efficiency: Annotated[float, BeforeValidator(_efficiency)]
    overhead_us: Annotated[float, _up_to(MOST_OVERHEAD_US)] = 0.0
    error: Annotated[float, _up_to(MOST_ERROR)]
    points: PositiveInt
    contexts: tuple[PositiveInt, PositiveInt]


class Calibration(FrozenModel):
    """All that was measured on one GPU."""

    gpu: str = Field(min_length=1)
    date: str = Field(min_length=1)
    software: dict[str, str] = Field(default_factory=dict)
    source: str = Field(min_length=1)
    families: tuple[FamilyEfficiency, ...]

    @model_validator(mode="after")
    def _has_no_doubles(self) -> Calibration:
        keys = [(f.family, f.dtype, f.group_size, f.block_size) for f in self.families]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise fault(f"has two entries for {twice[0]} with the same dtype, group and block")
        return self

    def to_json(self) -> dict[str, Any]:
        """The content of a calibration file."""
        return {"schema": SCHEMA, **self.model_dump(mode="json")}

    def efficiency(
        self, family: str, *, group_size: int, block_size: int = 0, dtype: str = "bf16"
    ) -> FamilyEfficiency | None:
        """The entry to use, or None when nothing near enough was measured."""
        entries = [f for f in self.families if (f.family, f.dtype) == (family, dtype)]
        for wanted in (group_size, None):
            mine = [entry for entry in entries if entry.group_size == wanted]
            if mine:
                return _at_block(mine, block_size)
        return None


def _at_block(entries: list[FamilyEfficiency], block_size: int) -> FamilyEfficiency | None:
    """The entry of that block size, or one between its neighbours (straight in log of the size)."""
    blocks: dict[int, FamilyEfficiency] = {}
    for entry in entries:
        if entry.block_size is None or entry.block_size == block_size:
            return entry
        blocks[entry.block_size] = entry
    below = max((size for size in blocks if size < block_size), default=None)
    above = min((size for size in blocks if size > block_size), default=None)
    if below is None or above is None:
        near = below or above or 0
        ratio = max(near, block_size) / max(min(near, block_size), 1)
        return blocks[near] if ratio <= NEAR else None
    part = math.log(block_size / below) / math.log(above / below)
    return _between(blocks[below], blocks[above], part)


def _between(low: FamilyEfficiency, high: FamilyEfficiency, part: float) -> FamilyEfficiency:
    def mix(a: float, b: float) -> float:
        return a + (b - a) * part

    return low.model_copy(
        update={
            "efficiency": mix(low.efficiency, high.efficiency),
            "overhead_us": mix(low.overhead_us, high.overhead_us),
            "error": max(low.error, high.error),
        }
    )


def load_calibration(path: str | Path, gpu: Gpu | None = None) -> Calibration:
    """Read a calibration file; with `gpu`, one of that GPU.

    Raises:
        UsageError: missing, malformed, of a newer schema, of another GPU, or no path at all.
    """
    if not isinstance(path, str | Path):
        raise UsageError(f"The calibration is a {type(path).__name__}; it must be a file.")
    data = read_document(path, "calibration")
    _check_schema(data.pop("schema", None), path)
    try:
        found = Calibration(**{str(key): value for key, value in data.items()})
    except UsageError as error:
        raise UsageError(f"The calibration {path} is wrong: {error.message}", error.hint) from None
    if gpu is not None and found.gpu != gpu.name:
        raise UsageError(f"The calibration {path} was measured on {found.gpu}, not on {gpu.name}.")
    return found


def _check_schema(schema: Any, path: str | Path) -> None:
    if schema is None:
        raise UsageError(f"{path} is not a calibration: it has no schema.")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise UsageError(f"{path} is not a calibration: its schema is {schema!r}.")
    if schema > SCHEMA:
        raise UsageError(
            f"The calibration {path} has schema {schema}, this version reads up to {SCHEMA}.",
            "Update sparsify-attention.",
        )


def calibration_for(gpu: Gpu, given: Calibration | str | Path | None = None) -> Calibration | None:
    """The calibration that is given, or read from the file given, else that of this package.

    Raises:
        As `load_calibration`.
    """
    if given is None:
        return packaged_calibration(gpu)
    return given if isinstance(given, Calibration) else load_calibration(given, gpu)


def packaged_calibration(gpu: Gpu) -> Calibration | None:
    """The calibration of this package for that GPU, if there is one; a GPU described by a file of
    the user's has none."""
    if gpu.file is not None:
        return None
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    path = Path(__file__).resolve().parent / "calibrations" / f"{slug}.json"
    return load_calibration(path, gpu) if path.is_file() else None
