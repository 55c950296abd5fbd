"""Runs a captured graph with every proved site replaced by dense attention built from its facts.

Only what was proved is used: heads, scale, mask kind, query offset, padding input and table of
documents. If the result equals the model, the facts are right.
"""

import torch
from torch.utils import _pytree as pytree

from sparsify.ir import MaskKind
from sparsify.passes.detect import attention_calls
from sparsify.passes.graphs import expression


def run(captured, sites, args, kwargs=None):
    """Outputs of the captured model (flat list) with the sites replaced."""
    return _Replaced(captured, sites).outputs(args, kwargs or {})


def original(captured, args, kwargs=None):
    """Outputs of the captured model as it is (flat list)."""
    return _Replaced(captured, ()).outputs(args, kwargs or {})


class _Replaced(torch.fx.Interpreter):
    def __init__(self, captured, sites):
        calls = attention_calls(captured) if sites else {}  # this normalises the graph
        super().__init__(captured.graph_module, garbage_collect_values=False)
        self.captured = captured
        found = ((calls[site.fqn, site.ordinal], site) for site in sites)
        self.sites = {call.out.node: (call, site) for call, site in found}
        assert len(self.sites) == len(sites)
        self.inputs = {}

    def outputs(self, args, kwargs):
        placeholders = self.captured.graph.find_nodes(op="placeholder")
        users = iter(pytree.tree_leaves((args, kwargs)))
        state = {**self.captured.parameters, **self.captured.buffers, **self.captured.constants}
        values = [
            self.captured.value(node.name).clone() if node.name in state else next(users)
            for node in placeholders
        ]
        self.inputs = dict(zip((node.name for node in placeholders), values, strict=True))
        with torch.no_grad():
            return pytree.tree_leaves(super().run(*values))

    def run_node(self, n):
        if n not in self.sites:
            return super().run_node(n)
        call, site = self.sites[n]
        q, k, v = (self.env[o.node].permute(o.order) for o in call.operands)
        assert q.dtype == v.dtype == n.meta["val"].dtype
        padding = None if site.mask.padding is None else self.inputs[site.mask.padding]
        documents = None if site.mask.documents is None else self._value(site.mask.documents)
        out = dense(site, q, k, v, padding, documents)
        out = out.permute(sorted(range(out.dim()), key=lambda axis: call.out.order[axis]))
        return _laid_out(out, n, self.captured.examples)

    def _value(self, name):
        (node,) = (node for node in self.env if node.name == name)
        return self.env[node]


def _laid_out(out, node, examples):
    """In the memory order of the captured output: a view behind it may rely on that."""
    strides = [expression(stride) for stride in node.meta["val"].stride()]
    known = {s: examples[str(s)] for stride in strides for s in stride.free_symbols}
    order = sorted(range(out.dim()), key=lambda axis: -int(strides[axis].subs(known)))
    back = [order.index(axis) for axis in range(out.dim())]
    return out.permute(order).contiguous().permute(back)


def dense(site, q, k, v, padding, documents=None):
    """Causal attention in float64 from the facts of `site`; any layout that SDPA accepts."""
    shape = (*q.shape[:-1], v.shape[-1])
    heads, group = site.heads.q_heads, site.heads.group
    q, k, v = (_by_heads(t, heads) for t in (q, k, v))
    assert (q.shape[1], q.shape[-1], v.shape[-1]) == (
        heads,
        site.heads.head_dim,
        site.heads.value_dim,
    )
    k, v = (_grouped(t, heads, group).double() for t in (k, v))
    rows, keys = q.shape[-2], k.shape[-2]
    offset = keys - rows  # what q_offset says, for the lengths of this run
    if isinstance(site.mask.q_offset, int):
        assert offset == site.mask.q_offset
    seen = torch.arange(rows)[:, None] + offset >= torch.arange(keys)[None, :]
    assert (site.mask.kind == MaskKind.DOCUMENT) == (documents is not None)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    if padding is not None:
        real = padding[:, None, None, :keys].bool()
        seen = seen & real
        # hidden keys and values are never read, whatever they hold
        k, v = (torch.where(real.transpose(-1, -2), t, 0.0) for t in (k, v))
    out = _softmax(q.double() @ k.transpose(-1, -2) * site.scale, seen) @ v
    return out.to(q.dtype).reshape(shape)


def _by_heads(t, heads):
    if t.dim() == 3:
        return t.reshape(t.shape[0] // heads, heads, *t.shape[1:])
    return t if t.dim() == 4 else t[None, None]


def _grouped(t, heads, group):
    """One key head for every group, as the facts claim, repeated for its query heads."""
    if t.shape[1] not in (1, heads // group):
        t = t[:, ::group]
    return t.repeat_interleave(heads // t.shape[1], 1)


def _softmax(scores, seen):
    scores = scores.masked_fill(~seen, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(top.isinf(), torch.zeros_like(top), top))
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, torch.ones_like(total), total)
