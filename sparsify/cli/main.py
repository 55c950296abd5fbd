"""Entry point of the command line. Imports next to nothing, so that Ctrl-C is heard at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sparsify.cli import stopping

__all__ = ["main", "run"]


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; whatever fails is told in a sentence on stderr."""
    stopping.begin()
    try:
        from sparsify.cli import application

        return application.execute(arguments)
    except KeyboardInterrupt:  # while modules are loaded
        return stopping.tell()


def run() -> None:
    """The console script."""
    stopping.listen()
    try:
        from sparsify.cli import streams

        with streams.own_stdout():
            code = main(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are loaded or streams closed
        code = stopping.tell()
    stopping.ignore()
    sys.exit(code)


if __name__ == "__main__":
    run()
