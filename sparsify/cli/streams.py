"""Who writes where: results go to stdout, everything else to stderr.

Libraries print to stdout now and then; while a verb works, their output is led to stderr, so that
`--json` leaves exactly one document on stdout.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TextIO

from rich.console import Console, RenderableType

__all__ = [
    "forget_stdout",
    "own_stdout",
    "progress",
    "show",
    "show_json",
    "tell",
    "working",
    "write",
]

PIPE_WIDTH = 200

_results: ContextVar[TextIO | None] = ContextVar("results", default=None)


@contextlib.contextmanager
def own_stdout() -> Iterator[None]:
    """Keep file descriptor 1 for results: what C code or child processes print goes to stderr."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    except (OSError, AttributeError):  # a stream is closed
        yield
        return
    before, encoding = sys.stdout, sys.stdout.encoding
    sys.stdout = os.fdopen(kept, "w", encoding=encoding, errors="backslashreplace")
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.close()
        sys.stdout = before


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Lead `print` of the libraries to stderr; `show` and `show_json` still reach stdout."""
    token = _results.set(sys.stdout)
    try:
        yield
    finally:
        _results.reset(token)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, `print` goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def show(*what: RenderableType) -> None:
    """Render tables or text on stdout; a pipe gets plain text of a fixed width."""
    console = _console(_stdout())
    for item in what:
        plain = isinstance(item, str)
        console.print(item, highlight=False, markup=False, soft_wrap=plain)


def write(text: str) -> None:
    """One piece of plain text on stdout, as it is."""
    print(text, file=_stdout(), flush=True)


def show_json(data: Any) -> None:
    """Print the one JSON document of this run; numbers that JSON lacks become null."""
    stream = _stdout()
    stream.write(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    stream.flush()


def tell(text: str) -> None:
    """One line on stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def forget_stdout() -> None:
    """Let the interpreter end quietly after its reader went away."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def progress(stages: int | None = None) -> Iterator[Callable[[str], None]]:
    """Yield `say(text)`, called at the beginning of every stage of the work.

    A terminal gets a bar (of `stages` steps, when they are known), anything else plain lines.
    """
    with quiet_libraries():
        if sys.stderr.isatty():
            yield from _bar(stages)
        else:
            started = time.monotonic()
            yield lambda text: tell(f"[{time.monotonic() - started:6.1f} s] {text}")


def _bar(stages: int | None) -> Iterator[Callable[[str], None]]:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False
    ) as bar:
        task = bar.add_task("", total=stages)
        begun = False

        def say(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, advance=1 if begun else 0)
            begun = True

        yield say


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _stdout() -> TextIO:
    return _results.get() or sys.stdout


def _console(stream: TextIO) -> Console:
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(file=stream, width=width, soft_wrap=False)
