"""Folders of sentence-transformers: what stands behind the model is carried whole, and no hidden unit that it reads is
moved away from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import symfuse
from command import done, run
from contract.tiny import MODELS
from symfuse.alignment import random_alignment
from symfuse.errors import CheckpointError, IncompatibleError, SymmetryError
from symfuse.io.companions import module_weights, readers
from symfuse.model import Model
from symfuse.rewriting import canonical

KIND = "sentence_transformers.models."
POOLING = {"word_embedding_dimension": 20, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
DENSE = {"in_features": 20, "out_features": 5, "bias": True, "activation_function": "torch.nn.modules.linear.Identity"}
SMALL = {
    "config_sentence_transformers.json": {"prompts": {"query": "q: "}, "similarity_fn_name": "cosine"},
    "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
    "1_Pooling/config.json": POOLING,
    "3_Normalize/config.json": {},
}


def folder(
    path: Path,
    *,
    seed: int = 0,
    dense: str | None = None,
    label: str = "bert",
    pooling: dict[str, object] | None = None,
) -> Path:
    """A tiny model with its modules. dense: the name of the file that holds the weights of a dense layer."""
    MODELS[label](seed=seed).save(path)
    files = SMALL | {"1_Pooling/config.json": POOLING | (pooling or {})}
    names = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    listed = [{"idx": i, "name": str(i), "path": paths[n], "type": KIND + n} for i, n in enumerate(names)]
    files |= {"modules.json": listed} | ({"2_Dense/config.json": DENSE} if dense else {})
    for name, data in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(data))
    if dense:
        (path / "2_Dense" / dense).parent.mkdir(exist_ok=True)
        weights = dense_weights(seed)
        torch.save(weights, path / "2_Dense" / dense) if dense.endswith(".bin") else save_file(
            weights, path / "2_Dense" / dense
        )
    return path


def dense_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed + 50)
    return {"linear.weight": torch.randn(5, 20, generator=rng), "linear.bias": torch.randn(5, generator=rng)}


def small(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in [*SMALL, "modules.json"]}


@pytest.mark.parametrize("dense", [None, "model.safetensors", "pytorch_model.bin"])
def test_align_and_merge_carry_all_modules(dense: str | None, tmp_path: Path) -> None:
    a, b = (folder(tmp_path / name, seed=seed, dense=dense) for name, seed in (("a", 0), ("b", 7)))
    done("align", str(a), "--to", str(b), "--axes", "attention,ffn,heads", "-o", str(tmp_path / "moved"))
    done("merge", str(a), str(b), "-o", str(tmp_path / "merged"))
    for out, of, seed in ((tmp_path / "moved", a, 0), (tmp_path / "merged", a, 0)):
        assert small(out) == small(of)
        if dense is None:
            assert not (out / "2_Dense").exists()
            continue
        assert (out / "2_Dense/config.json").read_bytes() == (of / "2_Dense/config.json").read_bytes()
        found = load_file(out / "2_Dense/model.safetensors")
        assert found.keys() == dense_weights().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in dense_weights(seed).items())
        assert not (out / "2_Dense/pytorch_model.bin").exists()


def test_a_merge_says_that_modules_differ(tmp_path: Path) -> None:
    a, b = (folder(tmp_path / name, seed=seed, dense="model.safetensors") for name, seed in (("a", 0), ("b", 7)))
    c = folder(tmp_path / "c")
    said = done("merge", str(a), str(b), str(c), "-o", str(tmp_path / "out")).output
    for other in (b, c):
        assert f"2_Dense/model.safetensors of {other} and {a} differ; those of {a} are copied" in said
    assert "2_Dense" not in done("merge", str(a), str(a), "-o", str(tmp_path / "same")).output


def test_the_stream_under_a_dense_layer_is_not_moved(tmp_path: Path) -> None:
    a, b = (folder(tmp_path / name, seed=seed, dense="model.safetensors") for name, seed in (("a", 0), ("b", 7)))
    model = Model.of(symfuse.open(a))
    with pytest.raises(
        IncompatibleError, match=r"a: 2_Dense \(modules\.json\) read the units .* axis residual, .*--axes"
    ):
        symfuse.match(a, b, axes="all")
    with pytest.raises(IncompatibleError, match="2_Dense"):
        random_alignment(model.spec, 1, axes={"residual"})(model.checkpoint)
    failed = run("align", str(a), "--to", str(b), "--axes", "residual", "-o", str(tmp_path / "out"))
    assert failed.exit_code != 0
    assert not (tmp_path / "out").exists()


def test_auto_leaves_such_a_stream_where_it_is(tmp_path: Path) -> None:
    a, b = (folder(tmp_path / name, seed=seed, dense="model.safetensors") for name, seed in (("a", 0), ("b", 7)))
    found = symfuse.match(a, b)
    axes = {instance.axis for instance in found.elements}
    assert "h" in axes
    assert "residual" not in axes
    plain = [folder(tmp_path / name, seed=seed) for name, seed in (("c", 0), ("d", 7))]
    assert "residual" in {instance.axis for instance in symfuse.match(*plain).elements}


def test_which_modules_read_units(tmp_path: Path) -> None:
    assert readers(folder(tmp_path / "mean")) == []
    assert readers(folder(tmp_path / "dense", dense="pytorch_model.bin")) == ["2_Dense"]
    assert readers(folder(tmp_path / "max", pooling={"pooling_mode_max_tokens": True})) == ["1_Pooling"]
    newer = {"pooling_mode": "max", "embedding_dimension": 20}
    assert readers(folder(tmp_path / "newer", pooling=newer)) == ["1_Pooling"]
    MODELS["bert"]().save(tmp_path / "none")
    assert readers(tmp_path / "none") == []
    (tmp_path / "none" / "modules.json").write_text("[3, {")
    assert readers(tmp_path / "none") == []


def test_the_final_norm_is_not_folded_from_under_a_pooling(tmp_path: Path) -> None:
    """Its output is pooled, whatever head the checkpoint has beside."""
    path = folder(tmp_path / "a", label="gpt2-lm-untied")
    with pytest.raises(SymmetryError, match=r"\(modules\.json\) read the output of its final norm"):
        canonical(Model.of(symfuse.open(path)), ("fold_norms",))
    assert symfuse.match(path, folder(tmp_path / "b", seed=7, label="gpt2-lm-untied")).frame == ()


def test_weights_that_would_be_left_behind(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", dense="query/model.safetensors")
    with pytest.raises(CheckpointError, match=r"query/model\.safetensors of a module in modules\.json would not"):
        module_weights(path)
    with pytest.raises(CheckpointError, match="Save that module again"):
        symfuse.open(path).save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_list_that_names_folders_elsewhere(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    (tmp_path / "2_Dense").mkdir()
    save_file(dense_weights(), tmp_path / "2_Dense" / "model.safetensors")
    (path / "modules.json").write_text(json.dumps([{"path": "../2_Dense"}, {"path": str(tmp_path / "2_Dense")}]))
    assert readers(path) == []
    assert module_weights(path) == {}
