"""Texts for the checks, as token ids. Real text without a download: the standard library's docs."""

from __future__ import annotations

from typing import Any

import torch

from sparsify.errors import UsageError

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
    With neither samples nor a tokenizer, random tokens stand in.

    Raises:
        UsageError: a text without a tokenizer, an empty sample, or a batch in one tensor.
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
    if not isinstance(samples, list | tuple):
        raise UsageError(f"Samples are texts or token ids, not a {type(samples).__name__}.")
    if not samples:
        raise UsageError("There are no samples to verify on.")
    return [_ids(sample, tokenizer).to(device) for sample in samples], note


def _ids(sample: Any, tokenizer: Any) -> torch.Tensor:
    if isinstance(sample, str):
        if tokenizer is None:
            raise UsageError("Texts need a tokenizer.", "Pass tokenizer=, or token ids.")
        # Token ids of a long text may pass the model's length; the checks cut them.
        sample = tokenizer(sample, verbose=False)["input_ids"]
    ids = torch.as_tensor(sample)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or len(ids) != 1 or ids.is_floating_point() or ids.shape[1] == 0:
        raise UsageError(
            f"A sample is a text or token ids [tokens] or [1, tokens], not {list(ids.shape)}.",
            "Give several sequences as a list.",
        )
    return ids.long()
