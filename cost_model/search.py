"""Which configurations a layer may have, what each costs there, and which of them to take.

Where quality was measured, plans are compared by it (`pareto`). Where it was not, configurations
are only put in order, which is no measure: more tokens read are better, and of equal budgets the
smaller block is, since a block's score stands out less the more keys it averages (signal-to-noise
argument of FlashMoBA, arXiv 2511.11571).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from sparsify.cost_model.configuration import DENSE, PUBLISHED, Configuration
from sparsify.cost_model.layer_cost import LayerCost
from sparsify.cost_model.situation import Situation
from sparsify.cost_model.stages import runs_sparse
from sparsify.cost_model.workload import AttentionShape

__all__ = [
    "LEAST_BUDGET_TOKENS",
    "NEAR_FASTEST",
    "Candidate",
    "best_in_order",
    "candidates",
    "examine",
    "grid",
    "limit_ms",
    "may_be_chosen",
    "obstacles",
    "quality_order",
]

# What the kernels are planned for.
HEAD_DIMS = (16, 256)
MOBA_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
MSA_BLOCKS = (32, 64, 128, 256)
MSA_BLOCK_RANGE = INDEX_DIM_RANGE = (32, 256)
# Fewer tokens than this leave kernels without work and models without context.
LEAST_TOKENS = 512
# Choices of this module: the sizes tried, and when Auto trades time for a better place in order.
# Nothing published reads fewer than three blocks (MoBA 512/3, arXiv 2502.13189).
TOPK = (4, 8, 16, 32)
LEAST_BUDGET_TOKENS = 2048
NEAR_FASTEST = 1.10


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration for one layer; `refused` says why it cannot be taken ("" if it can).

    `threshold_tokens` is the context from which it is faster than dense, None if never.
    """

    configuration: Configuration
    refused: str
    cost: LayerCost | None = None
    threshold_tokens: int | None = None

    @property
    def usable(self) -> bool:
        """Whether it is legal and faster than dense."""
        return not self.refused

    @property
    def expected_ms(self) -> float:
        """Expected time of one layer."""
        return 0.0 if self.cost is None else self.cost.time.expected_ms


def grid() -> Iterator[Configuration]:
    """The configurations that are tried: powers of two, and what is published.

    A learned indexer is left out: it means nothing before it is trained.
    """
    found: dict[Configuration, None] = {}
    for block in MOBA_BLOCKS:
        for topk in TOPK:
            found[Configuration("moba", block, topk)] = None
    for block in MSA_BLOCKS:
        for topk in TOPK:
            found[Configuration("msa", block, topk, "proxy")] = None
    for published in PUBLISHED:
        if not published.needs_training:
            found[replace(published, decode="sparse")] = None
    yield from found


def obstacles(
    configuration: Configuration, shape: AttentionShape, context_tokens: int
) -> list[str]:
    """Why the configuration is not for that layer and context, as clauses; none if it is legal."""
    block, budget = configuration.block_size, configuration.budget_tokens
    found = []
    for name, size in (("head size", shape.head_dim), ("value size", shape.value_dim)):
        found += _outside(name, size, HEAD_DIMS)
    if configuration.method == "msa":
        found += _outside("MSA block", block, MSA_BLOCK_RANGE)
        if configuration.index_dim is not None:
            found += _outside("index size", configuration.index_dim, INDEX_DIM_RANGE)
    if budget < LEAST_TOKENS:
        found.append(f"it reads {budget} tokens, fewer than {LEAST_TOKENS}")
    if 2 * budget >= context_tokens:
        found.append(
            f"it reads {budget:,} of {context_tokens:,} tokens: half or more saves too little"
        )
    return found


def _outside(name: str, size: int, bounds: tuple[int, int]) -> list[str]:
    least, most = bounds
    return [] if least <= size <= most else [f"{name} {size} is outside {least}..{most}"]


def examine(configuration: Configuration, shape: AttentionShape, situation: Situation) -> Candidate:
    """What a configuration costs there, and whether dense is faster. Legality is not judged."""
    cost = situation.cost(shape, configuration)
    if not runs_sparse(configuration, situation.workload):
        return Candidate(configuration, "it is dense in decode", cost)
    dense_ms = situation.cost(shape, DENSE).time.expected_ms
    threshold = situation.threshold_tokens(shape, configuration)
    context = situation.workload.context_tokens
    late = threshold is None or threshold > context
    if late or cost.time.expected_ms >= dense_ms:
        return Candidate(
            configuration,
            _slower(situation.gpu.name, threshold, context, dense_ms, cost.time.expected_ms),
            cost,
            threshold,
        )
    return Candidate(configuration, "", cost, threshold)


def _slower(gpu: str, threshold: int | None, context: int, dense_ms: float, ms: float) -> str:
    since = "at every context" if threshold is None else f"below {threshold:,} tokens"
    return (
        f"dense is faster {since} on {gpu} (at {context:,} tokens {dense_ms:.3g} ms a layer, "
        f"sparse {ms:.3g} ms)"
    )


def candidates(
    shape: AttentionShape,
    situation: Situation,
    *,
    free_bytes: float | None = None,
    tried: Iterable[Configuration] | None = None,
) -> list[Candidate]:
    """Every configuration tried, each with its cost or with why it cannot be taken.

    Args:
        free_bytes: memory beside weights and KV cache; caches and workspace of one layer must fit.
        tried: by default `grid`.
    """
    found = []
    for configuration in grid() if tried is None else tried:
        against = obstacles(configuration, shape, situation.workload.context_tokens)
        if against:
            found.append(Candidate(configuration, "; ".join(against)))
            continue
        found.append(_fitting(examine(configuration, shape, situation), free_bytes))
    return found


def _fitting(candidate: Candidate, free_bytes: float | None) -> Candidate:
    if candidate.cost is None or free_bytes is None or not candidate.usable:
        return candidate
    needed = candidate.cost.index_cache_bytes + candidate.cost.workspace_bytes
    if needed <= free_bytes:
        return candidate
    reason = (
        f"one layer needs {needed / 1e9:.3g} GB beside weights and KV cache, "
        f"{max(free_bytes, 0) / 1e9:.3g} GB are free"
    )
    return replace(candidate, refused=reason)


def quality_order(configuration: Configuration) -> tuple[int, int]:
    """Sorts from worse to better: by tokens read, then the smaller block. An order, no measure."""
    return configuration.budget_tokens, -configuration.block_size


def may_be_chosen(configuration: Configuration) -> bool:
    """Whether it reads enough to be taken unmeasured."""
    return configuration.budget_tokens >= LEAST_BUDGET_TOKENS


def limit_ms(fastest_ms: float, most_ms: float | None) -> float:
    """What a plan may take to be near the fastest, and within what was asked for if any is."""
    near = NEAR_FASTEST * fastest_ms
    return near if most_ms is None else min(near, max(most_ms, fastest_ms))


def best_in_order(
    totals_ms: Mapping[Configuration, float], *, most_ms: float | None = None
) -> Configuration | None:
    """Of the configurations within `NEAR_FASTEST` of the fastest total, the last in
    `quality_order`; None without any.

    Configurations that read fewer than `LEAST_BUDGET_TOKENS` do not take part. Of equally good ones
    the fastest is taken.

    Args:
        most_ms: a total that must not be exceeded, where one of them keeps it.
    """
    totals = {c: ms for c, ms in totals_ms.items() if may_be_chosen(c)}
    if not totals:
        return None
    limit = limit_ms(min(totals.values()), most_ms)
    close = [c for c, ms in totals.items() if ms <= limit]
    return max(close, key=lambda c: (quality_order(c), -totals[c]))
