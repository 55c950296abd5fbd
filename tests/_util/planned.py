"""Plans for transformers models made by hand, without a capture."""

from sparsify.hosts import transformers as host
from sparsify.plans import LayerPlan, Plan

SIZE, TOPK = 8, 2


def relative(a, b):
    """max|a - b| / max|b|."""
    return ((a - b).abs().max() / b.abs().max()).item()


def plan_for(model, method="moba", dense=(), **fields):
    """A plan that rewrites every attention module but those numbered in `dense`."""
    sizes = dict(block_size=SIZE, topk=TOPK) | ({"indexer": "proxy"} if method == "msa" else {})
    names = [n for n, _ in model.named_modules() if n.endswith((".self_attn", ".attn"))]
    layers = [
        LayerPlan(n, 0, "dense", "kept_dense", "by rule")
        if i in dense
        else LayerPlan(n, 0, method, "rewritten", "by rule", **{**sizes, **fields})
        for i, n in enumerate(names)
    ]
    return Plan(tuple(layers))


def rewrite(model, method="moba", dense=(), **fields):
    """A copy of the model with such a plan applied, on the same weights."""
    rewritten = host.copy_sharing_weights(model)
    host.apply(rewritten, plan_for(model, method, dense, **fields))
    return rewritten
