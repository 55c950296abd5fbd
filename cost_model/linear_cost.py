"""Time of what is no attention: matrix products, reads of memory, and all-reduces between GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparsify.cost_model.calibration import Calibration
from sparsify.cost_model.efficiencies import LAUNCH_US, share_of_bound
from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.times import ZERO_TIME, Source, TimeEstimate

__all__ = ["Operation", "OperationKind", "all_reduce", "matrix_product", "memory_read"]

OperationKind = Literal["linear", "attention", "communication"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a model: FLOP, bytes of device memory (or of links), time."""

    name: str
    kind: OperationKind
    flops: int
    dram_bytes: float
    time: TimeEstimate


@dataclass(frozen=True, slots=True)
class _Rates:
    """Units per second: the peak, what is expected at best, in the middle and at worst."""

    peak: float
    best: float
    middle: float
    worst: float
    measured: bool


def matrix_product(
    name: str, flops: int, dram_bytes: float, gpu: Gpu, calibration: Calibration | None = None
) -> Operation:
    """A product of activations with weights of `dram_bytes`, in bfloat16.

    The slower of computing and of reading the weights; activations are not counted.
    """
    return _operation(
        name, flops, dram_bytes, _compute_rates(gpu, calibration), _read_rates(gpu, calibration)
    )


def memory_read(
    name: str, dram_bytes: float, gpu: Gpu, calibration: Calibration | None = None
) -> Operation:
    """Something that only moves bytes."""
    return matrix_product(name, 0, dram_bytes, gpu, calibration)


def all_reduce(n_bytes: float, degree: int, gpu: Gpu) -> Operation:
    """A ring all-reduce: each GPU sends and receives 2 (t - 1) / t of the bytes.

    Without a known link nothing is counted; who calls says so. The bandwidth is the sheet's, in one
    direction; the range goes from all of it to half (nothing was measured).
    """
    link = gpu.link_bytes_per_s
    if degree == 1 or not link:
        return Operation("all-reduce", "communication", 0, 0.0, ZERO_TIME)
    sent = 2 * (degree - 1) / degree * n_bytes
    bound_ms = 1e3 * sent / link
    launch_ms = LAUNCH_US / 1e3
    time = TimeEstimate(
        bound_ms,
        bound_ms + launch_ms,
        bound_ms * 2**0.5 + launch_ms,
        bound_ms * 2 + launch_ms,
        Source.BOUND,
    )
    return Operation("all-reduce", "communication", 0, sent, time)


def _operation(
    name: str, flops: int, dram_bytes: float, compute: _Rates, read: _Rates
) -> Operation:
    def slower(compute_rate: float, read_rate: float) -> float:
        return 1e3 * max(flops / compute_rate, dram_bytes / read_rate)

    launch_ms = LAUNCH_US / 1e3
    binding = compute if flops / compute.middle > dram_bytes / read.middle else read
    time = TimeEstimate(
        slower(compute.peak, read.peak),
        slower(compute.best, read.best) + launch_ms,
        slower(compute.middle, read.middle) + launch_ms,
        slower(compute.worst, read.worst) + launch_ms,
        Source.CALIBRATED if binding.measured else Source.BOUND,
    )
    return Operation(name, "linear", flops, dram_bytes, time)


def _compute_rates(gpu: Gpu, calibration: Calibration | None) -> _Rates:
    """From the calibration, else from measured rates of this GPU, else from the usual range.

    `bf16_matmul_efficiency` is the most that was ever seen on a GPU: it bounds the range from
    above, typical products are slower.
    """
    peak = gpu.flops_per_s("bf16")
    found = _calibrated("gemm", peak, calibration)
    if found is not None:
        return found
    span = gpu.measured.matmul_tflops
    if span is not None:
        return _measured(peak, span.low * 1e12, span.high * 1e12)
    share = share_of_bound("gemm")
    most = gpu.bf16_matmul_efficiency
    high = share.high if most is None else most.value
    low = min(share.low, high)
    return _Rates(peak, high * peak, (high * low) ** 0.5 * peak, low * peak, False)


def _read_rates(gpu: Gpu, calibration: Calibration | None) -> _Rates:
    """Reading weights goes at the rate of reading caches."""
    peak = gpu.dram_bytes_per_s
    found = _calibrated("dense_decode", peak, calibration)
    if found is not None:
        return found
    span = gpu.measured.decode_read_gbs
    if span is not None:
        return _measured(peak, span.low * 1e9, span.high * 1e9)
    share = share_of_bound("dense_decode")
    return _Rates(peak, share.high * peak, share.middle * peak, share.low * peak, False)


def _measured(peak: float, low: float, high: float) -> _Rates:
    best = min(high, peak)
    return _Rates(peak, best, (best * min(low, best)) ** 0.5, min(low, best), True)


def _calibrated(family: str, peak: float, calibration: Calibration | None) -> _Rates | None:
    entry = calibration.efficiency(family, group_size=1) if calibration is not None else None
    if entry is None:
        return None
    middle = min(entry.efficiency, 1.0) * peak
    best = min(middle / max(1 - entry.error, 1e-3), peak)
    return _Rates(peak, best, middle, middle / (1 + entry.error), True)
