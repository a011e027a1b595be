"""The table of what a draft finds of each type of transformers: a row, and the page of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import suggestions

from symfuse.architectures import ARCHITECTURES


def test_types_become_rows_and_rows_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One type that is declared, in full; one whose class is not there; and those that have a row are not run again."""
    kinds = {"vit": "ViTForImageClassification", "gpt2": "NoSuchClass", "kept": "Kept"}
    monkeypatch.setitem(ARCHITECTURES, "vit", ARCHITECTURES["vit"])  # so that it is undone
    monkeypatch.setitem(ARCHITECTURES, "gpt2", ARCHITECTURES["gpt2"])
    monkeypatch.setattr(suggestions, "classes", lambda: kinds)
    monkeypatch.setattr(suggestions, "bounded", suggestions.row)
    monkeypatch.setattr(suggestions, "DATA", tmp_path / "rows.json")
    monkeypatch.setattr(suggestions, "PAGE", tmp_path / "page.md")
    kept = {"class": "Kept", "draft": "in part", "any": 0.5, "all": 0.25, "why": "not placed: 1 names"}
    suggestions.DATA.write_text(json.dumps({"kept": kept}), "utf-8")
    suggestions.main([])
    rows = json.loads(suggestions.DATA.read_text("utf-8"))
    assert rows["kept"] == kept
    assert (rows["vit"]["draft"], rows["vit"]["any"], rows["vit"]["rotated"]) == ("in full", 1.0, True)
    assert rows["gpt2"]["draft"] == "no tiny model"
    assert "kept" not in capsys.readouterr().out
    page = suggestions.PAGE.read_text("utf-8")
    assert "3 of 3 types have a row. Of 1 of these no tiny model could be made" in page
    assert "- declared: 1 in full, 0 in part, 0 not" in page
    assert "- undeclared: 0 in full, 1 in part, 0 not" in page
    assert "| kept | Kept | no | in part | 50% | 25% | – | – | – | not placed: 1 names |" in page
    assert "| gpt2 | NoSuchClass | module transformers has no attribute NoSuchClass |" in page


def test_sizes_are_known_by_their_names() -> None:
    config = {"hidden_size": 768, "text_config": {"num_hidden_layers": 12, "eos_token_id": 50000}, "dropout": 0.1}
    small = suggestions.shrunk(config | {"num_key_value_heads": 12, "use_cache": True}, {"num_key_value_heads": 4})
    assert small["hidden_size"] == 24
    assert small["text_config"] == {"num_hidden_layers": 2, "eos_token_id": 3}
    assert (small["num_key_value_heads"], small["dropout"], small["use_cache"]) == (4, 0.1, True)
