"""What the user wants done: a method, exceptions per layer, and budgets.

A policy is pure intent; it knows no model. `planner.make_plan` turns it into decisions per site.
Every model here is frozen and refuses unknown fields; a wrong value raises `UsageError` with one
sentence that names the field, what was given and what is expected.

Policy files are YAML or JSON of this shape (all fields but `method` may be left out)::

    method: {name: moba, block_size: 64, topk: 8, decode: sparse}
    dense_last: 3                 # short for the rule {match: "-3:", method: dense}, put first
    layers:                       # first match wins; a rule that matches nothing is an error
      - match: "model.layers.0.*" # a glob on the module path, or an index or range ("0", "2:8")
        method: dense
    min_context: 0                # dense below this number of keys
    quality: {min_score_recall: 0.8}
    on_unproved: refuse           # or "error": stop when a site to be rewritten is not proved
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import ConfigDict, Field, field_validator, model_validator

from sparsify.documents import read_document
from sparsify.errors import UsageError
from sparsify.fields import (
    Context,
    Fraction,
    FrozenModel,
    IndexDim,
    NonNegative,
    PositiveInt,
    TopK,
    did_you_mean,
    fault,
    tagged,
)
from sparsify.files import write_text

__all__ = [
    "MSA",
    "PRESETS",
    "Auto",
    "Dense",
    "LayerRule",
    "Method",
    "MoBA",
    "Policy",
    "Quality",
    "dump_policy",
    "load_policy",
]

Decode = Literal["sparse", "dense"]


class MoBA(FrozenModel):
    """Mixture of block attention: each query head reads its own block and the topk - 1 past blocks
    whose mean key scores best (arXiv 2502.13189; topk counts the own block)."""

    name: Literal["moba"] = "moba"
    block_size: PositiveInt
    topk: TopK
    decode: Decode = "sparse"


class MSA(FrozenModel):
    """MiniMax sparse attention: each KV group reads its own block and the best topk - 1 past ones
    by the maximum of an index score (arXiv 2606.13392).

    `indexer` "proxy" scores with the model's own queries and keys and needs no training;
    "learned" has `index_dim`-wide projections that must be trained. `local` "union" adds the own
    block to the best topk instead of counting it among them.
    """

    name: Literal["msa"] = "msa"
    block_size: PositiveInt
    topk: TopK
    indexer: Literal["proxy", "learned"] = "proxy"
    index_dim: IndexDim | None = None
    local: Literal["inside", "union"] = "inside"
    decode: Decode = "sparse"

    @model_validator(mode="after")
    def _index_dim_belongs_to_learned(self) -> Self:
        if (self.indexer == "learned") != (self.index_dim is not None):
            if self.indexer == "learned":
                raise fault("needs index_dim with indexer 'learned'")
            raise fault("has index_dim, which indexer 'proxy' does not use")
        return self


class Dense(FrozenModel):
    """Leave the attention as it is."""

    name: Literal["dense"] = "dense"


class Auto(FrozenModel):
    """Let the cost model choose method, block size and topk for a GPU, a context in tokens, and
    what the model does there. What `sparsify.plan` is told wins over these."""

    name: Literal["auto"] = "auto"
    gpu: str | None = None
    context: PositiveInt | None = None
    phase: Literal["prefill", "decode", "training"] | None = None


Method = Annotated[
    Annotated[MoBA | MSA | Dense | Auto, Field(discriminator="name")],
    tagged(
        "name",
        bare=("dense", "auto"),
        examples={
            "moba": "{name: moba, block_size: 64, topk: 8}",
            "msa": "{name: msa, block_size: 64, topk: 8}",
            "dense": "dense",
            "auto": "auto",
        },
    ),
]

_INDEX = re.compile(r"-?\d{1,9}")
_RANGE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?(?::(-?\d{1,9}))?")


class LayerRule(FrozenModel):
    """An exception for the sites that `match` names.

    `match` is a glob on the module path ("model.layers.0.*"; "(root)" is the root module; with a
    "#" it is matched against path#ordinal), or an index or Python range over all detected
    attention in execution order, refused sites included ("0", "-3:", "::2").
    """

    match: str
    method: Method

    @field_validator("match", mode="before")
    @classmethod
    def _index_as_text(cls, value: Any) -> Any:
        is_index = isinstance(value, int) and not isinstance(value, bool)
        return str(value) if is_index else value

    @field_validator("match")
    @classmethod
    def _is_pattern(cls, value: str) -> str:
        if not value.strip():
            raise fault("is empty; expected a module path, a glob or an index range")
        looks_like_range = re.fullmatch(r"[-\d\s:]*:[-\d\s:]*", value) is not None
        found = _RANGE.fullmatch(value)
        if looks_like_range and (found is None or found[3] in ("0", "-0")):
            raise fault(f'is {value!r}; expected an index range such as "-3:" or "2:8"')
        return value

    def indices(self, count: int) -> frozenset[int] | None:
        """Positions that an index or range names among `count` sites; None for a glob."""
        if _INDEX.fullmatch(self.match):
            index = int(self.match)
            return frozenset({index % count} if -count <= index < count else ())
        if found := _RANGE.fullmatch(self.match):
            start, stop, step = (None if part is None else int(part) for part in found.groups())
            return frozenset(range(count)[start:stop:step])
        return None


class Quality(FrozenModel):
    """A budget on what sparsity may cost, judged on the user's samples by the check V6."""

    min_score_recall: Fraction | None = None
    max_kl_nats: NonNegative | None = None
    max_loss_increase_nats: NonNegative | None = None

    def faults(self, run: Mapping[str, Any]) -> list[str]:
        """What a V6 run (keys score_recall, kl_nats, dense_loss_nats, sparse_loss_nats) misses."""
        found = []
        increase = run["sparse_loss_nats"] - run["dense_loss_nats"]
        if self.min_score_recall is not None and not run["score_recall"] >= self.min_score_recall:
            found.append(f"score recall {run['score_recall']:.3f} < {self.min_score_recall:g}")
        if self.max_kl_nats is not None and not run["kl_nats"] <= self.max_kl_nats:
            found.append(f"KL {run['kl_nats']:.4f} nats > {self.max_kl_nats:g}")
        limit = self.max_loss_increase_nats
        if limit is not None and not increase <= limit:
            found.append(f"loss increase {increase:.4f} nats > {limit:g}")
        return found


def _describe_dense_last(schema: dict[str, Any]) -> None:
    schema["properties"]["dense_last"] = {
        "type": "integer",
        "minimum": 0,
        "default": 0,
        "description": "Short for a first layer rule that keeps the last N sites dense.",
    }


class Policy(FrozenModel):
    """What to do with the attention of a model; see the module's text for the file format."""

    shorthands: ClassVar[frozenset[str]] = frozenset({"dense_last"})
    model_config = ConfigDict(json_schema_extra=_describe_dense_last)

    method: Method
    layers: tuple[LayerRule, ...] = ()
    min_context: Context = 0
    quality: Quality | None = None
    on_unproved: Literal["refuse", "error"] = "refuse"

    @model_validator(mode="before")
    @classmethod
    def _expand_dense_last(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "dense_last" not in data:
            return data
        data = dict(data)
        count = data.pop("dense_last")
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 10**6:
            raise fault(f"has dense_last {str(count)[:60]}; expected a whole number of at least 0")
        layers = data.get("layers", ())
        if count and isinstance(layers, list | tuple):
            data["layers"] = [{"match": f"-{count}:", "method": {"name": "dense"}}, *layers]
        return data

    @classmethod
    def moba(cls, *, block_size: int, topk: int, decode: Decode = "sparse", **rules: Any) -> Policy:
        """MoBA everywhere, except as `rules` say (`dense_last`, `layers`, `min_context`,
        `quality`, `on_unproved`).

        Raises:
            UsageError: a value that cannot be.
        """
        method = {"name": "moba", "block_size": block_size, "topk": topk, "decode": decode}
        return cls.from_json({"method": method, **rules})

    @classmethod
    def msa(
        cls,
        *,
        block_size: int,
        topk: int,
        indexer: Literal["proxy", "learned"] = "proxy",
        index_dim: int | None = None,
        local: Literal["inside", "union"] = "inside",
        decode: Decode = "sparse",
        **rules: Any,
    ) -> Policy:
        """MSA everywhere, except as `rules` say (as in `Policy.moba`).

        Raises:
            UsageError: a value that cannot be.
        """
        method = {"name": "msa", "block_size": block_size, "topk": topk, "indexer": indexer}
        method |= {"index_dim": index_dim, "local": local, "decode": decode}
        return cls.from_json({"method": method, **rules})

    @classmethod
    def dense(cls, **rules: Any) -> Policy:
        """Everything as it is, except as `rules` say."""
        return cls.from_json({"method": {"name": "dense"}, **rules})

    @classmethod
    def auto(
        cls,
        *,
        gpu: str | None = None,
        context: int | None = None,
        phase: Literal["prefill", "decode", "training"] | None = None,
        **rules: Any,
    ) -> Policy:
        """Let the cost model choose for a GPU and a context, except as `rules` say.

        Raises:
            UsageError: a value that cannot be.
        """
        method = {"name": "auto", "gpu": gpu, "context": context, "phase": phase}
        return cls.from_json({"method": method, **rules})

    @property
    def autos(self) -> tuple[Auto, ...]:
        """Every place where the cost model is to choose."""
        methods = (self.method, *(rule.method for rule in self.layers))
        return tuple(method for method in methods if isinstance(method, Auto))

    @classmethod
    def from_json(cls, data: Any) -> Policy:
        """Inverse of `to_json`.

        Raises:
            UsageError: an unknown field or a value that cannot be.
        """
        if not isinstance(data, Mapping):
            raise UsageError(f"A policy is a mapping of fields, not {type(data).__name__}.")
        return cls(**{str(key): value for key, value in data.items()})

    def to_json(self) -> dict[str, Any]:
        """All fields, as plans and JSON files hold them."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """All fields, as YAML files hold them."""
        text: str = yaml.safe_dump(self.to_json(), sort_keys=False, allow_unicode=True)
        return text


PRESETS: dict[str, Policy] = {
    # As published: MoBA report, 1M-token setting, last three layers dense, decode dense.
    "kimi-1m": Policy.moba(block_size=4096, topk=12, decode="dense", dense_last=3),
    # MiniMax-M3: index size 128; the indexer is learned. No attention layer is dense.
    "msa-m3": Policy.msa(block_size=128, topk=16, indexer="learned", index_dim=128),
}


def load_policy(source: str | Path) -> Policy:
    """A preset by name, or a policy file (YAML, or JSON by its ending).

    A preset's name wins over a file of the same name; write ./NAME for the file.

    Raises:
        UsageError: no such preset or file, or the file holds no valid policy.
    """
    if str(source) in PRESETS:
        return PRESETS[str(source)]
    if not Path(source).exists():
        hint = did_you_mean(source, sorted(PRESETS))
        text = f"There is no policy file {source} and no preset of that name{hint}"
        raise UsageError(text if text.endswith("?") else f"{text}.")
    data = read_document(source, "policy")
    try:
        return Policy.from_json(data)
    except UsageError as error:
        raise UsageError(f"The policy {source} is wrong: {error.message}", error.hint) from None


def dump_policy(policy: Policy, path: str | Path) -> None:
    """Write a policy file, as JSON when `path` ends in .json and as YAML otherwise."""
    if str(path).lower().endswith(".json"):
        write_text(path, policy.model_dump_json(indent=2) + "\n")
    else:
        write_text(path, policy.to_yaml())
