"""A rewritten folder and the model it was made of, loaded to be compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sparsify.errors import UsageError
from sparsify.sources import DTYPES, LoadedModel, load_model

__all__ = ["load_pair"]


def load_pair(
    directory: Path, against: str, say: Callable[[str], None], *, with_tokenizer: bool = False
) -> tuple[LoadedModel, LoadedModel]:
    """The rewritten model and the original, whose tokenizer is read where the first has none.

    Raises:
        UsageError: DIR was not written by `sparsify rewrite`, or a model cannot be loaded.
    """
    rewritten = load_model(str(directory), with_tokenizer=with_tokenizer, progress=say)
    if rewritten.kind != "sparsified":
        raise UsageError(f"{directory} was not written by `sparsify rewrite`: it holds no plan.")
    # The original in the same data type, or every number would differ by rounding.
    dtype = str(next(rewritten.model.parameters()).dtype).removeprefix("torch.")
    original = load_model(
        against,
        dtype=dtype if dtype in DTYPES else "auto",
        with_tokenizer=with_tokenizer and rewritten.tokenizer is None,
        progress=say,
    )
    return rewritten, original
