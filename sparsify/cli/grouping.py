"""Thirty identical layers on one row: model.layers.{0..29}.self_attn."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

__all__ = ["collapse", "group"]

_T = TypeVar("_T")


def group(
    items: Iterable[_T], name: Callable[[_T], str], facts: Callable[[_T], Hashable]
) -> list[tuple[str, list[_T]]]:
    """Items that agree in `facts` and whose names differ in their first number only, together.

    Returns common names and members, in order of first appearance.
    """
    rows: dict[Hashable, list[_T]] = {}
    for item in items:
        head, _, tail = _split(name(item))
        rows.setdefault((head, tail, facts(item)), []).append(item)
    return [(collapse([name(member) for member in members]), members) for members in rows.values()]


def collapse(names: list[str]) -> str:
    """One name for names that differ in their first number only."""
    if len(names) == 1:
        return names[0]
    head, _, tail = _split(names[0])
    return f"{head}{{{_ranges(sorted(int(_split(name)[1]) for name in names))}}}{tail}"


def _split(name: str) -> tuple[str, str, str]:
    found = re.fullmatch(r"((?:[^.]*\.)*?)(\d+)((?:[.#].*)?)", name)
    return (found[1], found[2], found[3]) if found else (name, "", "")


def _ranges(numbers: list[int]) -> str:
    """ "0..3,5" for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
