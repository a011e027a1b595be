"""Data to evaluate on, from files, folders of images and data sets: rows that know their place in the file."""

from __future__ import annotations

from symfuse.evaluation.data.reading import FORMATS, read_records
from symfuse.evaluation.data.records import Records

__all__ = ["FORMATS", "Records", "read_records"]
