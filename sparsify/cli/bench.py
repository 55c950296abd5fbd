"""`sparsify bench`: measured times of one op, of a rewritten model, or for a calibration."""

from __future__ import annotations

import contextlib
import json as json_module
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsify.cli import streams
from sparsify.cli.cost_options import Batch, parse_contexts
from sparsify.cli.options import Json, check_given, check_settings, parse_sizes, parse_whole
from sparsify.errors import UsageError
from sparsify.files import check_target, write_text

if TYPE_CHECKING:
    import torch

    from sparsify.cost_model.hardware import Gpu

__all__ = ["bench"]

CONTEXTS = "8k,32k,128k"
CPU_CONTEXTS = "4k"
SEQUENCES = "1k,4k"
TUNED = "32k"


class MethodName(StrEnum):
    """Methods that have kernels to time."""

    MOBA = "moba"
    MSA = "msa"


class ElementName(StrEnum):
    """Types of queries, keys and values."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class IndexName(StrEnum):
    """Types of MSA's index queries and keys, beside that of the others."""

    BF16 = "bf16"
    FP8 = "fp8"


def bench(
    ctx: typer.Context,
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="A folder that `sparsify rewrite` wrote."),
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL", help="The original of DIR.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="TEXT",
            help="One attention op instead: heads=16/16,dim=128,block=128,topk=8 (value=64 where "
            "values have another size); for MSA with index=128, or with keys=group for the proxy "
            "indexer.",
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Measure what `estimate --calibration` needs, on a GPU, in minutes."
        ),
    ] = False,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Measure tiles for --shape, and keep the fastest in SPARSIFY_CACHE_DIR.",
        ),
    ] = False,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="SIZES",
            help=f"Contexts of --shape; {CONTEXTS} by default ({CPU_CONTEXTS} on a CPU), "
            f"{TUNED} with --tune.",
        ),
    ] = None,
    seq: Annotated[
        str | None,
        typer.Option("--seq", metavar="SIZES", help=f"Lengths for DIR; {SEQUENCES} by default."),
    ] = None,
    method: Annotated[
        MethodName, typer.Option("--method", help="Method of --shape.")
    ] = MethodName.MOBA,
    queries: Annotated[
        str | None,
        typer.Option(
            "--queries",
            metavar="N",
            help="Queries of --shape, the last of each context; all by default, 1 to decode.",
        ),
    ] = None,
    index_dtype: Annotated[
        IndexName | None,
        typer.Option("--index-dtype", help="Elements of MSA's index; as --dtype by default."),
    ] = None,
    batch: Batch = "1",
    dtype: Annotated[
        ElementName, typer.Option("--dtype", help="Elements of --shape.")
    ] = ElementName.BF16,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="cuda:0, or cpu.")
    ] = "cuda:0",
    repeats: Annotated[
        str, typer.Option("--repeats", metavar="N", help="Timed calls; slow ones get fewer.")
    ] = "20",
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Write JSON here.")
    ] = None,
    into: Annotated[
        str | None,
        typer.Option("--into", metavar="FILE", help="Merge the calibration into this file."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing -o FILE.")] = False,
    json: Json = False,
) -> None:
    """Measure: --shape times one op, or its tiles with --tune; DIR --against MODEL two models,
    --calibrate a GPU."""
    given = {"DIR": None if directory is None else str(directory), "--against": against}
    check_given(**given, **{"--shape": shape, "--context": context, "--seq": seq})
    check_given(**{"--device": device, "-o": output, "--into": into})
    check_settings()
    _check_kinds(directory, against, shape, calibrate, context, seq, into, output, json)
    if tune and (shape is None or calibrate):
        raise UsageError("--tune is for --shape alone.", "Leave out what else is to be measured.")
    _check_unused(ctx, _kind(directory, shape, calibrate, tune))
    if output is not None:
        check_target(output, force=force, directory=False)
    size, count = _positive(batch, "--batch"), _positive(repeats, "--repeats")
    contexts = None if context is None else parse_contexts(context)
    if calibrate:
        _calibrate(shape, method.value, contexts, device, output, into, json)
        return
    if tune:
        data = _tune((shape, method.value, contexts), size, dtype.value, device, count, json)
    elif shape is not None:
        few = None if queries is None else _positive(queries, "--queries")
        index = None if index_dtype is None else index_dtype.value
        what = (shape, method.value, contexts, few, index)
        data = _attention(what, size, dtype.value, device, count, json)
    else:
        lengths = parse_sizes(seq or SEQUENCES, "--seq")
        data = _models(directory, against, lengths, size, device, count, json)
    if output is not None:
        _write(output, data)


# Options that a kind of measurement does not use.
UNUSED = {
    "--calibrate": ("batch", "dtype", "index_dtype", "method", "queries", "repeats"),
    "--calibrate --shape": ("batch", "dtype", "index_dtype", "queries", "repeats"),
    "DIR": ("dtype", "index_dtype", "method", "queries"),
    "--tune": ("index_dtype", "queries"),
    "--shape": (),
}


def _kind(directory: Path | None, shape: str | None, calibrate: bool, tune: bool) -> str:
    if calibrate:
        return "--calibrate" if shape is None else "--calibrate --shape"
    return "DIR" if directory else "--tune" if tune else "--shape"


def _check_unused(ctx: typer.Context, kind: str) -> None:
    """Refuse options that were given and would change nothing."""
    for name in UNUSED[kind]:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.replace("_", "-")
            raise UsageError(f"{kind} does not use --{option}.", "Leave it out.")


def _check_kinds(
    directory: Path | None,
    against: str | None,
    shape: str | None,
    calibrate: bool,
    context: str | None,
    seq: str | None,
    into: str | None,
    output: str | None,
    json: bool,
) -> None:
    """Refuse what does not go together."""
    if directory is None and shape is None and not calibrate:
        raise UsageError("Nothing to measure.", "Give DIR --against MODEL, --shape or --calibrate.")
    if directory is not None and (shape is not None or calibrate):
        raise UsageError("DIR does not go with --shape or --calibrate.", "Run them one by one.")
    if (directory is None) != (against is None):
        raise UsageError("DIR and --against MODEL belong together.")
    if directory is not None and context is not None:
        raise UsageError("--context is for --shape and --calibrate.", "DIR has --seq.")
    if directory is None and seq is not None:
        raise UsageError("--seq is for DIR.", "Use --context.")
    if into is not None and not calibrate:
        raise UsageError("--into is for --calibrate.")
    if into is not None and output is not None:
        raise UsageError("Give either -o or --into.")
    if calibrate and not (into or output or json):
        raise UsageError("The calibration has no place to go.", "Give -o FILE or --into FILE.")


def _positive(text: str, what: str) -> int:
    number = parse_whole(text, what)
    if number < 1:
        raise UsageError(f"{what} is {number}; it must be at least 1.")
    return number


def _attention(
    what: tuple[str, str, list[int] | None, int | None, str | None],
    batch: int,
    dtype: str,
    device: str,
    repeats: int,
    json: bool,
) -> dict[str, Any]:
    import torch

    from sparsify.benches.attention import Question, bench_attention
    from sparsify.benches.shapes import parse_shape
    from sparsify.cli import render_bench
    from sparsify.timing import machine

    shape, method, contexts, queries, index_dtype = what
    heads, configuration = parse_shape(shape, method)
    usual = CPU_CONTEXTS if device == "cpu" else CONTEXTS
    sizes = tuple(contexts or parse_contexts(usual))
    counts = (batch, dtype, repeats, queries, index_dtype)
    question = Question(heads, configuration, sizes, torch.device("cpu"), *counts)
    question = replace(question, device=_device(device))  # told last: other faults come first
    with streams.progress() as say, _memory_told():
        rows = bench_attention(question, say)
    about = machine(question.device)
    data = {"schema": 1, **about, **question.to_json(), "rows": [row.to_json() for row in rows]}
    if json:
        streams.show_json(data)
    else:
        streams.show(*render_bench.attention(question, rows, about))
    return data


def _tune(
    what: tuple[str | None, str, list[int] | None],
    batch: int,
    dtype: str,
    device: str,
    repeats: int,
    json: bool,
) -> dict[str, Any]:
    from sparsify.benches.attention import Question
    from sparsify.benches.shapes import parse_shape
    from sparsify.cli.bench_tune import bench_tune, check_question, render

    shape, method, contexts = what
    heads, configuration = parse_shape(shape or "", method)
    place = _gpu_only(device, "Tiles are measured on a GPU.", "Run it where a CUDA device is.")
    sizes = tuple(contexts or parse_contexts(TUNED))
    question = Question(heads, configuration, sizes, place, batch, dtype, repeats)
    check_question(question)
    with streams.progress() as say, _memory_told():
        data = bench_tune(question, say)
    streams.show_json(data) if json else streams.show(*render(data))
    return data


def _models(
    directory: Path | None,
    against: str | None,
    lengths: list[int],
    batch: int,
    device: str,
    repeats: int,
    json: bool,
) -> dict[str, Any]:
    from sparsify.cli import render_bench
    from sparsify.cli.bench_models import bench_models

    assert directory is not None and against is not None
    if not directory.is_dir():
        raise UsageError(f"There is no folder {directory}.")
    with streams.progress() as say, _memory_told():
        data = bench_models(directory, against, lengths, batch, _device(device), repeats, say)
    streams.show_json(data) if json else streams.show(*render_bench.models(data))
    return data


def _calibrate(
    shape: str | None,
    method: str,
    contexts: list[int] | None,
    device: str,
    output: str | None,
    into: str | None,
    json: bool,
) -> None:
    from sparsify.benches.calibration_runs import Case, Sizes, calibrate
    from sparsify.benches.shapes import parse_shape
    from sparsify.cli import render_bench
    from sparsify.cost_model.calibrating import merged, to_document
    from sparsify.cost_model.calibration import load_calibration

    sizes = Sizes(contexts=None if contexts is None else tuple(contexts))
    if shape is not None:
        sizes = Sizes(Case.of(*parse_shape(shape, method)), sizes.contexts)
    place = _gpu_only(
        device,
        "A calibration is measured on a GPU.",
        "Run it where a CUDA device is; `sparsify estimate --calibration FILE` reads the file.",
    )
    gpu = _figures(place)
    if into is not None:
        load_calibration(into, gpu)  # what is wrong with it is said before long work
    with streams.progress() as say, _memory_told():
        found = calibrate(gpu, place, sizes, say)
    data = to_document(found)
    if output is not None:
        _write(output, data)
    if into is not None:
        _write(into, merged(into, found))
    streams.show_json(data) if json else streams.show(*render_bench.calibration(found))


def _device(name: str) -> torch.device:
    from sparsify.timing import find_device

    return find_device(name)


def _gpu_only(name: str, why: str, hint: str) -> torch.device:
    """The GPU to measure on.

    Raises:
        UsageError: it is no GPU, or there is none.
    """
    import torch

    if name.strip().startswith("cpu") or not torch.cuda.is_available():
        raise UsageError(why, hint)
    return _device(name)


def _figures(device: torch.device) -> Gpu:
    """What is known of the GPU; its bounds are what efficiencies are shares of."""
    import torch

    from sparsify.cost_model.hardware import load_gpu

    return load_gpu(torch.cuda.get_device_name(device))


@contextlib.contextmanager
def _memory_told() -> Iterator[None]:
    """Memory that does not suffice is a sentence."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise UsageError(
            "The device has too little memory for this measurement.",
            "Give shorter contexts or a smaller batch.",
        ) from None


def _write(path: str, data: dict[str, Any]) -> None:
    write_text(path, json_module.dumps(data, indent=2) + "\n")
    streams.tell(f"sparsify: written to {path}")
