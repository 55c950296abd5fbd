"""The runs that a calibration is fitted on: a few minutes on a GPU.

Kernels are compiled by many threads first, most of the work on a machine that has not seen them.
Times are of the GPU alone, as CUDA graphs, with a cold L2 cache: in a model launches overlap with
the work before. Inputs are random, bfloat16; index tensors also float8_e4m3fn.

Legend: B batch, H query heads, G key/value heads, T queries, S keys, D head size, I index size.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsify.benches.dense import best, dense_times
from sparsify.benches.stages import by_family, moba_stages_ms, msa_stages_ms
from sparsify.cost_model.calibrating import FamilyRun, calibration_of, plain_run, stage_run
from sparsify.cost_model.calibration import Calibration, FamilyEfficiency
from sparsify.cost_model.configuration import DENSE, PUBLISHED, Configuration
from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.workload import BF16, AttentionShape, ElementBytes, Phase, Workload
from sparsify.errors import UsageError
from sparsify.kernels.proxy import proxy_index
from sparsify.timing import Run, Timing, machine, time_call

__all__ = ["Case", "Sizes", "calibrate", "graph_timer", "measured_runs"]

LOGGER = logging.getLogger("sparsify")

MOBA = tuple(replace(c, decode="sparse") for c in PUBLISHED if c.method == "moba")
PROXY, LEARNED = (c for c in PUBLISHED if c.method == "msa")
MOBA_SHAPES = tuple(AttentionShape(16, 16 // group, 128, 128) for group in (1, 4, 8, 16))
# Heads of whole models: few key/value heads would leave a GPU idle in decode. One more group of
# either number of key/value heads shares most kernels with the others.
LEARNED_SHAPES = tuple(AttentionShape(*heads, 128, 128) for heads in ((64, 4), (64, 8), (32, 8)))
# What the proxy has for itself are scores of float32 queries, head by head: alike for all heads.
PROXY_SHAPE = AttentionShape(16, 1, 128, 128)
FP8 = torch.float8_e4m3fn
FP8_SINCE = (8, 9)  # the first capability with products of eight bits
CONTEXTS = tuple(n << 10 for n in (8, 32, 64, 128, 256))
DENSE_CONTEXTS = tuple(n << 10 for n in (8, 16, 32, 64, 96, 128))
# Rows of products with the weights of a model of 8B parameters.
PRODUCT_ROWS = tuple(n << 10 for n in (1, 2, 4, 8, 16, 32))
WEIGHTS = ((4096, 4096), (4096, 14336), (14336, 4096))
COPY_BYTES = tuple(n << 20 for n in (16, 32, 64, 128, 256, 1024))
REPEATS, WARM_UP, BUDGET_S = 9, 2, 0.2
COMPILERS = 12  # threads, each with the tensors of a call
SOURCE = "medians of CUDA-graph times of this package's kernels and torch's; random inputs"

Timer = Callable[[Run], Timing]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """One shape under one configuration, or its choice of blocks alone, where another case has what
    follows; with `fp8` by an index of eight bits."""

    shape: AttentionShape
    configuration: Configuration
    choice_alone: bool = False
    fp8: bool = False

    @classmethod
    def of(cls, shape: AttentionShape, configuration: Configuration) -> tuple[Case, ...]:
        """All that can be measured of a shape."""
        found = (cls(shape, replace(configuration, decode="sparse")),)
        if configuration.indexer != "learned":
            return found
        return (*found, replace(found[0], choice_alone=True, fp8=True))

    @property
    def proxy(self) -> bool:
        """Whether it scores with the layer's own queries and keys."""
        return self.configuration.indexer == "proxy"

    @property
    def elements(self) -> ElementBytes:
        """Bytes of its tensors' elements."""
        return replace(BF16, index=1) if self.fp8 else BF16

    @property
    def label(self) -> str:
        """What it is, for people."""
        fp8 = ", index in fp8" if self.fp8 else ""
        return f"{self.configuration.label}, group {self.shape.group_size}{fp8}"


CASES = (
    *(Case(shape, configuration) for configuration in MOBA for shape in MOBA_SHAPES),
    *(Case(shape, LEARNED) for shape in LEARNED_SHAPES),
    Case(PROXY_SHAPE, PROXY, choice_alone=True),
    Case(LEARNED_SHAPES[0], LEARNED, choice_alone=True, fp8=True),
)


@dataclass(frozen=True)
class Sizes:
    """What is measured, and where (None: by the size of the configuration)."""

    cases: tuple[Case, ...] = CASES
    contexts: tuple[int, ...] | None = None
    dense_contexts: tuple[int, ...] = DENSE_CONTEXTS
    decode_batches: tuple[int, ...] = (1, 8)
    product_rows: tuple[int, ...] = PRODUCT_ROWS
    weights: tuple[tuple[int, int], ...] = WEIGHTS
    copy_bytes: tuple[int, ...] = COPY_BYTES

    def contexts_of(self, configuration: Configuration) -> tuple[int, ...]:
        """Contexts in which the configuration leaves something out.

        Raises:
            UsageError: there are none among those asked for.
        """
        kept = configuration.budget_tokens
        if self.contexts is not None:
            found = tuple(n for n in self.contexts if n > kept)
            if not found:
                raise UsageError(
                    f"{configuration.label} keeps {kept} tokens, all of every context asked for.",
                    "Give longer ones to --context.",
                )
            return found
        if configuration.indexer == "proxy" and 4 * kept <= CONTEXTS[0]:
            return tuple(n // 2 for n in CONTEXTS)  # its scores take long
        if 4 * kept <= CONTEXTS[0]:
            return CONTEXTS
        return tuple(kept * thirds // 3 for thirds in (4, 6, 8, 12, 16))


def graph_timer(device: torch.device) -> Timer:
    """Times a call as a CUDA graph, or as it is where it cannot be captured."""
    options: dict[str, Any] = {"repeats": REPEATS, "warm_up": WARM_UP, "budget_s": BUDGET_S}

    def timer(run: Run) -> Timing:
        try:
            return time_call(run, device=device, graph=True, **options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            LOGGER.warning("a call is timed as it is launched, not as a CUDA graph: %s", error)
            torch.cuda.synchronize(device)
            return time_call(run, device=device, **options)

    return timer


def calibrate(gpu: Gpu, device: torch.device, sizes: Sizes, say: Say) -> Calibration:
    """Measure `gpu`, which is `device`, and fit.

    Raises:
        UsageError: too few lengths for a fit.
    """
    runs = list(measured_runs(gpu, device, sizes, graph_timer(device), say))
    about = machine(device)
    made = {"date": about["date"], "software": about["software"], "source": SOURCE}
    return calibration_of(runs, gpu, **made, leave_out=_tell_left_out)


def _tell_left_out(entry: FamilyEfficiency) -> None:
    LOGGER.warning(
        "%s (%s, group %s, block %s) is left out: its fit misses unseen runs by %.0f%%",
        entry.family,
        entry.dtype,
        entry.group_size or "any",
        entry.block_size or "any",
        100 * entry.error,
    )


def measured_runs(
    gpu: Gpu, device: torch.device, sizes: Sizes, timer: Timer, say: Say
) -> Iterator[FamilyRun]:
    """All runs, in order."""
    for case in sizes.cases:
        sizes.contexts_of(case.configuration)  # refuse before any work
    if not _has_fp8(device):
        sizes = replace(sizes, cases=tuple(case for case in sizes.cases if not case.fp8))
    bench = _Bench(gpu, device, sizes, timer, say)
    bench.compile()
    yield from bench.copies()
    yield from bench.products()
    yield from bench.dense(Phase.PREFILL)
    yield from bench.dense(Phase.DECODE)
    for case in sizes.cases:
        yield from bench.sparse(case)


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= FP8_SINCE


@dataclass(frozen=True)
class _Bench:
    gpu: Gpu
    device: torch.device
    sizes: Sizes
    timer: Timer
    say: Say

    def _random(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device, dtype=torch.bfloat16)

    def _inputs(self, shape: AttentionShape, workload: Workload) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, tokens outside heads in memory, as projections leave them."""
        batch, keys = workload.batch, workload.context_tokens
        q = self._random(batch, workload.new_tokens, shape.q_heads, shape.head_dim)
        k = self._random(batch, keys, shape.kv_heads, shape.head_dim)
        v = self._random(batch, keys, shape.kv_heads, shape.value_dim)
        if workload.phase is Phase.DECODE:  # a cache has heads outside
            k, v = (x.view(batch, shape.kv_heads, keys, -1) for x in (k, v))
            return q.transpose(1, 2), k, v
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def compile(self) -> None:
        """Every call of a sparse kernel once; on a GPU, whose compilers run side by side."""
        if self.device.type != "cuda":
            return
        calls = [(c, w) for c in self.sizes.cases for w in self._workloads(c)]
        self.say(f"compiling the kernels of {len(calls)} calls")

        def first(call: tuple[Case, Workload]) -> None:
            with torch.cuda.device(self.device), contextlib.suppress(torch.OutOfMemoryError):
                self._times(*call, lambda run: (run(), 0.0)[1])  # if not now, when it is timed

        with ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1)) as pool:
            list(pool.map(first, calls))
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def copies(self) -> Iterator[FamilyRun]:
        self.say("copies")
        for n_bytes in self.sizes.copy_bytes:
            source = torch.zeros(n_bytes, dtype=torch.int8, device=self.device)
            target = torch.empty_like(source)
            ms = self.timer(lambda s=source, t=target: t.copy_(s)).median_ms  # type: ignore[misc]
            yield plain_run("copy", 0, 2 * n_bytes, n_bytes, ms, self.gpu, "torch")

    def products(self) -> Iterator[FamilyRun]:
        self.say("matrix products")
        for rows in self.sizes.product_rows:
            for inner, columns in self.sizes.weights:
                a, b = self._random(rows, inner), self._random(inner, columns)
                ms = self.timer(lambda a=a, b=b: a @ b).median_ms  # type: ignore[misc]
                flops = 2 * rows * inner * columns
                n_bytes = 2 * (rows * inner + inner * columns + rows * columns)
                yield plain_run("gemm", flops, n_bytes, rows, ms, self.gpu, "torch")

    def dense(self, phase: Phase) -> Iterator[FamilyRun]:
        """Runs of the kernel that is fastest in most of them."""
        decoding = phase is Phase.DECODE
        shape = self.sizes.cases[0].shape
        times: dict[Workload, dict[str, Timing]] = {}
        for tokens in self.sizes.dense_contexts:
            self.say(f"dense {phase.value}, {tokens} tokens")
            for batch in self.sizes.decode_batches if decoding else (1,):
                workload = Workload.of(phase, tokens, batch)
                times[workload] = dense_times(*self._inputs(shape, workload), self.timer)
        wins = Counter(name for found in times.values() if (name := best(found)))
        if not wins:
            raise UsageError("None of torch's attention kernels runs here.")
        kernel = wins.most_common(1)[0][0]
        for workload, found in times.items():
            if kernel in found:
                ms = found[kernel].median_ms
                yield stage_run(
                    f"dense_{phase.value}", shape, workload, DENSE, ms, self.gpu, kernel
                )

    def sparse(self, case: Case) -> Iterator[FamilyRun]:
        """Stages of prefill and of decode."""
        for workload in self._workloads(case):
            self.say(f"{case.label}, {workload.phase.value} of {workload.context_tokens} tokens")
            yield from self._stages(case, workload)

    def _workloads(self, case: Case) -> Iterator[Workload]:
        for tokens in self.sizes.contexts_of(case.configuration):
            yield Workload.of(Phase.PREFILL, tokens)
            for batch in self.sizes.decode_batches:
                yield Workload.of(Phase.DECODE, tokens, batch)

    def _index(self, case: Case, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries `[B, G, T, I]` and keys, as the indexer gives them."""
        if case.proxy:
            return proxy_index(q, k)
        size = case.configuration.index_dim or q.shape[3]
        iq = self._random(q.shape[0], q.shape[2], k.shape[1], size).transpose(1, 2)
        ik = self._random(k.shape[0], 1, k.shape[2], size)
        return (iq.to(FP8), ik.to(FP8)) if case.fp8 else (iq, ik)

    def _times(
        self, case: Case, workload: Workload, timer: Callable[[Run], float]
    ) -> dict[str, float]:
        q, k, v = self._inputs(case.shape, workload)
        configuration = case.configuration
        sizes: dict[str, Any] = {
            "block_size": configuration.block_size,
            "topk": configuration.topk,
            "timer": timer,
        }
        if configuration.method == "moba":
            return moba_stages_ms(q, k, v, **sizes)
        sizes |= {"proxy": case.proxy, "choice_alone": case.choice_alone}
        times = msa_stages_ms(q, k, v, *self._index(case, q, k), **sizes)
        return by_family(times, case.proxy)

    def _stages(self, case: Case, workload: Workload) -> Iterator[FamilyRun]:
        times = self._times(case, workload, lambda run: self.timer(run).median_ms)
        for family, ms in times.items():
            about = (case.shape, workload, case.configuration, ms, self.gpu, "sparsify")
            run = stage_run(family, *about, elements=case.elements)
            if run.dtype == "fp8" or not case.fp8:
                yield run
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
