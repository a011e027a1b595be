"""Times: what is added up, scaled and divided, on rows that are written out; and a config that extends another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
import zhang_table3
from config import Config
from study import Row

SHAPE = {"class": "BertModel", "config": {}, "noise": 0.01, "seeds": [0], "methods": ["RegMean"], "texts": 2}


def study() -> zhang_table3.Times:
    options = {"tuned": {"tiny": [0, 1]}, "shapes": {"large": SHAPE}, "texts_of": "tiny", "statistics": 8}
    return zhang_table3.Times(Config("tiny", Path(), "cpu", {}, {}, {"zhang_table3": options}))


def row(pair: str, seed: int, what: str, seconds: float, statistics: float = 0.0) -> Row:
    return {"pair": pair, "seed": seed, "what": what, "seconds": seconds, "statistics": statistics}


ROWS = [
    *(row("tiny", seed, "attention", 1.0 + 2 * seed) for seed in (0, 1)),
    *(row("tiny", seed, "both", 8.0) for seed in (0, 1)),
    *(row("tiny", seed, "RegMean", 10.0, 30.0) for seed in (0, 1)),
    *(row("tiny", seed, "Fisher", 1.0, 9.0) for seed in (0, 1)),
    *(row("large", 0, what, 1.0) for what in ("attention", "both")),
    *(row("large", 0, what, 30.0, 70.0) for what in ("RegMean", "Fisher")),
]


def test_a_share_is_of_the_merge_with_its_statistics() -> None:
    claims = study().claims(ROWS)
    assert ["attention and" in claim.says for claim in claims] == [False, False, True, True]
    assert [claim.here for claim in claims] == [
        "tiny 20.0 ± 10.0 %, large 1.0 %",  # of Fisher: 1 and 3 of 10 s, 1 of 100
        "tiny 5.0 ± 2.5 %, large 1.0 %",
        "tiny 80.0 ± 0.0 %, large 1.0 %",
        "tiny 20.0 ± 0.0 %, large 1.0 %",
    ]
    assert {claim.holds for claim in claims} == {None}
    slower = [r | {"statistics": 1e4 * (r["what"] in zhang_table3.METHODS)} for r in ROWS]
    assert {claim.holds for claim in study().claims(slower)} == {True}


def test_tables_have_the_paper_and_dashes_for_what_was_not_measured() -> None:
    found = study().tables(ROWS)
    assert "1.6 to 3.5" in found
    (large,) = (line for line in found.splitlines() if line.startswith("| large | 1.00"))
    assert large == "| large | 1.00 | – | 1.00 | – | 100.00 | 100.00 | – |"


def test_a_drawn_model_is_the_class_that_its_config_names_and_depends_on_the_seed() -> None:
    config = {
        "hidden_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    a, again, b = (zhang_table3.drawn("BertForMaskedLM", config, seed) for seed in (0, 0, 1))
    assert a.config["architectures"] == ["BertForMaskedLM"]
    name = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(a[name], again[name])
    assert not torch.equal(a[name], b[name])


@pytest.mark.parametrize(("first", "calls"), [(2.0, 1), (0.5, 3)])
def test_what_is_quick_is_measured_three_times(first: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([first, 0.1, 0.3])
    made: list[float] = []

    def clock(call: object) -> tuple[None, float]:
        made.append(next(spent))
        return None, made[-1]

    monkeypatch.setattr(zhang_table3, "seconds", clock)
    assert zhang_table3.usual(lambda: None) == (2.0 if calls == 1 else 0.3)
    assert len(made) == calls


def test_a_config_that_extends_another_has_its_models_and_not_its_studies(tmp_path: Path) -> None:
    base = {"device": "cuda", "families": {"a": {"x": 1}, "b": {}}, "tuned": {"t": {}}, "studies": {"s": {}}}
    (tmp_path / "base.yml").write_text(yaml.safe_dump(base), "utf-8")
    more = {"extends": str(tmp_path / "base.yml"), "families": {"a": {"x": 2}}, "studies": {"own": {}}}
    (tmp_path / "more.yml").write_text(yaml.safe_dump(more), "utf-8")
    found = Config.read(str(tmp_path / "more.yml"))
    assert (found.name, found.device, found.tuned, found.studies) == ("more", "cuda", {"t": {}}, {"own": {}})
    assert found.families == {"a": {"x": 2}, "b": {}}
