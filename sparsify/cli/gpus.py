"""`sparsify gpus`: the figures that estimates rest on, with their units and sources."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsify.cli import streams
from sparsify.cli.options import Json, check_given

__all__ = ["gpus", "tell_variants"]


def gpus(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME|FILE]", help="A GPU or a YAML file; none lists all."),
    ] = None,
    json: Json = False,
) -> None:
    """List the known GPUs, or all figures of one.

    A YAML file of your own needs name, vendor, architecture, bf16_dense_tflops (dense, FP32
    accumulation), memory_gb and memory_bandwidth_gbs. Figures are numbers, or {value: 989.4,
    source: where it stands}; `sparsify gpus h200` shows the other names that they have.
    """
    check_given(NAME=name)
    from sparsify.cli import render_gpus
    from sparsify.cost_model.hardware import list_gpus, load_gpu

    if name is None:
        found = list_gpus()
        if json:
            streams.show_json({"schema": 1, "gpus": [gpu.to_json() for gpu in found]})
        else:
            streams.show(*render_gpus.table(found))
        return
    gpu = load_gpu(name)
    tell_variants(name)
    if json:
        streams.show_json({"schema": 1, "gpu": gpu.to_json()})
    else:
        streams.show(*render_gpus.sheet(gpu))


def tell_variants(asked: str) -> None:
    """Say on stderr which GPU a name of a whole family was taken for.

    Raises:
        UnknownGpuError: no figures are known for it.
        UsageError: a file is missing or wrong.
    """
    from sparsify.cost_model.hardware import load_gpu, other_variants

    gpu = load_gpu(asked)
    others = other_variants(asked, gpu)
    if others:
        streams.tell(
            f"sparsify: {asked} is taken as {gpu.name}; there are also {', '.join(others)}."
        )
