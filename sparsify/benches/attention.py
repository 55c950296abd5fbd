"""One attention op against torch's dense attention, in the same run on the same device.

Legend: B batch, H query heads, G key/value heads, T queries, S keys, D head size, I index size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsify.benches.dense import best, dense_times
from sparsify.benches.stages import NAMES, moba_stages_ms, msa_stages_ms
from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.workload import AttentionShape
from sparsify.errors import UsageError
from sparsify.pair_counts import dense_pairs
from sparsify.timing import Run, Timing, extra_bytes, time_call

__all__ = [
    "DTYPES",
    "AttentionRow",
    "Question",
    "bench_attention",
    "index_inputs",
    "random_inputs",
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INDEX_DTYPES = DTYPES | {"fp8": torch.float8_e4m3fn}
# Dense attention of more work than this takes seconds: it is timed once, and beyond ten times as
# much without a warm-up.
ONCE_FLOPS = {"cuda": 1e15, "cpu": 5e11}
BUDGET_S = 5.0
LOGGER = logging.getLogger("sparsify")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """What is timed: prefill of whole contexts, or of the last `queries` tokens of them; one is a
    decode step. `index_dtype` is that of MSA's index queries and keys, None for `dtype`."""

    shape: AttentionShape
    configuration: Configuration
    contexts: tuple[int, ...]
    device: torch.device
    batch: int = 1
    dtype: str = "bf16"
    repeats: int = 20
    queries: int | None = None
    index_dtype: str | None = None

    def __post_init__(self) -> None:
        least = min(self.contexts)
        if self.queries is not None and self.queries > least:
            raise UsageError(
                f"{self.queries:,} queries are more than a context of {least:,} tokens has.",
                "Give fewer to --queries.",
            )
        if self.index_dtype is not None and self.configuration.indexer != "learned":
            raise UsageError(
                "--index-dtype is for MSA with index keys of its own.",
                "Leave it out, or give --method msa a shape without keys=group.",
            )

    @property
    def method(self) -> str:
        """The name of the method, for people."""
        return "MSA" if self.configuration.method == "msa" else "MoBA"

    @property
    def phase(self) -> str:
        """What the call is a part of."""
        if self.queries is None:
            return "prefill"
        return "decode" if self.queries == 1 else f"the last {self.queries:,} queries"

    def queries_of(self, tokens: int) -> int:
        """Queries of a call over `tokens` keys."""
        return tokens if self.queries is None else self.queries

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
            "queries": self.queries,
            **self._index_to_json(),
        }

    def _index_to_json(self) -> dict[str, Any]:
        if self.configuration.method != "msa":
            return {}
        learned = self.configuration.indexer == "learned"
        return {
            "indexer": self.configuration.indexer,
            "index_dim": self.configuration.index_dim or self.shape.head_dim,
            "index_keys": 1 if learned else self.shape.kv_heads,
            "index_dtype": self.index_dtype or (self.dtype if learned else "fp32"),
        }


@dataclass(frozen=True)
class AttentionRow:
    """What was found at one context.

    `graph` is the op as a CUDA graph, where there are such; `stages_ms` its parts, where it runs by
    Triton kernels and leaves something out. `extra_bytes` is the peak memory beyond inputs and
    outputs.
    """

    context_tokens: int
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
            "context_tokens": self.context_tokens,
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
    tensors = (q, k, v, *(index_inputs(question, q, k) or ()))
    on_gpu = question.device.type == "cuda"
    run, implementation = _op(tensors, question)
    say(f"{question.method}, {tokens} tokens")
    extra = extra_bytes(run, question.device)
    sparse = _timing(question, run)
    graph = _graph(question, run) if on_gpu else None
    every = question.configuration.budget_tokens >= tokens
    stages = {}
    if implementation == "triton" and on_gpu and not every:
        say(f"stages, {tokens} tokens")
        stages = _stages(question, tensors)
    say(f"dense, {tokens} tokens")
    dense = dense_times(q, k, v, lambda call: _dense_timing(question, tokens, call))
    return AttentionRow(tokens, implementation, dense, sparse, graph, stages, extra, every)


def random_inputs(question: Question, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v, tokens outside heads in memory, as projections leave them; the keys of a
    decode step have heads outside, as caches have."""
    torch.manual_seed(0)
    shape, queries = question.shape, question.queries_of(tokens)

    def make(heads: int, length: int, size: int) -> Tensor:
        options: dict[str, Any] = {"device": question.device, "dtype": DTYPES[question.dtype]}
        return torch.randn(question.batch, length, heads, size, **options).transpose(1, 2)

    q = make(shape.q_heads, queries, shape.head_dim)
    k = make(shape.kv_heads, tokens, shape.head_dim)
    v = make(shape.kv_heads, tokens, shape.value_dim)
    return (q, k.contiguous(), v.contiguous()) if queries < tokens else (q, k, v)


def index_inputs(
    question: Question, q_BHTD: Tensor, k_BGSD: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Index queries `[B, G, T, I]` and keys: random ones with one key for all heads, or those of
    the proxy; None for MoBA."""
    from sparsify.kernels.proxy import proxy_index

    configuration = question.configuration
    if configuration.method != "msa":
        return None
    if configuration.indexer == "proxy":
        return proxy_index(q_BHTD, k_BGSD)
    size, groups = configuration.index_dim or q_BHTD.shape[3], k_BGSD.shape[1]
    batch, tokens = q_BHTD.shape[0], k_BGSD.shape[2]
    iq = q_BHTD.new_empty(batch, q_BHTD.shape[2], groups, size).normal_().transpose(1, 2)
    ik = q_BHTD.new_empty(batch, 1, tokens, size).normal_()
    dtype = INDEX_DTYPES[question.index_dtype or question.dtype]
    return iq.to(dtype), ik.to(dtype)


def _op(tensors: tuple[Tensor, ...], question: Question) -> tuple[Run, str]:
    """The op as models call it, and what runs it."""
    from sparsify.kernels import reference, schemas
    from sparsify.kernels.dispatch import implementation
    from sparsify.kernels.layout import Layout

    configuration = question.configuration
    sizes: dict[str, Any] = {"block_size": configuration.block_size, "topk": configuration.topk}
    name = f"{configuration.method}_attention"
    op, given = getattr(schemas, name), _kept_between_calls(tensors, question)

    def run() -> Any:
        with torch.no_grad():
            return op(*tensors, **sizes, **given)

    module = implementation(name, tensors, Layout(), sizes)
    return run, "reference" if module is reference else "triton"


def _kept_between_calls(tensors: tuple[Tensor, ...], question: Question) -> dict[str, Tensor]:
    """The means of MoBA's blocks, which a cache holds."""
    if question.method != "MoBA" or tensors[0].shape[2] == tensors[1].shape[2]:
        return {}
    from sparsify.kernels.means import block_means

    return {"block_means": block_means(tensors[1], block_size=question.configuration.block_size)}


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


def _stages(question: Question, tensors: tuple[Tensor, ...]) -> dict[str, float]:
    configuration = question.configuration
    sizes: dict[str, Any] = {
        "block_size": configuration.block_size,
        "topk": configuration.topk,
        "timer": lambda run: _timing(question, run, graph=True).median_ms,
    }
    if configuration.method == "msa":
        times = msa_stages_ms(*tensors, **sizes, proxy=configuration.indexer == "proxy")
    else:
        means_given = tensors[0].shape[2] < tensors[1].shape[2]
        times = moba_stages_ms(*tensors, **sizes, means_given=means_given)
    return {NAMES[family]: ms for family, ms in times.items()}


def _dense_timing(question: Question, tokens: int, run: Run) -> Timing:
    shape = question.shape
    flops = 2 * question.batch * shape.q_heads * (shape.head_dim + shape.value_dim)
    flops *= dense_pairs(question.queries_of(tokens), tokens)
    once = ONCE_FLOPS[question.device.type]
    if flops < once:
        return _timing(question, run)
    return time_call(run, device=question.device, repeats=1, warm_up=int(flops < 10 * once))
