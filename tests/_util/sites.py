"""Attention sites and refusals made up for tests of what comes after the proof."""

from sparsify.ir import (
    AttentionSite,
    HeadLayout,
    MaskKind,
    MaskProof,
    Phase,
    Refusal,
    StreamProof,
)


def make_site(fqn, ordinal=0, q_heads=4, kv_heads=2, **changes):
    """A causal site of a language model."""
    facts = dict(
        pattern="sdpa",
        heads=HeadLayout(q_heads, kv_heads, 16, 16),
        scale=0.25,
        mask=MaskProof(MaskKind.CAUSAL, padding="attention_mask", evidence="j <= i"),
        stream=StreamProof("hidden"),
        phase=Phase.PREFILL,
        q_len="s0",
        kv_len="s0",
        source="model.py:7",
    )
    return AttentionSite(fqn, ordinal, **{**facts, **changes})


def make_sites(count, template="model.layers.{}.self_attn"):
    """One site per layer."""
    return [make_site(template.format(index)) for index in range(count)]


def make_refusal(fqn, code="SLIDING_WINDOW", ordinal=0, **changes):
    """A refused site."""
    return Refusal(fqn, ordinal, code, **{"message": "a window of 8 tokens", **changes})
