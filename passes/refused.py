"""The one way out of a proof that fails: a typed reason that becomes a `Refusal`."""

from __future__ import annotations

from sparsify.ir import REFUSAL_CODES

__all__ = ["Refused"]


class Refused(Exception):
    """A site cannot be proved. Raised inside the passes only, never shown to a caller.

    `code` is one of `REFUSAL_CODES`; `evidence` is what was read from the graph.
    """

    def __init__(self, code: str, message: str, evidence: str = "", hint: str = "") -> None:
        if code not in REFUSAL_CODES:
            raise ValueError(f"unknown refusal code {code!r}")
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.evidence, self.hint = code, message, evidence, hint
