"""Where a policy meets the sites that were found: one decision per site, and the report of it.

What a GPU makes of the decisions is `planning`'s.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from sparsify.errors import CaptureError, NothingToDoError, UsageError
from sparsify.ir import AttentionSite, Refusal, site_key, site_name
from sparsify.pair_counts import attended_pairs, dense_pairs
from sparsify.plans import LayerPlan, Plan
from sparsify.policy import MSA, Auto, Dense, LayerRule, MoBA, Policy
from sparsify.report import PairCount, SiteReport, SparsifyReport, VerificationReport
from sparsify.versions import package_versions

__all__ = [
    "CONTEXTS",
    "Choice",
    "apply_rules",
    "build_report",
    "check_plan",
    "execution_order",
    "layer_plan",
    "make_plan",
    "planned_pairs",
    "refuse_unproved",
    "rewritten_layer",
]

CONTEXTS = (4096, 32_768, 131_072)

Found = AttentionSite | Refusal


class Named(Protocol):
    """Attention that has a place in the model."""

    @property
    def fqn(self) -> str:
        """Path of its module."""
        ...

    @property
    def ordinal(self) -> int:
        """Its number inside the module."""
        ...


_log = logging.getLogger(__name__)


def make_plan(
    policy: Policy,
    sites: Sequence[AttentionSite],
    refusals: Sequence[Refusal],
    *,
    model: str = "",
    order: Sequence[str] | None = None,
) -> Plan:
    """One decision for every attention that was found; look-alikes (NOT_ATTENTION) do not count.

    Args:
        order: site keys in execution order; by default modules in natural order of their paths.

    Raises:
        NothingToDoError: there is no attention.
        UsageError: a layer rule matches nothing, or `Auto` is asked for, which needs a GPU
            (`sparsify.planning`).
        CaptureError: `on_unproved="error"` and a site that the policy would rewrite was refused.
    """
    found = execution_order(sites, refusals, order)
    if not found:
        raise NothingToDoError(f"No attention was found in {model or 'the model'}.")
    choices = apply_rules(policy, found)
    if policy.on_unproved == "error":
        refuse_unproved(found, choices)
    layers = [
        layer_plan(policy, item, method, because)
        for item, (method, because) in zip(found, choices, strict=True)
    ]
    return Plan(tuple(layers), policy.to_json(), model)


def check_plan(plan: Plan, sites: Sequence[AttentionSite], refusals: Sequence[Refusal]) -> None:
    """Hold a ready plan against the facts of a model.

    Raises:
        UsageError: it rewrites a site that is not proved, or leaves out or invents one.
    """
    proved = {site_key(site.fqn, site.ordinal) for site in sites}
    refused = {site_key(r.fqn, r.ordinal): r for r in refusals if r.code != "NOT_ATTENTION"}
    for layer in plan:
        name = site_name(layer.fqn, layer.ordinal)
        if layer.key not in proved and layer.key not in refused:
            raise UsageError(f"The plan names {name}, where the model has no attention.")
        if layer.sparse and layer.key not in proved and not _is_own(refused[layer.key], layer):
            why = f"{refused[layer.key].code}: {refused[layer.key].message}"
            raise UsageError(f"The plan rewrites {name}, which is not proved ({why}).")
    missing = sorted((proved | refused.keys()) - plan.by_key().keys(), key=_natural)
    if missing:
        raise UsageError(f"The plan says nothing of {missing[0].removesuffix('#0')}.")


def execution_order(
    sites: Sequence[AttentionSite],
    refusals: Sequence[Refusal],
    order: Sequence[str] | None = None,
) -> list[Found]:
    """Sites and refused attention merged in execution order."""
    found: list[Found] = [*sites, *(r for r in refusals if r.code != "NOT_ATTENTION")]
    keys = [site_key(item.fqn, item.ordinal) for item in found]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise ValueError(f"found twice: {sorted(twice)}")
    place = {key: index for index, key in enumerate(order or ())}
    return sorted(
        found,
        key=lambda item: (
            place.get(site_key(item.fqn, item.ordinal), len(place)),
            _natural(item.fqn),
            item.ordinal,
        ),
    )


def build_report(
    sites: Sequence[AttentionSite],
    refusals: Sequence[Refusal],
    plan: Plan,
    *,
    model: str = "",
    notes: Iterable[str] = (),
    contexts: Sequence[int] = CONTEXTS,
    verification: VerificationReport | None = None,
) -> SparsifyReport:
    """Every site with what it is, what the plan does there, why, and its exact pairs."""
    proved = {site_key(site.fqn, site.ordinal): site for site in sites}
    refused = {site_key(r.fqn, r.ordinal): r for r in refusals}
    rows = []
    for layer in plan:
        site = proved.get(layer.key)
        facts = _site_facts(site, layer, contexts) if site else _refusal_facts(refused, layer)
        rows.append(_site_report(layer, facts))
    return SparsifyReport(
        model or plan.model, tuple(rows), tuple(notes), verification, package_versions()
    )


def planned_pairs(layer: LayerPlan, q_heads: int, context: int) -> PairCount:
    """Pairs of a site before and after, for a prefill of `context` tokens.

    With `local="union"` a query may read one block more than topk; that upper bound is counted.
    """
    dense = dense_pairs(context, context) * q_heads
    if not layer.sparse or context < layer.min_context:
        return PairCount(context, dense, dense)
    assert layer.block_size is not None and layer.topk is not None
    topk = layer.topk + (layer.local == "union")
    attended = attended_pairs(context, context, layer.block_size, topk)
    return PairCount(context, dense, attended * q_heads)


Method = MoBA | MSA | Dense | Auto
Choice = tuple[Method, str]


def apply_rules(policy: Policy, found: Sequence[Named]) -> list[Choice]:
    """Method and its origin for every site; the first matching rule wins.

    Raises:
        UsageError: a rule matches nothing.
    """
    choices: list[Choice | None] = [None] * len(found)
    for rule in policy.layers:
        hits = [index for index, item in enumerate(found) if _matches(rule, index, item, found)]
        if not hits:
            raise UsageError(
                f"The layer rule {rule.match!r} matches none of the {len(found)} attention sites.",
                f"Their paths are {_shown(found)}.",
            )
        free = [index for index in hits if choices[index] is None]
        if not free:
            _log.warning(
                "the layer rule %r has no effect: earlier rules take its sites", rule.match
            )
        for index in free:
            choices[index] = (rule.method, f"by rule {rule.match!r}")
    default: Choice = (policy.method, "by policy")
    return [choice or default for choice in choices]


def _matches(rule: LayerRule, index: int, item: Named, found: Sequence[Named]) -> bool:
    indices = rule.indices(len(found))
    if indices is not None:
        return index in indices
    names = {item.fqn or "(root)"}
    if "#" in rule.match:
        names = {site_key(name, item.ordinal) for name in names}
    return any(fnmatch.fnmatchcase(name, rule.match) for name in names)


def _shown(found: Sequence[Named], most: int = 3) -> str:
    names = [site_name(item.fqn, item.ordinal) for item in found]
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def refuse_unproved(found: Sequence[Named], choices: Sequence[Choice]) -> None:
    """Under `on_unproved: error`.

    Raises:
        CaptureError: a site that would be rewritten was refused.
    """
    unproved = [
        f"{site_name(item.fqn, item.ordinal)} ({item.code}: {item.message})"
        for item, (method, _) in zip(found, choices, strict=True)
        if isinstance(item, Refusal) and not (isinstance(method, Dense) or _is_own(item, method))
    ]
    if unproved:
        more = "; ..." if len(unproved) > 5 else ""
        raise CaptureError(
            f"{len(unproved)} of {len(found)} attention sites are not proved: "
            f"{'; '.join(unproved[:5])}{more}.",
            'Exempt them by a layer rule, or set on_unproved to "refuse".',
        )


def layer_plan(policy: Policy, item: Named, method: Method, because: str) -> LayerPlan:
    """The decision for one attention; `because` says where the method comes from.

    Raises:
        UsageError: the method is `Auto`, which needs a GPU to choose for.
    """
    if isinstance(method, Auto):
        raise UsageError(
            "Policy.auto needs a GPU and a context to choose for.",
            "Run `sparsify plan MODEL --policy auto --gpu h200 --context 128k -o plan.json` "
            "(sparsify.plan in Python), or name both in the policy.",
        )
    if isinstance(item, Refusal) and _is_own(item, method):
        assert isinstance(method, MSA)
        reason = f"MSA {because}, on the layer's own indexer"
        return rewritten_layer(item, method, reason, policy.min_context)
    if isinstance(item, Refusal):
        reason = f"{item.code}: {item.message}"
        return LayerPlan(item.fqn, item.ordinal, "dense", "refused", reason)
    if isinstance(method, Dense):
        return LayerPlan(item.fqn, item.ordinal, "dense", "kept_dense", f"dense {because}")
    return rewritten_layer(item, method, _reason(method, because), policy.min_context)


def _is_own(refusal: Refusal, method: Method | LayerPlan) -> bool:
    """Whether a method is what a natively sparse layer does by itself."""
    if getattr(method, "indexer", None) != "learned" or getattr(method, "local", "") != "inside":
        return False
    sizes = (getattr(method, name) for name in ("block_size", "topk", "index_dim"))
    return refusal.facts.get("native") == tuple(sizes)


def rewritten_layer(
    item: Named, method: MoBA | MSA, reason: str, min_context: int = 0
) -> LayerPlan:
    """The decision to rewrite a site."""
    msa = method if isinstance(method, MSA) else None
    return LayerPlan(
        fqn=item.fqn,
        ordinal=item.ordinal,
        method=method.name,
        status="rewritten",
        reason=reason,
        block_size=method.block_size,
        topk=method.topk,
        decode=method.decode,
        min_context=min_context,
        indexer=msa.indexer if msa else None,
        index_dim=msa.index_dim if msa else None,
        local=msa.local if msa else "inside",
    )


def _reason(method: MoBA | MSA, because: str) -> str:
    if isinstance(method, MoBA):
        return f"MoBA {because}"
    if method.indexer == "learned":
        return f"MSA {because}; needs-training: the learned indexer has no trained weights yet"
    return f"MSA {because}"


def _site_facts(site: AttentionSite, layer: LayerPlan, contexts: Sequence[int]) -> dict[str, Any]:
    window = "" if site.mask.window is None else f"({site.mask.window})"
    return {
        "pattern": site.pattern,
        "q_heads": site.heads.q_heads,
        "kv_heads": site.heads.kv_heads,
        "head_dim": site.heads.head_dim,
        "value_dim": site.heads.value_dim,
        "mask": f"{site.mask.kind.value}{window}",
        "padding": site.mask.padding,
        "phase": site.phase.value,
        "source": site.source,
        "pairs": tuple(planned_pairs(layer, site.heads.q_heads, n) for n in contexts),
    }


def _refusal_facts(refused: dict[str, Refusal], layer: LayerPlan) -> dict[str, Any]:
    refusal = refused.get(layer.key)
    if refusal is None:
        return {}
    return {"source": refusal.source, "code": refusal.code, "hint": refusal.hint}


def _site_report(layer: LayerPlan, facts: dict[str, Any]) -> SiteReport:
    return SiteReport(
        fqn=layer.fqn,
        ordinal=layer.ordinal,
        status=layer.status,
        method=layer.method,
        reason=layer.reason,
        block_size=layer.block_size,
        topk=layer.topk,
        decode=layer.decode,
        min_context=layer.min_context,
        indexer=layer.indexer,
        index_dim=layer.index_dim,
        local=layer.local,
        **facts,
    )


def _natural(fqn: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts layers.2 before layers.10."""
    parts = re.findall(r"\d+|\D+", fqn)
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts)
