"""Rows of named columns, and the messages about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from symfuse.errors import DataError
from symfuse.messages import some, suggestion

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Records:
    """source: what messages call the data. format: such as "csv". lines: of each row the line of the file at which it
    starts; empty if rows have none."""

    rows: Sequence[Row]
    columns: tuple[str, ...]
    source: str
    format: str
    lines: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        """The place of a row: file and line, or its number, counted from 1."""
        return f"{self.source}:{self.lines[index]}" if self.lines else f"{self.source}, row {index + 1}"

    def require(self, **columns: str) -> None:
        """DataError if a column does not exist; by the option that names it, such as text_column."""
        for option, column in columns.items():
            if column not in self.columns:
                raise DataError(
                    f"{self.source}: expected a column {column!r}{suggestion(column, self.columns)}, found "
                    f"{some(map(repr, self.columns), 12)}; name the right one with {option} "
                    f"(--column {option.removesuffix('_column')}=NAME)"
                )

    def value(self, index: int, column: str) -> Any:
        """DataError if the row lacks it, or it is null."""
        result = self.rows[index].get(column)
        if result is None:
            raise DataError(f"{self.where(index)}: {column!r} is missing; fill it in, or take the row out")
        return result

    def text(self, index: int, column: str) -> str:
        result = self.value(index, column)
        if not isinstance(result, str):
            raise DataError(f"{self.where(index)}: {column!r} is of type {type(result).__name__}, expected text")
        return result

    def sequence(self, index: int, column: str) -> list[Any]:
        result = self.value(index, column)
        if not isinstance(result, list | tuple):
            raise DataError(
                f"{self.where(index)}: {column!r} is of type {type(result).__name__}, expected a list with an entry "
                "for each word; JSON lines and Parquet can hold lists"
            )
        return list(result)


def records(rows: Sequence[Row], source: str, kind: str, lines: Iterable[int] = ()) -> Records:
    """Records with all columns that any row has. DataError if there are no rows."""
    if not rows:
        raise DataError(f"{source}: there are no rows in it; give data to evaluate on")
    return Records(rows, tuple(dict.fromkeys(chain.from_iterable(rows))), source, kind, tuple(lines))
