"""Labels by the numbers that the model gives them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from symfuse.errors import DataError, OptionError
from symfuse.evaluation.tasks.base import UNKNOWN, Data
from symfuse.messages import some, suggestion


@dataclass(frozen=True)
class Labels:
    """The labels of a model's head, from its config (num_labels, label2id). name: of the model."""

    config: Any
    name: str

    def __post_init__(self) -> None:
        if self.config.problem_type == "multi_label_classification" or (
            self.config.problem_type == "regression" and not self.is_regression
        ):
            raise OptionError(
                f"{self.name}: its config says problem_type {self.config.problem_type!r} with {self.config.num_labels} "
                "labels; the built-in tasks have one label for each example. Evaluate it with a loss of your own"
            )

    @property
    def is_regression(self) -> bool:
        """One output: a number is predicted, not a class."""
        return int(self.config.num_labels) == 1

    def number(self, value: Any, where: str) -> int:
        """The number of a label: of a name by label2id, else an integer in range. DataError if it is neither."""
        names = self.config.label2id or {}
        if isinstance(value, str) and value in names:
            return int(names[value])
        result = _integer(value)
        if result is None:
            text = str(value)
            raise DataError(
                f"{where}: the label {text!r}{suggestion(text, names)} is none of those of {self.name}: "
                f"{some(names, 10)}; rename it, or number them from 0 in this order"
            )
        if not 0 <= result < self.config.num_labels:
            raise DataError(
                f"{where}: the label {result} is out of range; {self.name} has {self.config.num_labels} labels, 0 to "
                f"{self.config.num_labels - 1}: {some(names, 10)}"
            )
        return result

    def of_row(self, data: Data, index: int, column: str) -> int | float:
        """The label of a row: a class, or the number to be predicted; UNKNOWN where labels are not read."""
        if data.unlabelled:
            return UNKNOWN
        records = data.records
        value = records.value(index, column)
        if not self.is_regression:
            return self.number(value, records.where(index))
        try:
            result = float(value)
        except (TypeError, ValueError):
            result = math.nan
        if not math.isfinite(result):
            raise DataError(
                f"{records.where(index)}: the label {value!r} is no finite number; {self.name} has one output "
                "(num_labels 1), which predicts a number"
            )
        return result


def _integer(value: Any) -> int | None:
    """3, "3" and 3.0, as in tables with missing values."""
    try:
        result = int(value)
        return result if isinstance(value, str) or result == value else None
    except (TypeError, ValueError, OverflowError):
        return None
