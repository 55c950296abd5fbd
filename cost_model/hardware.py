"""GPUs: every figure with its unit, its source, and whether it was traced to the vendor.

One YAML file per GPU under `gpus/`; a user's own files are read the same way, by path or from the
folder SPARSIFY_GPU_SPECS. Names are compared without case, spaces, hyphens and the vendor's name,
so that "h200", "H200-SXM-141GB" and the device name "NVIDIA H200" are one GPU.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, StrictBool, model_validator

from sparsify import settings
from sparsify.documents import read_document
from sparsify.errors import UnknownGpuError, UsageError
from sparsify.fields import FrozenModel, fault

__all__ = [
    "UNITS",
    "Figure",
    "Gpu",
    "Link",
    "Measured",
    "Share",
    "Span",
    "list_gpus",
    "load_gpu",
    "other_variants",
]

# Larger is a slip of units: no GPU has 10^6 of any of these.
MOST = 1e6
SUFFIXES = (".yaml", ".yml", ".json")
NO_SOURCE = "no source given"

UNITS = {
    "bf16_dense_tflops": "TFLOP/s",
    "fp8_dense_tflops": "TFLOP/s",
    "memory_gb": "GB",
    "memory_bandwidth_gbs": "GB/s",
    "l2_mb": "MB",
    "l2_bandwidth_gbs": "GB/s",
    "sm_count": "",
    "shared_memory_kb_per_sm": "KB",
    "nvlink_gbs_total_bidirectional": "GB/s",
    "bf16_matmul_efficiency": "of bf16_dense_tflops",
    "fp8_matmul_efficiency": "of fp8_dense_tflops",
    "matmul_tflops": "TFLOP/s",
    "attention_tflops": "TFLOP/s",
    "decode_read_gbs": "GB/s",
    "fp8_index_efficiency": "of fp8_dense_tflops",
    "sparse_mla_efficiency": "of bf16_dense_tflops",
}


# What every estimate rests on.
USED_FIGURES = (
    "bf16_dense_tflops",
    "memory_bandwidth_gbs",
    "memory_gb",
    "l2_bandwidth_gbs",
)


def _number(least: float, most: float, wanted: str) -> BeforeValidator:
    def check(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < least or value > most:
            raise fault(f"is {value!r}; expected {wanted}")
        return float(value)

    return BeforeValidator(check)


TINY = 1e-6  # less is a slip of units, and leads to times without meaning
Positive = Annotated[float, _number(TINY, MOST, "a number from 1e-6 to 1e6")]
NotNegative = Annotated[float, _number(0, MOST, "a number from 0 to 1e6")]
Part = Annotated[float, _number(TINY, 1, "a number from 1e-6 to 1")]


class Figure(FrozenModel):
    """One figure of a GPU. A bare number in a file is a figure without a source, unverified."""

    value: Positive
    source: str = Field(min_length=1)
    verified: StrictBool = True

    @model_validator(mode="before")
    @classmethod
    def _bare_number(cls, data: Any) -> Any:
        if isinstance(data, int | float) and not isinstance(data, bool):
            return {"value": data, "source": NO_SOURCE, "verified": False}
        return data


class Link(Figure):
    """A figure that may be 0: cards without NVLink."""

    value: NotNegative


class Share(Figure):
    """A measured share of a peak."""

    value: Part


class Span(FrozenModel):
    """The lowest and the highest of several measurements."""

    low: Positive
    high: Positive
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise fault(f"has low {self.low:g} above high {self.high:g}")
        return self


class Measured(FrozenModel):
    """What others measured on this GPU; units as in `UNITS`."""

    bf16_matmul_efficiency: Share | None = None
    fp8_matmul_efficiency: Share | None = None
    matmul_tflops: Span | None = None
    attention_tflops: Span | None = None
    decode_read_gbs: Span | None = None
    fp8_index_efficiency: Span | None = None
    sparse_mla_efficiency: Span | None = None


class Gpu(FrozenModel):
    """One GPU (or half of a superchip); units are in the names of the figures.

    Rates are dense, with FP32 accumulation. `memory_gb` and bandwidths are decimal (10^9 bytes).
    `family` groups variants; its bare name is the alias of the variant that most people mean.
    """

    name: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    family: str | None = None
    vendor: str
    architecture: str
    compute_capability: str | None = None
    bf16_dense_tflops: Figure
    fp8_dense_tflops: Figure | None = None
    memory_gb: Figure
    memory_bandwidth_gbs: Figure
    l2_mb: Figure | None = None
    l2_bandwidth_gbs: Figure | None = None
    sm_count: Figure | None = None
    shared_memory_kb_per_sm: Figure | None = None
    nvlink_gbs_total_bidirectional: Link | None = None
    measured: Measured = Measured()
    notes: str = ""
    _file: str | None = PrivateAttr(None)

    @property
    def file(self) -> str | None:
        """The user's file it was read from; None for the figures of this package."""
        return self._file

    @property
    def figures(self) -> dict[str, Figure]:
        """The known figures by name, measured ones not included."""
        found = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: figure for name, figure in found.items() if isinstance(figure, Figure)}

    @property
    def unverified(self) -> tuple[str, ...]:
        """Names of the figures that were not traced to the vendor."""
        return tuple(name for name, figure in self.figures.items() if not figure.verified)

    def unverified_for(self, gpus: int) -> tuple[str, ...]:
        """Those of them that estimates for so many GPUs rest on; the link counts between GPUs."""
        used = (*USED_FIGURES, *(("nvlink_gbs_total_bidirectional",) if gpus > 1 else ()))
        return tuple(name for name in used if name in self.unverified)

    @property
    def memory_bytes(self) -> float:
        """Bytes of device memory."""
        return self.memory_gb.value * 1e9

    @property
    def dram_bytes_per_s(self) -> float:
        """Peak bandwidth of device memory, in bytes per second."""
        return self.memory_bandwidth_gbs.value * 1e9

    @property
    def l2_bytes_per_s(self) -> float | None:
        """Bandwidth of the L2 cache in bytes per second, None where nobody measured it."""
        return None if self.l2_bandwidth_gbs is None else self.l2_bandwidth_gbs.value * 1e9

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bytes per second in one direction between GPUs; 0 without a link, None if unknown."""
        link = self.nvlink_gbs_total_bidirectional
        return None if link is None else link.value * 1e9 / 2

    @property
    def ridge_flop_per_byte(self) -> float:
        """Bf16 FLOP per byte of device memory above which a kernel is limited by compute."""
        return self.flops_per_s("bf16") / self.dram_bytes_per_s

    @property
    def bf16_matmul_efficiency(self) -> Figure | None:
        """Share of the bf16 peak that matrix products were seen to reach."""
        return self.measured.bf16_matmul_efficiency

    @property
    def fp8_matmul_efficiency(self) -> Figure | None:
        """Share of the fp8 peak that matrix products were seen to reach."""
        return self.measured.fp8_matmul_efficiency

    def flops_per_s(self, dtype: Literal["bf16", "fp8"]) -> float:
        """Peak FLOP per second; fp8 on a GPU without fp8 units is computed at the bf16 rate."""
        if dtype == "fp8" and self.fp8_dense_tflops is not None:
            return self.fp8_dense_tflops.value * 1e12
        return self.bf16_dense_tflops.value * 1e12

    def to_json(self) -> dict[str, Any]:
        """All fields, with the ridge and what is unverified; null where nothing is known."""
        derived = {"ridge_flop_per_byte": self.ridge_flop_per_byte, "file": self.file}
        return {**self.model_dump(mode="json"), **derived, "unverified": list(self.unverified)}


def load_gpu(name_or_file: str | Path) -> Gpu:
    """The GPU of that name or alias, or the one that a file describes.

    What ends in .yaml, .yml or .json is a file. A file of the user's in SPARSIFY_GPU_SPECS wins
    over a GPU of this package of the same name or alias.

    Raises:
        UnknownGpuError: no figures are known for it; the nearest names are given.
        UsageError: a file is missing or wrong, or it is no text at all.
    """
    if not isinstance(name_or_file, str | Path):
        raise UsageError(
            f"The GPU is a {type(name_or_file).__name__}; it must be a name or a file."
        )
    named = str(name_or_file)
    if named.lower().endswith(SUFFIXES):
        return _read(Path(named))
    wanted = _plain(named)
    for found in (_users(), _packaged()):
        for gpu in found:
            if wanted in _keys(gpu):
                return gpu
    raise _unknown(named)


def list_gpus() -> list[Gpu]:
    """All GPUs: those of this package, in order of name, then the user's.

    Raises:
        UsageError: a file of the user's is wrong.
    """
    users = _users()
    replaced = {_plain(gpu.name) for gpu in users}
    return [*(gpu for gpu in _packaged() if _plain(gpu.name) not in replaced), *users]


def other_variants(asked: str, gpu: Gpu) -> tuple[str, ...]:
    """Names of the other GPUs that `asked` may have meant: those of the family it names."""
    if gpu.family is None or _plain(asked) != _plain(gpu.family):
        return ()
    known = [other for other in list_gpus() if other.family == gpu.family]
    return tuple(other.name for other in known if other.name != gpu.name)


def _unknown(asked: str) -> UnknownGpuError:
    names = {key: gpu.name for gpu in list_gpus() for key in sorted(_keys(gpu))}
    close = difflib.get_close_matches(_plain(asked), names, n=3, cutoff=0.6)
    near = list(dict.fromkeys(names[key] for key in close))
    listed = " or ".join(filter(None, (", ".join(near[:-1]), *near[-1:])))
    end = f"; did you mean {listed}?" if near else "."
    return UnknownGpuError(
        f"No figures are known for the GPU {asked!r}{end}",
        "`sparsify gpus` lists all; a YAML file with the figures of your own works too.",
    )


def _plain(name: str) -> str:
    """What names are compared by."""
    plain = re.sub(r"[^a-z0-9]+", "", name.lower())
    return re.sub(r"^(nvidia|amd|intel)?(geforce|instinct)?", "", plain) or plain


def _keys(gpu: Gpu) -> set[str]:
    return {_plain(gpu.name), *map(_plain, gpu.aliases)}


@functools.cache
def _packaged() -> tuple[Gpu, ...]:
    folder = Path(__file__).resolve().parent / "gpus"
    return tuple(_parsed(path) for path in sorted(folder.glob("*.yaml")))


def _users() -> list[Gpu]:
    folder = settings.gpu_specs_dir()
    if folder is None:
        return []
    if not folder.is_dir():
        raise UsageError(f"SPARSIFY_GPU_SPECS is {folder}, which is no folder.")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    found = [_read(path) for path in paths]
    _check_unique(found)
    return found


def _check_unique(found: Iterable[Gpu]) -> None:
    seen: dict[str, Gpu] = {}
    for key, gpu in _every_key(found):
        if key in seen:
            raise UsageError(
                f"The GPU files {seen[key].file} and {gpu.file} share the name {key!r}."
            )
        seen[key] = gpu


def _every_key(found: Iterable[Gpu]) -> Iterator[tuple[str, Gpu]]:
    for gpu in found:
        for key in sorted(_keys(gpu)):
            yield key, gpu


def _read(path: Path) -> Gpu:
    gpu = _parsed(path)
    gpu._file = str(path)
    return gpu


def _parsed(path: Path) -> Gpu:
    data = read_document(path, "GPU file")
    lacking = [name for name, field in Gpu.model_fields.items() if field.is_required()]
    lacking = [name for name in lacking if name not in data]
    if len(lacking) > 1:
        listed = f"{', '.join(lacking[:-1])} and {lacking[-1]}"
        raise UsageError(f"The GPU file {path} is wrong: {listed} are missing.")
    try:
        return Gpu(**{str(key): value for key, value in data.items()})
    except UsageError as error:
        raise UsageError(f"The GPU file {path} is wrong: {error.message}", error.hint) from None
