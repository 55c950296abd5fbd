"""What was found of a model's attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from sparsify.cost_model.model_shape import ModelShape
from sparsify.errors import UsageError
from sparsify.graph_shape import graph_shape
from sparsify.hosts.graph import Proved
from sparsify.ir import AttentionSite, Refusal, site_key

__all__ = ["Inspection", "captured_shape"]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """All attention of a model: what can be replaced, and what cannot and why.

    Refusals with the code NOT_ATTENTION only resemble attention.
    `expected` is the number of attention layers that the model's config names, if it names any.
    `order` holds the site keys in execution order, `programs` what was captured.
    """

    model: str
    sites: tuple[AttentionSite, ...]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...] = ()
    expected: int | None = None
    order: tuple[str, ...] = ()
    programs: tuple[Proved, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all attention found; look-alikes do not count."""
        refused = [site_key(r.fqn, r.ordinal) for r in self.refusals if r.code != "NOT_ATTENTION"]
        return (*(site_key(site.fqn, site.ordinal) for site in self.sites), *refused)

    def to_json(self) -> dict[str, Any]:
        """The document of `inspect --json`."""
        return {
            "schema": 1,
            "model": self.model,
            "expected": self.expected,
            "sites": [site.to_json() for site in self.sites],
            "refusals": [refusal.to_json() for refusal in self.refusals],
            "notes": list(self.notes),
        }


def captured_shape(found: Inspection, longest: Any = None) -> ModelShape:
    """What was captured as the cost model sees it; `longest` is the context it is made for.

    Raises:
        UsageError: nothing was captured.
        NothingToDoError: no attention of known size was found.
    """
    if not found.programs:
        raise UsageError("The inspection holds no captured program.", "Inspect the model anew.")
    captured = found.programs[0].captured
    shape = graph_shape(captured, found.sites, found.refusals, name=found.model)
    return dataclasses.replace(
        shape, max_context_tokens=longest if isinstance(longest, int) and longest > 0 else None
    )
