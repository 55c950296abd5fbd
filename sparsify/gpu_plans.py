"""Plans for a GPU, of a model in memory or of one that only its config describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsify import planner, recalls
from sparsify.cost_model.model_config import read_config
from sparsify.cost_model.model_shape import ModelShape
from sparsify.errors import NothingToDoError, UsageError
from sparsify.inspections import Inspection, captured_shape
from sparsify.passes.examples import is_transformers_model
from sparsify.planning import plan_for, sites_of_config, wanted_configurations
from sparsify.planning_result import Planned
from sparsify.planning_target import Target
from sparsify.policy import Policy
from sparsify.recalls import Recalls
from sparsify.samples import to_ids

__all__ = ["Request", "plan_config", "plan_model"]

UNPROVED = (
    "Nothing of this is proved: it comes from a config. `sparsify rewrite --plan` holds it against "
    "the model and refuses what does not fit."
)


@dataclass(frozen=True)
class Request:
    """What a plan is asked for; `gpu`, `context` and `phase` win over those of `Auto`."""

    gpu: str | None = None
    context: int | None = None
    batch: int = 1
    phase: str | None = None
    tensor_parallel: int = 1
    min_speedup: float | None = None
    calibration: str | Path | None = None

    def names_a_target(self, policy: Policy) -> bool:
        """Whether a plan for a GPU is wanted, not just the policy's decisions."""
        given = (self.gpu, self.context, self.phase, self.min_speedup, self.calibration)
        sized = self.batch != 1 or self.tensor_parallel != 1
        return sized or any(x is not None for x in given) or bool(policy.autos)

    def target(self, policy: Policy, model: ModelShape | None) -> Target:
        """The GPU and the call.

        Raises:
            UsageError: the GPU or the context is missing, or the policy's `Auto` disagree.
            UnknownGpuError: no figures are known for the GPU.
        """
        gpu = _agreed(policy, "gpu") if self.gpu is None else self.gpu
        context = _agreed(policy, "context") if self.context is None else self.context
        phase = _agreed(policy, "phase") if self.phase is None else self.phase
        missing = [
            name for name, value in (("a GPU", gpu), ("a context", context)) if value is None
        ]
        if missing:
            raise UsageError(
                f"{' and '.join(missing).capitalize().replace(' gpu', ' GPU')} to plan for "
                f"{'are' if len(missing) > 1 else 'is'} missing.",
                "Name both: --gpu h200 --context 128k (gpu= and context= in Python), or in the "
                "policy: {name: auto, gpu: h200, context: 131072}.",
            )
        self._check_speedup()
        return Target.of(
            gpu,
            context,
            phase="prefill" if phase is None else phase,
            batch=self.batch,
            tensor_parallel=self.tensor_parallel,
            calibration=self.calibration,
            model=model,
        )

    def _check_speedup(self) -> None:
        wanted = self.min_speedup
        is_number = isinstance(wanted, int | float) and not isinstance(wanted, bool)
        if wanted is not None and not (is_number and 1 <= wanted < float("inf")):
            raise UsageError(f"min_speedup is {wanted!r}; expected a number of at least 1.")


def _agreed(policy: Policy, name: str) -> Any:
    """What the `Auto` of a policy say of their target, None if nothing."""
    values = dict.fromkeys(v for auto in policy.autos if (v := getattr(auto, name)) is not None)
    if len(values) > 1:
        shown = " and ".join(str(value) for value in values)
        raise UsageError(f"The policy's auto methods name different targets: {name} {shown}.")
    return next(iter(values), None)


def plan_config(policy: Policy, model: ModelShape, request: Request) -> Planned:
    """The plan of a model that is only described.

    Raises:
        As `planning.plan_for` and `Request.target`.
    """
    target = request.target(policy, model)
    return plan_for(
        policy,
        sites_of_config(model),
        target,
        name=model.name,
        min_speedup=request.min_speedup,
        notes=(UNPROVED,),
    )


def plan_model(
    model: torch.nn.Module | None,
    found: Inspection,
    policy: Policy,
    request: Request,
    *,
    samples: Any = None,
    tokenizer: Any = None,
    progress: Callable[[str], None] | None = None,
) -> Planned:
    """The plan of a model whose attention was proved.

    Args:
        model: None where only its inspection is at hand, which serves for all but samples.
        samples: texts or token ids to measure the score recall on; of language models only.

    Raises:
        As `planning.plan_for` and `Request.target`, and UsageError for unusable samples.
    """
    say = progress or (lambda _: None)
    shape, notes = _shape_of(model, found)
    target = request.target(policy, shape)
    sites = planner.execution_order(found.sites, found.refusals, found.order or None)
    losses = None
    if samples is not None:
        if model is None or not is_transformers_model(model):
            raise UsageError("Samples need a language model in memory.", "Leave them out.")
        wanted = wanted_configurations(policy, sites, target)
        ids = _ids_of(model, samples, tokenizer, target.workload.context_tokens)
        measured = recalls.measure(model, found.sites, wanted, ids, say)
        losses = measured.losses
        notes += _notes_on(measured)
    say("planning")
    return plan_for(
        policy,
        sites,
        target,
        name=found.model,
        losses=losses,
        min_speedup=request.min_speedup,
        notes=notes,
    )


def _shape_of(
    model: torch.nn.Module | None, found: Inspection
) -> tuple[ModelShape | None, tuple[str, ...]]:
    """The model around its attention: of its config where there is one that tells, else of what was
    captured; None where neither does."""
    if model is not None and is_transformers_model(model):
        try:
            return read_config(_config_of(model)), ()
        except UsageError:
            pass  # an architecture that is not described; the graph is
    if not found.programs:
        return None, ()
    try:
        return captured_shape(found), ()
    except NothingToDoError as error:
        return None, (error.message,)


def _config_of(model: Any) -> dict[str, Any]:
    """Its config with the type of its weights, which configs of models in memory may lack."""
    told = dict(model.config.to_dict())
    if told.get("dtype") is None and told.get("torch_dtype") is None:
        told["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    return told


def _ids_of(
    model: torch.nn.Module, samples: Any, tokenizer: Any, context_tokens: int
) -> list[torch.Tensor]:
    """Token ids of the samples, no longer than the context planned for and the model's own."""
    config: Any = model.config
    text = config.get_text_config()
    device = next(model.parameters()).device
    ids, _ = to_ids(samples, tokenizer, text.vocab_size, device)
    most = getattr(text, "max_position_embeddings", None) or context_tokens
    return [x[:, : min(most, context_tokens)] for x in ids]


def _notes_on(measured: Recalls) -> tuple[str, ...]:
    lengths = ", ".join(f"{n:,}" for n in measured.tokens)
    found = [f"Score recall was measured on samples of {lengths} tokens, {measured.rows:,} rows."]
    if measured.unmeasured:
        found.append(
            "Not measurable on samples this short, so not chosen: "
            f"{', '.join(measured.unmeasured)}."
        )
    return tuple(found)
