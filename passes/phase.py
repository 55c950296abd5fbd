"""What step a site computes: whole prompts, one more token, or a chunk after a cache."""

from __future__ import annotations

from sparsify.ir import Phase, StreamProof
from sparsify.passes.frame import Frame

__all__ = ["phase_of"]


def phase_of(frame: Frame, stream: StreamProof) -> Phase:
    """The phase, from the lengths and the position of query 0 among the keys.

    A single query is decode, also without a cache in sight; more queries than one that begin
    behind other keys are a chunk.
    """
    if frame.q_len == 1 and (stream.cached or frame.kv_len != 1):
        return Phase.DECODE
    if stream.cached or frame.shift != 0:
        return Phase.CHUNKED_PREFILL
    return Phase.PREFILL
