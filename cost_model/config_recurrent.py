"""Weights and states of layers without attention: Mamba, gated delta rule, lightning, convolution.

Shapes as in the modelling files of transformers 5.24, which tests compare with.
"""

from __future__ import annotations

from dataclasses import replace

from sparsify.cost_model.config_fields import Fields
from sparsify.cost_model.model_shape import LayerShape

__all__ = ["recurrent_layer"]


def recurrent_layer(fields: Fields, name: str, hidden: int) -> LayerShape:
    """The mixer of a recurrent layer; MLP and norms around it are the caller's."""
    layer = LayerShape(name, "recurrent")
    if fields.has("linear_num_value_heads"):
        return _delta_rule(fields, layer, hidden)
    if fields.has("mamba_n_heads", "mamba_num_heads"):
        return _mamba2(fields, layer, hidden)
    if fields.has("mamba_d_state"):
        return _mamba1(fields, layer, hidden)
    if fields.has("conv_L_cache"):
        return _convolution(fields, layer, hidden)
    return _lightning(fields, layer, hidden)


def _delta_rule(fields: Fields, layer: LayerShape, hidden: int) -> LayerShape:
    values = fields.whole("linear_num_value_heads")
    key_dim, value_dim = fields.whole("linear_key_head_dim"), fields.whole("linear_value_head_dim")
    keys = fields.whole("linear_num_key_heads") * key_dim
    inner = values * value_dim
    convolved = (2 * keys + inner) * fields.whole("linear_conv_kernel_dim", default=4)
    return replace(
        layer,
        qkv_params=hidden * (2 * keys + 2 * inner + 2 * values),
        output_params=inner * hidden,
        other_params=convolved + value_dim + 2 * values,
        state_elements=values * key_dim * value_dim,
    )


def _mamba2(fields: Fields, layer: LayerShape, hidden: int) -> LayerShape:
    heads = fields.whole("mamba_n_heads", "mamba_num_heads")
    size = fields.value("mamba_d_head", "mamba_head_dim")
    expand = fields.whole("mamba_expand", "expand", default=2)
    inner = heads * size if isinstance(size, int) else expand * hidden
    states = fields.whole("mamba_d_state", "ssm_state_size")
    mixed = inner + 2 * fields.whole("mamba_n_groups", "n_groups", default=1) * states
    kernel = fields.whole("mamba_d_conv", "conv_kernel", default=4)
    biased = fields.flag("mamba_conv_bias", "use_conv_bias", default=True)
    return replace(
        layer,
        qkv_params=hidden * (inner + mixed + heads),
        output_params=inner * hidden,
        other_params=mixed * (kernel + biased) + inner + 3 * heads,
        state_elements=inner * states,
    )


def _mamba1(fields: Fields, layer: LayerShape, hidden: int) -> LayerShape:
    inner = fields.whole("mamba_expand", default=2) * hidden
    states = fields.whole("mamba_d_state")
    given = fields.value("mamba_dt_rank")
    rank = given if isinstance(given, int) else -(-hidden // 16)
    kernel = fields.whole("mamba_d_conv", default=4)
    convolved = inner * (kernel + fields.flag("mamba_conv_bias", default=True))
    return replace(
        layer,
        qkv_params=hidden * 2 * inner + inner * (rank + 2 * states) + rank * inner,
        output_params=inner * hidden,
        # A, D, the bias of dt, and Jamba's norms of dt, B and C.
        other_params=convolved + inner * (states + 2) + rank + 2 * states,
        state_elements=inner * states,
    )


def _convolution(fields: Fields, layer: LayerShape, hidden: int) -> LayerShape:
    kernel = fields.whole("conv_L_cache")
    biased = fields.flag("conv_bias", default=False)
    return replace(
        layer,
        qkv_params=3 * hidden * hidden,
        output_params=hidden * hidden,
        other_params=hidden * (kernel + 5 * biased),
        state_elements=hidden * kernel,
    )


def _lightning(fields: Fields, layer: LayerShape, hidden: int) -> LayerShape:
    """MiniMax-01's linear attention, which stands in for whatever else is not known."""
    if fields.text("model_type") != "minimax":
        fields.assume(
            "Recurrent layers whose sizes the config does not tell are counted with the "
            "projections of gated linear attention."
        )
    heads = fields.whole("num_attention_heads", "n_head")
    size = fields.whole("head_dim", default=max(hidden // heads, 1))
    inner = heads * size
    return replace(
        layer,
        qkv_params=4 * hidden * inner,
        output_params=inner * hidden,
        other_params=inner,
        state_elements=heads * size * size,
    )
