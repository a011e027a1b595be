"""Rotations by words: the same function in the same class, and refused by name where a model has none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import symfuse
from command import data, done, run
from contract.tiny import MODELS, case
from symfuse.alignment import Alignment
from symfuse.alignment.rewrites import spread
from symfuse.errors import CheckpointError, OptionError, SymmetryError
from symfuse.groups import Centred, Orthogonal, Similarity
from symfuse.model import Model
from symfuse.rewriting.rotations import hadamard, rotation
from symfuse.spec import Instance

# LayerNorm with a tied head, RMSNorm, LayerScale, grouped queries, a hybrid, norms without gains, several streams.
ROTATABLE = {
    "gpt2-lm": "hadamard", "llama-lm": "hadamard", "vit-classification": "hadamard", "dinov2-classification": "random",
    "olmo-clipped": "", "nemotron-h-lm": "random", "idefics3-lm": "hadamard",
}  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 12, 20, 28, 36, 44, 64, 76, 96, 384])
def test_hadamard_matrices(n: int) -> None:
    h = hadamard(n)
    assert h is not None
    assert torch.equal(h @ h.T, n * torch.eye(n, dtype=torch.float64))
    assert torch.equal(h[0], torch.ones(n, dtype=torch.float64))


def test_sizes_without_a_construction() -> None:
    assert all(hadamard(n) is None for n in (3, 6, 10, 92))


@pytest.mark.parametrize("n", [16, 24, 50])
@pytest.mark.parametrize("group", [Orthogonal(), Centred()])
def test_a_rotation_is_of_the_group_and_spreads_one_entry(n: int, group: Orthogonal | Centred) -> None:
    g = rotation(group, n, (3,), "hadamard", torch.Generator().manual_seed(1))
    assert group.contains(g, 1e-12)
    assert not torch.equal(g.matrix[0], g.matrix[1])
    assert float(g.matrix.abs().max()) < (1.01 / n**0.5 if isinstance(group, Orthogonal) and n != 50 else 0.9)


@pytest.mark.parametrize("label", ROTATABLE)
def test_rotated_models_compute_the_same(label: str) -> None:
    this = case(label)
    heads = [f"heads={ROTATABLE[label]}"] if ROTATABLE[label] else []  # the values of OLMo are clipped
    new = symfuse.rewrite(this.checkpoint, ["rotate=hadamard", *heads])
    assert this.error(new) < this.exact
    stream = next(i for i in Model.of(this.checkpoint).spec.movable if i.axis == "residual")
    name = next(n for n in this.spec.movable[stream] if len(this.checkpoint.info(this.spec.file_name(n)).shape) > 1)
    assert not torch.allclose(new[this.spec.file_name(name)], this.checkpoint[this.spec.file_name(name)])


@pytest.mark.parametrize("label", ["llama-lm", "gpt2-lm"])
def test_a_rotation_without_folded_norms_changes_outputs(label: str) -> None:
    this, stream = case(label), Instance("residual")
    n = this.spec.axes["residual"].size
    q = rotation(Orthogonal() if label == "llama-lm" else Centred(), n, (), "random", torch.Generator().manual_seed(0))
    plain = Alignment(this.spec, {stream: q})
    with pytest.raises(SymmetryError, match="no permutation part"):  # the gain of a norm refuses it
        dict(plain(this.checkpoint))
    names = {this.spec.file_name(name): name for name in this.spec.tensors}
    moved = {file: t for file, name in names.items() if (t := _moved(plain, this.checkpoint, name)) is not None}
    broken = this.checkpoint.replace(tensors={**dict(this.checkpoint), **moved})
    assert this.error(broken) > 1e-3


def _moved(by: Alignment, checkpoint: symfuse.Checkpoint, name: str) -> torch.Tensor | None:
    """The tensor rotated, except gains."""
    file = by.spec.file_name(name)
    return None if "|residual|" in str(by.spec.tensors[name].layout) else by.move(name, checkpoint[file])


def test_a_layer_norm_stream_is_not_turned_away_from_the_ones_vector() -> None:
    this = case("gpt2-lm")
    folded = symfuse.rewrite(this.checkpoint, ["untie", "fold_norms"])
    n = this.spec.axes["residual"].size
    q = Orthogonal().random(n, (), torch.Generator().manual_seed(0)).matrix
    assert not Centred().contains(Similarity(q), 1e-3)
    with pytest.raises(SymmetryError, match="does not map the ones vector to itself"):
        _with_file(folded, q)


def _with_file(model: symfuse.Checkpoint, matrix: torch.Tensor, name: str = "q.npz") -> symfuse.Checkpoint:
    np.savez(name, q=matrix.numpy())
    return symfuse.rewrite(model, [f"rotate={name}"])


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_matrix_of_ones_own() -> None:
    this = case("llama-lm")
    n = this.spec.axes["residual"].size
    q = Orthogonal().random(n, (), torch.Generator().manual_seed(3)).matrix
    assert this.error(_with_file(this.checkpoint, q)) < this.exact
    save_file({"q": q.float().contiguous()}, "q.safetensors")
    assert this.error(symfuse.rewrite(this.checkpoint, ["rotate=q.safetensors"])) < this.exact
    with pytest.raises(SymmetryError, match=r"not orthogonal: QᵀQ − 1 has an entry of 0\.21"):
        _with_file(this.checkpoint, 1.1 * q)
    with pytest.raises(OptionError, match=r"the matrix is \[23, 24\], and residual needs \[24, 24\]"):
        _with_file(this.checkpoint, q[1:])
    with pytest.raises(CheckpointError, match=r"none\.npz is not there"):
        symfuse.rewrite(this.checkpoint, ["rotate=none.npz"])
    with pytest.raises(CheckpointError, match="a file that ends in"):
        symfuse.rewrite(this.checkpoint, ["rotate=hadamrad"])
    np.savez("two.npz", a=q.numpy(), b=q.numpy())
    with pytest.raises(CheckpointError, match=r"two\.npz holds 2 tensors; expected one matrix"):
        symfuse.rewrite(this.checkpoint, ["rotate=two.npz"])


@pytest.mark.parametrize(
    ("label", "word", "why"),
    [
        ("bert-mlm", "rotate=hadamard", r"rotate needs norms without gains: .*post-norm.*; leave 'rotate' out$"),
        ("mamba-lm", "heads=random", r"values of heads of this mamba may not be rotated: no values of heads"),
        (
            "qwen3-next-lm",
            "heads=random",
            r"values of heads of this qwen3_next may not be rotated: what may act on them",
        ),
        ("torch-gelu-pre", "rotate=random", r"rotate needs norms without gains"),
    ],
)
def test_models_without_a_rotation_are_refused_by_name(label: str, word: str, why: str) -> None:
    with pytest.raises(SymmetryError, match=why):
        symfuse.rewrite(MODELS[label](), [word])


def test_words_that_are_none_or_there_twice() -> None:
    model = MODELS["llama-lm"]()
    with pytest.raises(OptionError, match=r"'heads=hadamrad' \(did you mean 'heads=hadamard'\?\)"):
        symfuse.rewrite(model, ["heads=hadamrad"])
    with pytest.raises(OptionError, match="the rewrite 'untie' is named twice; once is enough"):
        symfuse.rewrite(model, ["untie", "untie"])
    with pytest.raises(OptionError, match="named twice"):
        symfuse.rewrite(model, ["rotate=hadamard", "rotate=random"])
    for word in ("rotate", "rotate=", "untie=1", "heads"):
        with pytest.raises(OptionError, match=f"no rewrite is called '{word}'"):
            symfuse.rewrite(model, [word])


def test_what_changes_nothing_is_said() -> None:
    MODELS["llama-lm"](0).save("a")
    output = done("rewrite", "a", "centre", "drop_gauges", "untie", "fold_norms", "-o", "b").output
    assert "note: centre changes nothing here: its norms do not subtract the mean" in output
    assert "note: untie changes nothing here: its head is not tied" in output
    assert "fold_norms changes nothing" not in output


def test_the_command_says_what_it_needed_and_how_tensors_changed() -> None:
    this = MODELS["gpt2-lm"](0)
    this.save("a")
    found = data("rewrite", "a", "rotate=hadamard", "heads=random", "--seed", "5", "-o", "b")
    assert found["frame"] == ["untie", "fold_norms"]
    assert (found["moves"], found["seed"]) == (["rotate=hadamard", "heads=random"], 5)
    assert found["notes"][0] == "rotate needs untie, fold_norms, which are applied first"
    assert found["verified"]["equal"]
    assert found["tensors"] == {"before": spread(symfuse.open("a")), "after": spread(symfuse.open("b"))}
    assert json.loads(Path("b/symfuse.json").read_text("utf-8"))["tensors"] == found["tensors"]
    assert "moved by its own symmetries (rotate=hadamard, heads=random)" in Path("b/README.md").read_text("utf-8")
    again = symfuse.rewrite("a", ["heads=random", "rotate=hadamard"], seed=5)
    new = symfuse.open("b")
    assert all(torch.equal(new[name], again[name]) for name in new)
    other = symfuse.rewrite("a", ["heads=random", "rotate=hadamard"], seed=6)
    assert not torch.equal(new["transformer.wte.weight"], other["transformer.wte.weight"])
    assert run("rewrite", "a", "rotate=none.npz", "-o", "c").exit_code == 3
    assert not Path("c").exists()


def test_one_large_entry_is_spread() -> None:
    model = MODELS["llama-lm"](0)
    name = "model.embed_tokens.weight"
    planted = model.replace(tensors={**dict(model), name: model[name] * torch.where(torch.arange(24) == 3, 30.0, 1.0)})
    before, after = (spread(one)[name] for one in (planted, symfuse.rewrite(planted, ["rotate=hadamard"])))
    assert before["kurtosis"] > 10 * after["kurtosis"]
    assert before["max"] > 3 * after["max"]
    assert spread(symfuse.open({"x": torch.tensor([0.0, 0.0, 2.0, 0.0])}, config={"model_type": "none"})) == {
        "x": {"max": 2.0, "kurtosis": 4.0}
    }
