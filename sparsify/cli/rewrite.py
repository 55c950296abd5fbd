"""`sparsify rewrite`: a model in, a folder with its rewritten twin out."""

from __future__ import annotations

import dataclasses
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsify.cli import render, streams
from sparsify.cli.options import (
    DType,
    Dtype,
    Json,
    Model,
    check_given,
    check_settings,
    is_within,
    parse_size,
    parse_whole,
)
from sparsify.errors import NothingToDoError, UsageError
from sparsify.files import check_target, check_utf8

if TYPE_CHECKING:
    from sparsify.plans import Plan
    from sparsify.policy import Policy
    from sparsify.report import SparsifyReport
    from sparsify.sources import LoadedModel

__all__ = ["rewrite"]


class Host(StrEnum):
    """What a model is rewritten to."""

    AUTO = "auto"
    TRANSFORMERS = "transformers"
    GRAPH = "graph"


class MethodName(StrEnum):
    """Methods that can be asked for by options alone."""

    MOBA = "moba"
    MSA = "msa"


class DecodeMode(StrEnum):
    """How single new tokens attend."""

    SPARSE = "sparse"
    DENSE = "dense"


class Indexer(StrEnum):
    """Where MSA's block scores come from."""

    PROXY = "proxy"
    LEARNED = "learned"


@dataclasses.dataclass(frozen=True)
class _Where:
    """The host, and whether an existing folder may be replaced."""

    host: str
    force: bool


@dataclasses.dataclass(frozen=True)
class _Short:
    """The options that stand for a policy file."""

    method: MethodName | None
    block_size: str | None
    topk: str | None
    dense_last: str | None
    decode: DecodeMode | None
    indexer: Indexer | None
    index_dim: str | None


def rewrite(
    model: Model,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder to write.", show_default=False),
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="P", help="A policy file, or a preset's name.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="A plan.json to carry out.")
    ] = None,
    method: Annotated[
        MethodName | None, typer.Option("--method", help="Short for a policy file.")
    ] = None,
    block_size: Annotated[
        str | None, typer.Option("--block-size", metavar="N", help="Tokens of a block: 64, 4k.")
    ] = None,
    topk: Annotated[
        str | None,
        typer.Option(
            "--topk", metavar="K", help="Blocks that a query reads, its own one included."
        ),
    ] = None,
    dense_last: Annotated[
        str | None, typer.Option("--dense-last", metavar="N", help="Keep the last N layers dense.")
    ] = None,
    decode: Annotated[
        DecodeMode | None, typer.Option("--decode", help="How single new tokens attend.")
    ] = None,
    indexer: Annotated[
        Indexer | None, typer.Option("--indexer", help="Where MSA's block scores come from.")
    ] = None,
    index_dim: Annotated[
        str | None,
        typer.Option("--index-dim", metavar="N", help="Size of a learned indexer's vectors: 128."),
    ] = None,
    host: Annotated[
        Host, typer.Option("--host", help="What the result is: a transformers model, or a graph.")
    ] = Host.AUTO,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done; write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
    json: Json = False,
    dtype: Dtype = DType.AUTO,
) -> int:
    """Rewrite the proved attention of MODEL and write it to DIR.

    Exactly one of --policy, --plan and --method (with --block-size and --topk) says how.
    """
    check_given(MODEL=model, **{"-o": output, "--policy": policy})
    check_settings()
    short = _Short(method, block_size, topk, dense_last, decode, indexer, index_dim)
    wanted = _wanted(policy, plan, short)
    target = None if dry_run else _check_output(output, model, force)
    with streams.progress(stages=6) as say:
        from sparsify.sources import load_model

        loaded = load_model(model, dtype=dtype.value, with_tokenizer=not dry_run, progress=say)
        done = _work(loaded, wanted, target, _Where(host.value, force), say)
    streams.show_json(done.to_json()) if json else streams.show(*render.report(done))
    if dry_run and not done.counts["rewritten"]:
        raise NothingToDoError(f"Nothing would be rewritten in {done.model}.")
    if not json:
        streams.show("dry run: nothing was written" if dry_run else f"written to {target}")
    return 0


def _wanted(policy: str | None, plan: Path | None, short: _Short) -> Policy | Plan:
    """The one policy or plan that was asked for."""
    from sparsify.plans import Plan
    from sparsify.policy import load_policy

    given = {"--policy": policy, "--plan": plan, "--method": short.method}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise UsageError(
            f"{' and '.join(names)} exclude each other." if names else "What to do is missing.",
            "Give one of --policy P, --plan FILE, --method NAME --block-size N --topk K.",
        )
    if short.method is not None:
        return _short_policy(short)
    for name, value in dataclasses.asdict(short).items():
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')} belongs to --method, not to {names[0]}.")
    return Plan.load(plan) if plan is not None else load_policy(str(policy))


def _short_policy(short: _Short) -> Policy:
    from sparsify.policy import Policy

    missing = [
        option
        for option, value in (("--block-size", short.block_size), ("--topk", short.topk))
        if value is None
    ]
    if missing:
        raise UsageError(f"--method {short.method} needs {' and '.join(missing)}.")
    if short.indexer is not None and short.method is not MethodName.MSA:
        raise UsageError("--indexer belongs to --method msa.")
    learned = short.indexer is Indexer.LEARNED
    if learned and short.index_dim is None:
        raise UsageError("--indexer learned needs --index-dim.", "MiniMax-M3 has --index-dim 128.")
    if short.index_dim is not None and not learned:
        raise UsageError("--index-dim belongs to --indexer learned.")
    method: dict[str, Any] = {
        "name": str(short.method),
        "block_size": parse_size(str(short.block_size), "--block-size"),
        "topk": parse_whole(str(short.topk), "--topk"),
        "decode": str(short.decode or DecodeMode.SPARSE),
    }
    if learned:
        size = parse_whole(str(short.index_dim), "--index-dim")
        method |= {"indexer": "learned", "index_dim": size}
    dense_last = parse_whole(short.dense_last or "0", "--dense-last")
    return Policy.from_json({"method": method, "dense_last": dense_last})


def _check_output(given: str | None, model: str, force: bool) -> Path:
    if given is None:
        raise UsageError("Where to write is missing.", "Give -o DIR, or --dry-run.")
    output = Path(given)
    check_target(output, force=force)
    check_utf8(os.path.realpath(output))
    source = Path(model)
    if source.exists() and is_within(source, output):
        raise UsageError(f"{output} holds the model that is read.", "Choose another target.")
    return output


def _work(
    loaded: LoadedModel, wanted: Policy | Plan, output: Path | None, where: _Where, say: Any
) -> SparsifyReport:
    """Prove, plan, rewrite, and unless this is a dry run (no output) write."""
    from sparsify import api, planner
    from sparsify.plans import Plan
    from sparsify.rewriting import chosen_host

    host = chosen_host(loaded.model, loaded.args, loaded.kwargs, where.host)
    found = api.inspect(
        loaded.model, loaded.args, loaded.kwargs, host=host, name=loaded.name, progress=say
    )
    if isinstance(wanted, Plan):
        plan = wanted
        planner.check_plan(plan, found.sites, found.refusals)
    else:
        plan = api.plan(found, wanted)
    result = api.sparsify(
        loaded.model,
        args=loaded.args,
        kwargs=loaded.kwargs,
        plan=plan,
        inspection=found,
        host=host,
        inplace=host == "transformers",  # the graph host copies no weights either
        progress=say,
    )
    if output is not None:
        api.export(result, output, tokenizer=loaded.tokenizer, force=where.force, progress=say)
    return result.report
