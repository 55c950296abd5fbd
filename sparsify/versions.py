"""Versions of this package and of what it rests on, read without importing any of it."""

from __future__ import annotations

import importlib.metadata
import platform

__all__ = ["CORE", "EXTRAS", "VERSION", "installed_version", "package_versions"]

VERSION = "0.1.0"

# As in pyproject.toml (a test compares them); `doctor` names what is missing.
CORE = (
    "torch",
    "triton",
    "onnx",
    "sympy",
    "networkx",
    "numpy",
    "pydantic",
    "pyyaml",
    "typer",
    "rich",
)
EXTRAS: dict[str, tuple[str, ...]] = {
    "hf": ("transformers", "accelerate", "gguf", "safetensors"),
    "onnx": ("onnxscript", "onnxruntime"),
    "plot": ("matplotlib",),
}
RECORDED = ("torch", "triton", "transformers", "safetensors", "gguf", "onnx")


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None when it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_versions() -> dict[str, str]:
    """What reports and manifests record: this package, Python, and the installed ones of note."""
    found = {"sparsify-attention": VERSION, "python": platform.python_version()}
    for name in RECORDED:
        version = installed_version(name)
        if version is not None:
            found[name] = version
    return found
