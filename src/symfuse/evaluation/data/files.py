"""Text, CSV, TSV, JSON, JSON lines and Parquet: each a function from a file to its rows, with their lines.

Only as many rows as requested are read, except of a JSON list, which is parsed as a whole.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from symfuse.errors import DataError, OptionError
from symfuse.evaluation.data.records import Records, Row, records
from symfuse.messages import first_line

Numbered = Iterator[tuple[int, Row]]


def read_text(path: Path, encoding: str, limit: int | None) -> Records:
    """One row a line, in the column "text"; blank lines are left out."""
    with _opened(path, encoding) as file:
        lines = ((number, {"text": line.rstrip("\n")}) for number, line in enumerate(file, 1) if line.strip())
        return _collect(lines, path, "text", limit)


def read_csv(path: Path, encoding: str, limit: int | None, delimiter: str = ",") -> Records:
    """A header, then rows with as many fields; all are text."""
    allowed = csv.field_size_limit(sys.maxsize)  # texts may be longer than csv expects
    try:
        with _opened(path, encoding) as file:
            return _collect(_table(file, path, delimiter), path, "csv", limit)
    finally:
        csv.field_size_limit(allowed)


def read_tsv(path: Path, encoding: str, limit: int | None) -> Records:
    return read_csv(path, encoding, limit, "\t")


def read_json(path: Path, encoding: str, limit: int | None) -> Records:
    """A list of objects; or JSON lines, which some call .json too."""
    with _opened(path, encoding) as file:
        text = file.read()
    if not text.lstrip().startswith("["):
        return read_json_lines(path, encoding, limit)
    result = _parse(text, path)
    for number, row in enumerate(result, 1):
        _require_object(row, f"{path}, row {number}")
    return records(result[:limit], str(path), "json")


def read_json_lines(path: Path, encoding: str, limit: int | None) -> Records:
    """One object a line; blank lines are left out."""
    with _opened(path, encoding) as file:
        lines = ((number, _parse(line.rstrip(), path, number)) for number, line in enumerate(file, 1) if line.strip())
        return _collect(((n, _require_object(row, f"{path}:{n}")) for n, row in lines), path, "json", limit)


def read_parquet(path: Path, encoding: str, limit: int | None) -> Records:  # noqa: ARG001 (Parquet has its own)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow; pip install 'symfuse[data]'") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(1000) for row in batch.to_pylist())
            return records(list(islice(rows, limit)), str(path), "parquet")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file that can be read ({first_line(error)})") from error


def _collect(numbered: Numbered, path: Path, kind: str, limit: int | None) -> Records:
    result = list(islice(numbered, limit))
    return records([row for _, row in result], str(path), kind, (number for number, _ in result))


@contextmanager
def _opened(path: Path, encoding: str) -> Iterator[TextIO]:
    """The file as text without a byte order mark; DataError naming the first byte that is not in this encoding."""
    plain = encoding.lower().replace("_", "-") in ("utf-8", "utf8")
    try:
        # csv wants line ends as they are; all else takes any of the three
        with path.open(encoding="utf-8-sig" if plain else encoding, newline="" if _is_table(path) else None) as file:
            yield file
    except LookupError as error:
        raise OptionError(f"encoding is {encoding!r}, which Python does not know; such as utf-8 or latin-1") from error
    except UnicodeError as error:
        raise DataError(_bad_bytes(path, encoding)) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({first_line(error)})") from error


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in (".csv", ".tsv")


def _bad_bytes(path: Path, encoding: str) -> str:
    """The decoder of an open file counts bytes from its last block, so the whole is decoded once more."""
    data, result = path.read_bytes(), ""
    try:
        data.decode(encoding)
    except UnicodeDecodeError as error:
        result = f" at byte {error.start} (0x{data[error.start]:02x})" if data else ""
    except UnicodeError as error:
        result = f" ({error})"
    guess = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin-1" if encoding != "latin-1" else "utf-8"
    return (
        f"{path}: not {encoding}{result}; if it is in another encoding, say which: encoding={guess!r} "
        f"(--encoding {guess}), or convert it to utf-8"
    )


def _table(file: TextIO, path: Path, delimiter: str) -> Numbered:
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for fields in reader:
            if not fields:
                pass  # a blank line
            elif header is None:
                header = fields
                if len(set(header)) < len(header):
                    raise DataError(f"{path}:{line}: the header names a column twice: {', '.join(header)}; rename one")
            elif len(fields) != len(header):
                raise DataError(
                    f"{path}:{line}: {len(fields)} fields, expected {len(header)} as in the header "
                    f"({', '.join(header)}); put texts that hold a {delimiter!r} or line breaks in double quotes"
                )
            else:
                yield line, dict(zip(header, fields, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{line}: not a row of CSV ({error})") from error


def _parse(text: str, path: Path, line: int = 1) -> Any:
    """line: at which the text starts."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{line + error.lineno - 1}: broken JSON, {error.msg} at column {error.colno}; expected one "
            "object a line, or one list of objects"
        ) from error
    except RecursionError as error:
        raise DataError(f"{path}:{line}: JSON nested too deeply; expected flat objects") from error


def _require_object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}, expected an object with a field for each column")
    return row
