"""Apply a plan to a transformers model, in place, without touching its weights or its code.

One stateless attention function and one mask function are registered under the name "sparsify" in
both of transformers' interfaces (without the mask interface, padding would be lost silently). The
plan of a site sits on its attention module, so several models live side by side. Importing this
module registers them, and makes plain `from_pretrained` attach the plan that a saved config holds.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from sparsify.errors import ArtefactError, CaptureError, UsageError
from sparsify.hosts import index_files
from sparsify.hosts.attention import FALLBACK, sparsify_attention
from sparsify.hosts.indexers import check_room, indexers_of, insert, take_out
from sparsify.hosts.masks import dense_implementation, sparsify_mask
from sparsify.hosts.offering import offer, passes_keywords
from sparsify.manifests import MANIFEST, check_file, intact
from sparsify.plans import LayerPlan, Plan

__all__ = [
    "Handle",
    "apply",
    "as_sdpa",
    "call_counts",
    "copy_sharing_weights",
    "fallbacks",
    "plan_of",
]

NAME = "sparsify"
CONFIG_SCHEMA = 1


def call_counts(model: torch.nn.Module) -> dict[str, dict[str, int]]:
    """How often each planned module ran sparse, or dense and why, since the plan was applied."""
    return {
        name: dict(module.sparsify_counts)
        for name, module in model.named_modules()
        if "sparsify_counts" in module.__dict__
    }


def fallbacks(model: torch.nn.Module) -> dict[str, str]:
    """Modules that were planned sparse and yet ran dense, with the reason of one such call."""
    found = {}
    for name, counts in call_counts(model).items():
        reasons = [what for what in counts if FALLBACK in what]
        if reasons:
            found[name] = reasons[0].split(FALLBACK, 1)[1]
    return found


class Handle:
    """An applied plan; `restore()` undoes it."""

    def __init__(self, model: PreTrainedModel, plan: Plan, previous: str) -> None:
        self.model, self.plan, self.previous = model, plan, previous
        self._mark: object = None

    def restore(self) -> None:
        """Give the model back its previous attention; a second call does nothing.

        Raises:
            UsageError: another plan was applied to the model meanwhile.
        """
        current = getattr(self.model.config, "sparsify", None)
        if current is None:
            return
        if current is not self._mark:
            raise UsageError(
                "Another plan was applied to this model meanwhile.", "Restore that one instead."
            )
        _strip(self.model, self.previous)


def _strip(model: PreTrainedModel, previous: str) -> None:
    """Take every trace of a plan off the model."""
    for module in list(model.modules()):
        hook = module.__dict__.pop("sparsify_hook", None)
        if hook is not None:
            hook.remove()
        module.__dict__.pop("sparsify_plan", None)
        module.__dict__.pop("sparsify_counts", None)
        take_out(module)
    model.set_attn_implementation(previous)
    for config in _configs(model):
        for name in ("sparsify", "attn_implementation"):
            config.__dict__.pop(name, None)


def apply(model: PreTrainedModel, plan: Plan, *, start_indexers: bool = True) -> Handle:
    """Put `plan` on the attention modules of `model`, in place.

    A plan that was applied before is replaced; learned indexers keep their weights where they fit.
    The model is left as it was when this fails.

    Args:
        start_indexers: whether new learned indexers get weights from their layers' projections;
            otherwise they are random, for weights that are loaded afterwards.

    Raises:
        CaptureError: a planned site cannot be reached in this model.
        ArtefactError: the plan names modules that the model does not have.
    """
    if not isinstance(model, PreTrainedModel):
        raise CaptureError(f"{type(model).__name__} is not a transformers model.")
    modules = dict(model.named_modules())
    _check_reachable(model, modules, plan)
    learned = [layer for layer in plan.rewritten if layer.indexer == "learned"]
    check_room(model, learned)
    previous, known = model.config._attn_implementation, indexers_of(model)
    if previous == NAME:
        previous = dense_implementation(model.config)
        _strip(model, previous)
    handle = Handle(model, plan, previous)
    _swap_attention(model, previous)
    model.config.sparsify |= {"schema": CONFIG_SCHEMA, "plan": plan.to_json()}
    handle._mark = model.config.sparsify
    # Saved, so that transformers without this package refuses the folder instead of loading it
    # dense without a word.
    model.config.attn_implementation = NAME
    try:
        for layer in learned:
            insert(model, layer, known.get(layer.fqn), start_it=start_indexers)
    except CaptureError:
        _strip(model, previous)
        raise
    for layer in plan:
        _mark(modules[layer.fqn], layer)
    return handle


def _swap_attention(model: PreTrainedModel, previous: str) -> None:
    """Have transformers call our attention, and keep for each config what it called before."""
    for config in _configs(model):
        config.sparsify = {"dense": config._attn_implementation or previous}
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        _strip(model, previous)
        raise CaptureError(
            f"{type(model).__name__} calls its attention directly, so transformers cannot swap it."
        )


def _check_reachable(
    model: PreTrainedModel, modules: dict[str, torch.nn.Module], plan: Plan
) -> None:
    missing = [layer.fqn for layer in plan if layer.fqn not in modules]
    if missing:
        raise ArtefactError(
            f"The plan names {missing[0]!r}, which {type(model).__name__} does not have.",
            "It was made for another model.",
        )
    calls = Counter(layer.fqn for layer in plan)
    for layer in plan.rewritten:
        if calls[layer.fqn] > 1:
            raise CaptureError(
                f"{layer.fqn} calls attention {calls[layer.fqn]} times; this host cannot tell the "
                "calls apart.",
                "Keep the module dense by a layer rule.",
            )
        if layer.indexer == "learned" and not passes_keywords(modules[layer.fqn]):
            raise CaptureError(
                f"{layer.key}: {type(modules[layer.fqn]).__name__} does not pass on what a learned "
                "indexer has for its attention.",
                'Use indexer="proxy".',
            )


def _mark(module: torch.nn.Module, layer: LayerPlan) -> None:
    if layer.ordinal > 0:
        return
    module.sparsify_plan = layer  # type: ignore[assignment]
    module.sparsify_counts = Counter()  # type: ignore[assignment]
    if layer.sparse and passes_keywords(module):
        module.sparsify_hook = module.register_forward_pre_hook(  # type: ignore[assignment]
            offer, with_kwargs=True
        )


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every distinct config object that a module of the model reads."""
    found = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())


def copy_sharing_weights(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the module objects; parameters are the same tensors, buffers are copied."""
    shared: dict[int, Any] = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, shared)


def plan_of(model: torch.nn.Module) -> Plan | None:
    """The plan applied to `model`, if any."""
    stored = getattr(getattr(model, "config", None), "sparsify", None) or {}
    return Plan.from_json(stored["plan"]) if "plan" in stored else None


@contextlib.contextmanager
def as_sdpa(model: torch.nn.Module) -> Iterator[None]:
    """Within it the model runs its `sdpa` attention (or eager, where it has no other)."""
    config = getattr(model, "config", None)
    current = getattr(config, "_attn_implementation", None)
    if not isinstance(model, PreTrainedModel) or current in ("sdpa", "eager"):
        yield
        return
    dense = dense_implementation(config) if current == NAME else "sdpa"
    model.set_attn_implementation(dense)
    try:
        yield
    finally:
        model.set_attn_implementation(current)


def _attach_saved_plan(model: Any, folder: Any, options: Mapping[str, Any]) -> None:
    """Post-load step: put the plan of the saved config on a freshly loaded model."""
    stored = getattr(getattr(model, "config", None), "sparsify", None)
    if not isinstance(stored, dict) or "plan" not in stored:
        return
    if model.config._attn_implementation != NAME:  # the user asked for another attention
        return
    if stored.get("schema", 0) > CONFIG_SCHEMA:
        raise ArtefactError(
            f"{folder} was written by a newer version (schema {stored['schema']}).",
            "Update sparsify-attention.",
        )
    _check_saved_plan(folder, stored["plan"])
    dense = str(stored.get("dense", "sdpa"))
    saved = Plan.from_json(stored["plan"])
    plan = _fitted(saved, model)
    for config in _configs(model):
        config.__dict__.pop("sparsify", None)
    model.set_attn_implementation(dense)
    apply(model, plan, start_indexers=False)
    saved_as = {new.fqn: old.fqn for new, old in zip(plan, saved, strict=True)}
    index_files.read(model, folder, saved_as, options)


def _fitted(plan: Plan, model: PreTrainedModel) -> Plan:
    """The plan with module paths as this class has them: with or without the base model's name."""
    names, prefix = {name for name, _ in model.named_modules()}, f"{model.base_model_prefix}."
    renames: tuple[Callable[[str], str], ...] = (
        lambda fqn: fqn.removeprefix(prefix),
        lambda fqn: prefix + fqn,
    )
    for rename in renames:
        if any(layer.fqn not in names for layer in plan) and all(
            rename(layer.fqn) in names for layer in plan
        ):
            layers = tuple(dataclasses.replace(p, fqn=rename(p.fqn)) for p in plan)
            return Plan(layers, plan.policy, plan.model)
    return plan


def _is_ours(folder: Any) -> bool:
    """Whether this package wrote the folder; other tools write files of the manifest's name too."""
    if not isinstance(folder, str | os.PathLike) or not (Path(folder) / MANIFEST).is_file():
        return False
    config, plan = Path(folder) / "config.json", Path(folder) / "plan.json"
    return plan.is_file() or (config.is_file() and b'"sparsify"' in config.read_bytes())


def _check_saved_plan(folder: Any, stored: Any) -> None:
    """A folder that this package wrote still has its manifest, and says one thing in two places."""
    if not isinstance(folder, str | os.PathLike) or not (Path(folder) / "plan.json").is_file():
        return  # saved again by the user, or from elsewhere
    if not (Path(folder) / MANIFEST).is_file():
        raise ArtefactError(f"{folder} is incomplete: {MANIFEST} is missing.")
    if Plan.load(Path(folder) / "plan.json") != Plan.from_json(stored):
        raise ArtefactError(f"{folder}: plan.json and the plan in config.json differ.")


def _register() -> None:
    AttentionInterface.register(NAME, sparsify_attention)
    AttentionMaskInterface.register(NAME, sparsify_mask)
    original = PreTrainedModel.from_pretrained.__func__
    read_config = PreTrainedConfig.get_config_dict.__func__
    if getattr(original, "sparsify_wrapped", False):
        return

    @functools.wraps(original)
    def from_pretrained(
        cls: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        folder = pretrained_model_name_or_path
        with intact(folder) if _is_ours(folder) else contextlib.nullcontext():
            with index_files.expected(cls, folder):
                loaded = original(cls, folder, *args, **kwargs)
            _attach_saved_plan(loaded[0] if isinstance(loaded, tuple) else loaded, folder, kwargs)
        return loaded

    @functools.wraps(read_config)
    def get_config_dict(cls: type, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        # Auto classes read the config before the model class is known.
        if _is_ours(pretrained_model_name_or_path):
            check_file(pretrained_model_name_or_path, "config.json")
        return read_config(cls, pretrained_model_name_or_path, **kwargs)

    from_pretrained.sparsify_wrapped = True  # type: ignore[attr-defined]
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    PreTrainedConfig.get_config_dict = classmethod(get_config_dict)  # type: ignore[arg-type]


_register()
