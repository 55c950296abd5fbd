"""The text that names a shape on the command line: "heads=16/16,dim=128,block=128,topk=8" for MoBA,
for MSA "heads=64/4,dim=128,block=128,topk=16,index=128"."""

from __future__ import annotations

from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.workload import AttentionShape
from sparsify.errors import UsageError
from sparsify.policy import MSA, MoBA

__all__ = ["parse_shape"]

NEEDED = ("heads", "dim", "block", "topk")
KNOWN = {"moba": (*NEEDED, "value"), "msa": (*NEEDED, "value", "index", "keys")}
EXAMPLES = {
    "moba": "heads=16/16,dim=128,block=128,topk=8",
    "msa": "heads=64/4,dim=128,block=128,topk=16,index=128",
}
# Whose index keys are scored: one for all heads, of a learned indexer, or the layer's own.
KEYS = ("shared", "group")


def parse_shape(text: str, method: str = "moba") -> tuple[AttentionShape, Configuration]:
    """Heads (query/key-value), head size, size of values if another, block size and top-k.

    MSA has further the size of index queries and keys (`index`, that of heads if it is not given)
    and `keys`: "shared", one index key for all heads, or "group", the proxy indexer's own keys.

    Raises:
        UsageError: something is missing, unknown, given twice, or impossible.
    """
    fields = _fields(text, method)
    missing = [name for name in NEEDED if name not in fields]
    if missing:
        raise _wrong(text, method, f"{missing[0]} is missing")
    keys = fields.pop("keys", KEYS[0])
    q_heads, _, kv_heads = fields.pop("heads").partition("/")

    def number(name: str, value: str) -> int:
        if not value.strip().isascii() or not value.strip().isdigit() or len(value.strip()) > 9:
            raise _wrong(text, method, f"{name} is {value!r}")
        return int(value)

    numbers = {name: number(name, value) for name, value in fields.items()}
    q = number("heads", q_heads)
    kv = number("heads", kv_heads) if kv_heads else q
    shape = AttentionShape(q, kv, numbers["dim"], numbers.get("value", numbers["dim"]))
    if method == "moba":
        moba = MoBA(block_size=numbers["block"], topk=numbers["topk"])
        return shape, Configuration.of(moba)
    if keys not in KEYS:
        raise _wrong(text, method, f"keys is {keys!r}; it is {' or '.join(KEYS)}")
    if keys == "group" and "index" in numbers:
        raise _wrong(text, method, "with keys=group the layer's own keys are scored, of size dim")
    return shape, Configuration.of(_msa(numbers, keys))


def _fields(text: str, method: str) -> dict[str, str]:
    known, fields = KNOWN[method], dict[str, str]()
    for part in text.split(","):
        name, found, value = (x.strip() for x in part.partition("="))
        if name in KNOWN["msa"] and name not in known:
            raise _wrong(text, method, f"{name}= belongs to --method msa")
        if not found or name not in known:
            names = ", ".join(f"{k}=" for k in known)
            raise _wrong(text, method, f"{part.strip()!r} is none of {names}")
        if name in fields:
            raise _wrong(text, method, f"{name} is given twice")
        fields[name] = value
    return fields


def _msa(numbers: dict[str, int], keys: str) -> MSA:
    sizes = {"block_size": numbers["block"], "topk": numbers["topk"]}
    if keys == "group":
        return MSA(**sizes)
    return MSA(**sizes, indexer="learned", index_dim=numbers.get("index", numbers["dim"]))


def _wrong(text: str, method: str, why: str) -> UsageError:
    return UsageError(f"The shape {text!r} is wrong: {why}.", f"Write it like {EXAMPLES[method]}.")
