"""What runs a call of an op: the implementation, and the top-k in force."""

from __future__ import annotations

import functools
import logging
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

from torch import Tensor

from sparsify import settings
from sparsify.errors import UsageError
from sparsify.kernels import reference
from sparsify.kernels.layout import Layout, block_count, key_slots

__all__ = ["attends_every_block", "implementation", "with_topk_in_force"]

_log = logging.getLogger(__name__)


def implementation(
    name: str, args: tuple[Any, ...], layout: Layout, options: dict[str, Any]
) -> ModuleType:
    """The module that runs a call: Triton kernels on a GPU for what they can do, else the
    reference; `SPARSIFY_IMPL` asks for one of them.

    Raises:
        UsageError: what is asked for cannot run the call; nothing else runs in its place.
    """
    asked = settings.impl()
    if asked == "reference":
        return reference
    on_gpu = any(isinstance(x, Tensor) and x.device.type == "cuda" for x in args)
    if asked == "auto" and not on_gpu:
        return reference
    why = _why_not_triton(name, args, layout, options)
    if why is None and not on_gpu and not settings.triton_interpreted():
        why = "the tensors are not on a GPU"
    if why is None:
        from sparsify.kernels import accelerated

        return accelerated
    if asked == "triton":
        raise UsageError(
            f"SPARSIFY_IMPL is triton, but {why}.",
            "Use SPARSIFY_IMPL=auto or SPARSIFY_IMPL=reference.",
        )
    _tell(name, why)
    return reference


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@functools.cache
def _tell(name: str, why: str) -> None:
    """Once per reason that a call on a GPU is left to the reference."""
    _log.info("sparsify::%s runs as plain PyTorch: %s", name, why)


def _why_not_triton(
    name: str, args: tuple[Any, ...], layout: Layout, options: dict[str, Any]
) -> str | None:
    if not _has_triton():
        return "triton is not installed"
    from sparsify.kernels import accelerated

    return accelerated.unsupported(name, args, layout, options)


def attends_every_block(
    q: Tensor, k: Tensor, layout: Layout, min_context: int = 0, decode_dense: bool = False
) -> bool:
    """Whether a call that chooses blocks is to attend all of them: by its own options (see
    `sparsify.kernels.schemas.moba_attention`) or by SPARSIFY_DISABLE."""
    slots = key_slots(k, layout)
    decode = decode_dense and q.shape[2] == 1 and slots > 1
    if decode or settings.disabled():
        return True
    # Lengths of documents are read from the device only if they matter.
    return slots < min_context or (min_context > 0 and _longest(slots, layout) < min_context)


def with_topk_in_force(
    options: dict[str, Any], q: Tensor, k: Tensor, layout: Layout
) -> dict[str, Any]:
    """The options of a call that chooses, with top-k in the place of what decides on it."""
    kept = dict(options)
    # torch leaves out options that are at their defaults
    rule = {name: kept.pop(name) for name in ("min_context", "decode_dense") if name in kept}
    if attends_every_block(q, k, layout, **rule):
        kept["topk"] = max(kept["topk"], block_count(key_slots(k, layout), kept["block_size"]), 1)
    return kept


def _longest(slots: int, layout: Layout) -> int:
    """Key slots of the longest sequence."""
    cumulative = layout.cu_seqlens_q if layout.cu_seqlens_k is None else layout.cu_seqlens_k
    if cumulative is None:
        return slots
    return max((b - a for a, b in pairwise(cumulative.tolist())), default=0)
