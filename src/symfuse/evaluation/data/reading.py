"""Read data of any kind: a path, a data set, or rows in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from symfuse.errors import DataError, OptionError
from symfuse.evaluation.data.files import read_csv, read_json, read_json_lines, read_parquet, read_text, read_tsv
from symfuse.evaluation.data.images import METADATA, class_folders, with_metadata
from symfuse.evaluation.data.records import Records, Row, records
from symfuse.io.content import refuse_pointer

Reader = Callable[[Path, str, int | None], Records]

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
