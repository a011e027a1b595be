"""Axes where nobody names any: inside of layers for related models, all for models that were trained apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import symfuse
from command import done
from contract.tiny import MODELS
from symfuse.architectures import Model
from symfuse.io import Checkpoint
from symfuse.matching.auto import cosine

INSIDE = {"qk", "v", "ffn"}


def near(checkpoint: Checkpoint, share: float = 0.01) -> Checkpoint:
    """A fine-tune of it: every weight moved by that share of its size."""
    rng = torch.Generator().manual_seed(7)

    def moved(tensor: Tensor) -> Tensor:
        return tensor + share * tensor.std() * torch.randn(tensor.shape, generator=rng, dtype=tensor.dtype)

    return checkpoint.replace(tensors={name: moved(t) for name, t in checkpoint.items()}, name="fine-tune")


def axes_of(alignment: symfuse.Alignment) -> set[str]:
    return set(alignment.provenance["options"]["axes"])


@pytest.mark.parametrize("label", ["bert-mlm", "gpt2-lm", "vit"])
def test_fine_tunes_are_matched_inside_of_layers_and_others_on_all_axes(label: str) -> None:
    a, b = MODELS[label](0), MODELS[label](1)
    related, apart = symfuse.match(near(a), to=a), symfuse.match(a, to=b)
    assert axes_of(related) == INSIDE
    assert related.provenance["options"]["auto"]["cosine"] > 0.99
    assert related.frame == ()
    assert axes_of(apart) >= INSIDE | {"h", "residual"}
    assert abs(apart.provenance["options"]["auto"]["cosine"]) < 0.1
    assert symfuse.match(a, to=b, axes="all").to_bytes() != apart.to_bytes()  # which says why
    named = symfuse.match(a, to=b, axes="all")
    assert "auto" not in named.provenance["options"]
    assert {i: g.tensors() for i, g in named.elements.items()}.keys() == apart.elements.keys()


def test_a_stream_that_is_an_output_is_permuted_and_why_is_said() -> None:
    bare = symfuse.match(MODELS["gpt2"](0), to=MODELS["gpt2"](1))
    assert bare.frame == ()
    assert axes_of(bare) >= {"residual"}
    assert "cannot be folded" in bare.provenance["options"]["not rotated"]
    rotated = symfuse.match(MODELS["gpt2-lm"](0), to=MODELS["gpt2-lm"](1))
    assert rotated.frame != ()
    assert "not rotated" not in rotated.provenance["options"]


def test_several_models_are_matched_on_the_same_axes() -> None:
    a, b = MODELS["gpt2-lm"](0), MODELS["gpt2-lm"](1)
    found = symfuse.align([a, near(a), b], anchor=0)
    assert [axes_of(g) >= {"residual"} for g in found.alignments if g is not None] == [True, True]
    assert axes_of(symfuse.align([a, near(a)], anchor=0).alignments[1]) == INSIDE
    universe = symfuse.align([a, b, MODELS["gpt2-lm"](2)], anchor="universe")
    assert len({g.frame for g in universe.alignments if g is not None}) == 1
    assert any("residual" in {i.axis for i in g.elements} for g in universe.alignments if g is not None)


def test_the_cosine_is_that_of_matrices() -> None:
    a, b = (Model.of(MODELS["bert-mlm"](seed)) for seed in (0, 1))
    pairs = [(x, b.checkpoint[n]) for n, x in a.checkpoint.items() if x.ndim > 1]
    one, other = (torch.cat([pair[i].flatten() for pair in pairs]) for i in (0, 1))
    torch.testing.assert_close(cosine(a, b), float(torch.cosine_similarity(one, other, 0)), rtol=1e-12, atol=1e-15)
    assert cosine(a, a) == pytest.approx(1)
    turned = Model.of(a.checkpoint.replace(tensors={n: -t for n, t in a.checkpoint.items()}))
    assert cosine(a, turned) == pytest.approx(-1)


def test_it_is_the_default_of_the_command_line_and_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a = MODELS["gpt2-lm"](0)
    for name, model in (("a", a), ("near", near(a)), ("b", MODELS["gpt2-lm"](1))):
        model.save(name)
    assert "models that are related (cosine" in done("align", "near", "--to", "a", "-o", "out1").stdout
    assert "trained apart (cosine" in done("align", "b", "--to", "a", "-o", "out2").stdout
    models = "models: [{model: a}, {model: b}]\n"
    Path("recipe.yml").write_text(f"merge_method: linear\n{models}parameters: {{weight: 0.5}}\nalign: {{anchor: 1}}\n")
    assert "residual" in done("check", "recipe.yml").stdout
    merged = done("merge", "recipe.yml", "out3")
    assert "residual" in merged.stdout
    Path("near.yml").write_text(Path("recipe.yml").read_text().replace("model: b", "model: near"))
    assert "residual" not in done("check", "near.yml").stdout
