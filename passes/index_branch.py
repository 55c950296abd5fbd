"""The branch of a graph that computes index tensors for a learned indexer.

It hangs at the hidden state, the value through which all of q, k and v pass, and turns its vectors
by the very tables that turn q and k. Its weights become parameters of the program. Where a program
goes on after a cache it takes the index keys of the earlier tokens as a further input, and programs
that give a cache give all index keys as a further result.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from sparsify.errors import CaptureError
from sparsify.passes.graphs import aten, behind, is_tensor, op_name

__all__ = ["INDEX_KEYS", "IndexBranch", "IndexState", "rotary_tables"]

INDEX_KEYS = "sparsify_index_keys"  # name of the further input
_UNCHANGING = aten("to _to_copy alias clone contiguous")


@dataclasses.dataclass(frozen=True)
class IndexBranch:
    """What a host gives for one layer: weights by their names in the program's state, and functions
    of hidden states, tables (none if nothing turns) and these weights that give index queries
    `[B, G, T, I]` and index keys `[B, 1, T, I]`."""

    weights: Mapping[str, torch.nn.Parameter]
    queries: Callable[..., torch.Tensor]
    keys: Callable[..., torch.Tensor]
    hidden_size: int
    index_dim: int
    turns: bool


def rotary_tables(q: Node, hidden: Node) -> tuple[Node, Node] | None:
    """The cosines and the sines that turn q on its way from the hidden state, or None.

    Raises:
        CaptureError: there are several of one kind.
    """
    own = _between(q, hidden)
    found: dict[str, dict[Node, None]] = {"cos": {}, "sin": {}}
    for node in own:
        if op_name(node) not in aten("mul"):
            continue
        for factor in node.all_input_nodes:
            if factor not in own and is_tensor(factor):
                for kind, table in _tables_behind(factor, hidden):
                    found[kind][table] = None
    cos, sin = (list(found[kind]) for kind in ("cos", "sin"))
    if not cos and not sin:
        return None
    if len(cos) != 1 or len(sin) != 1:
        raise CaptureError(
            f"{q.name} is turned by {len(cos)} tables of cosines and {len(sin)} of sines.",
            'Use indexer="proxy".',
        )
    return cos[0], sin[0]


def _between(q: Node, hidden: Node) -> dict[Node, None]:
    """Nodes on the way from the hidden state to q, both included."""
    above = [q, *behind(q)]
    order = {node: place for place, node in enumerate(hidden.graph.nodes)}
    own: dict[Node, None] = {hidden: None}
    for node in sorted(set(above), key=order.__getitem__):
        if order[node] > order[hidden] and any(s in own for s in node.all_input_nodes):
            own[node] = None
    return own


def _tables_behind(factor: Node, hidden: Node) -> Iterable[tuple[str, Node]]:
    above = [factor, *behind(factor)]
    if hidden in above:
        return
    for node in above:
        for kind in ("cos", "sin"):
            if op_name(node) in aten(kind):
                yield kind, _finished(node, set(above))


def _finished(table: Node, above: set[Node]) -> Node:
    """The table once it was scaled and converted, before its axes change."""
    while True:
        later = [user for user in table.users if user in above and _keeps(user)]
        if len(later) != 1:
            return table
        table = later[0]


def _keeps(node: Node) -> bool:
    scaled = op_name(node) in aten("mul") and len(node.all_input_nodes) == 1
    return scaled or op_name(node) in _UNCHANGING


class IndexState:
    """The parameters, inputs and outputs that index branches add to a program.

    Args:
        graph: a copy of the program's graph, which is edited.
        program: the captured program.
        gives_keys: whether the program is to give all index keys.
    """

    def __init__(self, graph: Graph, program: ExportedProgram, *, gives_keys: bool) -> None:
        self.graph, self.program, self.gives_keys = graph, program, gives_keys
        self.weights: dict[str, torch.nn.Parameter] = {}
        self._first = next(iter(graph.nodes))
        self._states: list[InputSpec] = []
        self._inputs: list[InputSpec] = []
        self._outputs: list[Node] = []

    def parameter(self, name: str, value: torch.nn.Parameter, mode: FakeTensorMode) -> Node:
        """The placeholder of a weight, a new one if the program has none of that name."""
        specs = self.program.graph_signature.input_specs
        own = next((spec.arg.name for spec in specs if spec.target == name), None)
        if own is not None:
            there: dict[str, Node] = {n.name: n for n in self.graph.find_nodes(op="placeholder")}
            return there[own]
        label = "p_" + name.replace(".", "_")
        with self.graph.inserting_before(self._first):
            node = self.graph.placeholder(label)
        node.meta["val"] = mode.from_tensor(value, static_shapes=True)
        argument = TensorArgument(name=node.name)
        self._states.append(InputSpec(InputKind.PARAMETER, argument, name))
        self.weights[name] = value
        return node

    def earlier(self, value: torch.Tensor) -> Node:
        """A placeholder for index keys of the tokens in the cache."""
        last = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(f"{INDEX_KEYS}_{len(self._inputs)}")
        node.meta["val"] = value
        argument = TensorArgument(name=node.name)
        self._inputs.append(InputSpec(InputKind.USER_INPUT, argument, None))
        return node

    def give(self, keys: Node) -> None:
        """All index keys of a layer are a result of the program."""
        if self.gives_keys:
            self._outputs.append(keys)

    def finish(self) -> None:
        """Put the further results behind the others; nothing may be dropped before."""
        output = self.graph.output_node()
        (results,) = output.args
        output.args = ((*results, *self._outputs),)  # type: ignore[misc]

    def signature(self) -> ExportGraphSignature:
        """The program's signature with what was added; outputs by the names of the graph follow."""
        found: ExportGraphSignature = copy.deepcopy(self.program.graph_signature)
        found.input_specs[:] = [*self._states, *found.input_specs, *self._inputs]
        found.output_specs += [
            OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None)
            for node in self._outputs
        ]
        return found

    def call_graph(self) -> list[Any]:
        """The program's call entries: a further keyword, and results as a pair with the keys."""
        first, *rest = self.program.module_call_graph
        made = copy.copy(first.signature)
        leaf = pytree.tree_structure(0)
        if self._inputs:
            args, kwargs = _children(made.in_spec)
            keys = pytree.TreeSpec(list, None, [leaf] * len(self._inputs))
            named = pytree.TreeSpec(dict, [*kwargs.context, INDEX_KEYS], [*_children(kwargs), keys])
            made.in_spec = pytree.TreeSpec(tuple, None, [args, named])
            made.forward_arg_names = [*(made.forward_arg_names or ()), INDEX_KEYS]
        if self._outputs:
            results = pytree.TreeSpec(list, None, [leaf] * len(self._outputs))
            made.out_spec = pytree.TreeSpec(tuple, None, [made.out_spec, results])
        return [dataclasses.replace(first, signature=made), *rest]


def _children(spec: Any) -> list[Any]:
    """Its parts; torch 2.13 has a method in the place of the attribute."""
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)
