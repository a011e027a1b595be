"""Where parts meet: merges of merges, recorded frames, names that are no paths, warnings at the line of the caller."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import symfuse
from command import done
from contract.tiny import MODELS
from symfuse.errors import IncompatibleError, SymfuseWarning
from symfuse.io import Checkpoint


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for seed, name in enumerate("abc"):
        MODELS["gpt2-lm"](seed).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_merge_is_merged_again(folders: Path) -> None:
    first = symfuse.merge(["a", "b"])
    again = symfuse.merge([first, "c"], weights=[2.0, 1.0])
    third = symfuse.merge(["a", "b", "c"])
    for name in third:
        torch.testing.assert_close(again[name], third[name])
    symfuse.merge([first, first], method="slerp", base=0, parameters={"t": 0.5}).save("twice")
    found = json.loads(Path("twice/symfuse.json").read_text("utf-8"))
    assert [one["name"] for one in found["inputs"]] == ["a", "b"]


def test_models_of_one_name_are_told_apart(folders: Path) -> None:
    Path("x").mkdir()
    Path("b").rename("x/a")
    symfuse.merge(["a", "x/a"], weights=[0.3, 0.7]).save("out")
    assert json.loads(Path("out/symfuse.json").read_text("utf-8"))["weights"] == {"a": 0.3, "x/a": 0.7}
    card = Path("out/README.md").read_text("utf-8")
    assert "`a`, weight 0.3" in card
    assert "`x/a`, weight 0.7" in card


def test_a_model_that_is_called_by_dots_leaves_its_card_whole(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("a")
    done("merge", ".", "../b", "-o", "../dot", "-q")
    card = Path("../dot/README.md").read_text("utf-8")
    assert f"symfuse {symfuse.__version__}." in card
    assert "weight 0.5" in card


def test_options_end_at_two_dashes(folders: Path) -> None:
    done("merge", "-o", "out", "-q", "--", "a", "b")
    assert sorted(symfuse.open("out")) == sorted(symfuse.open("a"))


def test_labels_without_numbers_are_none(folders: Path) -> None:
    for name, seed in (("k1", 0), ("k2", 1)):
        MODELS["bert-sequence"](seed).save(name)
    config = json.loads(Path("k1/config.json").read_text("utf-8"))
    Path("k1/config.json").write_text(json.dumps({**config, "label2id": {"x": None}}), "utf-8")
    done("merge", "k1", "k2", "-o", "out", "-q")
    assert (Path("out") / "model.safetensors").is_file()


def test_a_model_in_a_frame_is_not_merged_with_one_that_is_in_none(folders: Path) -> None:
    aligned = symfuse.match("b", "a", axes="all")
    moved = aligned("b")
    moved.save("moved")
    for framed in (moved, "moved"):
        with pytest.raises(IncompatibleError, match="folded"):
            symfuse.merge([framed, "c"])
    assert len(symfuse.merge([moved, aligned.in_frame(symfuse.open("a"))]))


def test_an_odd_name_of_weights_is_overwritten(tmp_path: Path) -> None:
    def model(value: float) -> Checkpoint:
        return Checkpoint({"w": torch.full((2,), value)}, {"x": 1}, name="m")

    model(1).save(tmp_path / "in")
    (tmp_path / "in/model.safetensors").rename(tmp_path / "in/weights.safetensors")
    for value in (2.0, 3.0):
        opened = symfuse.open(tmp_path / "in")
        opened.replace(tensors={"w": torch.full((2,), value)}).save(tmp_path / "out", overwrite=value == 3)
    assert float(symfuse.open(tmp_path / "out")["w"][0]) == 3


def test_a_warning_is_at_the_line_of_the_caller(folders: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        symfuse.merge(["a", "b"])
    ours = [one for one in caught if issubclass(one.category, SymfuseWarning)]
    assert ours
    assert {Path(one.filename).name for one in ours} == {Path(__file__).name}


def test_an_alignment_moves_a_state_dict(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 5, "intermediate_size": 28}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    config.architectures = ["ViTForImageClassification"]
    module = transformers.ViTForImageClassification(config).eval()
    source = symfuse.open(module.state_dict(), config=config)
    alignment = symfuse.match(source, source, axes="ffn")
    found = symfuse.verify(source, alignment(source))
    assert found
    assert found.equal
    changed = {name: tensor * 2 if name.endswith("fc1.weight") else tensor for name, tensor in source.items()}
    other = symfuse.open(changed, config=config)
    assert bool(symfuse.verify(source, other)) == symfuse.verify(source, other).equal


def test_a_pooler_that_the_class_demands_is_not_dropped(tmp_path: Path) -> None:
    classifier, language_model = MODELS["bert-sequence"](0), MODELS["bert-mlm"](1)
    classifier.save(tmp_path / "classifier")
    language_model.save(tmp_path / "lm")
    recipe = {
        "merge_method": "linear", "models": [{"model": str(tmp_path / name)} for name in ("classifier", "lm")],
        "parameters": {"weight": 0.5}, "foreign": "drop", "heads": str(tmp_path / "classifier"),
    }  # fmt: skip
    with pytest.raises(IncompatibleError, match=r"pooler\.dense"):
        symfuse.merge_recipe(recipe)
    assert any("pooler" in name for name in symfuse.merge_recipe({**recipe, "foreign": "keep"}))
