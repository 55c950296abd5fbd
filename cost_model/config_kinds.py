"""Which layers of a config attend to everything, to a window, or keep a recurrent state.

Newer configs list `layer_types`; older ones tell a period, an offset or a list of indices, each
family in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sparsify.cost_model.config_fields import Fields
from sparsify.cost_model.model_shape import Kind

__all__ = ["LayerKind", "layer_kinds"]

_FULL = frozenset({"full_attention", "attention", "global", "global_attention", "full", "hybrid"})
_SLIDING = frozenset({"sliding_attention", "sliding", "local", "local_attention"})
_CHUNKED = frozenset({"chunked_attention"})
_RECURRENT = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "linear"})
# Nemotron-H writes its layers as letters; there an MLP or a mixture is a layer of its own.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_FEED_FORWARD = frozenset({"mlp", "moe"})
_LISTS = ("layer_types", "layers_block_type", "block_types", "_block_types")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a layer does with earlier tokens; `native` names a sparse attention of its own.

    `behind` says what stands behind the mixing of tokens: "any" is what the config tells for that
    layer, else it is an "mlp", a "moe", or "nothing".
    """

    kind: Kind
    window: int | None = None
    native: str = ""
    behind: Literal["any", "mlp", "moe", "nothing"] = "any"


FULL, RECURRENT = LayerKind("attention"), LayerKind("recurrent")


def layer_kinds(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    """The kind of each of `count` layers.

    Raises:
        UsageError: a list of layers is too short, or a window is needed and missing.
    """
    told = _listed(fields, count)
    if told is not None:
        kinds = tuple(_named(fields, name) for name in told)
        if all(kind.kind != "feed_forward" for kind in kinds):
            return kinds
        return tuple(replace(k, behind="nothing") if k.behind == "any" else k for k in kinds)
    return _by_period(fields, count) or _by_window(fields, count)


def _listed(fields: Fields, count: int) -> Sequence[str] | None:
    if fields.has("hybrid_override_pattern"):
        return _spelt(fields, count)
    name = next((name for name in _LISTS if fields.has(name)), None)
    if name is None:
        return None
    given = fields.value(name)
    if isinstance(given, list) and given and name.endswith("block_types"):
        given = [given[index % len(given)] for index in range(count)]  # RecurrentGemma repeats it
        return Fields({name: given}, fields.origin).sequence(name, count, str)
    return fields.sequence(name, count, str)


def _spelt(fields: Fields, count: int) -> list[str]:
    letters = fields.text("hybrid_override_pattern")
    if len(letters) != count or not set(letters) <= set(_LETTERS):
        known = " ".join(_LETTERS)
        raise fields.fail(
            f"hybrid_override_pattern is {letters!r:.60}; expected {count} letters of {known}."
        )
    return [_LETTERS[letter] for letter in letters]


def _named(fields: Fields, name: str) -> LayerKind:
    if name in _FULL:
        return FULL
    if name in _SLIDING:
        return LayerKind("sliding", _window(fields))
    if name in _CHUNKED:
        fields.assume("Chunked attention is counted as a sliding window of the chunk's length.")
        return LayerKind("sliding", fields.whole("attention_chunk_size"))
    if name in _RECURRENT:
        return RECURRENT
    if name in _FEED_FORWARD:
        return LayerKind("feed_forward", behind="moe" if name == "moe" else "mlp")
    if "sparse" in name:
        fields.assume(
            f"Layers of type {name} are natively sparse; dense is what they would cost without it."
        )
        return LayerKind("attention", native=name)
    fields.assume(f"Layers of the unknown type {name:.40} are counted as full attention.")
    return FULL


def _by_period(fields: Fields, count: int) -> tuple[LayerKind, ...] | None:
    """Hybrids that tell where their few attention layers stand."""
    if fields.text("model_type").startswith("llama4") and fields.has("attention_chunk_size"):
        step = fields.whole("no_rope_layer_interval", default=4)
        rotated = fields.sequence("no_rope_layers", count, int) or tuple(
            (index + 1) % step for index in range(count)
        )
        chunked = _named(fields, "chunked_attention")
        return tuple(chunked if rotates else FULL for rotates in rotated)
    every = fields.maybe("full_attention_interval")  # Qwen3-Next
    if every:
        full = frozenset(range(every - 1, count, every))
    elif fields.has("attn_layer_period"):  # Jamba
        period = fields.whole("attn_layer_period")
        full = frozenset(
            range(fields.whole("attn_layer_offset", default=0, least=0), count, period)
        )
    elif (flags := fields.sequence("attn_type_list", count, int)) is not None:  # MiniMax-01
        full = frozenset(index for index, flag in enumerate(flags) if flag == 1)
    else:
        indices = [fields.indices(name) for name in ("attn_layer_indices", "full_attn_idxs")]
        found = [item for item in indices if item is not None]
        if not found:
            return None
        full = found[0]
    return tuple(FULL if index in full else RECURRENT for index in range(count))


def _by_window(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    if not _slides(fields):
        return (FULL,) * count
    sliding = LayerKind("sliding", _window(fields))
    pattern = fields.value("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(pattern, str) and pattern:  # EXAONE: "LLLG"
        letters = [pattern[index % len(pattern)] for index in range(count)]
        return tuple(FULL if letter == "G" else sliding for letter in letters)
    if fields.has("sliding_window_pattern", "_sliding_window_pattern"):
        every = fields.whole("sliding_window_pattern", "_sliding_window_pattern")
    elif fields.has("max_window_layers"):  # Qwen: the first ones see everything
        first = fields.whole("max_window_layers", least=0)
        return tuple(FULL if index < first else sliding for index in range(count))
    else:
        return (sliding,) * count
    return tuple(FULL if (index + 1) % every == 0 else sliding for index in range(count))


def _slides(fields: Fields) -> bool:
    """Whether the window that is told is used; Qwen configs tell one that is switched off."""
    if not fields.has("sliding_window"):
        return False
    qwen = fields.text("model_type").startswith("qwen")
    return fields.flag("use_sliding_window", default=not qwen)


def _window(fields: Fields) -> int:
    return fields.whole("sliding_window", "attention_window_size", "window_size")
