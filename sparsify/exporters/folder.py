"""What every folder that `sparsify` writes holds beside its model: plan, report and manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsify.files import check_utf8, output_directory
from sparsify.manifests import MANIFEST, write_manifest
from sparsify.plans import Plan
from sparsify.report import SparsifyReport

__all__ = ["artefact", "kind_of", "saved_again"]


@contextmanager
def artefact(
    directory: Path,
    kind: str,
    *,
    plan: Plan,
    report: SparsifyReport,
    tokenizer: Any = None,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Path]:
    """A folder to write the model into; it appears complete at the end, or not at all.

    Raises:
        UsageError: the target exists, is not empty and `force` is not given, or its path is not
            valid UTF-8.
    """
    say = progress or (lambda _: None)
    check_utf8(os.path.realpath(directory))
    with output_directory(directory, force=force) as folder:
        say("writing the model")
        yield folder
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for name, content in (("plan.json", plan.to_json()), ("report.json", report.to_json())):
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
        say("hashing files")
        write_manifest(folder, {"kind": kind, "model": plan.model})


def kind_of(directory: Path) -> str:
    """Which loader a folder needs: "pt2" or "transformers"."""
    return "pt2" if (directory / "model.pt2").is_file() else "transformers"


def saved_again(directory: Path) -> bool:
    """Whether a rewritten transformers model was saved there by its own `save_pretrained`, as after
    training: its config holds the plan, and nothing of what `artefact` writes is there."""
    if any((directory / name).exists() for name in ("plan.json", MANIFEST)):
        return False
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    ours = config.get("sparsify") if isinstance(config, dict) else None
    return isinstance(ours, dict) and "plan" in ours
