"""Texts for the checks, as token ids. Real text without a download: the standard library's docs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["default_text", "to_ids"]

SEED = 20_240_701


def default_text() -> str:
    """English prose of about 60,000 characters: docstrings of standard-library modules."""
    import argparse
    import ast
    import decimal
    import heapq
    import logging
    import optparse
    import pathlib
    import pickletools
    import textwrap

    modules = (argparse, ast, decimal, heapq, logging, optparse, pathlib, textwrap)
    texts = [m.__doc__ or "" for m in modules]
    for module in (*modules, pickletools):
        for name in sorted(vars(module)):
            doc = getattr(vars(module)[name], "__doc__", None)
            if isinstance(doc, str) and len(doc) > 300:
                texts.append(textwrap.dedent(doc))
    return "\n\n".join(dict.fromkeys(texts))[:60_000]


def to_ids(
    samples: Any, tokenizer: Any, vocab_size: int, device: torch.device
) -> tuple[list[torch.Tensor], str]:
    """Token ids `[1, T]` of every sample, and a note on where they come from.

    `samples` may be None, a text, a list of texts, a tensor `[1, T]` or a list of such tensors.
    Without a tokenizer, texts cannot be used and random tokens stand in.
    """
    if samples is None and tokenizer is not None:
        samples, note = [default_text()], "docstrings of the Python standard library"
    elif samples is None:
        generator = torch.Generator().manual_seed(SEED)
        samples = [torch.randint(0, vocab_size, (1, 4096), generator=generator)]
        note = "random tokens (no tokenizer)"
    else:
        note = "the samples given"
    if isinstance(samples, str | torch.Tensor):
        samples = [samples]
    return [_ids(sample, tokenizer).to(device) for sample in samples], note


def _ids(sample: Any, tokenizer: Any) -> torch.Tensor:
    if isinstance(sample, torch.Tensor):
        return sample.reshape(1, -1)
    if not isinstance(sample, str):
        return torch.tensor(list(sample), dtype=torch.long).reshape(1, -1)
    if tokenizer is None:
        raise ValueError("Texts need a tokenizer; pass tokenizer= or token ids.")
    # Token ids of a long text may pass the model's length; the checks cut them.
    ids: Sequence[int] = tokenizer(sample, verbose=False)["input_ids"]
    return torch.tensor([list(ids)], dtype=torch.long)
