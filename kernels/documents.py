"""Several documents in one row: from a table of document numbers to the layout that the ops take.

A table `[B, T]` says which document every token belongs to. The rows are put one behind the other,
so that the batch becomes one packed row, and cumulative lengths say where documents begin. Their
number depends on data, the shape of the lengths must not: there is room for a document per token,
and the entries left over repeat the end, so that they are documents without tokens. Nothing here
reads a value on the host, and nothing has a shape that depends on data.

Legend: B batch, H heads, T tokens of a row, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels.layout import Layout

__all__ = ["as_batch", "as_packed_row", "document_layout"]


def document_layout(documents: Tensor, key_mask: Tensor | None = None) -> Layout:
    """Where the documents lie once the rows are put one behind the other.

    A hidden token (padding, a hole) belongs to the document before it, or to the first one of its
    row, whatever its number says. Equal numbers in two rows are two documents.

    Args:
        documents: `[B, T]` whole numbers, equal inside a document. They need not rise.
        key_mask: `[B, T]` bool, False where a token is hidden.

    Returns:
        The layout tensors for `as_packed_row` of queries, keys and values: cumulative lengths int32
        `[B * T + 1]`, and the key mask `[1, B * T]`.

    Raises:
        ValueError: for another shape or dtype.
        RuntimeError: equal numbers of a row do not stand next to each other. While a graph is
            captured this becomes a check that runs with the graph.
    """
    _check_table(documents, key_mask)
    if key_mask is not None:
        documents = _without_holes(documents, key_mask)
    starts_BT = _changes(documents)
    _check_contiguous(documents, starts_BT)
    starts_N = starts_BT.reshape(-1)
    slots_N = torch.arange(starts_N.shape[0], device=documents.device)
    end_N = torch.full_like(slots_N, starts_N.shape[0])
    begins_N = torch.where(starts_N, slots_N, end_N).sort().values
    cu_seqlens = torch.cat([begins_N, slots_N.new_full((1,), starts_N.shape[0])]).int()
    packed_mask = None if key_mask is None else key_mask.reshape(1, -1)
    return Layout(key_mask=packed_mask, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)


def as_packed_row(x_BHTD: Tensor) -> Tensor:
    """The rows of a batch one behind the other, `[1, H, B * T, D]`."""
    return x_BHTD.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def as_batch(x_1HND: Tensor, batch: int, length: int) -> Tensor:
    """Undoes `as_packed_row`: `[batch, H, length, D]`. The last axis may be missing (lse)."""
    rows_HBTD = x_1HND.reshape(x_1HND.shape[1], batch, length, *x_1HND.shape[3:])
    return rows_HBTD.transpose(0, 1)


def _check_table(documents: Tensor, key_mask: Tensor | None) -> None:
    if documents.dim() != 2:
        raise ValueError(f"documents has shape {list(documents.shape)}; expected [B, T].")
    if documents.is_floating_point() or documents.is_complex():
        raise ValueError(f"documents has dtype {documents.dtype}; expected whole numbers.")
    if key_mask is not None and key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask has dtype {key_mask.dtype}; expected torch.bool.")


def _changes(documents: Tensor) -> Tensor:
    """Where a number differs from the one before it, `[B, T]`; a row begins with one."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat([first, documents[:, 1:] != documents[:, :-1]], 1)


def _without_holes(documents: Tensor, real_BT: Tensor) -> Tensor:
    """The table with the number of the last real token, or of the first one, at hidden tokens."""
    length = documents.shape[1]
    slots_BT = torch.arange(length, device=documents.device).expand_as(real_BT)
    in_order_BT = slots_BT.masked_fill(~real_BT, length - 1).sort(1).values
    real_until_BT = real_BT.cumsum(1)
    return documents.gather(1, in_order_BT.gather(1, (real_until_BT - 1).clamp(min=0)))


def _check_contiguous(documents: Tensor, starts_BT: Tensor) -> None:
    """As many runs of equal numbers as there are numbers, in every row."""
    numbers_B = _changes(documents.sort(1).values).sum(1)
    torch._assert_async(
        (starts_BT.sum(1) == numbers_B).all(),
        "The tokens of a document do not stand next to each other in their row.",
    )
