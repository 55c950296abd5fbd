"""The manifest of a saved folder: versions, and size and SHA-256 of every file.

A folder is what its manifest says: files that were changed, shortened or lost are refused, and so
are files beside them that a loader might read. Notes of the user's own are welcome.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from typing import Any

from sparsify.errors import ArtefactError
from sparsify.versions import package_versions

__all__ = [
    "MANIFEST",
    "MANIFEST_SCHEMA",
    "check_file",
    "check_manifest",
    "intact",
    "write_manifest",
]

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1
CHUNK_BYTES = 1 << 22
# Weights, code, configs, indices, vocabularies and templates: what loaders look for by name.
READ_BY_LOADERS = (
    *(".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pt2", ".pth"),
    *(".safetensors", ".index", ".json", ".jinja", ".py", ".so"),
    *(".model", ".spm", ".tiktoken"),
)
VOCABULARIES = ("merges.txt", "vocab.txt")

# The folder whose files are known to be sound at this moment.
_sound: ContextVar[Path | None] = ContextVar("sound", default=None)


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
    """Compare every file with the manifest and return it.

    Files that it does not name are allowed where no loader would read them. Symbolic links to
    files stand for what they point to; hidden files and folders are passed over.

    Raises:
        ArtefactError: no manifest, a damaged one, one of a newer version, a file that is missing
            or was changed, or one too many (the message names it).
    """
    root = Path(folder)
    data = _read(root)
    with _readable(root):
        for name, facts in data["files"].items():
            _check_file(root, name, facts)
        _refuse_strangers(root, data["files"])
    return data


def check_file(folder: str | Path, name: str) -> None:
    """Compare one file that the manifest names; for those who read nothing else.

    Raises:
        ArtefactError: as `check_manifest`.
    """
    root = Path(folder)
    data = _read(root)
    with _readable(root):
        if name in data["files"]:
            _check_file(root, name, data["files"][name])


@contextlib.contextmanager
def intact(folder: str | Path) -> Iterator[None]:
    """Within it the files are those of the manifest; its end fails if they were replaced meanwhile.

    One `intact` inside another of the same folder does not read the files again.

    Raises:
        ArtefactError: as `check_manifest`, or the files changed before the end.
    """
    root = Path(os.path.realpath(folder))
    if _sound.get() == root:
        yield
        return
    before = _identities(root)
    files = [root / name for name in (MANIFEST, *check_manifest(folder)["files"])]
    token = _sound.set(root)
    try:
        yield
    finally:
        _sound.reset(token)
    after = _identities(root)
    if any(before.get(path) != after.get(path) for path in files):
        raise ArtefactError(f"{folder} was changed while it was read.", "Load it again.")


@contextlib.contextmanager
def _readable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArtefactError(f"Cannot read {error.filename or root}: {error.strerror}.") from None


def _check_file(root: Path, name: str, facts: dict[str, Any]) -> None:
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


def _refuse_strangers(root: Path, known: dict[str, Any]) -> None:
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        kind = path.suffix.lower()
        if name not in known and (kind in READ_BY_LOADERS or path.name.lower() in VOCABULARIES):
            raise ArtefactError(
                f"{root} holds {name}, which `sparsify rewrite` did not write and which a loader "
                "might read.",
                "Move it elsewhere.",
            )


def _files(root: Path) -> Iterator[Path]:
    """All files but the manifest and hidden ones."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path != root / MANIFEST:
                yield path


def _identities(root: Path) -> dict[Path, tuple[int, ...]]:
    """What changes when a file is written to or another is put in its place."""
    found: dict[Path, tuple[int, ...]] = {}
    for path in (root / MANIFEST, *_files(root)):
        with contextlib.suppress(OSError):
            facts = path.stat()
            found[path] = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
    return found


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
