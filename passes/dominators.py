"""The value through which all of q, k and v pass: dominators of the captured graph."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import networkx as nx
from torch.fx import Graph, Node

from sparsify.passes.graphs import aten, holds_data, is_shape_only, is_tensor, op_name
from sparsify.passes.matchers import sdpa
from sparsify.passes.matchers.call import AttentionCall
from sparsify.passes.views import EXPANDS, IDENTITY, RESHAPES, RULES, SPLITS

__all__ = ["VIEWS", "Dataflow"]

PROJECTIONS = aten("linear addmm mm matmul")
PIECES = SPLITS | aten("slice select narrow unbind index") | {"getitem"}
VIEWS = EXPANDS | IDENTITY | RESHAPES | frozenset(RULES)


class Dataflow:
    """The graph as data flows from the user's inputs. Sizes are not data: an edge that carries
    only the size or the type of a tensor is left out. Neither are masks: they say which tokens
    attention reads, not what these are.

    Args:
        graph: the captured graph.
        inputs: names of the placeholders of the user's tensors.
        calls: the attention of the graph by the node of its result, each one step of the flow;
            only what is one operator if None.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Iterable[str],
        calls: Mapping[Node, AttentionCall] | None = None,
    ) -> None:
        self.calls = sdpa.calls_of(graph) if calls is None else calls
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(self.order)
        for node in self.order:
            self.graph.add_edges_from((source, node) for source in self._data_of(node))
        wanted = set(inputs)
        self.inputs = [n for n in self.order if n.op == "placeholder" and n.name in wanted]
        self._parents: dict[Node, dict[Node, Node]] = {}
        self._sources: dict[Node, frozenset[Node]] = {}

    @functools.cached_property
    def live(self) -> frozenset[Node]:
        """Nodes that some output, or an operator with an effect, depends on."""
        live: set[Node] = set()
        for node in reversed(self.order):
            if node.op == "output" or node.is_impure() or any(u in live for u in node.users):
                live.add(node)
        return frozenset(live)

    def inputs_of(self, node: Node) -> frozenset[Node]:
        """User inputs that the node's value depends on."""
        if not self._sources:
            self._sources = self._reaching()
        return self._sources[node]

    def common_source(self, values: Sequence[Node]) -> Node | None:
        """The last tensor through which everything that reaches all `values` passes.

        Seen from each input of the last value (v, which no position encoding reaches) by itself;
        the latest answer counts. None when they share no input, or nothing but an input's sizes.
        """
        shared = frozenset.intersection(*(self.inputs_of(value) for value in values))
        found = [node for root in shared if (node := self._common(root, values)) is not None]
        return max(found, key=lambda node: self.order[node], default=None)

    def _data_of(self, node: Node) -> list[Node]:
        if is_shape_only(node):
            return []
        if node in self.calls:
            return [operand.node for operand in self.calls[node].operands]
        return [source for source in node.all_input_nodes if holds_data(source)]

    def _reaching(self) -> dict[Node, frozenset[Node]]:
        roots = set(self.inputs)
        out: dict[Node, frozenset[Node]] = {}
        for node in self.order:
            own = frozenset({node}) if node in roots else frozenset()
            out[node] = own.union(*(out[source] for source in self.graph.predecessors(node)))
        return out

    def _common(self, root: Node, values: Sequence[Node]) -> Node | None:
        chains = [self._chain(root, value) for value in values]
        shared = set(chains[0]).intersection(*chains[1:])
        latest = max(shared, key=lambda node: self.order[node])
        return self._hidden(latest, chains[0])

    def _chain(self, root: Node, node: Node) -> list[Node]:
        """The node's dominators, itself first, the root last."""
        if root not in self._parents:
            self._parents[root] = nx.immediate_dominators(self.graph, root)
        parents = self._parents[root]
        chain = [node]
        while chain[-1] is not root:
            chain.append(parents[chain[-1]])
        return chain

    def _hidden(self, node: Node, chain: list[Node]) -> Node | None:
        """A fused q/k/v projection, its pieces and mere views are not the hidden state: what
        they are made of is."""
        for candidate in chain[chain.index(node) :]:
            viewed = op_name(candidate) in VIEWS | PIECES or not is_tensor(candidate)
            if not (viewed or _is_cut_up(candidate)):
                return candidate
        return chain[-1] if is_tensor(chain[-1]) else None


def _is_cut_up(node: Node) -> bool:
    """Whether the node is a projection whose output is only cut into pieces."""
    return op_name(node) in PROJECTIONS and all(_leads_to_pieces(user) for user in node.users)


def _leads_to_pieces(node: Node) -> bool:
    name = op_name(node)
    if name in PIECES:
        return True
    return name in VIEWS and all(_leads_to_pieces(user) for user in node.users)
