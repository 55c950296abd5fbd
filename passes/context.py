"""What surrounds a site in its graph, as all of its proofs need it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import Node

from sparsify.passes.capture import Captured
from sparsify.passes.dominators import Dataflow
from sparsify.passes.index_expr import Evaluator
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.logits import Logits
from sparsify.passes.reads import Reader

__all__ = ["Context"]


@dataclass(frozen=True)
class Context:
    """The graph around one site.

    `hidden` is the value through which q, k and v pass, if there is one; `causal` are earlier
    attention nodes whose rows read no later position; `frozen` are nodes that are changed in place
    and therefore not read; `logits` is set when the attention is written out.
    """

    captured: Captured
    flow: Dataflow
    hidden: Node | None = None
    causal: Collection[Node] = ()
    frozen: frozenset[Node] = frozenset()
    logits: Logits | None = None

    def evaluator(self, space: IndexSpace) -> Evaluator:
        """A reader of values."""
        return Evaluator(self.captured, space, self.frozen)

    def reader(self, space: IndexSpace) -> Reader:
        """A reader of dependencies, back to the hidden state or to the inputs."""
        stop = () if self.hidden is None else (self.hidden,)
        calls = self.flow.calls
        return Reader(space, stop, self.causal, self.evaluator(space), self.frozen, calls)
