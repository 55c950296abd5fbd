"""Anchor: a softmax between two matrix products, attention spelt out by hand.

Such sites are found and named, not proved yet: each becomes a refusal, with a better code than
FORM_UNSUPPORTED where one is plain to see. A softmax that is no attention (a router's, a
classifier's, a memory lookup's) is told apart by its scores: they are no product of queries and
keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from sparsify.passes.dominators import Dataflow
from sparsify.passes.graphs import argument, aten, is_tensor, op_name, shape_of
from sparsify.passes.reads import is_pointwise
from sparsify.passes.refused import Refused
from sparsify.passes.views import EXPANDS, IDENTITY, RESHAPES, RULES

__all__ = ["is_anchor", "judge"]

SOFTMAXES = aten("softmax _softmax _safe_softmax")
PRODUCTS = aten("matmul bmm mm baddbmm einsum")
VIEWS = EXPANDS | IDENTITY | RESHAPES | frozenset(RULES)
JOINING = aten("cat concat amax")


@dataclass(frozen=True)
class _Match:
    """A softmax with the products before it and, if there are any, behind it."""

    softmax: Node
    scores: tuple[Node, ...]
    chain: frozenset[Node]
    values: tuple[Node, ...]
    between: tuple[Node, ...]
    others: tuple[Node, ...]


def is_anchor(node: Node) -> bool:
    """Whether the node is a softmax."""
    return op_name(node) in SOFTMAXES


def judge(node: Node, flow: Dataflow) -> Refused:
    """Why this softmax is not replaced; NOT_ATTENTION when it is no attention at all."""
    match = _match(node, flow)
    if not match.scores or not match.values:
        what = "scores of queries and keys" if not match.scores else "a product with values"
        return Refused("NOT_ATTENTION", f"a softmax without {what}", node.name)
    return _reason(match, flow)


def _reason(match: _Match, flow: Dataflow) -> Refused:
    dim, rank = argument(match.softmax, "dim", -1), len(shape_of(match.softmax))
    if dim not in (-1, rank - 1):
        return Refused("SOFTMAX_AXIS", "the softmax does not run over the keys", f"dim={dim}")
    inside = {op_name(node) for node in match.chain}
    if "aten.tanh" in inside:
        return Refused("SOFTCAP", "the scores are capped by tanh", _names(match.chain, "tanh"))
    if inside & {"aten.cat", "aten.concat"}:
        return Refused("ATTENTION_SINK", "the softmax has an extra column", match.softmax.name)
    if match.between:
        evidence = ", ".join(node.name for node in match.between)
        return Refused("WEIGHTS_MODIFIED", "the attention weights are changed", evidence)
    if match.others:
        evidence = f"also used by {', '.join(node.name for node in match.others)}"
        return Refused("WEIGHTS_USED", "the attention weights are used elsewhere", evidence)
    return _about_scores(match, flow)


def _about_scores(match: _Match, flow: Dataflow) -> Refused:
    inside = match.chain | {match.softmax, *match.scores}
    for node in (*match.scores, *match.chain):
        outside = [user for user in node.users if user not in inside and is_tensor(user)]
        if outside or any(user.op == "output" for user in node.users):
            evidence = f"{node.name} is also used by {', '.join(u.name for u in outside)}"
            return Refused("SCORES_USED", "the scores are used elsewhere", evidence)
    for node in match.chain:
        factor = _data_factor(node, match, flow)
        if factor is not None:
            return Refused(
                "SCALE_NOT_CONSTANT", "the scores are scaled by computed values", factor.name
            )
    return Refused(
        "FORM_UNSUPPORTED",
        "attention written as separate matmul and softmax; not rewritten yet",
        f"{match.scores[0].name}, {match.softmax.name}, {match.values[0].name}",
        "Use torch.nn.functional.scaled_dot_product_attention.",
    )


def _data_factor(node: Node, match: _Match, flow: Dataflow) -> Node | None:
    """The other operand of a product or quotient on the scores, when it depends on the input."""
    if op_name(node) not in aten("mul div true_divide multiply divide"):
        return None
    own = match.chain | set(match.scores)
    others = [s for s in node.all_input_nodes if s not in own and is_tensor(s)]
    return next((other for other in others if flow.inputs_of(other)), None)


def _match(node: Node, flow: Dataflow) -> _Match:
    chain, scores = _scores(node, flow)
    values: list[Node] = []
    between: list[Node] = []
    others: list[Node] = []
    for user, changed in _uses(node):
        if op_name(user) in PRODUCTS:
            values.append(user)
            between += changed
        else:
            others.append(user)
    return _Match(
        node, tuple(scores), frozenset(chain), tuple(values), tuple(between), tuple(others)
    )


def _scores(softmax: Node, flow: Dataflow) -> tuple[list[Node], list[Node]]:
    """Elementwise steps before the softmax, and the products of two data tensors behind them."""
    chain: list[Node] = []
    scores: list[Node] = []
    seen, todo = set(), [softmax.args[0]]
    while todo:
        node = todo.pop()
        if not isinstance(node, Node) or node in seen or not is_tensor(node):
            continue
        seen.add(node)
        if op_name(node) in PRODUCTS:
            if _is_query_key(node, flow):
                scores.append(node)
        elif _passes(node):
            chain.append(node)
            todo += node.all_input_nodes
    return [n for n in chain if _leads_from(n, set(scores))], scores


def _is_query_key(product: Node, flow: Dataflow) -> bool:
    """Both factors depend on the model's inputs: a Parameter as keys is a memory or a gate."""
    factors = [s for s in product.all_input_nodes if is_tensor(s)][-2:]
    return all(flow.inputs_of(factor) for factor in factors)


def _passes(node: Node) -> bool:
    name = op_name(node)
    return name in VIEWS or name in JOINING or is_pointwise(node)


def _leads_from(node: Node, sources: set[Node]) -> bool:
    seen, todo = set(), [node]
    while todo:
        current = todo.pop()
        if current in sources:
            return True
        if current in seen or not (_passes(current) or current is node):
            continue
        seen.add(current)
        todo += current.all_input_nodes
    return False


def _uses(node: Node, changed: tuple[Node, ...] = ()) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Where the weights go: a product with values, or anything else; with what changes them."""
    for user in node.users:
        name = op_name(user)
        if name in VIEWS or name == "getitem":
            yield from _uses(user, changed)
        elif is_pointwise(user) and _reaches_product(user):
            yield from _uses(user, (*changed, user))
        elif is_tensor(user) or user.op == "output":
            yield user, changed


def _reaches_product(node: Node) -> bool:
    todo, seen = [node], set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if op_name(current) in PRODUCTS:
            return True
        if op_name(current) in VIEWS or is_pointwise(current):
            todo += current.users
    return False


def _names(nodes: frozenset[Node], part: str) -> str:
    return ", ".join(sorted(node.name for node in nodes if part in op_name(node)))
