"""Whether inputs are such as a program was captured with: types, axes, sizes and options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sparsify.errors import UsageError
from sparsify.hosts.sizes import holds
from sparsify.ir import ONLY_0_AND_1
from sparsify.passes.graphs import expression

__all__ = ["Inputs", "check_values", "same_option"]


@dataclass(frozen=True)
class Inputs:
    """What a program says of its flat inputs, which come in the order of `placeholders`.

    `ranges` are torch.export's range constraints by symbol; `guards` and `ones` are those of
    `sparsify.hosts.program.Program`.
    """

    placeholders: Sequence[Node]
    ranges: Mapping[Any, Any]
    guards: tuple[str, ...]
    ones: frozenset[str]

    def sizes(self, leaves: Sequence[Any]) -> dict[str, int]:
        """Numbers of the shape symbols by name, from the inputs that are there."""
        return _by_name(self._numbers(leaves))

    def check(self, leaves: Sequence[Any]) -> None:
        """Types, ranks and fixed sizes are those of the capture; equal symbols are equal sizes.

        Raises:
            UsageError: an input is not; the message names it.
        """
        for node, leaf in zip(self.placeholders, leaves, strict=True):
            _check_kind(node.name, leaf, node.meta.get("val"))
        sizes = self._numbers(leaves)
        for node, value, leaf in self._tensors(leaves):
            for dim, size in enumerate(value.shape):
                self._check_size(node.name, dim, leaf.shape[dim], expression(size), sizes)
        broken = next((g for g in self.guards if not holds(g, _by_name(sizes))), None)
        if broken is not None:
            raise UsageError(
                f"The inputs do not fit each other: {self._told(broken)} does not hold."
            )

    def _tensors(self, leaves: Sequence[Any]) -> Iterator[tuple[Node, torch.Tensor, torch.Tensor]]:
        """Placeholder, captured tensor and given tensor of every input that is one."""
        for node, leaf in zip(self.placeholders, leaves, strict=True):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and isinstance(leaf, torch.Tensor):
                yield node, value, leaf

    def _numbers(self, leaves: Sequence[Any]) -> dict[Any, int]:
        """Numbers of the shape symbols; the first input that has one decides."""
        found: dict[Any, int] = {}
        for _, value, leaf in self._tensors(leaves):
            for size, number in zip(value.shape, leaf.shape, strict=False):
                symbol = expression(size)
                if symbol.is_Symbol:
                    found.setdefault(symbol, int(number))
        return found

    def _check_size(
        self, name: str, dim: int, found: int, size: Any, sizes: Mapping[Any, int]
    ) -> None:
        wanted = size.subs(sizes)
        if wanted.is_Integer and int(wanted) != found:
            reason = "" if size.is_Integer else ", as the other inputs say"
            raise UsageError(
                f"dim {dim} of {name} is {found}; the program was captured for {wanted}{reason}."
            )
        if not size.is_Symbol:
            return
        low, high = self._limits(size)
        if found < low or (high is not None and found > high):
            raise UsageError(
                f"dim {dim} of {name} is {found}; the program holds for {low}"
                + (" and more." if high is None else f" to {high}.")
            )

    def _limits(self, symbol: Any) -> tuple[int, int | None]:
        """Smallest and largest size; what other sizes ask of this one stands in the guards."""
        low = 1 if str(symbol) in self.ones else 2
        interval = self.ranges.get(symbol)
        if interval is None:
            return low, None
        if int(interval.lower) > 2 and not self._is_related(symbol):
            low = int(interval.lower)
        return low, int(interval.upper) if interval.upper.is_Integer else None

    def _is_related(self, symbol: Any) -> bool:
        """Whether a guard holds the size against another one."""
        known = {str(other) for other in self.ranges}
        found = [known & set(re.findall(r"\w+", guard)) for guard in self.guards]
        return any(str(symbol) in names and len(names) > 1 for names in found)

    def _told(self, guard: str) -> str:
        """A guard with sizes under the names that the caller knows."""
        for node in self.placeholders:
            value = node.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                symbol = expression(size)
                if symbol.is_Symbol:
                    guard = re.sub(rf"\b{symbol}\b", f"{node.name}.shape[{dim}]", guard)
        return guard


def same_option(value: Any, captured: Any) -> bool:
    """Whether a value that is no tensor is the one that the program was captured with."""
    return type(value) is type(captured) and bool(value == captured)


def check_values(name: str, padding: torch.Tensor, values: str) -> None:
    """A padding input holds the numbers that its proof assumes.

    Raises:
        UsageError: it holds others, which the model would read otherwise.
    """
    real = padding >= 0
    if values == ONLY_0_AND_1:
        real = (padding == 0) | (padding == 1)
    if padding.dtype != torch.bool and not bool(real.all()):
        raise UsageError(f"{name} must hold {values}.")


def _by_name(sizes: Mapping[Any, int]) -> dict[str, int]:
    return {str(symbol): number for symbol, number in sizes.items()}


def _check_kind(name: str, leaf: Any, value: Any) -> None:
    """The input is the captured option, or a tensor like the captured one, sizes aside."""
    if not isinstance(value, torch.Tensor):
        if not same_option(leaf, value):
            told = f"a {type(leaf).__name__}" if isinstance(leaf, torch.Tensor) else repr(leaf)
            raise UsageError(f"{name} is {told}; the program was captured with {value!r}.")
        return
    if not isinstance(leaf, torch.Tensor):
        raise UsageError(f"{name} is a {type(leaf).__name__}; it must be a tensor.")
    if leaf.dtype != value.dtype:
        raise UsageError(f"{name} is {leaf.dtype}; the program was captured with {value.dtype}.")
    if leaf.dim() != value.dim():
        raise UsageError(
            f"{name} has {leaf.dim()} axes; the program was captured with {value.dim()}."
        )
