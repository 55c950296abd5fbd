"""Example inputs for transformers models, recognised without importing transformers."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from sparsify.errors import CaptureError

__all__ = ["example_inputs", "is_transformers_model"]

DEFAULT_LENGTH = 16
PADDED = 3  # positions hidden in the first row: only the shapes matter to the capture


def is_transformers_model(model: torch.nn.Module) -> bool:
    """Whether a base class of the model is called PreTrainedModel."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__)


def example_inputs(model: torch.nn.Module, *, seq_len: int | None = None) -> dict[str, Any]:
    """Keyword inputs for a transformers language model.

    `input_ids` and `attention_mask` are int64 `[2, N]`, the first row padded on the left, and the
    cache is off. An encoder-decoder also gets `decoder_input_ids`.

    Args:
        model: a transformers model whose main input is `input_ids`.
        seq_len: N; by default 16, or the model's longest input if that is shorter.

    Raises:
        CaptureError: the model takes other inputs (images, audio); examples must be given.
    """
    main = getattr(model, "main_input_name", "input_ids")
    accepted = inspect.signature(model.forward).parameters
    if main != "input_ids" or "input_ids" not in accepted:
        raise CaptureError(
            f"{type(model).__name__} takes {main}, not input_ids.", "Pass example inputs."
        )
    length = _length(model, seq_len)
    ids, mask = _ids(model, length), _mask(model, length)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids.clone()
    inputs["use_cache"] = False
    return {name: value for name, value in inputs.items() if name in accepted}


def _length(model: torch.nn.Module, seq_len: int | None) -> int:
    if seq_len is not None:
        return seq_len
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return min(DEFAULT_LENGTH, longest) if isinstance(longest, int) else DEFAULT_LENGTH


def _device(model: torch.nn.Module) -> torch.device:
    parameter = next(iter(model.parameters()), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _ids(model: torch.nn.Module, length: int) -> torch.Tensor:
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    top = vocabulary if isinstance(vocabulary, int) and vocabulary > 1 else 2
    ids = torch.arange(2 * length, device=_device(model)).reshape(2, length)
    return ids * 7 % top


def _mask(model: torch.nn.Module, length: int) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.int64, device=_device(model))
    mask[0, : min(PADDED, length - 1)] = 0
    return mask
