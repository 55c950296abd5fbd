"""The text that names a shape on the command line: "heads=16/16,dim=128,block=128,topk=8"."""

from __future__ import annotations

from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.workload import AttentionShape
from sparsify.errors import UsageError
from sparsify.policy import MoBA

__all__ = ["parse_shape"]

EXAMPLE = "heads=16/16,dim=128,block=128,topk=8"
NEEDED = ("heads", "dim", "block", "topk")
KNOWN = (*NEEDED, "value")


def parse_shape(text: str) -> tuple[AttentionShape, Configuration]:
    """Heads (query/key-value), head size, size of values if another, block size and top-k.

    Raises:
        UsageError: something is missing, unknown, given twice, or impossible.
    """
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, found, value = (x.strip() for x in part.partition("="))
        if not found or name not in KNOWN:
            raise _wrong(text, f"{part.strip()!r} is none of {', '.join(f'{k}=' for k in KNOWN)}")
        if name in fields:
            raise _wrong(text, f"{name} is given twice")
        fields[name] = value
    missing = [name for name in NEEDED if name not in fields]
    if missing:
        raise _wrong(text, f"{missing[0]} is missing")
    q_heads, _, kv_heads = fields["heads"].partition("/")
    numbers = {
        name: _number(text, name, value) for name, value in fields.items() if name != "heads"
    }
    q = _number(text, "heads", q_heads)
    kv = _number(text, "heads", kv_heads) if kv_heads else q
    method = MoBA(block_size=numbers["block"], topk=numbers["topk"])
    shape = AttentionShape(q, kv, numbers["dim"], numbers.get("value", numbers["dim"]))
    return shape, Configuration.of(method)


def _number(text: str, name: str, value: str) -> int:
    if not value.strip().isascii() or not value.strip().isdigit() or len(value.strip()) > 9:
        raise _wrong(text, f"{name} is {value!r}")
    return int(value)


def _wrong(text: str, why: str) -> UsageError:
    return UsageError(f"The shape {text!r} is wrong: {why}.", f"Write it like {EXAMPLE}.")
