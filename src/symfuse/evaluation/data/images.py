"""Folders of images, with one sub-folder for each class or a table of metadata; and images from whatever holds one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from symfuse.errors import DataError
from symfuse.evaluation.data.records import Records, records
from symfuse.messages import first_line

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


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
        with Image.open(io.BytesIO(value) if isinstance(value, bytes) else value) as image:
            return image.convert(mode)
    # What pillow raises for broken files of one kind or another.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{where}: {name} cannot be opened as an image ({first_line(error)}); repair it, or take it out"
        ) from error
