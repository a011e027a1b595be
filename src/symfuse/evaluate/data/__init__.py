"""Data to evaluate on, from files, folders of images and data sets: rows that know where they stand."""

from __future__ import annotations

from symfuse.evaluate.data.reading import FORMATS, read_records
from symfuse.evaluate.data.records import Records

__all__ = ["FORMATS", "Records", "read_records"]
