"""What is to be estimated: configurations of the attention layers, by policy, plan or name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sparsify.cost_model.configuration import DENSE, PUBLISHED, Configuration
from sparsify.cost_model.model_shape import LayerShape, ModelShape
from sparsify.cost_model.stages import runs_sparse
from sparsify.cost_model.workload import Workload
from sparsify.errors import NothingToDoError, UsageError
from sparsify.ir import site_name
from sparsify.planner import apply_rules
from sparsify.plans import Plan
from sparsify.policy import Auto, Policy

__all__ = ["Scheme", "schemes_of"]

What = Policy | Plan | Configuration | Sequence[Configuration] | None


@dataclass(frozen=True, slots=True)
class _Place:
    fqn: str
    ordinal: int


@dataclass(frozen=True)
class Scheme:
    """Configurations of layers by name; `main` is the one that most layers have.

    Below `min_context` tokens a layer runs dense.
    """

    main: Configuration
    by_name: Mapping[str, Configuration]
    min_context: Mapping[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What is sparse, the most frequent first: "MoBA 128/8 and MSA proxy 128/16"."""
        counts = Counter(one for one in self.by_name.values() if one.sparse)
        return " and ".join(one.label for one, _ in counts.most_common()) or self.main.label

    @property
    def needs_training(self) -> bool:
        """Whether one of the layers means nothing before its own weights are trained."""
        return any(one.needs_training for one in self.by_name.values())

    def at(self, call: Workload) -> dict[str, Configuration]:
        """The layers that leave something out in that call."""
        return {
            name: configuration
            for name, configuration in self.by_name.items()
            if runs_sparse(configuration, call)
            and call.context_tokens >= self.min_context.get(name, 0)
        }

    def sparse_layers(self, model: ModelShape) -> tuple[LayerShape, ...]:
        """Layers that are sparse where the context is long enough."""
        chosen = {name for name, configuration in self.by_name.items() if configuration.sparse}
        return tuple(layer for layer in model.full_attention_layers if layer.name in chosen)


def schemes_of(model: ModelShape, what: What) -> tuple[Scheme, ...]:
    """One scheme for a policy, a plan or a configuration, one each for several configurations.

    None stands for what is published.

    Raises:
        UsageError: a layer rule matches nothing, a plan is for other layers, the policy leaves the
            choice to the planner.
        NothingToDoError: no layer attends to everything, so nothing can be sparse.
    """
    if not model.full_attention_layers:
        raise NothingToDoError(f"{model.name} has no full attention that could be made sparse.")
    if isinstance(what, Policy):
        return (_by_policy(model, what),)
    if isinstance(what, Plan):
        return (_by_plan(model, what),)
    chosen = PUBLISHED if what is None else (what,) if isinstance(what, Configuration) else what
    if isinstance(chosen, str) or not isinstance(chosen, Sequence):
        raise UsageError(
            f"policy is a {type(what).__name__}; it must be a policy, a plan or configurations.",
            "For a preset or a file: sparsify.load_policy.",
        )
    if not chosen or not all(isinstance(one, Configuration) for one in chosen):
        raise UsageError("policy is a list; all of it must be configurations, one at least.")
    names = [layer.name for layer in model.full_attention_layers]
    return tuple(Scheme(one, dict.fromkeys(names, one)) for one in chosen)


def _by_policy(model: ModelShape, policy: Policy) -> Scheme:
    layers = model.attention_layers
    # The rules count all attention, windows included, as they do in a captured model.
    choices = [method for method, _ in apply_rules(policy, [_named(layer) for layer in layers])]
    if any(isinstance(method, Auto) for method in choices):
        raise UsageError(
            "Policy.auto has no sizes before a plan is made.",
            "Run `sparsify plan` and estimate the plan, or name a method.",
        )
    by_name = {
        layer.name: Configuration.of(method)
        for layer, method in zip(layers, choices, strict=True)
        if layer in model.full_attention_layers and not isinstance(method, Auto)
    }
    return _scheme(by_name, dict.fromkeys(by_name, policy.min_context))


def _named(layer: LayerShape) -> _Place:
    """Path and ordinal of a layer's attention, as rules match them."""
    fqn, _, ordinal = layer.name.partition("#")
    return _Place("" if fqn == "(root)" else fqn, int(ordinal or 0))


def _by_plan(model: ModelShape, plan: Plan) -> Scheme:
    planned = {site_name(layer.fqn, layer.ordinal): layer for layer in plan}
    known = {layer.name for layer in model.attention_layers}
    foreign = next((n for n, layer in planned.items() if layer.sparse and n not in known), None)
    if foreign is not None:
        first = model.attention_layers[0].name
        raise UsageError(
            f"The plan rewrites {foreign}, which {model.name} does not have.",
            f"Its layers are called {first} and so on.",
        )
    layers = [layer for layer in model.full_attention_layers if layer.name in planned]
    by_name = {layer.name: Configuration.of(planned[layer.name]) for layer in layers}
    return _scheme(by_name, {name: planned[name].min_context for name in by_name})


def _scheme(by_name: dict[str, Configuration], min_context: dict[str, int]) -> Scheme:
    counts = Counter(one for one in by_name.values() if one.sparse)
    main = counts.most_common(1)[0][0] if counts else DENSE
    return Scheme(main, by_name, min_context)
