"""MSA's learned indexer as a module, which lives in its attention module as `indexer`.

There it is seen by `state_dict`, by optimisers and by sharding. It has the shape, the parameter
names and the norms of the indexer in transformers' MiniMax-M3, so that
`indexer.load_state_dict(theirs.state_dict())` works for equal sizes.

Legend: B batch, T tokens, C channels of the hidden state, G key/value heads, I index size, R width
of the rotary tables, W index channels that turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.kernels.learned_index import index_heads

__all__ = ["IndexNorm", "MSAIndexer", "turning_columns"]

Tables = tuple[Tensor, Tensor]


class IndexNorm(nn.Module):
    """Weights of an RMS norm whose gain is `1 + weight`."""

    def __init__(
        self,
        index_dim: int,
        eps: float,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(index_dim, dtype=dtype, device=device))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class MSAIndexer(nn.Module):
    """Index queries and index keys of one attention layer, from its hidden states.

    Args:
        hidden_size: C, channels of the hidden state.
        groups: G, key/value heads; each chooses its own blocks.
        index_dim: I, size of an index vector.
        columns: for each index channel that turns, its column in the model's rotary tables; the
            second half of them belongs to the partners of the first. None turns without it.
        norm: whether both sides are normalised per head.
        bias: whether the projections have a bias.
        eps: of the norms.

    Raises:
        ValueError: sizes that make no indexer.
    """

    columns: Tensor

    def __init__(
        self,
        hidden_size: int,
        groups: int,
        index_dim: int,
        *,
        columns: Sequence[int] = (),
        norm: bool = False,
        bias: bool = False,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if min(hidden_size, groups, index_dim) < 1:
            raise ValueError("hidden_size, groups and index_dim must be at least 1.")
        if len(columns) % 2 or len(columns) > index_dim:
            raise ValueError(f"{len(columns)} of {index_dim} index channels cannot turn in pairs.")
        self.hidden_size, self.groups, self.index_dim = hidden_size, groups, index_dim
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.q_proj = nn.Linear(hidden_size, groups * index_dim, bias=bias, **place)
        self.k_proj = nn.Linear(hidden_size, index_dim, bias=bias, **place)
        self.q_norm = IndexNorm(index_dim, eps, **place) if norm else None
        self.k_norm = IndexNorm(index_dim, eps, **place) if norm else None
        numbers = torch.tensor(list(columns), dtype=torch.long, device=device)
        self.register_buffer("columns", numbers, persistent=False)

    def forward(self, hidden_BTC: Tensor, tables: Tables | None = None) -> tuple[Tensor, Tensor]:
        """Index queries `[B, G, T, I]` and index keys `[B, 1, T, I]`.

        Args:
            hidden_BTC: hidden states, the input of the layer's own projections.
            tables: the model's cosines and sines `[B or 1, T, R]`; needed if channels turn.

        Raises:
            ValueError: the tables are missing.
        """
        turning = self.turning(tables)
        return (
            self._side(hidden_BTC, self.q_proj, self.q_norm, turning),
            self._side(hidden_BTC, self.k_proj, self.k_norm, turning),
        )

    def turning(self, tables: Tables | None) -> Tables | None:
        """Cosines and sines `[B or 1, T, W]` of the channels that turn, in their order."""
        if not self.columns.shape[0]:
            return None
        if tables is None:
            raise ValueError("This indexer turns its vectors and needs the model's rotary tables.")
        cos, sin = tables
        return cos.index_select(-1, self.columns), sin.index_select(-1, self.columns)

    def _side(
        self, hidden_BTC: Tensor, side: nn.Linear, norm: nn.Module | None, turning: Tables | None
    ) -> Tensor:
        gain, eps = (norm.weight, norm.eps) if isinstance(norm, IndexNorm) else (None, 0.0)
        size = self.index_dim
        return index_heads(hidden_BTC, side.weight, side.bias, gain, eps, turning, size)

    def extra_repr(self) -> str:
        return f"groups={self.groups}, index_dim={self.index_dim}, turning={len(self.columns)}"


def turning_columns(
    index_dim: int, head_dim: int, width: int, groups: int, *, interleaved: bool = False
) -> list[int]:
    """Columns of the model's rotary tables for the channels of an index vector.

    As many of its channels turn as of a head's, in proportion. They take the slowest frequencies,
    which tell far blocks apart, and each of them several times where there is room: a key's index
    vector serves all groups, and their keys differ within a frequency.

    Args:
        head_dim, width: channels of an attention head, and how many of them turn.
        groups: key/value heads.
        interleaved: the tables repeat every frequency at once, instead of the whole list.
    """
    pairs = min(index_dim // 2, round(index_dim * width / head_dim / 2))
    known = width // 2
    if not pairs or not known:
        return []
    times = max(1, min(groups, 2 * pairs // known))
    slowest = min(known, -(-pairs // times))
    first = [number for _ in range(times) for number in range(known - slowest, known)]
    first = (first * -(-pairs // len(first)))[:pairs]
    if interleaved:
        return [2 * number for number in first] + [2 * number + 1 for number in first]
    return first + [number + known for number in first]
