"""The head of a GGUF file, read with every length held against the file's size.

The readers that load such files believe what the head says: a damaged count keeps them busy for
ever, and sizes that it does not tell are made up, for a giant of a model.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from sparsify.errors import UsageError

__all__ = ["check_gguf", "read_gguf_head"]

STRING, ARRAY = 8, 9
FORMATS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))


class _Damaged(Exception):
    """The file ends before what its head announces."""


def check_gguf(path: Path) -> None:
    """Refuse a file whose head is damaged, lacks sizes, or tells others than its tensors have.

    Raises:
        UsageError: it is so; the message says what.
    """
    read_gguf_head(path)


def read_gguf_head(path: Path) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Metadata by key (arrays are None) and shapes of tensors, checked as by `check_gguf`.

    Raises:
        UsageError: the file cannot be read or fails the check; the message says why.
    """
    try:
        with path.open("rb") as handle:
            told, shapes = _Head(handle, path.stat().st_size).read()
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from None
    except (_Damaged, UnicodeDecodeError, RecursionError):
        raise UsageError(f"{path} is damaged: it ends early or holds no GGUF data.") from None
    kind = str(told.get("general.architecture"))
    held = {"block_count": len({n.split(".")[1] for n in shapes if n.startswith("blk.")})}
    for name, tensor, axis in (
        ("embedding_length", "token_embd.weight", 0),
        ("feed_forward_length", "blk.0.ffn_up.weight", 1),
    ):
        if tensor in shapes:
            held[name] = shapes[tensor][axis]
    for name in (*held, "attention.head_count"):
        size = told.get(f"{kind}.{name}")
        if size is None:
            raise UsageError(f"{path} is damaged: it does not tell its {kind}.{name}.")
        if isinstance(size, int) and size != held.get(name, size):
            raise UsageError(
                f"{path} is damaged: its {kind}.{name} is {size}, but it holds {held[name]}."
            )
    return told, shapes


class _Head:
    """Reads numbers and texts in order; arrays are passed over."""

    def __init__(self, handle: BinaryIO, n_bytes: int) -> None:
        self.handle, self.left = handle, n_bytes

    def read(self) -> tuple[dict[str, Any], dict[str, list[int]]]:
        """Metadata by key, and the shape of every tensor."""
        if self.take(4) != b"GGUF" or self.number("I") not in (2, 3):
            raise _Damaged
        n_tensors, n_pairs = self.number("Q"), self.number("Q")
        told = {}
        for _ in range(n_pairs):
            key = self.text()
            told[key] = self.value(self.number("I"))
        shapes = {}
        for _ in range(n_tensors):
            name, n_dims = self.text(), self.number("I")
            if n_dims > 8:
                raise _Damaged
            shapes[name] = [self.number("Q") for _ in range(n_dims)]
            self.take(12)  # type and offset
        return told, shapes

    def take(self, n_bytes: int) -> bytes:
        self.left -= n_bytes
        if self.left < 0:
            raise _Damaged
        return self.handle.read(n_bytes)

    def number(self, letter: str) -> Any:
        layout = "<" + letter
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            return self.array(inner, count)
        if kind not in FORMATS:
            raise _Damaged
        return self.number(FORMATS[kind])

    def array(self, kind: int, count: int) -> None:
        if kind in FORMATS:
            self.take(count * struct.calcsize("<" + FORMATS[kind]))
            return
        for _ in range(count):
            self.value(kind)
