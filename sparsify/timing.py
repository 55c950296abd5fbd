"""Timing of calls on a device.

On a GPU every call stands between two CUDA events, and nothing waits for the device before the last
one, so that launches overlap with the work as they do in a model. Before each call 256 MB are
read, more than twice the L2 cache of any GPU: else decode reads its cache from L2. Were they
written, the call would wait for what leaves the L2 cache: 9 us of 76 on an H200. A call can be
replayed as a CUDA graph, which leaves the launches out; it takes some 2 us more than one of many in
a graph. On a CPU a wall clock is read.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparsify.errors import UsageError

__all__ = ["Run", "Timing", "extra_bytes", "find_device", "machine", "time_call"]

FLUSH_BYTES = 256_000_000
# torch has no types for these.
_CUDA: Any = torch.cuda
_BACKENDS: Any = torch.backends
Run = Callable[[], Any]
"""A call without arguments."""


@dataclass(frozen=True)
class Timing:
    """Times of one call in milliseconds, in the order they were taken, and how."""

    samples_ms: tuple[float, ...]
    method: str
    warm_up: int

    @property
    def median_ms(self) -> float:
        """The middle one."""
        return statistics.median(self.samples_ms)

    @property
    def min_ms(self) -> float:
        """The shortest one."""
        return min(self.samples_ms)

    @property
    def once(self) -> bool:
        """Whether there is one sample only, so that nothing is known of the spread."""
        return len(self.samples_ms) == 1

    def percentile_ms(self, percent: float) -> float:
        """The time that `percent` of the calls do not exceed, straight between samples."""
        ordered = sorted(self.samples_ms)
        place = (len(ordered) - 1) * percent / 100
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    def to_json(self) -> dict[str, Any]:
        """The figures, for a result file."""
        percentiles = {f"p{p}_ms": self.percentile_ms(p) for p in (50, 95, 99)}
        return {
            "median_ms": self.median_ms,
            **percentiles,
            "min_ms": self.min_ms,
            "samples": len(self.samples_ms),
            "warm_up": self.warm_up,
            "method": self.method,
        }


def time_call(
    run: Run,
    *,
    device: str | torch.device,
    repeats: int = 20,
    warm_up: int = 3,
    flush_l2: bool = True,
    graph: bool = False,
    budget_s: float | None = None,
) -> Timing:
    """Time `run`, a call without arguments.

    Args:
        repeats, warm_up: calls that count, and calls before them that do not.
        flush_l2: whether the L2 cache holds nothing that a call reads.
        graph: capture the call as a CUDA graph and time its replays; the call must not wait for
            the device, and what it reads must stay where it is.
        budget_s: fewer repeats, at least one, where they would take longer in all. Without a
            warm-up nothing is known of a call before it was timed, and `repeats` holds.

    Raises:
        UsageError: no repeats, or a graph on a device that has none.
    """
    if repeats < 1 or warm_up < 0:
        raise UsageError(f"{repeats} repeats after {warm_up} warm-up calls time nothing.")
    device = torch.device(device)
    if device.type != "cuda":
        if graph:
            raise UsageError("CUDA graphs need a CUDA device.", "Time the call itself.")
        return _on_cpu(run, repeats, warm_up, budget_s)
    with torch.cuda.device(device):
        return _on_gpu(run, repeats, warm_up, flush_l2, graph, budget_s)


def _on_cpu(run: Run, repeats: int, warm_up: int, budget_s: float | None) -> Timing:
    def seconds() -> float:
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    spent_s = [seconds() for _ in range(warm_up)]
    repeats = _affordable(repeats, spent_s, budget_s)
    return Timing(tuple(1e3 * seconds() for _ in range(repeats)), "wall clock", warm_up)


def _affordable(repeats: int, spent_s: list[float], budget_s: float | None) -> int:
    """Repeats that fit the budget, by the last warm-up call."""
    if budget_s is None or not spent_s:
        return repeats
    return max(1, min(repeats, int(budget_s / max(spent_s[-1], 1e-9))))


def _on_gpu(
    run: Run, repeats: int, warm_up: int, flush_l2: bool, graph: bool, budget_s: float | None
) -> Timing:
    captured = _captured(run) if graph else None
    call = run if captured is None else captured.replay
    spent_s = [_seconds(call) for _ in range(warm_up)]
    repeats = _affordable(repeats, spent_s, budget_s)
    scratch = torch.zeros(FLUSH_BYTES // 8, dtype=torch.int64, device="cuda") if flush_l2 else None
    pairs = [_between_events(call, scratch) for _ in range(repeats)]
    torch.cuda.synchronize()
    samples = tuple(begin.elapsed_time(end) for begin, end in pairs)
    if captured is not None:
        captured.reset()
    method = "CUDA events" + (", CUDA graph" if graph else "") + (", cold L2" if flush_l2 else "")
    return Timing(samples, method, warm_up)


def _flush(scratch: torch.Tensor) -> None:
    """Fill the L2 cache with `scratch`, unwritten."""
    scratch.sum()


def _between_events(call: Run, scratch: torch.Tensor | None) -> tuple[Any, Any]:
    begin, end = (_CUDA.Event(enable_timing=True) for _ in range(2))
    if scratch is not None:
        _flush(scratch)
    begin.record()
    call()
    end.record()
    return begin, end


def _seconds(call: Run) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def _captured(run: Run) -> torch.cuda.CUDAGraph:
    """`run` as a graph; called twice before, since what compiles or allocates first cannot be
    captured."""
    stream = _CUDA.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def extra_bytes(run: Run, device: str | torch.device) -> int | None:
    """Peak memory of a call beyond what was there before and what it returns; None on a CPU.

    Called twice: what is made once and kept (compiled kernels, plans of libraries) does not count.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    run()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = run()
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    peak = torch.cuda.max_memory_allocated(device)
    del kept
    return peak - held


def find_device(name: str) -> torch.device:
    """The device that `name` stands for: "cpu", "cuda" or "cuda:1".

    Raises:
        UsageError: it is no device, or there is none here.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise UsageError(f"{name!r} is no device.", "Use cpu, cuda or cuda:0.") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"Nothing can be timed on {name!r}.", "Use cpu, cuda or cuda:0.")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UsageError(
                f"There is no CUDA device here, so nothing runs on {name}.",
                "With --device cpu the reference implementation is timed.",
            )
        if device.index is not None and device.index >= count:
            raise UsageError(f"There is no {name}: CUDA devices here are 0 to {count - 1}.")
        device = torch.device("cuda", device.index or 0)
    return device


def machine(device: str | torch.device) -> dict[str, Any]:
    """What was measured on and with, and when; for result files."""
    device = torch.device(device)
    software = {"torch": torch.__version__, "python": platform.python_version()}
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        software |= _cuda_software()
    return {
        "gpu" if device.type == "cuda" else "cpu": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "software": software,
    }


def _cuda_software() -> dict[str, str]:
    found = {"cuda": str(torch.version.cuda), "cudnn": str(_BACKENDS.cudnn.version())}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    return found
