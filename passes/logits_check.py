"""Read logits against their own numbers.

What stands between the product of queries and keys and the softmax is run with random scores and
with none: visible keys must get exactly the score times the scale, hidden ones a fill.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch

from sparsify.passes.capture import Captured
from sparsify.passes.frame import Frame
from sparsify.passes.graphs import dtype_of, shape_of
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.mask_check import NumericCheck
from sparsify.passes.mask_concrete import SEED, concrete
from sparsify.passes.mask_values import SOFTEST_FILL
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
        super().__init__(captured, frame, scores.logits, scores.product)
        self.scores, self.factor = scores, factor
        self.shape = (*frame.call.out.shape[:-1], frame.call.kv_len)
        self.space = IndexSpace(captured.ranges)
        pairs = zip(scores.places, self.shape, strict=True)
        self.space.sizes.update((place, size) for place, size in pairs if place.is_Symbol)

    def _seen(self, sizes: dict[Expr, int], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        shape = [concrete(size, sizes) for size in shape_of(self.scores.product)]
        generator = torch.Generator().manual_seed(SEED)
        noise = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
        bare = self._logits(sizes, inputs, torch.zeros_like(noise))
        seen = ~(bare <= SOFTEST_FILL)
        scored = self._logits(sizes, inputs, noise)
        wanted = self.factor * self._gathered(noise, self.scores.entries, sizes)
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
        """The narrowest type on the way. Constants may be float32, whatever the scores are."""
        dtypes = [dtype_of(node) for node in (self.scores.product, self.scores.logits)]
        dtypes.append(torch.float32)
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def _logits(
        self, sizes: dict[Expr, int], inputs: dict[str, torch.Tensor], product: torch.Tensor
    ) -> torch.Tensor:
        """What the softmax takes for these scores, `[..., L, S]`."""
        given = product.to(dtype_of(self.scores.product))
        logits = self.slice.run(sizes, inputs, given).double()
        scores = self.scores
        index = softmax_index(scores.weights, scores.softmax, scores.places, self.space)
        assert index is not None  # the matcher has followed it
        return self._gathered(logits, index, sizes)

    def _gathered(
        self, tensor: torch.Tensor, index: tuple[Expr, ...], sizes: dict[Expr, int]
    ) -> torch.Tensor:
        """The tensor's elements `index`, which is a function of the places, `[..., L, S]`."""
        shape = [concrete(size, sizes) for size in self.shape]
        if index == self.scores.places:
            return tensor.expand(shape)
        grids = {
            place: torch.arange(size).view([-1 if axis == a else 1 for a in range(len(shape))])
            for axis, (place, size) in enumerate(zip(self.scores.places, shape, strict=True))
            if place.is_Symbol
        }
        return tensor[tuple(_on(grids, entry, sizes) for entry in index)].expand(shape)


def _on(grids: dict[Expr, torch.Tensor], entry: Expr, sizes: dict[Expr, int]) -> torch.Tensor:
    """An index expression on grids of numbers."""
    rules = {"floor": torch.floor, "Mod": torch.remainder}
    function = sympy.lambdify(list(grids), entry.subs(sizes), modules=[rules, "math"])
    return torch.as_tensor(function(*(grid.double() for grid in grids.values()))).long()
