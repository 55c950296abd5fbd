"""Everything the product can fail with. Each class carries its exit code of the command line.

A message is one clear sentence for the user; `hint`, when given, says what to do about it.
"""

from __future__ import annotations

__all__ = [
    "ArtefactError",
    "CaptureError",
    "InfeasibleError",
    "MissingExtraError",
    "NothingToDoError",
    "SparsifyError",
    "StrictError",
    "UnknownGpuError",
    "UsageError",
    "VerificationError",
]


class SparsifyError(Exception):
    """Base of all errors raised on purpose."""

    exit_code: int = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message} {hint}")
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type, tuple[str, str | None]]:
        return type(self), (self.message, self.hint)


class UsageError(SparsifyError):
    """Wrong arguments, a bad policy, a missing or malformed file, a target in the way."""

    exit_code = 2


class ArtefactError(UsageError):
    """A saved folder is damaged, incomplete, or written by a newer version."""


class NothingToDoError(SparsifyError):
    """The model holds no attention, or nothing was rewritten."""

    exit_code = 3


class VerificationError(SparsifyError):
    """A check failed: the rewritten model is not what it should be."""

    exit_code = 4


class CaptureError(SparsifyError):
    """The model cannot be captured, rewritten or exported on the chosen route."""

    exit_code = 5


class MissingExtraError(SparsifyError):
    """An optional dependency is not installed."""

    exit_code = 6


class UnknownGpuError(SparsifyError):
    """No figures are known for the GPU asked for."""

    exit_code = 7


class InfeasibleError(SparsifyError):
    """No plan satisfies the constraints."""

    exit_code = 8


class StrictError(SparsifyError):
    """`SPARSIFY_STRICT=1` and a planned site would have run dense."""

    exit_code = 5
