"""Whole models: a rewritten one against its original, prefill and decode step, on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparsify.timing import Timing, extra_bytes, time_call
from sparsify.variants import takes

__all__ = ["ModelTimes", "pair_rows", "time_language_model", "time_module"]

BUDGET_S = 20.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class ModelTimes:
    """One model at one length; `decode` is None where a step cannot be repeated.

    `tokens` is None for a module that is timed on its own example inputs. `extra_bytes` is the peak
    memory of a prefill beyond the weights and what it returns, cache included.
    """

    tokens: int | None
    prefill: Timing
    decode: Timing | None
    extra_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """The figures, for a result file."""
        return {
            "prefill": self.prefill.to_json(),
            "decode": None if self.decode is None else self.decode.to_json(),
            "extra_bytes": self.extra_bytes,
        }


def time_language_model(
    model: Any,
    lengths: Sequence[int],
    device: torch.device,
    *,
    batch: int,
    repeats: int,
    say: Say,
    name: str,
) -> list[ModelTimes]:
    """Prefill and decode step of a transformers model on random tokens, logits of the last one."""
    model = model.to(device)
    found = []
    for tokens in lengths:
        ids = _random_ids(model, batch, tokens, device)
        run = _prefill(model, ids)
        say(f"{name}: prefill of {tokens} tokens")
        extra = extra_bytes(run, device)
        prefill = _timing(run, device, repeats)
        say(f"{name}: decode step after {tokens} tokens")
        found.append(ModelTimes(tokens, prefill, _decode(model, ids, device, repeats), extra))
    return found


def time_module(
    model: torch.nn.Module,
    args: Iterable[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    *,
    repeats: int,
    say: Say,
    name: str,
) -> list[ModelTimes]:
    """The forward of any other module on its example inputs."""
    model = model.to(device)
    args = [_to(x, device) for x in args]
    kwargs = {key: _to(x, device) for key, x in kwargs.items()}

    def run() -> Any:
        with torch.inference_mode():
            return model(*args, **kwargs)

    say(f"{name}: forward")
    extra = extra_bytes(run, device)
    return [ModelTimes(None, _timing(run, device, repeats), None, extra)]


def pair_rows(dense: Sequence[ModelTimes], sparse: Sequence[ModelTimes]) -> list[dict[str, Any]]:
    """A row per length, with speed-ups: dense time over that of the rewritten model."""
    rows = []
    for a, b in zip(dense, sparse, strict=True):
        decode = None
        if a.decode is not None and b.decode is not None:
            decode = a.decode.median_ms / b.decode.median_ms
        rows.append(
            {
                "tokens": a.tokens,
                "dense": a.to_json(),
                "rewritten": b.to_json(),
                "prefill_speedup": a.prefill.median_ms / b.prefill.median_ms,
                "decode_speedup": decode,
            }
        )
    return rows


def _timing(run: Callable[[], Any], device: torch.device, repeats: int) -> Timing:
    return time_call(
        run, device=device, repeats=repeats, warm_up=1, flush_l2=False, budget_s=BUDGET_S
    )


def _random_ids(model: Any, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    config = model.config.get_text_config()
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, config.vocab_size, (batch, tokens), generator=draw).to(device)


def _prefill(model: Any, ids: torch.Tensor) -> Callable[[], Any]:
    options = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}

    def run() -> Any:
        with torch.inference_mode():
            return model(input_ids=ids, use_cache=True, **options)

    return run


def _decode(model: Any, ids: torch.Tensor, device: torch.device, repeats: int) -> Timing | None:
    """A step behind the prefilled cache, which is cut back after each; None if it cannot be."""
    name = "cache" if takes(model, "cache") else "past_key_values"  # today's name, and the old one
    cache = _prefill(model, ids)()[name]
    if not hasattr(cache, "crop"):
        return None
    last = ids[:, -1:]

    def run() -> None:
        with torch.inference_mode():
            model(input_ids=last, use_cache=True, **{name: cache})
            cache.crop(-1)

    try:
        return _timing(run, device, repeats)
    except (NotImplementedError, ValueError):  # a recurrent state cannot be cut back
        return None


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
