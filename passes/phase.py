"""What step a site computes: whole prompts, one more token, or a chunk after a cache."""

from __future__ import annotations

from typing import Any

import sympy

from sparsify.ir import Phase, StreamProof
from sparsify.passes.matchers.sdpa import SdpaCall

__all__ = ["phase_of"]


def phase_of(call: SdpaCall, stream: StreamProof, offset: Any) -> Phase:
    """The phase, from the lengths and the position of query 0 among the keys.

    A single query is decode, also without a cache in sight; more queries than one that begin
    behind other keys are a chunk.
    """
    if call.q_len == 1 and (stream.cached or call.kv_len != 1):
        return Phase.DECODE
    if stream.cached or sympy.sympify(offset) != 0:
        return Phase.CHUNKED_PREFILL
    return Phase.PREFILL
