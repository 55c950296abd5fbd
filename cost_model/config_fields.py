"""Typed reading of a config.json's fields: every fault is one sentence with the field and the file.

Publishers name the same thing differently, so a field is asked for by all its names, the first
that is there counts, and null counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsify.errors import UsageError

__all__ = ["Fields"]

LARGEST = 2**31 - 1  # as in policies; a larger size is a typing error


class Fields:
    """The fields of one config, the place it came from, and what had to be assumed of it."""

    def __init__(self, data: Mapping[str, Any], origin: str) -> None:
        self.data, self.origin = data, origin
        self._assumptions: dict[str, None] = {}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences, each once, in order."""
        return tuple(self._assumptions)

    def assume(self, sentence: str) -> None:
        """Remember what was not told."""
        self._assumptions.setdefault(sentence)

    def fail(self, text: str, hint: str | None = None) -> UsageError:
        """The error that `text` says of this config."""
        return UsageError(f"{self.origin}: {text}", hint)

    def has(self, *names: str) -> bool:
        """Whether one of the fields is there and not null."""
        return self._found(*names) is not None

    def value(self, *names: str) -> Any:
        """The first of the fields that is there, unchecked; None when none is."""
        name = self._found(*names)
        return None if name is None else self.data[name]

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number.

        Raises:
            UsageError: it is missing without a default, or is no number of at least `least`.
        """
        name = self._found(*names)
        if name is None and default is not None:
            return default
        if name is None:
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise self.fail(f"the field {names[0]}{others} is missing.")
        given = self.data[name]
        if isinstance(given, bool) or not isinstance(given, int) or not least <= given <= LARGEST:
            raise self.fail(f"{name} is {given!r:.60}; expected a whole number from {least} up.")
        return given

    def maybe(self, *names: str, least: int = 1) -> int | None:
        """A whole number, or None when it is not told.

        Raises:
            UsageError: it is told and no number of at least `least`.
        """
        return self.whole(*names, least=least) if self.has(*names) else None

    def flag(self, *names: str, default: bool) -> bool:
        """A truth value.

        Raises:
            UsageError: it is told and neither true nor false.
        """
        name = self._found(*names)
        if name is None:
            return default
        given = self.data[name]
        if not isinstance(given, bool):
            raise self.fail(f"{name} is {given!r:.60}; expected true or false.")
        return given

    def text(self, *names: str, default: str = "") -> str:
        """A text.

        Raises:
            UsageError: it is told and no text.
        """
        name = self._found(*names)
        if name is None:
            return default
        given = self.data[name]
        if not isinstance(given, str):
            raise self.fail(f"{name} is {given!r:.60}; expected a text.")
        return given

    def sequence(self, name: str, length: int, kind: type) -> tuple[Any, ...] | None:
        """A list with one entry per layer, or None when it is not told; longer ones are cut.

        transformers cuts too: some configs list the layers of a larger sibling.

        Raises:
            UsageError: it is no list of that kind, or shorter than there are layers.
        """
        given = self.value(name)
        if given is None:
            return None
        if not isinstance(given, list | tuple) or not all(isinstance(g, kind) for g in given):
            what = {str: "texts", int: "whole numbers"}.get(kind, kind.__name__)
            raise self.fail(f"{name} is {given!r:.60}; expected a list of {what}.")
        if len(given) < length:
            raise self.fail(f"{name} has {len(given)} entries for {length} layers.")
        return tuple(given[:length])

    def indices(self, name: str) -> frozenset[int] | None:
        """A list of layer numbers, or None when it is not told.

        Raises:
            UsageError: it is no list of whole numbers.
        """
        if not self.has(name):
            return None
        found = self.sequence(name, 0, int)
        assert found is not None
        return frozenset(self.value(name))

    def _found(self, *names: str) -> str | None:
        return next((name for name in names if self.data.get(name) is not None), None)
