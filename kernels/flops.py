"""What the ops cost, for `torch.utils.flop_counter.FlopCounterMode`.

The counter gives 0 for an op that it has no formula for, so every op has one. A multiply-add is two
operations. Counted are the pairs of a query with a key that it sees, exactly, not tiles or squares:

* attention `2 (D + V) H` per attended pair, backward `2 (3 D + 2 V) H`;
* MoBA's gate `2 H D` per query and complete past block; the own block is free, and so is topk 1;
* MSA's index `2 I` per index query head and visible key.

Softmax, means, top-k and copies are left out, as in torch's own formulas. A fused backward pass
chooses again and is charged for it. A call that `min_context`, `decode_dense` or SPARSIFY_DISABLE
makes dense is dense attention and chooses nothing.

Bounds from above: hidden keys (holes, padding on the right) count as if they were seen;
`local="union"` counts topk + 1 blocks; a query behind the last key counts as if it stood there.
`block_attention` takes its lists to be as the select ops make them, the own block among them.

Layout tensors are read if they hold data. Fake and meta tensors do not; then the queries end where
the keys end, in one sequence, and symbolic sizes count by their hints.

Legend: B batch, H query heads, T queries, D key size, V value size, I index size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from sparsify import settings
from sparsify.kernels.layout import Layout, key_slots, sequences
from sparsify.pair_counts import attended_pairs, dense_pairs, gate_pairs

__all__ = ["FORMULAS", "register"]

Values = dict[str, Any]
"""Arguments of a call by name, defaults filled in."""


class _Span(NamedTuple):
    """Queries of one sequence: how many, over how many keys, the first at position `start`."""

    queries: int
    keys: int
    start: int


def register() -> None:
    """Give torch's counter a formula for every op; they must be defined.

    Nothing happens where the counter itself cannot be imported.
    """
    try:
        from torch.utils.flop_counter import register_flop_formula
    except Exception:  # it imports Triton where there is one, and that may be broken
        return
    for name, formula in FORMULAS.items():
        op = getattr(torch.ops.sparsify, name)
        register_flop_formula(op, get_raw=True)(_by_name(op, formula))


def _by_name(op: Any, formula: Callable[[Values], int]) -> Callable[..., int]:
    """The formula as torch calls it. Arguments at their defaults are left out of calls."""
    defaults = {a.name: a.default_value for a in op.default._schema.arguments}

    def count(*args: Any, out_val: Any = None, **options: Any) -> int:
        given = dict(zip(defaults, args, strict=False))
        return formula({**defaults, **given, **options})

    return count


def _moba_select(call: Values) -> int:
    return _gate(call, _spans(call, "q", "k"))


def _msa_select(call: Values) -> int:
    return _index(call, _spans(call, "iq", "ik"))


def _block_attention(call: Values) -> int:
    width = max(_size(call["blocks"].shape[3]), 1)
    return _per_pair(call) * _attended(call, _spans(call, "q", "k"), width)


def _moba_attention(call: Values) -> int:
    return _fused(call, call["topk"], _gate)


def _msa_attention(call: Values) -> int:
    return _fused(call, call["topk"] + (call["local"] == "union"), _index)


def _fused(call: Values, topk: int, choice: Callable[[Values, list[_Span]], int]) -> int:
    spans = _spans(call, "q", "k")
    if _runs_dense(call):
        return _per_pair(call) * _total(spans, dense_pairs)
    return choice(call, spans) + _per_pair(call) * _attended(call, spans, topk)


FORMULAS: dict[str, Callable[[Values], int]] = {
    "moba_select": _moba_select,
    "msa_select": _msa_select,
    "block_attention": _block_attention,
    "block_attention_backward": _block_attention,
    "moba_attention": _moba_attention,
    "moba_attention_backward": _moba_attention,
    "msa_attention": _msa_attention,
    "msa_attention_backward": _msa_attention,
}
"""Operations of a call by the name of its op."""


def _gate(call: Values, spans: list[_Span]) -> int:
    """Operations of MoBA's gate."""
    if call["topk"] == 1:
        return 0
    _, heads, _, size = map(_size, call["q"].shape)
    block = call["block_size"]
    return 2 * heads * size * _total(spans, lambda q, k, at: gate_pairs(q, k, block, at))


def _index(call: Values, spans: list[_Span]) -> int:
    """Operations of MSA's index."""
    if call["topk"] == 1 and call["local"] == "inside":
        return 0
    _, heads, _, size = map(_size, call["iq"].shape)
    return 2 * heads * size * _total(spans, dense_pairs)


def _per_pair(call: Values) -> int:
    """Operations of a pair of one query with one key, all heads together."""
    heads, size, value_size = (_size(n) for n in (*call["q"].shape[1::2], call["v"].shape[3]))
    if "out" in call:  # a backward pass: scores again, and the products of five gradients
        return 2 * heads * (3 * size + 2 * value_size)
    return 2 * heads * (size + value_size)


def _attended(call: Values, spans: list[_Span], topk: int) -> int:
    block = call["block_size"]
    return _total(spans, lambda q, k, at: attended_pairs(q, k, block, topk, at))


def _total(spans: list[_Span], pairs: Callable[[int, int, int], int]) -> int:
    """Sum over the sequences; what stands behind the last key counts as if it stood at it."""
    total = 0
    for queries, keys, start in spans:
        before = max(0, min(queries, keys - start))
        total += pairs(before, keys, start) if before else 0
        total += (queries - before) * pairs(1, keys, keys - 1) if keys else 0
    return total


def _spans(call: Values, queries: str, keys: str) -> list[_Span]:
    batch, _, q_len, _ = map(_size, call[queries].shape)
    layout = _layout(call)
    slots = _size(key_slots(call[keys], layout))
    found = sequences(batch, q_len, slots, _readable(layout))
    return [_Span(s.queries, s.keys, s.start) for s in found]


def _runs_dense(call: Values) -> bool:
    """As `sparsify.kernels.dispatch.attends_every_block`, without guards on symbolic sizes."""
    layout = _layout(call)
    slots = _size(key_slots(call["k"], layout))
    if call["decode_dense"] and _size(call["q"].shape[2]) == 1 and slots > 1:
        return True
    known = _readable(layout)
    borders = known.cu_seqlens_q if known.cu_seqlens_k is None else known.cu_seqlens_k
    if borders is not None:
        slots = max((b - a for a, b in pairwise(borders.tolist())), default=0)
    return settings.disabled() or slots < call["min_context"]


def _layout(call: Values) -> Layout:
    return Layout(*(call[name] for name in Layout._fields))


def _readable(layout: Layout) -> Layout:
    """The layout tensors that hold data. What counts per document goes with the documents."""
    known = Layout(*(x if x is not None and _holds_data(x) else None for x in layout))
    packed = (layout.cu_seqlens_q, layout.cu_seqlens_k)
    if any(x is not None and not _holds_data(x) for x in packed):
        return Layout()
    return known


def _holds_data(x: Tensor) -> bool:
    return x.device.type != "meta" and not is_fake(x)


def _size(size: int | torch.SymInt) -> int:
    """A size as a number; one that is not known yet by its hint, which guards nothing."""
    if isinstance(size, torch.SymInt) and size.node.has_hint():
        return int(size.node.hint)
    return int(size)
