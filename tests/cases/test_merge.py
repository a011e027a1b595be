"""Merges of files: inputs that broke other tools, and the right behaviour. Named after the cases."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
import transformers

from contract.tiny import MODELS, TEXT, marked, of
from matched import match
from symfuse import api
from symfuse.errors import IncompatibleError, SpecError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint


def same(a: Checkpoint, b: Checkpoint) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def refused(folder: Path, message: str, *models: Checkpoint | Path, **options: str) -> None:
    """Before anything is read or written; in every order."""
    for order in itertools.permutations(models):
        with pytest.raises(IncompatibleError, match=message):
            api.merge(order, **options).save(folder / "out")
        assert not (folder / "out").exists()


@pytest.mark.parametrize("label", marked(MODELS))
def test_c21_a_merge_has_all_tensors_of_its_family(label: str) -> None:
    """Every family and head: with itself a model stays what it is, with another one nothing is left out."""
    a, b = MODELS[label](0), MODELS[label](1)
    assert same(api.merge([a, a], weights=[0.3, 0.7]), a)
    merged = api.merge([a, b])
    assert merged.keys() == a.keys()
    for name in a:
        assert merged.info(name) == a.info(name)
        # Rotary frequencies and constants of an activation follow from the config and are those of both.
        same_in_both = name.endswith(("rotary_embeddings.inv_freq", "act_fn.beta", "act_fn.eps"))
        assert torch.equal(merged[name], a[name]) == same_in_both


def test_c05_vocabularies_of_two_sizes_are_refused_with_both(tmp_path: Path) -> None:
    for kind in ("BertModel", "BertForMaskedLM"):
        ours, theirs = (of(kind, "BertConfig", TEXT, vocab_size=size)(0) for size in (61, 63))
        folders = ours.save(tmp_path / kind / "ours"), theirs.save(tmp_path / kind / "theirs")
        refused(tmp_path, r"vocabulary sizes differ: (61 and 63|63 and 61)", *folders)


def test_c07_padded_rows_are_merged_like_the_rest(tmp_path: Path) -> None:
    """A tokenizer with fewer tokens than the embedding has rows is normal; rows are never cut."""
    folders = [MODELS["bert-mlm"](seed).save(tmp_path / str(seed)) for seed in (0, 1)]
    for folder in folders:
        (folder / "vocab.txt").write_text("\n".join(f"token{i}" for i in range(50)), "utf-8")
    merged = open_checkpoint(api.merge(folders).save(tmp_path / "out"))
    name = "bert.embeddings.word_embeddings.weight"
    a, b = (open_checkpoint(folder)[name] for folder in folders)
    assert torch.equal(merged[name], (a + b) / 2)
    assert len(merged[name]) == merged.config["vocab_size"] == 61


def test_c13_c15_files_of_different_versions_and_classes(tmp_path: Path) -> None:
    """A stored buffer, a prefix and old norm names in one file; the output is that of the base."""
    a, b = MODELS["bert"](0), MODELS["bert"](1)
    old = {}
    for name, tensor in b.items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[f"bert.{name}"] = tensor
    old["bert.embeddings.position_ids"] = torch.arange(37)[None]
    theirs = open_checkpoint(old, config=b.config).save(tmp_path / "old")
    ours = a.save(tmp_path / "new")
    merged = api.merge([ours, theirs])
    assert same(merged, api.merge([a, b]))
    out = merged.save(tmp_path / "out")
    _, loading = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values()), loading


def test_c22_foreign_tensors_are_listed_before_any_work(tmp_path: Path) -> None:
    a, b = MODELS["gpt2-lm"](0), MODELS["gpt2-lm"](1)
    foreign = {**dict(a), "model_ema.decay": torch.tensor([0.5]), "ema.model.norm.weight": torch.zeros(20)}
    stray = open_checkpoint(foreign, config=a.config)
    for models in ([stray, b], [b, stray]):
        with pytest.raises(SpecError, match=r"not declared: model_ema\.decay, ema\.model\.norm\.weight"):
            api.merge(models)


def test_c61_c62_depth_and_width(tmp_path: Path) -> None:
    ours = MODELS["bert"](0)
    for options, message in (
        ({"num_hidden_layers": 3}, r"numbers of layers differ: (2 and 3|3 and 2)"),
        ({"hidden_size": 24}, r"hidden sizes .* differ: (20 and 24|24 and 20)"),
    ):
        refused(tmp_path, message, ours, of("BertModel", "BertConfig", TEXT, **options)(0))


def test_c88_the_layout_of_the_input_files_does_not_matter(tmp_path: Path) -> None:
    a, b = MODELS["bert-mlm"](0), MODELS["bert-mlm"](1)
    whole = [model.save(tmp_path / f"whole{i}") for i, model in enumerate((a, b))]
    cut = b.save(tmp_path / "cut", max_shard_size="9KB")
    assert len(list(cut.glob("*.safetensors"))) > 4
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(dict(b), pickled / "pytorch_model.bin")
    (pickled / "config.json").write_text(json.dumps(dict(b.config)), "utf-8")
    first = api.merge(whole, weights=[0.3, 0.7]).save(tmp_path / "first")
    for number, other in enumerate((cut, pickled)):
        again = api.merge([whole[0], other], weights=[0.3, 0.7]).save(tmp_path / f"again{number}")
        assert (again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


def test_c97_inputs_are_byte_for_byte_what_they_were(tmp_path: Path) -> None:
    folders = [MODELS["gpt2-lm"](seed).save(tmp_path / str(seed)) for seed in (0, 1)]
    before = {path: path.read_bytes() for folder in folders for path in folder.iterdir()}
    aligned = api.align(folders)
    api.merge(aligned.checkpoints).save(tmp_path / "out")
    assert {path: path.read_bytes() for folder in folders for path in folder.iterdir()} == before


@pytest.mark.parametrize("base", [0, 1])
def test_c101_the_files_of_the_base_come_along(tmp_path: Path, base: int) -> None:
    folders = [MODELS["gpt2-lm"](seed).save(tmp_path / str(seed)) for seed in (0, 1)]
    for i, folder in enumerate(folders):
        (folder / "generation_config.json").write_text(json.dumps({"max_length": i}), "utf-8")
        (folder / "chat_template.jinja").write_text(f"template {i}", "utf-8")
        (folder / "code.py").write_text("raise SystemExit", "utf-8")
    alignment = match(folders[0], folders[1])
    out = api.merge([alignment(open_checkpoint(folders[0])), folders[1]], base=base).save(tmp_path / "out")
    assert json.loads((out / "generation_config.json").read_text("utf-8")) == {"max_length": base}
    assert (out / "chat_template.jinja").read_text("utf-8") == f"template {base}"
    assert not (out / "code.py").exists()
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md", "alignment-1.symfuse", "chat_template.jinja", "config.json", "generation_config.json",
        "model.safetensors", "symfuse.json",
    ]  # fmt: skip
    assert os.access(out / "model.safetensors", os.R_OK)
