"""The least time that a stage can take: the larger of its compute and DRAM times.

All rates are the peaks of the GPU's sheet, so no kernel is faster than these bounds. Traffic
through the L2 cache depends on how a kernel is made; it limits that kernel, but is no bound. What
makes real kernels slower and can be counted (idle processors in the last wave, a long work item at
the end) is in `wave_factor` and `imbalance_factor`; the rest is an efficiency (`calibration`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sparsify.cost_model.counts import StageCounts
from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.workload import ElementBytes

__all__ = [
    "Binding",
    "StageBound",
    "imbalance_factor",
    "made_ms",
    "product_flops_per_s",
    "slowdown",
    "stage_bound",
    "wave_factor",
]

Binding = Literal["compute", "dram", "l2", "launch"]

# Tiles that one work item of a KV-outer kernel takes at most: hot blocks are split there.
CHUNK_TILES = 8


@dataclass(frozen=True, slots=True)
class StageBound:
    """Bounds of one stage in milliseconds."""

    compute_ms: float
    dram_ms: float
    l2_ms: float

    @property
    def ms(self) -> float:
        """The least time of any kernel."""
        return max(self.compute_ms, self.dram_ms)

    @property
    def kernel_ms(self) -> float:
        """The least time of a kernel of this kind, its L2 traffic included."""
        return max(self.ms, self.l2_ms)

    @property
    def binding(self) -> Binding:
        """What limits such a kernel."""
        if self.l2_ms > self.ms:
            return "l2"
        return "compute" if self.compute_ms > self.dram_ms else "dram"


def stage_bound(stage: StageCounts, gpu: Gpu, element_bytes: ElementBytes) -> StageBound:
    """The bounds of `stage` on `gpu`; the L2 bound is 0 where nobody measured the L2 cache."""
    l2 = gpu.l2_bytes_per_s
    return StageBound(
        compute_ms=1e3 * stage.flops / _flops_per_s(stage, gpu, element_bytes),
        dram_ms=1e3 * stage.dram_bytes / gpu.dram_bytes_per_s,
        l2_ms=1e3 * stage.l2_bytes / l2 if l2 else 0.0,
    )


def _flops_per_s(stage: StageCounts, gpu: Gpu, element_bytes: ElementBytes) -> float:
    """Products run at the rate of their widest operand."""
    if stage.on_index:
        return product_flops_per_s(element_bytes.index, gpu)
    return product_flops_per_s(
        max(element_bytes.query, element_bytes.key, element_bytes.value), gpu
    )


def product_flops_per_s(n_bytes: float, gpu: Gpu) -> float:
    """Peak rate of products of elements of `n_bytes`: one byte fp8, two bf16, more TF32, which is
    half of bf16."""
    if n_bytes > 2:
        return gpu.flops_per_s("bf16") / 2
    return gpu.flops_per_s("fp8" if n_bytes <= 1 else "bf16")


def made_ms(stage: StageCounts, gpu: Gpu, element_bytes: ElementBytes) -> float:
    """The least time of a kernel of this kind with its waves and tail, in milliseconds: what
    calibrated efficiencies are shares of."""
    return stage_bound(stage, gpu, element_bytes).kernel_ms * slowdown(stage, gpu)


def slowdown(stage: StageCounts, gpu: Gpu) -> float:
    """Factor of the last wave, or of the tail where blocks are shared out by how often they are
    chosen; 1 where the number of processors is not known."""
    processors = None if gpu.sm_count is None else gpu.sm_count.value
    if stage.family.endswith("_attention"):
        return imbalance_factor(stage.tiles, processors)
    return wave_factor(stage.tiles, processors)


def wave_factor(tiles: int | None, processors: float | None) -> float:
    """Time over that of work which divides evenly: the last wave of thread blocks may be short."""
    if not tiles or not processors:
        return 1.0
    waves = tiles / processors
    return math.ceil(waves) / waves


def imbalance_factor(tiles: int | None, processors: float | None) -> float:
    """Bound on the tail when work items of `CHUNK_TILES` tiles are handed out as they come."""
    if not tiles or not processors:
        return 1.0
    return 1.0 + min(CHUNK_TILES, tiles) * processors / tiles
