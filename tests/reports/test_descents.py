"""The curve of the objective on the page, from the run's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import symfuse
from contract.tiny import MODELS
from symfuse.reports import alignment_run
from symfuse.reports.page import page


def test_every_start_is_drawn_and_its_numbers_stand_below(tmp_path: Path) -> None:
    a, b = MODELS["bert-mlm"](0), MODELS["bert-mlm"](1)
    alignment = symfuse.match(a, to=b, axes="all")
    run = alignment_run(a, b, alignment, None)
    assert run["descents"] == alignment.provenance["descents"]
    file = tmp_path / "symfuse.json"
    file.write_text(json.dumps(run), "utf-8")
    text = page([file])
    assert "The objective, sweep by sweep" in text
    best = min(run["descents"], key=lambda start: run["descents"][start][-1])
    assert f"is reached from {best} in {len(run['descents'][best]) - 1} sweeps" in text
    for curve in run["descents"].values():
        assert all(f"{value:.6g}" in text.replace(" ", "") for value in curve)
    plain = alignment_run(a, b, symfuse.match(a, to=b, axes="ffn"), None)
    file.write_text(json.dumps(plain), "utf-8")
    assert "sweep by sweep" not in page([file])
