"""What is computed: the shape of one attention layer, and one call of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sparsify.errors import UsageError

__all__ = [
    "BF16",
    "MOST_BATCH",
    "MOST_GPUS",
    "MOST_TOKENS",
    "AttentionShape",
    "ElementBytes",
    "Phase",
    "Workload",
    "check_count",
]

# Beyond these a number is a slip.
MOST_TOKENS, MOST_BATCH, MOST_GPUS = 1 << 30, 1 << 20, 1 << 10
# One bit, and complex numbers of double precision.
LEAST_BYTES, MOST_BYTES = 0.125, 16


def check_count(what: str, value: Any, most: int) -> None:
    """Refuse what is no whole number from 1 to `most`.

    Raises:
        UsageError: it is not; `what` begins the sentence.
    """
    count = value if isinstance(value, int) and not isinstance(value, bool) else 0
    if not 1 <= count <= most:
        raise UsageError(f"{what} is {value!r:.40}; expected a whole number from 1 to {most:,}.")


class Phase(StrEnum):
    """What the model does: reads a text, writes one token per sequence, or learns."""

    PREFILL = "prefill"
    DECODE = "decode"
    TRAINING = "training"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one attention layer: `q_heads` query heads in `kv_heads` groups.

    `head_dim` is the size of queries and keys, `value_dim` that of values and outputs.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        sizes = (self.q_heads, self.kv_heads, self.head_dim, self.value_dim)
        if min(sizes) < 1 or self.q_heads % self.kv_heads:
            raise UsageError(
                f"Attention of {self.q_heads} query heads over {self.kv_heads} key/value heads of "
                f"size {self.head_dim}/{self.value_dim} is impossible."
            )

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.q_heads // self.kv_heads

    def _splits(self, degree: int) -> bool:
        """Whether so many GPUs can share the heads."""
        even = self.kv_heads % degree == 0 or degree % self.kv_heads == 0
        return self.q_heads % degree == 0 and even

    def sharded(self, degree: int) -> AttentionShape:
        """The heads of one of `degree` tensor-parallel ranks; few KV heads are replicated.

        Raises:
            UsageError: the query heads do not divide among the ranks, or the KV heads do neither
                divide nor replicate evenly.
        """
        if not self._splits(degree):
            possible = [n for n in range(1, min(self.q_heads, 1024) + 1) if self._splits(n)]
            raise UsageError(
                f"{self.q_heads} query and {self.kv_heads} key/value heads cannot be split over a "
                f"tensor-parallel degree of {degree}.",
                f"Possible are {', '.join(map(str, possible))}.",
            )
        heads = (self.q_heads // degree, max(self.kv_heads // degree, 1))
        return AttentionShape(*heads, self.head_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes of one element of each tensor; 2 is bfloat16 or float16, 1 is float8 or int8.

    Raises:
        UsageError: one is no number above 0 and up to `MOST_BYTES`.
    """

    query: float = 2
    key: float = 2
    value: float = 2
    output: float = 2
    index: float = 2
    weight: float = 2

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not LEAST_BYTES <= value <= MOST_BYTES:
                raise UsageError(
                    f"The bytes of an element ({name}) are {value!r:.40}; expected a number from "
                    f"{LEAST_BYTES} to {MOST_BYTES}."
                )


BF16 = ElementBytes()


@dataclass(frozen=True, slots=True)
class Workload:
    """One call: `batch` sequences, each with `new_tokens` queries behind `prefix_tokens` cached.

    A whole prefill has no prefix; a chunk of a prefill has one; decode has one new token.
    """

    phase: Phase
    batch: int
    new_tokens: int
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UsageError(f"The batch is {self.batch}; it must be at least 1.")
        if self.new_tokens < 1 or self.prefix_tokens < 0:
            raise UsageError(f"The context is {self.context_tokens} tokens; it must be at least 1.")

    @property
    def context_tokens(self) -> int:
        """Keys of a sequence, the new tokens included."""
        return self.prefix_tokens + self.new_tokens

    @classmethod
    def of(cls, phase: Phase, context_tokens: int, batch: int = 1) -> Workload:
        """A whole prefill or training step of that length, or the decode step that ends there."""
        if phase is Phase.DECODE:
            return cls(phase, batch, 1, context_tokens - 1)
        return cls(phase, batch, context_tokens)
