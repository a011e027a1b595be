"""Data of every format, and one clear error for each way in which they can be bad."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from symfuse.errors import DataError, OptionError, SymfuseError
from symfuse.evaluation.data import FORMATS, Records, read_records
from symfuse.evaluation.data.reading import open_image

ROWS = [{"text": "a, b", "label": "x"}, {"text": 'two "lines"\nof it', "label": "y"}, {"text": "é", "label": "x"}]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def dataset(rows: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list(rows)


def splits() -> Any:
    import datasets

    return datasets.DatasetDict({"train": dataset(ROWS), "test": dataset(ROWS)})


def picture(path: Path, colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3), colour).save(path)
    return path


TABLES: dict[str, Callable[[Path], Any]] = {
    "csv": lambda folder: written(
        folder / "d.csv", 'text,label\n"a, b",x\n\n"two ""lines""\nof it",y\né,x\n'
    ),
    "csv, crlf and byte order mark": lambda folder: written(
        folder / "d.csv", b"\xef\xbb\xbf" + 'text,label\r\n"a, b",x\r\n"two ""lines""\nof it",y\r\né,x\r\n'.encode()
    ),
    "csv, utf-16": lambda folder: written(
        folder / "sixteen.csv", 'text,label\n"a, b",x\n"two ""lines""\nof it",y\né,x\n'.encode("utf-16")
    ),
    "tsv": lambda folder: written(folder / "d.TSV", 'text\tlabel\na, b\tx\n"two ""lines""\nof it"\ty\né\tx\n'),
    "json": lambda folder: written(folder / "d.json", json.dumps(ROWS, indent=1)),
    "json lines": lambda folder: written(folder / "d.jsonl", "\n\n".join(map(json.dumps, ROWS))),
    "json lines by another name": lambda folder: written(folder / "d.json", "\n".join(map(json.dumps, ROWS))),
    "parquet": lambda folder: parquet(folder / "d.parquet", ROWS),
    "datasets": lambda _: dataset(ROWS),
    "list": lambda _: ROWS,
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_all_formats_give_the_same_rows(kind: str, tmp_path: Path) -> None:
    source = TABLES[kind](tmp_path)
    encoding = "utf-16" if kind == "csv, utf-16" else "utf-8"
    found = read_records(source, encoding=encoding)
    assert (list(map(dict, found.rows)), found.columns, len(found)) == (ROWS, ("text", "label"), 3)
    assert list(map(dict, read_records(source, encoding=encoding, limit=2).rows)) == ROWS[:2]
    assert list(map(dict, read_records(source, encoding=encoding, limit=9).rows)) == ROWS


def test_rows_know_where_they_stand(tmp_path: Path) -> None:
    table = read_records(TABLES["csv"](tmp_path))
    assert [table.where(i) for i in range(3)] == [f"{tmp_path / 'd.csv'}:{line}" for line in (2, 4, 6)]
    lines = read_records(TABLES["json lines"](tmp_path))
    assert [lines.where(i) for i in range(3)] == [f"{tmp_path / 'd.jsonl'}:{line}" for line in (1, 3, 5)]
    assert read_records(TABLES["parquet"](tmp_path)).where(1) == f"{tmp_path / 'd.parquet'}, row 2"
    assert read_records(ROWS).where(1) == "memory, row 2"


def test_text_has_one_row_a_line_and_no_blank_ones(tmp_path: Path) -> None:
    found = read_records(written(tmp_path / "d.txt", b"\xef\xbb\xbfone \r\n\r\n two\x0bthree\n \nfour"))
    assert found.rows == [{"text": "one "}, {"text": " two\x0bthree"}, {"text": "four"}]
    assert found.lines == (1, 3, 5)
    assert read_records(written(tmp_path / "old.txt", "caf\xe9".encode("latin-1")), encoding="latin-1").rows == [
        {"text": "café"}
    ]


def test_long_fields_are_read_and_the_limit_of_csv_stays(tmp_path: Path) -> None:
    import csv

    before = csv.field_size_limit()
    found = read_records(written(tmp_path / "d.csv", "text\n" + "x" * 200_000 + "\n"))
    assert (len(found.text(0, "text")), csv.field_size_limit()) == (200_000, before)


def test_image_folders_by_class_and_by_metadata(tmp_path: Path) -> None:
    paths = [picture(tmp_path / "by class" / name) for name in ("b/2.png", "b/deep/1.JPG", "a/z.png")]
    written(tmp_path / "by class/a/notes.txt", "no image")
    found = read_records(tmp_path / "by class")
    assert found.rows == [
        {"image": path, "label": label} for path, label in zip([paths[2], *paths[:2]], "abb", strict=True)
    ]
    path = picture(tmp_path / "described" / "one.png")
    written(tmp_path / "described/metadata.csv", "file_name,label\none.png,7\n")
    table = read_records(tmp_path / "described")
    assert table.rows == [{"image": path, "file_name": "one.png", "label": "7"}]
    assert table.where(0) == f"{tmp_path / 'described/metadata.csv'}:2"


def test_images_are_opened_from_paths_bytes_and_dicts(tmp_path: Path) -> None:
    path = picture(tmp_path / "one.png", "blue")
    data = path.read_bytes()
    for value in (path, str(path), data, {"bytes": data, "path": None}, {"path": str(path)}, Image.open(path)):
        found = open_image(value, "row 1")
        assert (found.mode, found.size, found.getpixel((0, 0))) == ("RGB", (4, 3), (0, 0, 255))
    assert open_image(path, "row 1", "L").mode == "L"


LATIN = "text\ncaf\xe9\n".encode("latin-1")

# What is written → what is said: parts of the one message.
BAD_FILES: dict[str, tuple[str, str | bytes, list[str]]] = {
    "empty": ("d.csv", "", ["the file is empty"]),
    "only a header": ("d.csv", "text,label\n", ["there are no rows in it"]),
    "only blank lines": ("d.txt", "\n \n", ["there are no rows in it"]),
    "no kind": ("d.xlsx", "x", ["'.xlsx'", "expected one of .txt, .csv", "folder of images"]),
    "no ending": ("d", "x", ["'nothing'"]),
    "too few fields": ("d.csv", 'a,b\n"1\n2",3\n4\n', ["d.csv:4: 1 fields, expected 2", "(a, b)", "double quotes"]),
    "too many fields": ("d.csv", "a,b\n1,2,3\n", ["d.csv:2: 3 fields, expected 2"]),
    "quotes": ("d.csv", 'a,b\n1,"2\n', ["d.csv:2: not a row of CSV"]),
    "one column twice": ("d.csv", "a,b,a\n1,2,3\n", ["d.csv:1", "a, b, a", "rename"]),
    "broken json line": ("d.jsonl", '{"a": 1}\n\n{"a": }\n', ["d.jsonl:3: broken JSON", "at column 7"]),
    "broken json": ("d.json", '[{"a": 1},\n {"a": 2}\n', ["d.json:3: broken JSON"]),
    "deep json": ("d.jsonl", "[" * 100_000, ["d.jsonl:1: JSON nested too deeply"]),
    "no object on a line": ("d.jsonl", '{"a": 1}\n[2]\n', ["d.jsonl:2: a list, expected an object"]),
    "no object in a list": ("d.json", '[{"a": 1}, 2]', ["d.json, row 2: a int, expected an object"]),
    "empty list": ("d.json", "[]", ["there are no rows in it"]),
    "latin-1": ("d.csv", LATIN, ["not utf-8 at byte 8 (0xe9)", "encoding='latin-1'", "--encoding latin-1"]),
    "latin-1, far in": ("d.txt", b"x\n" * 40_000 + LATIN, ["not utf-8 at byte 80008 (0xe9)"]),
    "utf-16": ("d.jsonl", '{"a": 1}'.encode("utf-16"), ["not utf-8 at byte 0 (0xff)", "--encoding utf-16"]),
    "no parquet": ("d.parquet", "PAR1", ["not a Parquet file that can be read"]),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_give_one_clear_error(kind: str, tmp_path: Path) -> None:
    name, content, parts = BAD_FILES[kind]
    with pytest.raises(DataError) as caught:
        read_records(written(tmp_path / name, content))
    message = str(caught.value)
    assert message.startswith(str(tmp_path / name)) or kind == "no kind"
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message


def bad_folder(path: Path) -> Path:
    written(path / "notes.txt", "text")
    return path


def nameless_metadata(path: Path) -> Path:
    picture(path / "one.png")
    written(path / "metadata.jsonl", '{"file": "one.png"}')
    return path


BAD_SOURCES: dict[str, tuple[Callable[[Path], Any], dict[str, Any], type[SymfuseError], list[str]]] = {
    "missing": (lambda p: p / "none.csv", {}, DataError, ["none.csv: there is no such file"]),
    "folder without images": (bad_folder, {}, DataError, ["no images in it", "one sub-folder for each class"]),
    "metadata without file_name": (nameless_metadata, {}, DataError, ["metadata.jsonl", "file_name, found file"]),
    "splits": (
        lambda _: splits(),
        {}, DataError, ["the splits train, test; give one"],
    ),
    "stream": (lambda _: dataset(ROWS).to_iterable_dataset(), {}, DataError, ["give a datasets.Dataset"]),
    "empty data set": (lambda _: dataset(ROWS).select([]), {}, DataError, ["has no rows"]),
    "empty list": (lambda _: [], {}, DataError, ["memory: there are no rows"]),
    "a number": (lambda _: 7, {}, DataError, ["data of type int", "a list of dicts"]),
    "list of texts": (lambda _: ["a", "b"], {}, DataError, ["data of type list"]),
    "encoding": (TABLES["csv"], {"encoding": "utf-9"}, OptionError, ["'utf-9'", "such as utf-8"]),
    "wrong encoding": (TABLES["csv"], {"encoding": "ascii"}, DataError, ["not ascii at byte 45 (0xc3)"]),
    "limit": (TABLES["csv"], {"limit": 0}, OptionError, ["limit is 0"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_SOURCES)
def test_bad_sources_give_one_clear_error(kind: str, tmp_path: Path) -> None:
    make, options, error, parts = BAD_SOURCES[kind]
    with pytest.raises(error) as caught:
        read_records(make(tmp_path), **options)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize("content", [b"no image", None, "half"])
def test_images_that_cannot_be_opened_are_named(content: bytes | str | None, tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    if content == "half":
        whole = picture(tmp_path / "whole.png").read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"^row 3: .*one\.png cannot be opened as an image \(.*\); repair it"):
        open_image(path, "row 3")
    with pytest.raises(DataError, match="row 3: an image of type int"):
        open_image(3, "row 3")


def test_columns_and_values_are_asked_for_by_name() -> None:
    found = read_records([{"txt": "a", "n": 1, "gap": None}, {"txt": "b", "more": [1]}])
    assert isinstance(found, Records)
    assert found.columns == ("txt", "n", "gap", "more")
    with pytest.raises(DataError, match=r"a column 'text' \(did you mean 'txt'\?\), found 'txt', 'n', 'gap', 'more'; "
                                        r"name the right one with text_column \(--column text=NAME\)"):  # fmt: skip
        found.require(text_column="text")
    with pytest.raises(DataError, match="memory, row 2: 'n' is missing"):
        found.value(1, "n")
    with pytest.raises(DataError, match="memory, row 1: 'gap' is missing"):
        found.text(0, "gap")
    with pytest.raises(DataError, match="memory, row 1: 'n' is of type int, expected text"):
        found.text(0, "n")
    with pytest.raises(DataError, match="memory, row 1: 'txt' is of type str, expected a list"):
        found.sequence(0, "txt")
    assert set(FORMATS) == {".txt", ".csv", ".tsv", ".json", ".jsonl", ".parquet"}
