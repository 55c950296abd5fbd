"""The vocabulary of facts: what an attention site is, what was proved of it, or why it was refused.

Frozen dataclasses without behaviour beyond their JSON form; they import nothing but the standard
library, so every layer of the product can speak them.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "NO_NEGATIVE_NUMBER",
    "ONLY_0_AND_1",
    "REFUSAL_CODES",
    "AttentionSite",
    "HeadLayout",
    "MaskKind",
    "MaskProof",
    "Phase",
    "Refusal",
    "StreamProof",
    "site_key",
    "site_name",
]

REFUSAL_CODES = frozenset(
    {
        "ATTENTION_SINK",
        "CROSS_ATTENTION",
        "DROPOUT",
        "DTYPE",
        "FILL_NOT_MASKING",
        "FORM_UNSUPPORTED",
        "HEAD_DIM",
        "LOGIT_BIAS",
        "MASK_UNPROVED",
        "MASK_UNSUPPORTED",
        "MASK_UPPER_LEFT",
        "NATIVELY_SPARSE",
        "NOT_ATTENTION",
        "NOT_CAUSAL",
        "NOT_SELF_ATTENTION",
        "PADDING_UNPROVED",
        "ROWS_WITHOUT_KEYS",
        "SCALE_NOT_CONSTANT",
        "SCORES_MODIFIED",
        "SCORES_USED",
        "SLIDING_WINDOW",
        "SOFTCAP",
        "SOFTMAX_AXIS",
        "WEIGHTS_MODIFIED",
        "WEIGHTS_USED",
    }
)


class Phase(enum.StrEnum):
    """What kind of step a site computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    CHUNKED_PREFILL = "chunked_prefill"


class MaskKind(enum.StrEnum):
    """Which keys a query may see, apart from padding."""

    CAUSAL = "causal"
    SLIDING = "sliding"
    FULL = "full"
    DOCUMENT = "document"


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Head counts and sizes as the scores see them; query head h reads KV head h // group."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads


# What may have to be assumed of the numbers of a padding input.
ONLY_0_AND_1 = "only 0 and 1"
NO_NEGATIVE_NUMBER = "no negative number"


@dataclass(frozen=True, slots=True)
class MaskProof:
    """What was proved of a mask.

    `padding` names the model input of shape [batch, keys] that hides keys, if there is one.
    `documents` names the node of the normalised graph (or the model input) that holds the number
    of every token's document, [batch or 1, keys]; a query sees keys of its own document only. It is
    set if and only if the kind is DOCUMENT, which is causal inside every document.
    `q_offset` is the position of query 0 among the keys: a number or a symbolic expression.
    `evidence` is the simplified visibility formula or the flag that carries the proof.
    """

    kind: MaskKind
    window: int | None = None
    padding: str | None = None
    q_offset: int | str = 0
    assumptions: tuple[str, ...] = ()
    evidence: str = ""
    documents: str | None = None

    @property
    def padding_values(self) -> str | None:
        """What the padding input is assumed to hold; None where any number will do."""
        values = (ONLY_0_AND_1, NO_NEGATIVE_NUMBER)
        return next((v for v in values if f"{self.padding} holds {v}" in self.assumptions), None)


@dataclass(frozen=True, slots=True)
class StreamProof:
    """Where k and v come from: the queries' own token stream, or a cache followed by it.

    `source` names the graph value through which all of q, k and v pass ("hidden state"), or is
    None when q, k and v are separate model inputs (then `assumptions` says so).
    """

    source: str | None
    cached: bool = False
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """One proved, replaceable attention call. `fqn` is the module path ("" for the root module),
    `ordinal` the order of attention calls inside that module."""

    fqn: str
    ordinal: int
    pattern: str
    heads: HeadLayout
    scale: float
    mask: MaskProof
    stream: StreamProof
    phase: Phase
    q_len: int | str
    kv_len: int | str
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        """The form of `inspect --json` (schema 1)."""
        return {
            "fqn": self.fqn,
            "ordinal": self.ordinal,
            "pattern": self.pattern,
            "q_heads": self.heads.q_heads,
            "kv_heads": self.heads.kv_heads,
            "head_dim": self.heads.head_dim,
            "value_dim": self.heads.value_dim,
            "scale": self.scale,
            "mask": {
                "kind": self.mask.kind.value,
                "window": self.mask.window,
                "padding": self.mask.padding,
                "documents": self.mask.documents,
                "q_offset": self.mask.q_offset,
                "assumptions": list(self.mask.assumptions),
                "evidence": self.mask.evidence,
            },
            "stream": asdict(self.stream),
            "phase": self.phase.value,
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class Refusal:
    """One attention (or look-alike) that stays as it is, and why.

    `code` is one of `REFUSAL_CODES`; `evidence` is what was read from the graph; `hint` says what
    the user can change. With NATIVELY_SPARSE `facts["native"]` are the layer's own block size,
    top-k and index_dim: MSA of these very sizes runs on the layer's own indexer.
    """

    fqn: str
    ordinal: int
    code: str
    message: str
    evidence: str = ""
    hint: str = ""
    source: str = ""
    facts: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)

    def __post_init__(self) -> None:
        if self.code not in REFUSAL_CODES:
            raise ValueError(f"unknown refusal code {self.code!r}")

    def to_json(self) -> dict[str, Any]:
        """The form of `inspect --json` (schema 1)."""
        return {
            "fqn": self.fqn,
            "ordinal": self.ordinal,
            "code": self.code,
            "message": self.message,
            "evidence": self.evidence,
            "hint": self.hint,
            "source": self.source,
        }


def site_key(fqn: str, ordinal: int) -> str:
    """Key of a site in plans and selections, e.g. "model.layers.7.self_attn#0"."""
    return f"{fqn}#{ordinal}"


def site_name(fqn: str, ordinal: int) -> str:
    """How a site is shown to people: the module path, the ordinal only when it is not 0."""
    name = fqn or "(root)"
    return name if ordinal == 0 else f"{name}#{ordinal}"
