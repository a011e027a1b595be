"""What `check` says of models as they are: no relation in this basis, code of their own, and whose numbers it knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import symfuse
from command import data, done
from contract.tiny import MODELS
from symfuse import api
from symfuse.alignment import random_alignment
from symfuse.io import is_other


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a fine-tune of it, and that fine-tune moved."""
    folder = tmp_path_factory.mktemp("models")
    base = MODELS["bert-mlm"]()
    rng = torch.Generator().manual_seed(1)
    tuned = base.replace(tensors={n: t + 0.01 * torch.randn(t.shape, generator=rng) for n, t in base.items()})
    moved = random_alignment(api.declare(tuned), 1)(tuned)
    for name, model in {"base": base, "tuned": tuned, "moved": moved}.items():
        model.save(folder / name)
    return folder


@pytest.fixture(autouse=True)
def there(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)


def test_d20_a_moved_fine_tune_has_no_relation_in_this_basis() -> None:
    (report,) = data("check", "base", "moved")["recipes"]
    (warning,) = report["warnings"]
    assert warning.startswith("moved and base have no relation in this basis (cosine ")
    assert "trained apart, or one was transformed by a symmetry" in warning
    assert "unrelated" not in json.dumps(report)
    (report,) = data("check", "base", "tuned")["recipes"]
    assert not report["warnings"]


def test_d20_all_axes_are_matched_by_default_and_show_the_relation() -> None:
    found = api.match("moved", to="base")
    assert found.provenance["options"]["auto"]["same_basis"] is False
    assert {"residual", "h", "ffn"} <= {instance.axis for instance in found.elements}
    assert api.relate("moved", "base").distance.cosine < 0.2
    assert api.relate(found("moved"), "base").distance.cosine > 0.99
    assert (
        "models that do not share a basis" in done("align", "moved", "--to", "base", "-o", "out", "--no-verify").stdout
    )


def test_j8_code_of_a_model_is_named_by_check(tmp_path: Path) -> None:
    for name in ("base", "coded"):
        MODELS["bert-mlm"]().save(tmp_path / name)
    config = tmp_path / "coded" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"auto_map": {"AutoModel": "modeling_x.Y"}}))
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_x.Slow", None]}}
    (tmp_path / "coded" / "tokenizer_config.json").write_text(json.dumps(tokenizer), "utf-8")
    (report,) = data("check", str(tmp_path / "base"), str(tmp_path / "coded"))["recipes"]
    notes = [note for note in report["notes"] if "names code of its own" in note]
    named = [("config.json", "modeling_x"), ("tokenizer_config.json", "tokenization_x")]
    for file, code in named:
        text = f"{file} names code of its own (auto_map: {code}.py)"
        assert any(text in note for note in notes), notes
    assert all("symfuse never runs or copies it" in note for note in notes)
    (report,) = data("check", "base", "tuned")["recipes"]
    assert not any("auto_map" in note for note in report["notes"])


def test_j8_a_lineage_says_which_numbers_it_is_of() -> None:
    base = MODELS["bert-mlm"]()
    name = "bert.embeddings.word_embeddings.weight"

    def changed(at: int) -> dict[str, object]:
        flat = base[name].flatten().clone()
        flat[at] += 1
        return base.replace(tensors={**dict(base), name: flat.view_as(base[name])}).lineage()

    size = base[name].numel()
    known = base.lineage()
    assert known["sha256_of"] == "the first, middle and last 64 numbers of each tensor"
    assert all(is_other(changed(at), known) for at in (0, 63, size // 2, size - 64, size - 1))
    assert not is_other(changed(200), known)  # as it says
    earlier = {**known, "sha256": "0" * 64, "sha256_of": None}
    assert not is_other(earlier, known)  # of an earlier version, over other numbers
    assert symfuse.open("base").lineage()["sha256"] == known["sha256"]
