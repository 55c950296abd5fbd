"""A plan for a GPU and a context: what the cost model makes of a policy.

Layers under a fixed method stay dense where dense is faster; layers under `Auto` get what
`cost_model.choosing` chooses. The plan says what it expects, and what it does not know.

Sites come from proofs, or, before a model is loaded, from its config (`sites_of_config`); then the
plan is unproved until it is applied, when it is held against the facts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sparsify import planner
from sparsify.cost_model.choosing import Choice
from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.efficiencies import SCALES
from sparsify.cost_model.model_shape import ModelShape
from sparsify.cost_model.search import LEAST_BUDGET_TOKENS, Candidate
from sparsify.cost_model.stages import runs_sparse
from sparsify.cost_model.times import TimeEstimate
from sparsify.errors import NothingToDoError, UsageError
from sparsify.ir import HeadLayout, Refusal, site_key
from sparsify.planning_checks import check, notes_of
from sparsify.planning_result import Planned, Row, Scaled, time_json
from sparsify.planning_target import Target
from sparsify.planning_work import ConfigSite, Found, Losses, OpenSite, Work
from sparsify.plans import LayerPlan, Plan
from sparsify.policy import MSA, Auto, Dense, MoBA, Policy

__all__ = ["method_of", "plan_for", "sites_of_config", "wanted_configurations"]


def sites_of_config(model: ModelShape) -> list[Found]:
    """The attention that a config names, in order; windows are refused, as a proof would."""
    found: list[Found] = []
    for layer in model.attention_layers:
        heads = layer.attention
        assert heads is not None
        if layer.kind == "attention":
            sizes = (heads.q_heads, heads.kv_heads, heads.head_dim, heads.value_dim)
            found.append(ConfigSite(layer.name, HeadLayout(*sizes)))
        else:
            message = f"a window of {layer.window} tokens"
            found.append(Refusal(layer.name, 0, "SLIDING_WINDOW", message))
    return found


def wanted_configurations(
    policy: Policy, found: Sequence[Found], target: Target
) -> dict[str, list[Configuration]]:
    """By site key, the configurations whose quality has to be known: the fixed one, or under `Auto`
    all that are legal and faster than dense."""
    work = Work(policy, tuple(found), target)
    return {
        site.key: [c.configuration for c in work.candidates[site.shape] if c.usable]
        if isinstance(site.method, Auto)
        else [Configuration.of(site.method)]
        for site in work.open_sites
    }


def plan_for(
    policy: Policy,
    found: Sequence[Found],
    target: Target,
    *,
    name: str = "",
    losses: Losses | None = None,
    min_speedup: float | None = None,
    notes: Sequence[str] = (),
) -> Planned:
    """The plan of `policy` for a GPU and a context.

    Args:
        found: all attention in execution order.
        losses: what was measured on samples; None without samples.
        min_speedup: end to end, expected.
        notes: sentences to keep with the plan.

    Raises:
        NothingToDoError: there is no attention.
        UsageError: a layer rule matches nothing, heads cannot be split, or a quality budget comes
            without samples.
        CaptureError: `on_unproved: error` and a site was refused.
        InfeasibleError: memory, `min_speedup` or the policy's quality budget cannot be met.
    """
    if not found:
        raise NothingToDoError(f"No attention was found in {name or 'the model'}.")
    work = Work(policy, tuple(found), target, losses, min_speedup)
    if work.least_recall is not None and losses is None:
        raise UsageError(
            "The policy has a quality budget (min_score_recall), and there are no samples to "
            "measure it on.",
            "Give samples (--prompts FILE), or leave the budget to `sparsify verify`.",
        )
    return _planned(work, name, notes)


def _planned(work: Work, name: str, notes: Sequence[str]) -> Planned:
    choice = work.choice()
    layers = tuple(_layers(work, choice))
    rows = tuple(_row(work, layer) for layer in layers)
    planned = _total(work, rows)
    check(work, rows, planned, choice)
    sensitivity = tuple(_scaled(work, rows, scale) for scale in SCALES)
    told = (*notes, *notes_of(work, rows, planned, sensitivity))
    estimate = _estimate(work, planned, told)
    return Planned(
        Plan(layers, work.policy.to_json(), name, estimate),
        work.target,
        rows,
        work.dense,
        planned,
        work.target.model is not None,
        work.attention.expected_ms / work.dense.expected_ms,
        choice.front if choice else (),
        sensitivity,
        _refused(work),
        told,
    )


def _layers(work: Work, choice: Choice | None) -> Iterator[LayerPlan]:
    open_sites = {site.key: site for site in work.open_sites}
    for item, (method, because) in zip(work.found, work.choices, strict=True):
        site = open_sites.get(site_key(item.fqn, item.ordinal))
        if site is None:
            shown = Dense() if isinstance(method, Auto) else method
            yield planner.layer_plan(work.policy, item, shown, because)
        elif isinstance(site.method, Auto):
            assert choice is not None
            yield _chosen_layer(work, site, choice.picks[site.key])
        else:
            yield _fixed_layer(work, site)


def _fixed_layer(work: Work, site: OpenSite) -> LayerPlan:
    """As the policy says, or dense where dense is faster."""
    candidate = work.fixed[site.key]
    planned = planner.layer_plan(work.policy, site.item, site.method, site.because)
    if not runs_sparse(candidate.configuration, work.target.workload):
        return planned  # dense in this phase by the policy itself, sparse in the others
    if not candidate.usable:
        named = f"{candidate.configuration.label} {site.because}"
        return _dense_layer(site, f"{named}, but {candidate.refused}")
    return _from_threshold(work, planned, candidate)


def _chosen_layer(work: Work, site: OpenSite, configuration: Configuration) -> LayerPlan:
    if not configuration.sparse:
        return _dense_layer(site, _why_dense(work, site))
    reason = f"{configuration.label} chosen {site.because}"
    planned = planner.rewritten_layer(
        site.item, method_of(configuration), reason, work.policy.min_context
    )
    return _from_threshold(work, planned, work.candidate(site.shape, configuration))


def method_of(configuration: Configuration) -> MoBA | MSA:
    """The policy's name for a sparse configuration."""
    sizes: dict[str, Any] = {
        "block_size": configuration.block_size,
        "topk": configuration.topk,
        "decode": configuration.decode,
    }
    if configuration.method == "moba":
        return MoBA(**sizes)
    index = {"indexer": configuration.indexer, "index_dim": configuration.index_dim}
    return MSA(**sizes, **index, local=configuration.local)


def _from_threshold(work: Work, planned: LayerPlan, candidate: Candidate) -> LayerPlan:
    """Dense below the context from which sparse is faster."""
    threshold = candidate.threshold_tokens or 0
    reason = f"{planned.reason}; faster than dense from {threshold:,} tokens on {work.gpu_name}"
    least = max(planned.min_context, threshold)
    return replace(planned, min_context=least, reason=reason)


def _dense_layer(site: OpenSite, reason: str) -> LayerPlan:
    return LayerPlan(site.item.fqn, site.item.ordinal, "dense", "kept_dense", reason)


def _why_dense(work: Work, site: OpenSite) -> str:
    known = work.candidates[site.shape]
    context = f"{work.target.workload.context_tokens:,} tokens on {work.gpu_name}"
    if any(candidate.usable for candidate in known):
        if work.losses is not None:
            return f"dense {site.because}: no measured configuration serves the plan better"
        return (
            f"dense {site.because}: nothing that reads {LEAST_BUDGET_TOKENS:,} tokens or more "
            f"is faster at {context}"
        )
    late = [c for c in known if c.threshold_tokens is not None]
    if late:
        first = min(late, key=lambda c: c.threshold_tokens or 0)
        return (
            f"dense {site.because}: nothing is faster at {context}; the first, "
            f"{first.configuration.label}, would be from {first.threshold_tokens:,} tokens"
        )
    return f"dense {site.because}: nothing is possible at {context} ({known[0].refused})"


def _row(work: Work, layer: LayerPlan) -> Row:
    shape = work.shapes.get(layer.key)
    if shape is None:
        return Row(layer)
    return Row(layer, work.dense_times[shape], work.time_of(layer, shape))


def _total(work: Work, rows: Sequence[Row], scale: float = 1.0) -> TimeEstimate:
    """Everything under the plan."""
    parts = [
        work.time_of(row.layer, work.shapes[row.layer.key], scale)
        for row in rows
        if row.layer.key in work.shapes
    ]
    return TimeEstimate.total([work.rest, *parts])


def _scaled(work: Work, rows: Sequence[Row], scale: float) -> Scaled:
    planned = _total(work, rows, scale).expected_ms
    choice = work.choice(scale)
    if choice is None:
        names = dict.fromkeys(c.configuration.label for c in work.fixed.values())
        label = " and ".join(names) if work.fixed_saves(scale) else "dense"
    else:
        counts = Counter(c.label for c in choice.picks.values())
        label = ", ".join(f"{count} x {name}" for name, count in counts.most_common())
    return Scaled(scale, planned, work.dense.expected_ms, label)


def _refused(work: Work) -> tuple[Candidate, ...]:
    """What cannot be taken and why, each once."""
    found = [c for known in work.candidates.values() for c in known] + list(work.fixed.values())
    seen = {(c.configuration, c.refused): c for c in found if c.refused}
    return tuple(seen.values())


def _estimate(work: Work, planned: TimeEstimate, notes: Sequence[str]) -> dict[str, Any]:
    """What a plan file keeps of all this."""
    target = work.target
    return {
        "gpu": work.gpu_name,
        "phase": target.workload.phase.value,
        "context_tokens": target.workload.context_tokens,
        "batch": target.workload.batch,
        "tensor_parallel": target.tensor_parallel,
        "of": "attention" if target.model is None else "the whole model",
        "dense_ms": time_json(work.dense),
        "planned_ms": time_json(planned),
        "speedup": work.dense.expected_ms / planned.expected_ms,
        "notes": list(notes),
    }
