"""Tables that a terminal may be too narrow for: no number is ever cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Fitting", "number_table"]

# Columns of words are folded down to this, those of sentences to a few words.
TEXT_WIDTH, SENTENCE_WIDTH = 10, 24
WIDE = 1000


def number_table(*columns: str) -> Table:
    """An open table; ">" aligns a column of numbers to the right, which never break, and "~" marks
    sentences."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        if column.startswith(">"):
            table.add_column(column[1:], justify="right", no_wrap=True)
        else:
            least = SENTENCE_WIDTH if column.startswith("~") else TEXT_WIDTH
            table.add_column(column.removeprefix("~"), min_width=least, overflow="fold")
    return table


class Fitting:
    """The first of several tables that the terminal is wide enough for, else a line for each row of
    the first.

    `keys` is how many columns name a row; where one of them but the last is empty, it is as above.
    """

    def __init__(self, *tables: Table, keys: int) -> None:
        self.tables, self.keys = tables, keys
        for table in tables:
            for column in table.columns:
                if column.no_wrap:
                    column.min_width = max(map(_width, (column.header, *column.cells)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sizes = [
            Measurement.get(console, options.update(max_width=WIDE), table) for table in self.tables
        ]
        for table, size in zip(self.tables, sizes, strict=True):
            if size.maximum <= options.max_width:
                yield table
                return
        if sizes[-1].minimum <= options.max_width:
            yield self.tables[-1]
            return
        yield Text("")
        yield from self._lines()
        yield Text("")

    def _lines(self) -> Iterator[Text]:
        columns = self.tables[0].columns
        headers = [_plain(column.header) for column in columns]
        above = [""] * self.keys
        for cells in zip(*(map(_plain, column.cells) for column in columns), strict=True):
            names = [
                cell or (old if index < self.keys - 1 else "")
                for index, (cell, old) in enumerate(zip(cells[: self.keys], above, strict=True))
            ]
            above = names
            facts = zip(headers[self.keys :], cells[self.keys :], strict=True)
            yield Text(_line(names, [f"{name} {value}" for name, value in facts if value]))


def _line(names: Sequence[str], facts: Sequence[str]) -> str:
    return f"{', '.join(filter(None, names))}: {'; '.join(facts)}"


def _plain(cell: object) -> str:
    return " ".join(str(cell).split())


def _width(cell: object) -> int:
    return max((cell_len(line) for line in str(cell).split("\n")), default=0)
