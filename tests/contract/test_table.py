"""The table of families names axes that exist, and says what holds for some classes of a family only."""

from __future__ import annotations

import re

from contract.table import COLUMNS, ROOT, cells, in_all_or_some, measure
from contract.tiny import EXACT, MODELS, model_of


def test_every_axis_of_the_columns_is_moved_in_some_model() -> None:
    axes = set().union(*COLUMNS.values())
    for label in MODELS:
        axes -= {instance.axis for instance in model_of(label).spec.movable}
        if not axes:
            break
    assert not axes


def test_every_measured_error_is_below_what_is_proved() -> None:
    page = (ROOT / "docs/families.md").read_text("utf-8")
    errors = [float(cell) for cell in re.findall(r" (\de[-+]\d\d) ", page)]
    assert len(errors) > 5 * len(MODELS)
    assert max(errors) < EXACT


def test_a_row() -> None:
    family, name, errors, biases, groups = measure("deberta-mlm-absolute")
    assert (family, name) == ("deberta-v2", "DebertaV2ForMaskedLM")
    assert errors.keys() == {*COLUMNS, "all at once"} - {"experts"}
    assert 0 < max(errors.values()) < 1e-13
    assert "embedding: permutation" in groups
    assert cells(errors, biases)[-1] == "key free, value folded"


def test_what_holds_for_some_classes_only() -> None:
    assert in_all_or_some([{"value folded"}, {"key free", "value folded"}]) == {"key free (not all)", "value folded"}
    assert in_all_or_some([{"key free"}, {"key free"}]) == {"key free"}
    assert in_all_or_some([set()]) == set()
