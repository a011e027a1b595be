"""Read data of any kind: a path, a data set, or rows in memory. Each format (text, CSV, TSV, JSON, JSON lines, Parquet)
is a function from a file to its rows, with their lines; folders of images have one sub-folder for each class, or a
table of metadata.

Only as many rows as requested are read, except of a JSON list, which is parsed as a whole.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from symfuse.errors import DataError, OptionError
from symfuse.evaluation.data.records import Records, Row, records
from symfuse.files import regular
from symfuse.io.stamp import refuse_pointer
from symfuse.messages import first_line

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
Numbered = Iterator[tuple[int, Row]]
Reader = Callable[[Path, str, int | None], Records]


def class_folders(folder: Path, limit: int | None) -> Records:
    """Columns "image" (a path, opened when it is used) and "label" (the name of the sub-folder), sorted by both.

    As in torchvision's ImageFolder; hidden files and those that are no images are left out. DataError if no sub-folder
    holds an image.
    """
    kinds = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    rows = [
        {"image": path, "label": kind.name}
        for kind in kinds
        for path in sorted(kind.rglob("*"))
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    ]
    if not rows:
        raise DataError(
            f"{folder}: no images in it; expected one sub-folder for each class with images ({', '.join(SUFFIXES)}), "
            f"or images and a {METADATA[0]} with a column file_name. Of text files and tables give the file itself"
        )
    return records(rows[:limit], str(folder), "images")


def with_metadata(folder: Path, table: Records) -> Records:
    """The rows of a metadata file, with a column "image": the path in "file_name", from the folder."""
    if "file_name" not in table.columns:
        raise DataError(f"{table.source}: expected a column file_name, found {', '.join(table.columns)}; rename it")
    rows = [{"image": folder / table.text(i, "file_name")} | dict(table.rows[i]) for i in range(len(table))]
    return Records(rows, ("image", *table.columns), table.source, "images", table.lines)


def open_image(value: Any, where: str, mode: str = "RGB") -> Any:
    """The PIL image of a path, of bytes, of a dict with one of both (as in Parquet files), or as it is, in that mode.

    where: names the row in the DataError that an image gives which is missing, broken or too large.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"{where}: reading images needs pillow; pip install 'symfuse[data]'") from error
    if isinstance(value, Image.Image):
        return value.convert(mode)
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if not isinstance(value, str | Path | bytes):
        raise DataError(f"{where}: an image of type {type(value).__name__}, expected a path, bytes or a PIL image")
    name = "its bytes" if isinstance(value, bytes) else str(value)
    try:
        with Image.open(io.BytesIO(value) if isinstance(value, bytes) else regular(Path(value))) as image:
            return image.convert(mode)
    # What pillow raises for broken files of one kind or another.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{where}: {name} cannot be opened as an image ({first_line(error)}); repair it, or take it out"
        ) from error


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
        with regular(path).open(
            encoding="utf-8-sig" if plain else encoding, newline="" if _is_table(path) else None
        ) as file:
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


# By the suffix of the file's name.
FORMATS: Mapping[str, Reader] = {
    ".txt": read_text,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".json": read_json,
    ".jsonl": read_json_lines,
    ".parquet": read_parquet,
}


def read_records(source: Any, *, encoding: str = "utf-8", limit: int | None = None) -> Records:
    """Rows of a file (FORMATS, by its ending), a folder of images, a `datasets.Dataset`, or a list of dicts.

    limit: only the first rows are read. encoding: of text files; a byte order mark of utf-8 is skipped. DataError,
    naming the file and the line or byte, for what is missing, empty, broken, or of no known kind.
    """
    if limit is not None and limit < 1:
        raise OptionError(f"limit is {limit}; expected 1 row at least")
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        return _folder(path, encoding, limit) if path.is_dir() else _file(path, encoding, limit)
    if hasattr(source, "column_names"):
        return _dataset(source, limit)
    if isinstance(source, Sequence) and all(isinstance(row, Mapping) for row in source):
        return records(source[:limit], "memory", "rows")
    raise DataError(
        f"data of type {type(source).__name__}: expected a path, a datasets.Dataset, or a list of dicts, one a row"
    )


def _file(path: Path, encoding: str, limit: int | None) -> Records:
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    reader = FORMATS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path}: data in a file ending in {path.suffix or 'nothing'!r} are not known; expected one of "
            f"{', '.join(FORMATS)}, or a folder of images"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    refuse_pointer(path, DataError)
    return reader(path, encoding, limit)


def _folder(folder: Path, encoding: str, limit: int | None) -> Records:
    table = next((folder / name for name in METADATA if (folder / name).is_file()), None)
    return class_folders(folder, limit) if table is None else with_metadata(folder, _file(table, encoding, limit))


def _dataset(dataset: Any, limit: int | None) -> Records:
    """A map-style data set of the library `datasets`; rows are read when they are used."""
    name = f"the {type(dataset).__name__}"
    if isinstance(dataset, Mapping):
        raise DataError(f"{name} has the splits {', '.join(dataset)}; give one of them")
    if not hasattr(dataset, "select"):
        raise DataError(f"{name} can only be read once, in order; give a datasets.Dataset")
    if len(dataset) == 0:
        raise DataError(f"{name} has no rows; give data to evaluate on")
    taken = dataset.with_format(None)  # plain Python values
    taken = taken if limit is None else taken.select(range(min(limit, len(dataset))))
    return Records(_Rows(taken), tuple(dataset.column_names), name, "dataset")


class _Rows(Sequence[Row]):
    """A data set as a Sequence."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)
