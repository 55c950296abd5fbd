"""The environment variables of the product, all read here and nowhere else.

| variable | values | effect |
| --- | --- | --- |
| `SPARSIFY_IMPL` | `auto`, `reference`, `triton` | which implementation the ops use |
| `SPARSIFY_DISABLE` | `1` | rewritten models run dense everywhere |
| `SPARSIFY_STRICT` | `1` | a planned site that would fall back to dense raises instead |
| `SPARSIFY_LOG_LEVEL` | a `logging` level name | verbosity on stderr |
| `SPARSIFY_DEBUG_DIR` | a folder | the graph is written there after every pass |
| `SPARSIFY_GPU_SPECS` | a folder | your own GPU files; they win over the packaged ones |
| `SPARSIFY_CACHE_DIR` | a folder | where `make demo` keeps its model, and measured tiles are kept |
| `SPARSIFY_AUTOTUNE` | `1` | tiles of new shapes are measured inside the first call that has them |
"""

from __future__ import annotations

import os
from pathlib import Path

from sparsify.errors import UsageError

__all__ = [
    "autotune",
    "cache_dir",
    "debug_dir",
    "disabled",
    "gpu_specs_dir",
    "impl",
    "log_level",
    "strict",
    "triton_interpreted",
]


def impl() -> str:
    """Implementation asked for: "auto", "reference" or "triton".

    Raises:
        UsageError: for any other value.
    """
    value = os.environ.get("SPARSIFY_IMPL", "auto") or "auto"
    if value not in ("auto", "reference", "triton"):
        raise UsageError(f"SPARSIFY_IMPL is {value!r}; use auto, reference or triton.")
    return value


def triton_interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU (TRITON_INTERPRET of triton)."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes", "y")


def disabled() -> bool:
    """Whether rewritten models run dense everywhere."""
    return _flag("SPARSIFY_DISABLE")


def strict() -> bool:
    """Whether a planned site that would fall back to dense raises instead."""
    return _flag("SPARSIFY_STRICT")


def autotune() -> bool:
    """Whether calls may measure tiles for shapes that have none; slow, and waits for the device."""
    return _flag("SPARSIFY_AUTOTUNE")


def log_level() -> str:
    """Name of the logging level, upper-case."""
    return (os.environ.get("SPARSIFY_LOG_LEVEL", "WARNING") or "WARNING").upper()


def debug_dir() -> Path | None:
    """Folder for graph dumps, if asked for."""
    return _path("SPARSIFY_DEBUG_DIR")


def gpu_specs_dir() -> Path | None:
    """Folder with the user's own GPU description files, if any."""
    return _path("SPARSIFY_GPU_SPECS")


def cache_dir() -> Path | None:
    """Folder the product may keep files in between runs, if any."""
    return _path("SPARSIFY_CACHE_DIR")


def _flag(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value not in ("", "0", "1", "true", "false"):
        raise UsageError(f"{name} is {value!r}; use 1 or 0.")
    return value in ("1", "true")


def _path(name: str) -> Path | None:
    value = os.environ.get(name, "")
    return Path(value) if value else None
