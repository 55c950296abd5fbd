"""MODEL arguments of `estimate` and `compare`: metadata where there is some, else a capture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparsify.cli import streams
from sparsify.factories import looks_like_factory
from sparsify.model_files import read_model

if TYPE_CHECKING:
    from sparsify.cost_model.model_shape import ModelShape

__all__ = ["shape_of"]


def shape_of(spec: str) -> ModelShape:
    """The shape of a model: of its config, or of the graph of what a factory returns.

    Raises:
        UsageError: there is no such thing, or it does not say enough.
        CaptureError: a factory's module cannot be captured.
    """
    if looks_like_factory(spec) and not Path(spec).exists():
        return _captured(spec)
    return read_model(spec)


def _captured(spec: str) -> ModelShape:
    with streams.progress(stages=3) as say:
        from sparsify import api
        from sparsify.inspections import captured_shape
        from sparsify.sources import load_model

        loaded = load_model(spec, with_tokenizer=False, progress=say)
        found = api.inspect(
            loaded.model, loaded.args, loaded.kwargs, name=loaded.name, progress=say
        )
        return captured_shape(found)
