"""Outputs that appear whole or not at all.

A file or folder is written beside its target under a hidden temporary name, flushed to disk and
renamed. An exception, Ctrl-C or SIGTERM on the way removes the temporary and leaves what was there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsify.errors import UsageError

__all__ = [
    "check_target",
    "check_utf8",
    "output_directory",
    "output_file",
    "write_text",
]

_IN_THE_WAY = "Choose another target, or replace it with --force (force=True in Python)."
_USER_FAULTS = (
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


def check_target(target: str | Path, *, force: bool = False, directory: bool = True) -> None:
    """Refuse a target that `output_directory` or `output_file` would refuse, before long work.

    Raises:
        UsageError: it exists and `force` is not given (an empty folder is no obstacle), it is of
            the other kind, `force` would remove the working directory or one above it, its name is
            empty or too long, or nothing can be written there.
    """
    if not str(target):
        raise UsageError("The name of the output is empty.")
    try:
        _check_target(target, _resolve(target), force=force, directory=directory)
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else str(error)
        raise UsageError(f"Cannot write {target}: {said}.") from error


def check_utf8(path: str | Path) -> None:
    """Refuse a path of bytes that are no text: files of weights are not opened by it.

    Raises:
        UsageError: the path is not valid UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"The path {path} is not valid UTF-8; weights cannot be opened by it.",
            "Rename it.",
        ) from None


def _check_target(given: str | Path, path: Path, *, force: bool, directory: bool) -> None:
    if not path.exists():
        _check_parent(given, path)
        return
    if path.is_dir() != directory:
        kind, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise UsageError(f"{given} is a {kind}; the output is a {wanted}.", "Choose another name.")
    if path.is_mount():
        raise UsageError(
            f"{given} is a mount point, which cannot be replaced as a whole.",
            "Write to a folder inside it.",
        )
    if directory and not any(path.iterdir()):
        return
    if not force:
        state = "is not empty" if directory else "exists"
        raise UsageError(f"{given} {state}.", _IN_THE_WAY)
    if directory and (_holds(path, Path.cwd()) or _holds(path, Path.home())):
        raise UsageError(f"{given} holds the working directory or a home; it is not replaced.")


@contextlib.contextmanager
def output_directory(target: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` when the block ends well.

    With `force` an existing folder is replaced, after the new one is complete.

    Raises:
        UsageError: as `check_target`, or the disk is full or read-only.
    """
    with _output(target, force=force, directory=True) as temporary:
        temporary.mkdir()
        yield temporary


@contextlib.contextmanager
def output_file(target: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file that becomes `target` when the block ends well.

    Raises:
        UsageError: as `check_target`, or the disk is full or read-only.
    """
    with _output(target, force=force, directory=False) as temporary:
        yield temporary


def write_text(target: str | Path, text: str, *, force: bool = True) -> None:
    """Write a UTF-8 file atomically."""
    with output_file(target, force=force) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _output(target: str | Path, *, force: bool, directory: bool) -> Iterator[Path]:
    check_target(target, force=force, directory=directory)
    path = _resolve(target)
    start = os.fsencode(path.name)[:100].decode(errors="ignore")
    temporary = path.with_name(f".{start}.{secrets.token_hex(4)}.partial")
    created = [p for p in path.parents if not p.exists()]
    with _terminable():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            _sync(temporary)
            _open_up(temporary)
            with _undisturbed():
                _put_in_place(temporary, path, given=target, force=force)
        except BaseException as error:
            with _undisturbed():
                _remove(temporary)
                for parent in created:
                    with contextlib.suppress(OSError):
                        parent.rmdir()
            number = _errno(error)
            gone = number == errno.ENOENT and not temporary.parent.is_dir()
            if number in _USER_FAULTS or gone:
                raise UsageError(f"Cannot write {target}: {os.strerror(number)}.") from error
            raise


def _errno(error: BaseException) -> int:
    """Number of a system error, 0 for others; libraries in Rust put it into the text."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else 0


def _put_in_place(temporary: Path, path: Path, *, given: str | Path, force: bool) -> None:
    """Rename the finished output; an old one goes only after the new one is in its place."""
    old = None
    if force and path.is_dir():
        old = temporary.with_suffix(".old")
        path.rename(old)
    elif not force and path.is_file():
        raise UsageError(f"{given} exists.", _IN_THE_WAY)
    try:
        temporary.rename(path)
    except OSError as error:
        if old is not None:
            old.rename(path)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UsageError(f"{given} appeared meanwhile and is not empty.") from None
        raise
    _sync_folder(path.parent)
    if old is not None:
        _remove(old)


def _resolve(target: str | Path) -> Path:
    # Through symbolic links, so that the link stays and what it names is replaced.
    return Path(os.path.realpath(target))


def _check_parent(given: str | Path, path: Path) -> None:
    parent = next(p for p in path.parents if p.exists())
    if not parent.is_dir():
        raise UsageError(f"Cannot write {given}: {parent} is not a folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"Cannot write {given}: no permission to write in {parent}.")
    longest = os.pathconf(parent, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    if any(len(os.fsencode(part)) > longest for part in path.relative_to(parent).parts):
        raise UsageError(f"Cannot write {given}: {os.strerror(errno.ENAMETOOLONG)}.")
    with tempfile.TemporaryFile(dir=parent):  # file systems such as /proc take no files
        pass


def _holds(folder: Path, other: Path) -> bool:
    return _resolve(other).is_relative_to(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _open_up(path: Path) -> None:
    """Give files the permissions that the umask allows; some writers leave them private."""
    if path.is_dir():
        mode = path.stat().st_mode & 0o666
        for file in path.rglob("*"):
            if file.is_file() and not file.is_symlink():
                file.chmod(file.stat().st_mode | mode)


def _sync(path: Path) -> None:
    if path.is_dir():
        for folder, _, names in os.walk(path):
            for name in names:
                _sync_file(Path(folder, name))
            _sync_folder(Path(folder))
    else:
        _sync_file(path)


def _sync_file(path: Path) -> None:
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack, so that temporaries are removed."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before: dict[int, Any] = {}
    for number in numbers:
        if signal.getsignal(number) is signal.SIG_DFL:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back for the few renames that belong together."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda got, frame: held.append(got))
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not None
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for got in dict.fromkeys(held):
            signal.raise_signal(got)
