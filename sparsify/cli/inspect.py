"""`sparsify inspect`: all attention of a model, what can be replaced, and why the rest cannot."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsify.cli import render, streams
from sparsify.cli.options import DType, Dtype, Json, Model, check_given, check_settings, parse_size
from sparsify.errors import NothingToDoError, UsageError
from sparsify.ir import AttentionSite, Refusal, site_key, site_name

if TYPE_CHECKING:
    from sparsify.api import Inspection

__all__ = ["inspect"]

Found = AttentionSite | Refusal


def inspect(
    model: Model,
    seq: Annotated[
        str | None, typer.Option("--seq", help="Length of the example input, such as 256 or 4k.")
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="SITE", help="Everything known of one site."),
    ] = None,
    json: Json = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Also show what only resembles attention.")
    ] = False,
    dtype: Dtype = DType.AUTO,
) -> int:
    """Find all attention of MODEL and say what can be replaced. Changes nothing."""
    check_given(MODEL=model)
    check_settings()
    seq_len = None if seq is None else parse_size(seq, "--seq")
    with streams.progress(stages=3) as say:
        from sparsify import api
        from sparsify.sources import load_model

        loaded = load_model(model, dtype=dtype.value, with_tokenizer=False, progress=say)
        found = api.inspect(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            seq_len=seq_len,
            name=loaded.name,
            progress=say,
        )
    refusals = [r for r in found.refusals if debug or r.code != "NOT_ATTENTION"]
    if explain is not None:
        _explain(_pick(explain, [*found.sites, *found.refusals]), found.model, json)
        return 0
    if json:
        streams.show_json({**found.to_json(), "refusals": [r.to_json() for r in refusals]})
    elif found.sites or refusals:
        streams.show(*render.inspection(found.model, found.sites, refusals, found.notes))
    _warn_of_missing(found)
    if not found.sites and all(r.code == "NOT_ATTENTION" for r in refusals):
        raise NothingToDoError(f"No attention was found in {found.model}.")
    return 0


def _explain(found: Found, model: str, json: bool) -> None:
    if json:
        verdict = "refusal" if isinstance(found, Refusal) else "site"
        streams.show_json({"schema": 1, "model": model, verdict: found.to_json()})
    else:
        streams.show(*render.explain(found))


def _pick(wanted: str, found: list[Any]) -> Found:
    """The site of that path, or path#ordinal."""
    by_name: dict[str, Found] = {}
    for item in found:
        by_name.setdefault(site_name(item.fqn, item.ordinal), item)
        by_name.setdefault(site_key(item.fqn, item.ordinal), item)
        by_name.setdefault(item.fqn, item)
    if wanted in by_name:
        return by_name[wanted]
    close = difflib.get_close_matches(wanted, by_name, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]}?" if close else "`sparsify inspect MODEL --json` lists all."
    raise UsageError(f"There is no attention site {wanted}.", hint)


def _warn_of_missing(found: Inspection) -> None:
    attention = len(found.sites) + sum(r.code != "NOT_ATTENTION" for r in found.refusals)
    if found.expected is not None and attention != found.expected:
        streams.tell(
            f"sparsify: WARNING: the config of {found.model} names {found.expected} attention "
            f"layers, {attention} were found."
        )
