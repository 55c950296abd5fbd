"""What the checks share: their context, running models, and the rule for "equal".

How equal is equal: two right implementations choose differently at near ties, so outputs are
compared with the selection of one replayed in the other, and differing selections are counted.
Unqualified equality is asked for at top-k = all blocks only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from sparsify import settings
from sparsify.errors import UsageError
from sparsify.hosts.native_sparse import native_layers
from sparsify.plans import Plan
from sparsify.report import CheckResult
from sparsify.variants import all_dense, plan_of, retuned, takes

__all__ = [
    "Context",
    "Pair",
    "error",
    "join",
    "left_padded",
    "logits",
    "logits_in_steps",
    "names_of",
    "plain_and_padded",
    "plan_to_verify",
    "result",
    "same_bits",
    "variant",
]

CHECK_TOKENS = 1024
# max|a - b| / max|b| for the outputs of a model, given the same selection.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}


@dataclasses.dataclass
class Pair:
    """A rewritten model and its original.

    `expected` attention layers are named by the original's config, `detected` are the site keys of
    a fresh inspection; `inputs` are the arguments of one call, for models that need examples.
    """

    original: Any
    rewritten: Any
    plan: Plan
    expected: int | None
    detected: tuple[str, ...] | None
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None

    @functools.cached_property
    def dense(self) -> Any:
        """The original rewritten under a policy that keeps every layer dense."""
        return all_dense(self.original, self.rewritten, self.inputs)


@dataclasses.dataclass
class Context(Pair):
    """What every check of a language model sees. `ids` are the samples as token ids `[1, T]`, the
    first leads."""

    ids: list[torch.Tensor]
    source: str
    tokenizer: Any
    lengths: tuple[int, ...] | None
    directory: Path | None
    dump_selection: Path | None
    greedy_tokens: int
    say: Callable[[str], None]

    @property
    def pads_left(self) -> bool:
        """Whether padding on the left leaves what the original computes: it moves the blocks of
        layers that are sparse by themselves."""
        return not native_layers(self.original)

    @property
    def settings_run(self) -> str:
        """How `plain_and_padded` runs the models, in words."""
        return "alone and left-padded in a batch" if self.pads_left else "alone"

    @property
    def spans(self) -> list[int]:
        """top-k * block size of the layers, in tokens, rising; rows before it stay dense."""
        return sorted({math.prod(p.budget) for p in self.plan.rewritten})

    @property
    def limit(self) -> int:
        """Longest input of the equality checks, in tokens: beyond twice every span if it can be."""
        wanted = max(
            CHECK_TOKENS, 2 * self.spans[-1] + 3 if 2 * self.spans[-1] > CHECK_TOKENS else 0
        )
        longest = getattr(self.original.config, "max_position_embeddings", None) or wanted
        return min(wanted, longest, 8 * CHECK_TOKENS)

    def derived_lengths(self) -> list[int]:
        """Lengths around the borders of blocks and of top-k * block size, up to the limit."""
        found: set[int] = {self.limit}
        for size, topk in {p.budget for p in self.plan.rewritten}:
            span = size * topk
            found |= {1, size - 1, size + 1, span - 1, span + 1, 2 * span + 3, 4 * span}
        return sorted(n for n in found if 1 <= n <= self.limit)

    def quality_lengths(self) -> list[int]:
        """Token counts of the V6 runs: those asked for, else one of up to 4 * top-k * block."""
        longest = max(ids.shape[1] for ids in self.ids)
        limit = getattr(self.original.config, "max_position_embeddings", None) or longest
        wanted = self.lengths or (max(4 * self.spans[-1], CHECK_TOKENS),)
        return sorted({min(n, longest, limit) for n in wanted})

    def tokens(self, length: int) -> torch.Tensor:
        """The first `length` tokens of the leading sample, repeated when it is shorter."""
        ids = self.ids[0]
        return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]


def names_of(checks: Any, known: Collection[str]) -> list[str]:
    """Names of the checks that are asked for, all by default.

    Raises:
        UsageError: a name that is not known.
    """
    names = list(known) if checks is None else [str(name).strip().upper() for name in checks]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"Unknown check {unknown[0]}; known for this kind of model are {', '.join(known)}."
        )
    return names


def plan_to_verify(rewritten: torch.nn.Module) -> Plan:
    """The plan of a rewritten model.

    Raises:
        UsageError: it has none, or runs dense everywhere.
    """
    plan = plan_of(rewritten)
    if plan is None or not plan.rewritten:
        raise UsageError("The second model is not a rewritten one: it has no plan.")
    if settings.disabled():
        raise UsageError(
            "SPARSIFY_DISABLE=1 makes the rewritten model run dense; there is nothing to verify.",
            "Unset it.",
        )
    return plan


def result(
    check: str, name: str, faults: list[str], done: str, metrics: dict[str, Any]
) -> CheckResult:
    """What a check found: failed with its first faults, or passed with what was `done`."""
    if faults:
        return CheckResult(check, name, "failed", "; ".join(faults[:3]), metrics)
    return CheckResult(check, name, "passed", done, metrics)


def variant(c: Context, **changes: Any) -> Any:
    """The rewritten model with its sparse layers changed, on the same weights."""
    return retuned(c.rewritten, **changes)


def plain_and_padded(c: Context, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """The input alone, and, if the original can be, in a left-padded batch with a shorter one."""
    ids = c.tokens(length)
    yield ids, None
    if length > 2 and c.pads_left:
        yield left_padded(ids, length - length // 3)


def left_padded(ids: torch.Tensor, shorter: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of `ids` and a left-padded sequence of `shorter` tokens, with its 2-D mask."""
    n = ids.shape[1]
    other = torch.cat([ids.new_zeros(1, n - shorter), ids[:, n - shorter :].flip(1)], 1)
    mask = torch.ones(2, n, dtype=torch.long, device=ids.device)
    mask[1, : n - shorter] = 0
    return torch.cat([ids, other]), mask


def logits(
    model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **inputs: torch.Tensor
) -> torch.Tensor:
    """Logits of the real tokens: `[1, T, V]`, or `[rows, V]` of a padded batch.

    `inputs` are more arguments of the model, such as `position_ids`.
    """
    out: torch.Tensor = model(ids, attention_mask=mask, use_cache=False, **inputs).logits
    return out if mask is None else out[mask.bool()]


def logits_in_steps(model: Any, ids: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Logits `[1, T, V]` computed chunk by chunk over a growing KV cache."""
    from transformers import DynamicCache

    name = "cache" if takes(model, "cache") else "past_key_values"
    config = getattr(model, "config", None)  # a loaded program has none
    cache, parts, start = DynamicCache() if config is None else DynamicCache(config=config), [], 0
    for end in ends:
        out = model(ids[:, start:end], use_cache=True, **{name: cache})
        parts.append(out.logits)
        start = end
    return torch.cat(parts, 1)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max|b|."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit that matters; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(torch.all((a == b) | ((a != a) & (b != b))))


def error(
    a: torch.Tensor, b: torch.Tensor, in_float64: Callable[[], torch.Tensor]
) -> tuple[float, float]:
    """Error of `a` and what is allowed: against `b`, or for 16-bit dtypes against float64.

    A 16-bit result may be at most twice as far from float64 as the eager result `b` is.
    """
    if a.dtype in TOLERANCE:
        return relative(a, b), TOLERANCE[a.dtype]
    exact = in_float64()
    return relative(a, exact), 2 * relative(b, exact)


def join(items: list[Any]) -> str:
    """Items in words: "1, 2 and 3"."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
