"""Arguments and options that several verbs share, and how their values are read."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sparsify import settings
from sparsify.errors import UsageError

__all__ = [
    "DType",
    "Dtype",
    "Json",
    "Model",
    "check_given",
    "check_settings",
    "is_within",
    "parse_size",
    "parse_sizes",
    "parse_whole",
]


class DType(StrEnum):
    """Data types of weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face folder, a .gguf file, package.module:factory, or the id of a model "
        "in the local Hugging Face cache. Nothing is downloaded.",
        show_default=False,
    ),
]
Dtype = Annotated[
    DType,
    typer.Option("--dtype", help="Data type to load weights in; auto keeps the checkpoint's."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def check_settings() -> None:
    """Refuse wrong environment variables before any long work.

    Raises:
        UsageError: one has an impossible value.
    """
    for read in (settings.impl, settings.disabled, settings.strict, settings.autotune):
        read()


def check_given(**values: str | None) -> None:
    """Refuse empty texts, such as an unset variable of the shell gives; None is no value at all.

    Raises:
        UsageError: one is empty.
    """
    for name, value in values.items():
        if value is not None and not value.strip():
            raise UsageError(f"The value of {name} is empty.")


def parse_whole(text: str, what: str) -> int:
    """A whole number; its range is judged by what takes it.

    Raises:
        UsageError: anything else.
    """
    if re.fullmatch(r"[-+]?\d{1,15}", text.strip()) is None:
        raise UsageError(f"{what} is {text!r}; expected a whole number.")
    return int(text)


def parse_size(text: str, what: str) -> int:
    """A count of tokens: "4096", "4k" or "1m" (powers of two).

    Raises:
        UsageError: anything else, or less than 1.
    """
    found = re.fullmatch(r"(\d{1,15})([km]?)", text.strip().lower())
    size = int(found[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[found[2]] if found else 0
    if size < 1:
        raise UsageError(
            f"{what} is {text!r}; expected a size of at least 1, such as 512, 4k or 1m."
        )
    return size


def parse_sizes(text: str, what: str) -> list[int]:
    """A comma-separated list of sizes, as `parse_size`."""
    return [parse_size(part, what) for part in text.split(",")]


def is_within(path: Path, folder: Path) -> bool:
    """Whether `path` is `folder` or lies inside it, symbolic links resolved."""
    return path.resolve().is_relative_to(folder.resolve())
