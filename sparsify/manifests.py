"""The manifest of a saved folder: versions, and size and SHA-256 of every file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any

from sparsify.errors import ArtefactError
from sparsify.versions import package_versions

__all__ = ["MANIFEST", "MANIFEST_SCHEMA", "check_manifest", "write_manifest"]

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1
CHUNK_BYTES = 1 << 22


def write_manifest(folder: str | Path, extra: dict[str, Any] | None = None) -> None:
    """Write `manifest.json` over all files of `folder`; `extra` adds fields of the caller's."""
    root = Path(folder)
    files = {
        path.relative_to(root).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(root.rglob("*"))
        if path.is_file() and path != root / MANIFEST
    }
    data = {
        **(extra or {}),
        "schema": MANIFEST_SCHEMA,
        "versions": package_versions(),
        "files": files,
    }
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    (root / MANIFEST).write_text(text, encoding="utf-8")


def check_manifest(folder: str | Path) -> dict[str, Any]:
    """Compare every file with the manifest and return it. Files it does not name are allowed.

    Raises:
        ArtefactError: no manifest, a damaged one, one of a newer version, or a file that is
            missing or was changed (the message names it).
    """
    root = Path(folder)
    data = _read(root)
    for name, facts in data["files"].items():
        path = root / name
        if not path.is_file():
            raise ArtefactError(f"{root} is incomplete: {name} is missing.", _HINT)
        size = path.stat().st_size
        if size != facts["bytes"]:
            raise ArtefactError(
                f"{root} is damaged: {name} has {size} bytes instead of {facts['bytes']}.", _HINT
            )
        if _sha256(path) != facts["sha256"]:
            raise ArtefactError(f"{root} is damaged: {name} was changed after writing.", _HINT)
    return data


_HINT = "Write the folder again with `sparsify rewrite`."


def _read(root: Path) -> dict[str, Any]:
    path = root / MANIFEST
    if not root.is_dir():
        raise ArtefactError(f"There is no folder {root}.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtefactError(
            f"{root} has no {MANIFEST}; `sparsify rewrite` did not write it."
        ) from None
    except OSError as error:
        raise ArtefactError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ArtefactError(f"{path} is damaged: not valid JSON.", _HINT) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema > MANIFEST_SCHEMA:
        raise ArtefactError(
            f"{path} has schema {schema}, this version reads up to {MANIFEST_SCHEMA}.",
            "Update sparsify-attention.",
        )
    if schema != MANIFEST_SCHEMA or not _well_formed(data.get("files")):
        raise ArtefactError(f"{path} is damaged: not a manifest.", _HINT)
    found: dict[str, Any] = data
    return found


def _well_formed(files: Any) -> bool:
    return isinstance(files, dict) and all(
        isinstance(facts, dict) and {"bytes", "sha256"} <= set(facts) and _inside(name)
        for name, facts in files.items()
    )


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
