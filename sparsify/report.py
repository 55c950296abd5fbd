"""What was found, what was done and what it cost, as data with a JSON form.

These classes hold numbers that others computed; `cli.render` draws the tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self, TypeVar

from sparsify.errors import ArtefactError
from sparsify.ir import site_key, site_name

__all__ = [
    "CHECK_NAMES",
    "REPORT_SCHEMA",
    "CheckResult",
    "PairCount",
    "SiteReport",
    "SparsifyReport",
    "VerificationReport",
]

REPORT_SCHEMA = 1
CHECK_NAMES = ("V1", "V2", "V3", "V4", "V5", "V6", "V7")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Outcome of one named check, such as "V3". `summary` is one sentence; `metrics` is JSON."""

    check: str
    name: str
    status: Literal["passed", "failed", "skipped"]
    summary: str
    metrics: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """Outcome of all checks of a rewritten `model` against the original (`against`)."""

    model: str
    against: str
    checks: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """No check failed, and at least one ran."""
        states = [check.status for check in self.checks]
        return "failed" not in states and "passed" in states

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")

    def to_json(self) -> dict[str, Any]:
        """The document of `verify --json`."""
        return {
            "schema": REPORT_SCHEMA,
            "ok": self.ok,
            "model": self.model,
            "against": self.against,
            "checks": [check.to_json() for check in self.checks],
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Inverse of `to_json`.

        Raises:
            ArtefactError: not such a document, or one of a newer version.
        """
        _check_schema(data, "verification report")
        checks = _list(CheckResult, data.get("checks"), "verification report")
        return cls(str(data.get("model", "")), str(data.get("against", "")), checks)


@dataclass(frozen=True, slots=True)
class PairCount:
    """Query-key pairs of one sequence of `context` tokens: prefill, causal, exact, summed over
    query heads. `attended` is what the planned attention computes; choosing the blocks is extra.
    """

    context: int
    dense: int
    attended: int

    @property
    def share(self) -> float:
        """Attended pairs as a share of the dense ones."""
        return self.attended / self.dense if self.dense else 1.0

    @classmethod
    def total(cls, counts: Iterable[PairCount]) -> tuple[PairCount, ...]:
        """Sums by context, in order of first appearance."""
        sums: dict[int, tuple[int, int]] = {}
        for count in counts:
            dense, attended = sums.get(count.context, (0, 0))
            sums[count.context] = (dense + count.dense, attended + count.attended)
        return tuple(cls(context, *both) for context, both in sums.items())


@dataclass(frozen=True, slots=True)
class SiteReport:
    """One attention site: what it is, what was done with it, and why.

    `code` and `hint` belong to refused sites; their heads are unknown (None) and they have no
    `pairs`.
    """

    fqn: str
    ordinal: int
    status: Literal["rewritten", "kept_dense", "refused"]
    method: Literal["moba", "msa", "dense"]
    reason: str
    block_size: int | None = None
    topk: int | None = None
    decode: str = "sparse"
    min_context: int = 0
    indexer: str | None = None
    index_dim: int | None = None
    local: str = "inside"
    pattern: str = ""
    q_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    mask: str = ""
    padding: str | None = None
    phase: str = ""
    source: str = ""
    code: str | None = None
    hint: str = ""
    pairs: tuple[PairCount, ...] = ()

    @property
    def key(self) -> str:
        """Key of the site in plans."""
        return site_key(self.fqn, self.ordinal)

    @property
    def name(self) -> str:
        """The site as shown to people."""
        return site_name(self.fqn, self.ordinal)


@dataclass(frozen=True, slots=True)
class SparsifyReport:
    """The content of `report.json`: all attention of a model, in execution order.

    Pair totals cover the proved sites only, since what a refused site computes is not known.
    """

    model: str
    sites: tuple[SiteReport, ...]
    notes: tuple[str, ...] = ()
    verification: VerificationReport | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Sites detected, rewritten, kept dense and refused."""
        states: list[str] = [site.status for site in self.sites]
        kinds = ("rewritten", "kept_dense", "refused")
        return {"detected": len(states), **{kind: states.count(kind) for kind in kinds}}

    @property
    def pairs(self) -> tuple[PairCount, ...]:
        """Totals of the proved sites, by context."""
        return PairCount.total(count for site in self.sites for count in site.pairs)

    def to_json(self) -> dict[str, Any]:
        """The content of `report.json`."""
        return {
            "schema": REPORT_SCHEMA,
            "model": self.model,
            "counts": self.counts,
            "pairs": [asdict(count) for count in self.pairs],
            "sites": [asdict(site) for site in self.sites],
            "notes": list(self.notes),
            "verification": self.verification and self.verification.to_json(),
            "versions": self.versions,
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Inverse of `to_json`.

        Raises:
            ArtefactError: not such a document, or one of a newer version.
        """
        _check_schema(data, "report")
        sites = _list(SiteReport, _with_pairs(data.get("sites")), "report")
        verification = data.get("verification")
        return cls(
            model=str(data.get("model", "")),
            sites=sites,
            notes=tuple(_given(data, "notes", list, tuple)),
            verification=verification and VerificationReport.from_json(verification),
            versions=_given(data, "versions", dict),
        )


def _with_pairs(sites: Any) -> Any:
    if not isinstance(sites, list) or not all(isinstance(site, dict) for site in sites):
        return sites
    return [
        {**site, "pairs": _list(PairCount, _given(site, "pairs", list, tuple), "report")}
        for site in sites
    ]


def _given(data: dict[str, Any], name: str, *kinds: type) -> Any:
    """A value of a report, empty where it is missing. Before they are written lists are tuples."""
    value = data.get(name, kinds[0]())
    if not isinstance(value, kinds):
        raise ArtefactError(f"Not a report: {name} is a {type(value).__name__}.")
    return kinds[0](value)


def _check_schema(data: Any, what: str) -> None:
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, bool) or not isinstance(schema, int):
        raise ArtefactError(f"Not a {what}: it has no schema number.")
    if schema > REPORT_SCHEMA:
        raise ArtefactError(
            f"The {what} has schema {schema}, this version reads up to {REPORT_SCHEMA}.",
            "Update sparsify-attention.",
        )


def _list(cls: type[_T], items: Any, what: str) -> tuple[_T, ...]:
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if not isinstance(items, list):
        raise ArtefactError(f"Not a {what}: expected a list of {cls.__name__}.")
    found = []
    for item in items:
        if not isinstance(item, dict) or set(item) - known:
            raise ArtefactError(f"Not a {what}: a {cls.__name__} has unknown fields.")
        try:
            found.append(cls(**item))
        except TypeError as error:
            raise ArtefactError(f"Not a {what}: {error}.") from None
    return tuple(found)
