"""A model of the graph host as a folder: torch.export archives, plan and report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsify.errors import ArtefactError, UsageError
from sparsify.exporters.folder import artefact
from sparsify.hosts import archive
from sparsify.hosts.graph_model import GraphModel
from sparsify.manifests import intact
from sparsify.plans import Plan

__all__ = ["FORMAT", "load", "save"]

FORMAT = "pt2"


def save(model: GraphModel, directory: Path, **contents: Any) -> Path:
    """Write the folder; `contents` are those of `sparsify.exporters.folder.artefact`.

    Raises:
        UsageError: the target exists, is not empty and `force` is not given.
    """
    with artefact(directory, "pt2", **contents) as folder:
        archive.save(model, folder)
    return directory


def load(directory: Path, **options: Any) -> GraphModel:
    """Load a folder written by `save`.

    Raises:
        ArtefactError: not such a folder, or a file is missing or damaged.
        UsageError: for any option; an exported program is loaded as it is.
    """
    if options:
        raise UsageError(f"{directory} holds exported programs, which take no {min(options)}.")
    if not directory.is_dir():
        raise ArtefactError(f"There is no folder {directory}.")
    with intact(directory):
        return archive.load(directory, Plan.load(directory / "plan.json"))
