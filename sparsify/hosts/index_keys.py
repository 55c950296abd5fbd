"""Index keys of a learned indexer beside the keys of a cache layer.

They are offered before the attention module runs and taken in with the keys by the layer's own
`update`, so that both always hold the same tokens. Where they do not (the cache was filled without
an indexer, or edited past its methods) there are none, and the call is not attended sparsely.

Legend: B batch, G key/value heads, T queries, S keys, I index size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["IndexKeys", "IndexUse", "StaticIndexKeys"]


class IndexKeys:
    """Index keys `[B, 1, S, I]` of a growing layer."""

    def __init__(self) -> None:
        self.keys_B1SI: Tensor | None = None
        self._offered: Tensor | None = None
        self._ready: Tensor | None = None

    def offer(self, new_B1TI: Tensor) -> None:
        """Index keys of the tokens that the next `grow` is about."""
        self._offered = new_B1TI

    def grow(self, before: int, count: int) -> None:
        """`count` keys were appended to `before` ones."""
        new, self._offered = self._offered, None
        known = self.keys_B1SI
        if (
            new is None
            or new.shape[2] != count
            or (0 if known is None else known.shape[2]) != before
        ):
            self.keys_B1SI = self._ready = None
            return
        self.keys_B1SI = self._ready = new if known is None else torch.cat([known, new], 2)

    def take(self) -> Tensor | None:
        """All index keys after the last `grow`, once: they may be moved to another device then."""
        ready, self._ready = self._ready, None
        return ready

    def crop(self, n_S: int) -> None:
        """Keep the first `n_S` keys."""
        if self.keys_B1SI is not None:
            self.keys_B1SI = self.keys_B1SI[:, :, :n_S]

    def index(self, rows: Tensor) -> None:
        """Keep, drop, repeat or reorder sequences of the batch."""
        if self.keys_B1SI is not None:
            self.keys_B1SI = self.keys_B1SI[rows.to(self.keys_B1SI.device)]

    def reset(self, kept: int = 0) -> None:
        """Forget everything; older versions of transformers keep the keys, as zeros."""
        self._offered = self._ready = None
        known = self.keys_B1SI
        self.keys_B1SI = torch.zeros_like(known) if known is not None and kept else None

    def move(self, device: Any) -> None:
        """To another device."""
        if self.keys_B1SI is not None:
            self.keys_B1SI = self.keys_B1SI.to(device, non_blocking=True)


class StaticIndexKeys(IndexKeys):
    """Index keys `[B, 1, room, I]` of a layer with room for a fixed number of keys.

    Nothing here waits for the device: the slots of new keys are computed there.

    Args:
        empty: whether the layer holds no keys yet.
    """

    def __init__(self, room: int, *, empty: bool) -> None:
        super().__init__()
        self.room, self.whole = room, empty

    def write(self, slots_T: Tensor) -> None:
        """Keys were written to these slots."""
        new, self._offered = self._offered, None
        self.whole = self.whole and new is not None and new.shape[2] == slots_T.shape[0]
        if not self.whole or new is None:
            self._ready = None
            return
        if self.keys_B1SI is None:
            self.keys_B1SI = new.new_zeros(*new.shape[:2], self.room, new.shape[3])
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.keys_B1SI)
        self.keys_B1SI.index_copy_(2, slots_T, new)
        self._ready = self.keys_B1SI

    def crop(self, n_S: int) -> None:
        """Slots beyond the keys in use are written anew."""

    def reset(self, kept: int = 0) -> None:
        """The layer is empty again; the memory stays where it is."""
        self._offered = self._ready = None
        self.whole = True
        if self.keys_B1SI is not None:
            self.keys_B1SI.zero_()


@dataclass(frozen=True)
class IndexUse:
    """Index tensors of one call: queries `[B, G, T, I]`, and the keys `[B, 1, S, I]` of all tokens,
    or `cached`, which has those once the cache was updated."""

    queries: Tensor
    keys: Tensor
    cached: IndexKeys | None = None

    def all_keys(self) -> Tensor | None:
        """Index keys of all tokens, once; None where the cache does not have them."""
        return self.keys if self.cached is None else self.cached.take()
