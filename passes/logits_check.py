"""Read logits against their own numbers.

What stands between the product of queries and keys and the softmax is run with random scores and
with none: visible keys must get exactly the score times the scale, hidden ones a fill.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Node

from sparsify.passes.capture import Captured
from sparsify.passes.frame import Frame
from sparsify.passes.graphs import dtype_of
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.mask_check import NumericCheck
from sparsify.passes.mask_concrete import SEED, concrete
from sparsify.passes.mask_values import SOFTEST_FILL
from sparsify.passes.matchers.call import Operand
from sparsify.passes.matchers.softmax_walk import softmax_index
from sparsify.passes.refused import Refused

__all__ = ["LogitsCheck"]

Expr = Any
ROUNDINGS = 16  # steps between the score and the softmax, each of which may round


class LogitsCheck(NumericCheck):
    """Runs the scores of a written-out attention on numbers.

    Args:
        captured: gives the values of buffers and constants.
        frame: the site's indices.
        factor: what visible scores are said to be multiplied by.
    """

    most_elements = 32_000_000  # of float64, several times

    def __init__(self, captured: Captured, frame: Frame, factor: float) -> None:
        scores = frame.call.scores
        assert scores is not None
        super().__init__(captured, frame, scores.logits, scores.product.node)
        self.scores, self.factor = scores, factor

    def _seen(self, sizes: dict[Expr, int], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        shape = [concrete(size, sizes) for size in self.scores.product.shape]
        generator = torch.Generator().manual_seed(SEED)
        noise = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
        bare = self._logits(sizes, inputs, torch.zeros_like(noise))
        seen = ~(bare <= SOFTEST_FILL)
        scored = self._logits(sizes, inputs, noise)
        wanted = torch.where(seen, self.factor * noise, bare)
        bound = abs(self.factor) * ROUNDINGS * torch.finfo(self._dtype).eps
        right = torch.where(seen, (scored - wanted).abs() <= bound, scored <= SOFTEST_FILL / 2)
        if not bool(right.all() and (bare[seen] == 0).all()):
            raise Refused(
                "MASK_UNPROVED",
                "the numbers of the scores contradict what was read",
                f"random scores do not reach {self.mask.name} as {self.factor:g} times the score",
            )
        return seen

    @property
    def _dtype(self) -> torch.dtype:
        """The narrowest type on the way."""
        dtypes = [dtype_of(node) for node in (self.scores.product.node, self.scores.logits)]
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def _logits(
        self, sizes: dict[Expr, int], inputs: dict[str, torch.Tensor], scores: torch.Tensor
    ) -> torch.Tensor:
        """What the softmax takes for these scores, `[..., L, S]` both."""
        product = self.scores.product
        own = sorted(range(product.rank), key=lambda axis: product.order[axis])
        given = scores.permute(own).to(dtype_of(product.node))
        logits = self.slice.run(sizes, inputs, given)
        return _gathered(logits, self.scores.weights, self.scores.softmax, scores.shape, sizes)


def _gathered(
    logits: torch.Tensor, weights: Operand, softmax: Node, shape: torch.Size, sizes: dict[Expr, int]
) -> torch.Tensor:
    """The logits in the canonical axes of the weights."""
    space, rank = IndexSpace(), len(shape)
    here = tuple(space.index(f"x{axis}", size) for axis, size in enumerate(weights.shape))
    index = softmax_index(weights, softmax, here, space)
    assert index is not None
    if index == here and logits.dim() == rank:
        return logits.double().expand(shape)
    grids = {
        entry: torch.arange(shape[axis]).view([-1 if a == axis else 1 for a in range(rank)])
        for axis, entry in enumerate(here)
        if entry.is_Symbol
    }
    places = tuple(_placed(entry, grids, sizes) for entry in index)
    return logits[places].double().expand(shape)


def _placed(entry: Expr, grids: dict[Expr, torch.Tensor], sizes: dict[Expr, int]) -> torch.Tensor:
    """An index expression on grids of numbers."""
    rules = {"floor": torch.floor, "Mod": torch.remainder}
    function = sympy.lambdify(list(grids), entry.subs(sizes), modules=[rules, "math"])
    value = function(*(grid.double() for grid in grids.values()))
    return torch.as_tensor(value).long()
