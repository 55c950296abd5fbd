"""Options of `estimate` and `compare`, and how their values are read."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from sparsify.cli import streams
from sparsify.cli.options import parse_sizes

if TYPE_CHECKING:
    from sparsify.cost_model.workload import ElementBytes
    from sparsify.estimate_report import Estimate

__all__ = [
    "Batch",
    "Calibrated",
    "Contexts",
    "ElementType",
    "IndexType",
    "KvType",
    "ModelOrConfig",
    "PhaseName",
    "Phases",
    "PolicyName",
    "TensorParallel",
    "element_bytes",
    "parse_contexts",
    "tell_warnings",
]


class PhaseName(StrEnum):
    """What the model does."""

    PREFILL = "prefill"
    DECODE = "decode"
    TRAINING = "training"


class ElementType(StrEnum):
    """Types of the elements of caches."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    INT8 = "int8"


BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "int8": 1.0}

ModelOrConfig = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A config.json or a folder that holds one, a .gguf file, the id of a model in the "
        "local Hugging Face cache, or package.module:factory. Weights are not read from files.",
        show_default=False,
    ),
]
Contexts = Annotated[
    str, typer.Option("--context", metavar="SIZES", help="Contexts in tokens: 32k,128k,1m.")
]
Phases = Annotated[PhaseName, typer.Option("--phase", help="What the model does.")]
Batch = Annotated[str, typer.Option("--batch", metavar="N", help="Sequences at a time.")]
PolicyName = Annotated[
    str | None,
    typer.Option("--policy", metavar="NAME|FILE", help="What is made sparse: a preset or a file."),
]
TensorParallel = Annotated[
    str, typer.Option("--tensor-parallel", metavar="N", help="GPUs that share every layer.")
]
KvType = Annotated[ElementType, typer.Option("--kv-dtype", help="Elements of the KV cache.")]
IndexType = Annotated[
    ElementType, typer.Option("--index-dtype", help="Elements of the index keys of MSA.")
]
Calibrated = Annotated[
    str | None,
    typer.Option("--calibration", metavar="FILE", help="Efficiencies measured on that GPU."),
]


def parse_contexts(text: str) -> list[int]:
    """The contexts, each once, in the order given.

    Raises:
        UsageError: one is no size.
    """
    return list(dict.fromkeys(parse_sizes(text, "--context")))


def element_bytes(kv: ElementType, index: ElementType) -> ElementBytes:
    """Bytes per element of every tensor."""
    from sparsify.cost_model.workload import ElementBytes

    return ElementBytes(key=BYTES[kv], value=BYTES[kv], index=BYTES[index])


def tell_warnings(found: Sequence[Estimate]) -> None:
    """Warnings of estimates, each once, on stderr."""
    for text in dict.fromkeys(text for one in found for text in one.warnings):
        streams.tell(f"sparsify: WARNING: {text}")
