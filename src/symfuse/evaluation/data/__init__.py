"""Data to evaluate on, from files, folders of images and data sets: rows that know where they stand."""

from __future__ import annotations

from symfuse.evaluation.data.reading import FORMATS, read_records
from symfuse.evaluation.data.records import Records

__all__ = ["FORMATS", "Records", "read_records"]
