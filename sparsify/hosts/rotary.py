"""What the rotary tables of a transformers model look like, seen from their numbers.

Legend: R width of the tables, D head size.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsify.errors import CaptureError

__all__ = ["Rotary", "rotary_of", "takes_tables"]


@dataclass(frozen=True)
class Rotary:
    """Channels of a head that turn (0 for none), whether the tables repeat every frequency at once
    instead of the whole list, and whether the two channels of a pair are neighbours instead of half
    a width apart."""

    width: int = 0
    tables_interleaved: bool = False
    channels_interleaved: bool = False


def takes_tables(module: nn.Module) -> bool:
    """Whether an attention module is given rotary tables, and uses them."""
    takes = inspect.signature(type(module).forward).parameters
    return "position_embeddings" in takes and bool(getattr(module, "use_rope", True))


def rotary_of(model: nn.Module, module: nn.Module, fqn: str, head_dim: int) -> Rotary:
    """The rotary tables that an attention module of path `fqn` is given.

    Raises:
        CaptureError: it is given some that are not understood.
    """
    if not takes_tables(module):
        return Rotary()
    cos, sin = _tables(model, fqn)
    half = cos.shape[-1] // 2
    if cos.dim() != 3 or cos.shape[-1] != 2 * half or not 0 < 2 * half <= head_dim:
        raise _not_understood(fqn)
    halves = torch.equal(cos[..., :half], cos[..., half:])
    if not halves and not torch.equal(cos[..., ::2], cos[..., 1::2]):
        raise _not_understood(fqn)
    neighbours = _turns_neighbours(module, cos, sin, head_dim)
    return Rotary(2 * half, not halves, not halves if neighbours is None else neighbours)


@torch.no_grad()
def _tables(model: nn.Module, fqn: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[1, 2, R]` of two positions, from the `rotary_emb` nearest above."""
    parts = fqn.split(".")
    above = (model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1))
    rotary = next((r for m in above if (r := getattr(m, "rotary_emb", None)) is not None), None)
    buffers = [] if rotary is None else list(rotary.buffers())
    if rotary is None or any(buffer.is_meta for buffer in buffers):
        raise _not_understood(fqn)
    device = buffers[0].device if buffers else None
    try:
        found = rotary(torch.zeros(1, device=device), torch.tensor([[1, 2]], device=device))
    except Exception as error:  # the model's own code
        raise _not_understood(fqn) from error
    if not (isinstance(found, tuple) and all(isinstance(x, Tensor) for x in found)):
        raise _not_understood(fqn)
    cos, sin = found
    return cos, sin


@torch.no_grad()
def _turns_neighbours(module: nn.Module, cos: Tensor, sin: Tensor, head_dim: int) -> bool | None:
    """Whether the model's own function turns channel 0 into channel 1; None if it has none."""
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None or cos.shape[-1] <= 2:
        return None
    x = cos.new_zeros(1, 1, cos.shape[1], head_dim)
    x[..., 0] = 1
    try:
        turned = apply(x, x, cos, sin)[0]
    except Exception:  # the model's own code, called in another way
        return None
    return bool((turned[..., 1] != 0).any())


def _not_understood(fqn: str) -> CaptureError:
    return CaptureError(
        f"{fqn}: the learned indexer cannot read this model's rotary tables.",
        'Use indexer="proxy".',
    )
