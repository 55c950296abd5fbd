"""One attention op against torch's dense attention, in the same run on the same device.

Legend: B batch, H query heads, G key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsify.benches.dense import best, dense_times
from sparsify.benches.stages import PREFILL_STAGES, moba_stages_ms
from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.workload import AttentionShape
from sparsify.pair_counts import dense_pairs
from sparsify.timing import Run, Timing, extra_bytes, time_call

__all__ = ["DTYPES", "AttentionRow", "Question", "bench_attention", "random_inputs"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Dense attention of more work than this takes seconds: it is timed once, and beyond ten times as
# much without a warm-up.
ONCE_FLOPS = {"cuda": 1e15, "cpu": 5e11}
BUDGET_S = 5.0
LOGGER = logging.getLogger("sparsify")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """What is timed: prefill of whole contexts."""

    shape: AttentionShape
    configuration: Configuration
    contexts: tuple[int, ...]
    device: torch.device
    batch: int = 1
    dtype: str = "bf16"
    repeats: int = 20

    def to_json(self) -> dict[str, Any]:
        """The question, for a result file."""
        return {
            "method": self.configuration.method,
            "block_size": self.configuration.block_size,
            "topk": self.configuration.topk,
            "q_heads": self.shape.q_heads,
            "kv_heads": self.shape.kv_heads,
            "head_dim": self.shape.head_dim,
            "value_dim": self.shape.value_dim,
            "batch": self.batch,
            "dtype": self.dtype,
            "device": str(self.device),
        }


@dataclass(frozen=True)
class AttentionRow:
    """What was found at one context.

    `graph` is the op as a CUDA graph, where there are such; `stages_ms` its parts, where it runs by
    Triton kernels and leaves something out. `extra_bytes` is the peak memory beyond inputs and
    outputs.
    """

    context: int
    implementation: str
    dense: dict[str, Timing]
    sparse: Timing
    graph: Timing | None
    stages_ms: dict[str, float]
    extra_bytes: int | None
    attends_all: bool

    @property
    def dense_best(self) -> str | None:
        """The fastest dense kernel."""
        return best(self.dense)

    @property
    def speedup(self) -> float | None:
        """Best dense time over the op's, the better of launched and graph."""
        name = self.dense_best
        if name is None:
            return None
        mine = min(t.median_ms for t in (self.sparse, self.graph) if t is not None)
        return self.dense[name].median_ms / mine

    @property
    def dense_once(self) -> bool:
        """Whether dense attention was timed once only."""
        return any(timing.once for timing in self.dense.values())

    def to_json(self) -> dict[str, Any]:
        """The row, for a result file."""
        return {
            "context": self.context,
            "implementation": self.implementation,
            "attends_all": self.attends_all,
            "dense": {name: timing.to_json() for name, timing in self.dense.items()},
            "dense_best": self.dense_best,
            "dense_timed_once": self.dense_once,
            "sparse": self.sparse.to_json(),
            "sparse_graph": None if self.graph is None else self.graph.to_json(),
            "stages_ms": self.stages_ms,
            "extra_bytes": self.extra_bytes,
            "speedup": self.speedup,
        }


def bench_attention(question: Question, say: Say) -> list[AttentionRow]:
    """A row per context."""
    return [_row(question, tokens, say) for tokens in question.contexts]


def _row(question: Question, tokens: int, say: Say) -> AttentionRow:
    q, k, v = random_inputs(question, tokens)
    on_gpu = question.device.type == "cuda"
    run, implementation = _op(q, k, v, question.configuration)
    say(f"MoBA, {tokens} tokens")
    extra = extra_bytes(run, question.device)
    sparse = _timing(question, run)
    graph = _graph(question, run) if on_gpu else None
    every = question.configuration.budget_tokens >= tokens
    stages = {}
    if implementation == "triton" and on_gpu and not every:
        say(f"stages, {tokens} tokens")
        stages = _stages(question, q, k, v)
    say(f"dense, {tokens} tokens")
    dense = dense_times(q, k, v, lambda call: _dense_timing(question, tokens, call))
    return AttentionRow(tokens, implementation, dense, sparse, graph, stages, extra, every)


def random_inputs(question: Question, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v, tokens outside heads in memory, as projections leave them."""
    torch.manual_seed(0)
    shape = question.shape

    def make(heads: int, size: int) -> Tensor:
        options: dict[str, Any] = {"device": question.device, "dtype": DTYPES[question.dtype]}
        return torch.randn(question.batch, tokens, heads, size, **options).transpose(1, 2)

    return (
        make(shape.q_heads, shape.head_dim),
        make(shape.kv_heads, shape.head_dim),
        make(shape.kv_heads, shape.value_dim),
    )


def _op(q: Tensor, k: Tensor, v: Tensor, configuration: Configuration) -> tuple[Run, str]:
    """The op as models call it, and what runs it."""
    from sparsify.kernels import reference, schemas
    from sparsify.kernels.dispatch import implementation
    from sparsify.kernels.layout import Layout

    sizes: dict[str, Any] = {"block_size": configuration.block_size, "topk": configuration.topk}

    def run() -> Any:
        with torch.no_grad():
            return schemas.moba_attention(q, k, v, **sizes)

    module = implementation("moba_attention", (q, k, v), Layout(), sizes)
    return run, "reference" if module is reference else "triton"


def _timing(question: Question, run: Run, *, graph: bool = False) -> Timing:
    return time_call(
        run,
        device=question.device,
        repeats=question.repeats,
        warm_up=3 if question.device.type == "cuda" else 1,
        graph=graph,
        budget_s=BUDGET_S,
    )


def _graph(question: Question, run: Run) -> Timing | None:
    """The op as a CUDA graph; None where it cannot be captured."""
    try:
        return _timing(question, run, graph=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        LOGGER.warning("the op cannot be captured as a CUDA graph: %s", error)
        return None


def _stages(question: Question, q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    times = moba_stages_ms(
        q,
        k,
        v,
        block_size=question.configuration.block_size,
        topk=question.configuration.topk,
        timer=lambda run: _timing(question, run, graph=True).median_ms,
    )
    return {PREFILL_STAGES[family]: ms for family, ms in times.items()}


def _dense_timing(question: Question, tokens: int, run: Run) -> Timing:
    shape = question.shape
    flops = 2 * question.batch * shape.q_heads * (shape.head_dim + shape.value_dim)
    flops *= dense_pairs(tokens, tokens)
    once = ONCE_FLOPS[question.device.type]
    if flops < once:
        return _timing(question, run)
    return time_call(run, device=question.device, repeats=1, warm_up=int(flops < 10 * once))
