"""Ctrl-C, SIGTERM and SIGHUP: the work unwinds, one sentence is told, the exit code says which.

All of them raise KeyboardInterrupt, which nothing takes for an error of its own.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time

__all__ = ["begin", "ignore", "listen", "tell"]

BURST_SECONDS = 1.0

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_NUMBERS = [signal.Signals[name] for name in _NAMES if name in signal.Signals.__members__]


class _State:
    number = int(signal.SIGINT)
    heard_at: float | None = None
    told = False


def listen() -> None:
    """Hear the signals from now on, but for those that the parent process had ignored."""
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def begin() -> None:
    """A command begins: nothing has been heard or told of it, whatever ended the one before."""
    _State.number, _State.heard_at, _State.told = int(signal.SIGINT), None, False


def ignore() -> None:
    """The exit code is settled; what comes now must not replace it."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def tell() -> int:
    """Say once, on stderr, what ended the work; returns the exit code."""
    name = signal.Signals(_State.number).name
    text = "interrupted" if name == "SIGINT" else f"terminated by {name}"
    if not _State.told:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"sparsify: {text}", file=sys.stderr, flush=True)
    _State.told = True
    return 128 + _State.number


def _stop(number: int, frame: object) -> None:
    # Many at once are one wish: a second one would only disturb the clearing up after the first.
    now = time.monotonic()
    if _State.heard_at is not None and now - _State.heard_at < BURST_SECONDS:
        return
    if _State.heard_at is None:
        _State.number = number
    _State.heard_at = now
    raise KeyboardInterrupt
