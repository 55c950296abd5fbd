"""What is to be done at each attention site, as versioned JSON.

A plan is keyed by module path and ordinal, so one plan serves every host. It records the outcome
for *all* attention that was found: sites to rewrite, sites kept dense by policy, refused sites.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from sparsify.errors import ArtefactError
from sparsify.ir import site_key

__all__ = ["PLAN_SCHEMA", "LayerPlan", "Plan"]

# Version 2 adds "estimate". A plan without one is written as version 1, which older versions read.
PLAN_SCHEMA = 2
LARGEST, LARGEST_INDEX_DIM = 2**31 - 1, 4096  # as in policies
FIELDS = {"schema", "model", "policy", "layers"}
FIELDS_2 = FIELDS | {"estimate"}

Method = Literal["moba", "msa", "dense"]
Status = Literal["rewritten", "kept_dense", "refused"]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The decision for one attention site.

    `method` "dense" means the site stays as it was; `status` says whether by policy ("kept_dense")
    or for want of proof ("refused"); `reason` is one sentence for the user. `topk` counts the
    query's own block. `min_context` is the number of keys below which the site runs dense.
    `indexer`, `index_dim` and `local` belong to MSA.
    """

    fqn: str
    ordinal: int
    method: Method
    status: Status
    reason: str
    block_size: int | None = None
    topk: int | None = None
    decode: Literal["sparse", "dense"] = "sparse"
    min_context: int = 0
    indexer: Literal["proxy", "learned"] | None = None
    index_dim: int | None = None
    local: Literal["inside", "union"] = "inside"

    @property
    def key(self) -> str:
        """Key of the site, e.g. "model.layers.7.self_attn#0"."""
        return site_key(self.fqn, self.ordinal)

    @property
    def sparse(self) -> bool:
        """Whether the site is to be rewritten."""
        return self.method != "dense"

    @property
    def budget(self) -> tuple[int, int]:
        """Block size in tokens and top-k of a site to be rewritten."""
        if self.block_size is None or self.topk is None:
            raise ValueError(f"{self.key} stays dense and has no block size")
        return self.block_size, self.topk

    def to_json(self) -> dict[str, Any]:
        """All fields, as stored."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Inverse of `to_json`.

        Raises:
            ArtefactError: a field is missing, unknown, or has an impossible value.
        """
        known = {f.name for f in fields(cls)}
        if not isinstance(data, dict):
            raise ArtefactError(f"A layer of the plan is {data!r:.100}; expected an object.")
        if set(data) - known:
            raise ArtefactError(f"A layer of the plan has unknown fields: {_names(data, known)}.")
        try:
            layer = cls(**data)
        except TypeError as error:
            raise ArtefactError(f"A layer of the plan is incomplete: {error}.") from None
        layer._check()
        return layer

    def _check(self) -> None:
        """Every field has its type and a possible value; a plan may come from a user's editor."""
        self._check_choices()
        name = self._name
        if not isinstance(self.fqn, str) or not isinstance(self.reason, str):
            raise ArtefactError(f"Layer {name!r} of the plan needs a text fqn and reason.")
        self._check_indexer()
        needed = ("ordinal", "min_context") + (("block_size", "topk") if self.sparse else ())
        needed += ("index_dim",) if self.indexer == "learned" else ()
        for attr in needed:
            least = 0 if attr in ("ordinal", "min_context") else 1
            largest = LARGEST_INDEX_DIM if attr == "index_dim" else LARGEST
            if not _is_int(getattr(self, attr), least, largest):
                raise ArtefactError(
                    f"Layer {name!r} of the plan has {attr} {getattr(self, attr)!r}; "
                    f"it must be a whole number from {least} to {largest}."
                )
        if (self.status == "rewritten") != self.sparse:
            raise ArtefactError(
                f"Layer {name!r} of the plan has status {self.status!r} "
                f"with method {self.method!r}."
            )

    def _check_choices(self) -> None:
        choices = {
            "method": ("moba", "msa", "dense"),
            "status": ("rewritten", "kept_dense", "refused"),
            "decode": ("sparse", "dense"),
            "indexer": ("proxy", "learned", None),
            "local": ("inside", "union"),
        }
        for attr, allowed in choices.items():
            if getattr(self, attr) not in allowed:
                raise ArtefactError(
                    f"Layer {self._name!r} of the plan has {attr} {getattr(self, attr)!r}; "
                    f"use one of {', '.join(str(a) for a in allowed)}."
                )

    def _check_indexer(self) -> None:
        if self.indexer is not None and self.method != "msa":
            raise ArtefactError(
                f"Layer {self._name!r} of the plan has indexer {self.indexer!r}, which method "
                f"{self.method!r} does not use."
            )
        if self.indexer != "learned" and self.index_dim is not None:
            raise ArtefactError(
                f"Layer {self._name!r} of the plan has index_dim {self.index_dim!r:.40}, which "
                "only indexer 'learned' uses."
            )

    @property
    def _name(self) -> str:
        return self.fqn if isinstance(self.fqn, str) else repr(self.fqn)


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions for all attention of a model, in execution order.

    `policy` is the policy they came from, in its JSON form; `model` names the model for people.
    `estimate` is what the cost model says of the plan, where it was made for a GPU: the GPU, the
    workload, times, notes; nothing is read from it when a model is rewritten.
    """

    layers: tuple[LayerPlan, ...]
    policy: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    estimate: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LayerPlan]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def rewritten(self) -> tuple[LayerPlan, ...]:
        """The layers to rewrite."""
        return tuple(layer for layer in self.layers if layer.sparse)

    def by_key(self) -> dict[str, LayerPlan]:
        """Layers by site key."""
        return {layer.key: layer for layer in self.layers}

    def to_json(self) -> dict[str, Any]:
        """The content of `plan.json`."""
        data: dict[str, Any] = {
            "schema": PLAN_SCHEMA if self.estimate else 1,
            "model": self.model,
            "policy": self.policy,
            "layers": [layer.to_json() for layer in self.layers],
        }
        return {**data, "estimate": self.estimate} if self.estimate else data

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Inverse of `to_json`.

        Raises:
            ArtefactError: not a plan, a newer schema, or an impossible layer.
        """
        if not isinstance(data, dict) or not isinstance(data.get("layers"), list):
            raise ArtefactError('Not a plan: expected a JSON object with a list "layers".')
        schema: Any = data.get("schema")
        if not _is_int(schema, 1):
            raise ArtefactError(f"Not a plan: schema is {schema!r}.")
        if schema > PLAN_SCHEMA:
            raise ArtefactError(
                f"The plan has schema {schema}, this version reads up to {PLAN_SCHEMA}.",
                "Update sparsify-attention.",
            )
        known = FIELDS if schema == 1 else FIELDS_2
        if set(data) - known:
            raise ArtefactError(f"The plan has unknown fields: {_names(data, known)}.")
        policy, model = data.get("policy", {}), data.get("model", "")
        if not isinstance(policy, dict) or not isinstance(model, str):
            raise ArtefactError('Not a plan: "policy" must be an object and "model" a text.')
        estimate = data.get("estimate", {})
        if not isinstance(estimate, dict):
            raise ArtefactError('Not a plan: "estimate" must be an object.')
        layers = tuple(LayerPlan.from_json(layer) for layer in data["layers"])
        keys = [layer.key for layer in layers]
        if len(set(keys)) != len(keys):
            raise ArtefactError("The plan names a site twice.")
        return cls(layers, policy, model, estimate)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a `plan.json`.

        Raises:
            ArtefactError: the file is missing, unreadable, or not a plan.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ArtefactError(f"Cannot read the plan {path}: {error.strerror}.") from None
        except (ValueError, RecursionError):
            raise ArtefactError(f"The plan {path} is not valid JSON.") from None
        try:
            return cls.from_json(data)
        except ArtefactError as error:
            raise ArtefactError(f"{path}: {error.message}", error.hint) from None


def _is_int(value: Any, least: int, largest: int = LARGEST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= largest


def _names(data: dict[str, Any], known: set[str]) -> str:
    return ", ".join(sorted(map(str, set(data) - known)))
