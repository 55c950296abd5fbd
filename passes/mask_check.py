"""A proved mask against its own numbers.

The mask's sub-graph is run at a short odd length and at one beyond every constant in it, with
random padding and random documents, and compared with the visibility that was proved, element by
element.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Node

from sparsify.passes.capture import Captured
from sparsify.passes.frame import Frame
from sparsify.passes.graphs import dtype_of, shape_of
from sparsify.passes.mask_concrete import (
    NotRunnable,
    Slice,
    concrete,
    random_documents,
    random_padding,
    random_positions,
)
from sparsify.passes.mask_values import SOFTEST_FILL

__all__ = ["NumericCheck"]

Expr = Any
SHORT_LENGTH = 7
LONG_LENGTH = 24


class NumericCheck:
    """Runs one mask of a site on numbers.

    Args:
        captured: gives the values of buffers and constants.
        frame: the site's indices.
        mask: the boolean or float tensor that hides keys; the one of the call by default.
        cut: a node in its sub-graph whose values will be given.
    """

    most_elements = 90_000_000

    def __init__(
        self,
        captured: Captured,
        frame: Frame,
        mask: Node | None = None,
        cut: Node | None = None,
    ) -> None:
        mask = frame.call.mask if mask is None else mask
        assert mask is not None
        self.captured, self.frame, self.mask = captured, frame, mask
        self.slice = Slice(captured, mask, frame.call.node, cut)
        self.lengths = set(frame.q_len.free_symbols) | set(frame.call.kv_len.free_symbols)

    def counterexample(
        self, padding: str | None = None, documents: str | None = None, padded: bool = True
    ) -> str | None:
        """A query and a key where the mask is not causal with this padding input, inside the
        documents of this table, in words.

        `padded` runs it with random padding, else with none.

        Raises:
            NotRunnable: the sub-graph cannot be run, or not at a telling size.
        """
        table = None if documents is None else self._table(documents)
        beyond = self.slice.largest_constant() + 8
        for length in (SHORT_LENGTH, max(LONG_LENGTH, beyond)):
            sizes = self._sizes(length)
            inputs = self._inputs(sizes, padded, table)
            seen = self._seen(sizes, inputs)
            expected = self._causal(sizes)
            if padding is not None:
                expected = expected & self._like(seen, sizes, inputs[padding].bool()[:, None])
            if table is not None:
                numbers = table.run(sizes, inputs)
                same = numbers[:, :, None] == numbers[:, None]
                expected = expected & self._like(seen, sizes, same)
            found = _difference(seen, expected)
            if found is not None:
                return found
        return None

    def _seen(self, sizes: dict[Expr, int], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Which keys are visible, in the axes of the mask."""
        return _visible(self.slice.run(sizes, inputs))

    def _table(self, documents: str) -> Slice:
        """What the table of document numbers depends on."""
        node = next(node for node in self.slice.nodes if node.name == documents)
        return Slice(self.captured, node, self.frame.call.node)

    def _sizes(self, length: int) -> dict[Expr, int]:
        """Numbers for all symbols. A padding input of free length gets a column for every key."""
        inputs = self.slice.model_inputs()
        first = [shape_of(node)[0] for node in inputs if shape_of(node)]
        batch = set().union(*(s.free_symbols for s in (*first, *self.frame.call.q.shape[:-2])))
        batch -= self.lengths
        sizes = self.slice.sizes(batch, length)
        for symbol in self.lengths | batch:
            sizes.setdefault(symbol, 2 if symbol in batch else length)
        for keys, queries in self.frame.tie.items():
            sizes[keys] = sizes[queries]
        for node in inputs:
            columns = shape_of(node)[-1] if len(shape_of(node)) == 2 else sympy.Integer(0)
            if columns.is_Symbol and columns not in self.lengths:
                sizes[columns] = concrete(self.frame.kv_len, sizes)
        elements = sympy.prod([concrete(size, sizes) for size in shape_of(self.mask)])
        if elements > self.most_elements:
            raise NotRunnable(f"a mask for {length} positions is too large to check")
        return sizes

    def _inputs(
        self, sizes: dict[Expr, int], padded: bool, table: Slice | None
    ) -> dict[str, torch.Tensor]:
        numbered = set() if table is None else set(table.model_inputs())
        out = {}
        for node in self.slice.model_inputs():
            shape, dtype = tuple(concrete(s, sizes) for s in shape_of(node)), dtype_of(node)
            if len(shape) != 2:
                raise NotRunnable(f"{node.name} would have to be made up")
            if table is not None and node in numbered:
                make = random_documents if node == table.node else random_positions
                out[node.name] = make(shape, dtype)
            else:
                padding = random_padding(shape, dtype)
                out[node.name] = padding if padded else torch.ones_like(padding)
        return out

    def _causal(self, sizes: dict[Expr, int]) -> torch.Tensor:
        """Causal visibility `[queries, keys]`."""
        rows, keys = concrete(self.frame.q_len, sizes), concrete(self.frame.kv_len, sizes)
        first = torch.arange(rows)[:, None] + concrete(self.frame.shift, sizes)
        return first >= torch.arange(keys)[None, :]

    def _like(
        self, seen: torch.Tensor, sizes: dict[Expr, int], rows_BTS: torch.Tensor
    ) -> torch.Tensor:
        """What holds for the rows of a batch, in the axes of the mask."""
        if self.frame.call.rank == 3:  # one row of the mask for every head
            return rows_BTS.repeat_interleave(concrete(self.frame.heads, sizes), 0)
        return rows_BTS[:, None] if seen.dim() == 4 else rows_BTS


def _difference(seen: torch.Tensor, expected: torch.Tensor) -> str | None:
    """The first place where the mask shows more or less than expected, in words."""
    extra = seen & ~expected
    wrong = (extra | (expected & ~seen)).nonzero()
    if not len(wrong):
        return None
    place, (rows, keys) = tuple(int(n) for n in wrong[0]), expected.shape[-2:]
    verb = "sees" if bool(extra[place]) else "misses"
    return f"query {place[-2]} {verb} key {place[-1]} ({rows} queries, {keys} keys)"


def _visible(mask: torch.Tensor) -> torch.Tensor:
    """Visibility of a boolean or float mask."""
    return mask if mask.dtype == torch.bool else ~(mask <= SOFTEST_FILL)
