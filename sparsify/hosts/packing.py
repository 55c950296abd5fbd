"""Several documents packed into one row, as transformers tells its mask functions.

Positions that begin anew in the middle of a row make transformers combine two functions of its own:
the causal one on positions, and one that compares the number of every token's document. They are
known by the code of those functions, never by name, and their tables are read out of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils
from transformers.masking_utils import and_masks, causal_mask_function

__all__ = ["documents_of"]

_NOTHING = torch.empty(0)
_BOTH = and_masks(causal_mask_function).__code__
_SAME_DOCUMENT = masking_utils.packed_sequence_mask_function(_NOTHING).__code__
# a version without it leaves the causal function as it is
_remap: Any = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_ON_POSITIONS: Any = None if _remap is None else _remap(causal_mask_function, _NOTHING).__code__


def documents_of(mask_function: Callable[..., Any]) -> torch.Tensor | None:
    """The number of every token's document `[batch, length]`, where the function is causal inside
    documents and shows nothing else; None for any other function."""
    parts = _closed_over(mask_function, _BOTH).get("mask_functions", ())
    if len(parts) != 2:
        return None
    causal, same = parts
    documents = _closed_over(same, _SAME_DOCUMENT).get("packed_sequence_mask")
    if not isinstance(documents, torch.Tensor) or documents.dim() != 2:
        return None
    if causal is causal_mask_function:
        return documents if _in_order(documents) else None
    remapped = _closed_over(causal, _ON_POSITIONS)
    positions = remapped.get("position_ids")
    if remapped.get("mask_function") is not causal_mask_function or positions is None:
        return None
    return documents if _in_order(documents, positions) else None


def _closed_over(function: Any, code: Any) -> dict[str, Any]:
    """The variables of a function that has this very code; nothing for any other."""
    own = getattr(function, "__code__", None)
    if own is None or own is not code:
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(own.co_freevars, cells, strict=True)}


def _in_order(documents: torch.Tensor, positions: torch.Tensor | None = None) -> bool:
    """Whether the tokens of a document stand next to each other, and their positions, where these
    are compared, rise by one, so that they are as good as places in the row. It is so where
    transformers makes documents of positions; another caller may combine other tables."""
    steps = documents[:, 1:] - documents[:, :-1]
    sound = steps >= 0
    if positions is not None:
        if positions.shape != documents.shape:
            return False
        sound = sound & ((steps != 0) | (positions[:, 1:] - positions[:, :-1] == 1))
    return bool(sound.all())
