"""The mask object that a rewritten transformers model hands to its attention.

transformers asks a mask function for a mask once per forward and passes the answer to every
attention layer unread. Ours answers with what is *known* (causal, where the queries stand, which
keys are padding), and builds the dense mask only for layers that ask for it: at 128K tokens a
dense mask is 17 GB a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from sparsify.hosts.packing import documents_of
from sparsify.kernels.documents import document_layout

__all__ = ["SparsityMask", "dense_implementation", "sparsify_mask"]


Placed = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@dataclass
class SparsityMask:
    """What is known of the mask of one forward.

    `causal` says that the visible keys of query i are exactly the unpadded keys j <= q_offset + i,
    of the query's own document where `documents` gives the number of every token's document.
    `padding` is the user's 2-D mask cut or extended to the keys, bool [batch, kv_length], or None
    when no key is hidden; keys beyond the user's mask count as hidden, as in transformers.
    """

    causal: bool
    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | torch.Tensor
    kv_offset: int
    padding_2d: torch.Tensor | None
    build_dense: Callable[[], torch.Tensor | None] = field(repr=False)
    documents: torch.Tensor | None = None
    _moved: dict[torch.device, Placed] = field(default_factory=dict, repr=False)
    # `generate` prepares the mask for static caches and hands it to the forward, which asks this.
    ndim: ClassVar[int] = 4

    @cached_property
    def padding(self) -> torch.Tensor | None:
        """Real keys, bool [batch, kv_length]; None when every key is real."""
        if self.padding_2d is None:
            return None
        known = self.padding_2d[:, self.kv_offset : self.kv_offset + self.kv_length].bool()
        missing = self.kv_length - known.shape[-1]
        if missing > 0:
            known = torch.nn.functional.pad(known, (0, missing))
        return None if bool(known.all()) else known

    @cached_property
    def keys_in_use(self) -> int:
        """Keys up to the last query, as against room in the cache behind them; those of the
        longest document where rows hold several."""
        if self.documents is not None:
            ends = document_layout(self.documents).cu_seqlens_q
            return 0 if ends is None else int(ends.diff().max())
        return int(self.q_offset) - self.kv_offset + self.q_length

    @property
    def holds_whole_documents(self) -> bool:
        """Whether every document begins in these queries: no key of it lies in a cache."""
        lengths = {self.q_length, self.kv_length}
        if self.documents is not None:
            lengths.add(self.documents.shape[1])
        return (
            len(lengths) == 1
            and not isinstance(self.q_offset, torch.Tensor)
            and self.q_offset == self.kv_offset == 0
        )

    @cached_property
    def left_padded_only(self) -> bool:
        """Whether every key after the first real one is real, so that blocks are contiguous."""
        if self.padding is None:
            return True
        return bool((self.padding[:, 1:] >= self.padding[:, :-1]).all())

    @cached_property
    def origins(self) -> tuple[int, ...] | None:
        """Slot of the first real key of each sequence; None without padding."""
        return None if self.padding is None else tuple(self.padding.int().argmax(-1).tolist())

    def q_start(self, device: torch.device) -> torch.Tensor | None:
        """Slot of query 0, int64 [batch]; None when the queries are the last keys (the default)."""
        offset = self.q_offset - self.kv_offset
        if isinstance(offset, int) and offset == self.kv_length - self.q_length:
            return None
        if isinstance(offset, torch.Tensor):
            starts = offset.reshape(-1).long().expand(self.batch_size).contiguous()
            return starts.to(device)
        return torch.full((self.batch_size,), offset, dtype=torch.long, device=device)

    def on(self, device: torch.device) -> Placed:
        """`q_start`, `padding` and `documents` where a layer computes: masks are made where the
        first one does, or on the CPU."""
        if device not in self._moved:
            padding = None if self.padding is None else self.padding.to(device)
            documents = None if self.documents is None else self.documents.to(device)
            self._moved[device] = (self.q_start(device), padding, documents)
        return self._moved[device]

    @cached_property
    def _dense(self) -> torch.Tensor | None:
        return self.build_dense()

    def dense(self) -> torch.Tensor | None:
        """The mask that the model's previous attention expects (built once per forward)."""
        return self._dense


def dense_implementation(config: Any) -> str:
    """Name of the attention that a rewritten model uses where it stays dense."""
    known = getattr(config, "sparsify", None) or {}
    return str(known.get("dense", "sdpa"))


def sparsify_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | SparsityMask | None = None,
    config: Any = None,
    **kwargs: Any,
) -> SparsityMask:
    """Mask function for `AttentionMaskInterface` (transformers.masking_utils).

    Only transformers' own causal mask function, and its causal one inside packed documents, both by
    identity, are known to be causal; windows and user functions arrive as other functions and are
    left to the dense mask. A mask that was prepared before is handed through.
    """
    if isinstance(attention_mask, SparsityMask):
        return attention_mask
    if isinstance(q_offset, torch.Tensor):
        # A static cache hands over its own counter, which moves before the mask is read.
        q_offset = q_offset.clone()

    def build_dense() -> torch.Tensor | None:
        previous = ALL_MASK_ATTENTION_FUNCTIONS.get(dense_implementation(config))
        if previous is None:
            return None
        mask: torch.Tensor | None = previous(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            config=config,
            **kwargs,
        )
        return mask

    documents = documents_of(mask_function)
    return SparsityMask(
        causal=mask_function is causal_mask_function or documents is not None,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        padding_2d=attention_mask,
        build_dense=build_dense,
        documents=documents,
    )
