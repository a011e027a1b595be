"""Axes where nobody names any: inside of layers for related models, all for models that were trained apart."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import symfuse
from command import done, run
from contract.tiny import DISTIL, MODELS, of
from symfuse.errors import IncompatibleError
from symfuse.io import Checkpoint
from symfuse.matching import coordinate, descent
from symfuse.matching.auto import cosine
from symfuse.model import Model

INSIDE = {"qk", "v", "ffn"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which axes are matched is decided before any search, and so it does not depend on how long that is."""
    monkeypatch.setattr(descent, "SWEEPS", 2)
    monkeypatch.setattr(coordinate, "ROUNDS", 1)


@cache
def apart(label: str) -> symfuse.Alignment:
    """Of two seeds of a model."""
    return symfuse.match(MODELS[label](0), to=MODELS[label](1))


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
    related, unrelated = symfuse.match(near(a), to=a), apart(label)
    assert axes_of(related) == INSIDE
    assert related.provenance["options"]["auto"]["cosine"] > 0.99
    assert related.frame == ()
    assert axes_of(unrelated) >= INSIDE | {"h", "residual"}
    assert abs(unrelated.provenance["options"]["auto"]["cosine"]) < 0.1
    named = symfuse.match(a, to=b, axes="all")
    assert named.to_bytes() != unrelated.to_bytes()  # which says why
    assert "auto" not in named.provenance["options"]
    assert {i: g.tensors() for i, g in named.elements.items()}.keys() == unrelated.elements.keys()


def test_a_stream_that_is_an_output_is_permuted_and_why_is_said() -> None:
    bare = apart("gpt2")
    assert bare.frame == ()
    assert axes_of(bare) >= {"residual"}
    assert "cannot be folded" in bare.provenance["options"]["not_rotated"]
    rotated = apart("gpt2-lm")
    assert rotated.frame != ()
    assert "not_rotated" not in rotated.provenance["options"]


def test_several_models_are_matched_on_the_same_axes() -> None:
    a, b = MODELS["gpt2-lm"](0), MODELS["gpt2-lm"](1)
    found = symfuse.align([a, near(a), b], anchor=0)
    assert [axes_of(g) >= {"residual"} for g in found.alignments if g is not None] == [True, True]
    assert axes_of(symfuse.align([a, near(a)], anchor=0).alignments[1]) == INSIDE
    universe = symfuse.align([a, b, MODELS["gpt2-lm"](2)], anchor="universe", rounds=1)
    assert len({g.frame for g in universe.alignments if g is not None}) == 1
    assert any("residual" in {i.axis for i in g.elements} for g in universe.alignments if g is not None)


def test_the_cosine_is_that_of_matrices() -> None:
    a, b = (Model.of(MODELS["bert-mlm"](seed)) for seed in (0, 1))
    pairs = [(x.flatten(), b.checkpoint[n].flatten()) for n, x in a.checkpoint.items() if x.ndim > 1]
    expected = sorted(float(torch.cosine_similarity(x, y, 0)) for x, y in pairs)[(len(pairs) - 1) // 2]
    assert cosine(a, b) == pytest.approx(expected, rel=1e-9)
    assert cosine(a, a) == pytest.approx(1)
    turned = Model.of(a.checkpoint.replace(tensors={n: -t for n, t in a.checkpoint.items()}))
    assert cosine(a, turned) == pytest.approx(-1)


def test_it_is_the_default_of_the_command_line_and_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a = MODELS["gpt2-lm"](0)
    for name, model in (("a", a), ("near", near(a)), ("b", MODELS["gpt2-lm"](1))):
        model.save(name)
    assert "models that share a basis (cosine" in done("align", "near", "--to", "a", "-o", "out1").stdout
    assert "models that do not share a basis (cosine" in done("align", "b", "--to", "a", "-o", "out2").stdout
    models = "models: [{model: a}, {model: b}]\n"
    Path("recipe.yml").write_text(f"merge_method: linear\n{models}parameters: {{weight: 0.5}}\nalign: {{anchor: 1}}\n")
    assert "residual" in done("check", "recipe.yml").stdout
    merged = done("merge", "recipe.yml", "out3")
    assert "residual" in merged.stdout
    Path("near.yml").write_text(Path("recipe.yml").read_text().replace("model: b", "model: near"))
    assert "residual" not in done("check", "near.yml").stdout


def gain_lost(checkpoint: Checkpoint) -> Checkpoint:
    """A model whose final norm cannot be folded: one of its gains is zero."""
    gain = checkpoint["transformer.ln_f.weight"].clone()
    gain[3] = 0
    return checkpoint.replace(tensors={**checkpoint, "transformer.ln_f.weight": gain}, name="lost")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_all_models_of_a_merge_are_in_one_frame(order: tuple[int, ...], tmp_path: Path) -> None:
    a, b, c = (MODELS["gpt2-lm-untied"](seed) for seed in (0, 1, 2))
    models = [(a, b, gain_lost(c))[i] for i in order]
    found = symfuse.align(models)
    assert {g.frame for g in found.alignments if g is not None} == {()}
    together = symfuse.merge_recipe(
        {
            "merge_method": "linear",
            "models": [{"model": name, "parameters": {"weight": 1.0}} for name in "xyz"],
            "align": {"anchor": "x"},
        },
        dict(zip("xyz", models, strict=True)),
    )
    gains = torch.stack([model["transformer.ln_f.weight"] for model in models])
    assert float((together["transformer.ln_f.weight"].sort().values - gains.mean(0).sort().values).abs().max()) > 0
    assert not bool((together["transformer.ln_f.weight"] == 1).any())


def test_models_that_can_all_be_folded_are() -> None:
    folded = symfuse.align([MODELS["gpt2-lm-untied"](seed) for seed in (0, 1, 2)])
    assert len({g.frame for g in folded.alignments if g is not None}) == 1
    assert all(bool((model["transformer.ln_f.weight"] == 1).all()) for model in folded.checkpoints)


@pytest.mark.parametrize("label", ["gpt2-lm-untied", "vit-classification"])
def test_models_of_two_frames_are_not_averaged(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = MODELS[label](0), MODELS[label](1)
    alignment = apart(label)
    with pytest.raises(IncompatibleError, match=r"all gains of norms are folded .* `alignment\.in_frame\(model\)`"):
        symfuse.merge([alignment(a), b])
    assert symfuse.merge([alignment(a), alignment.in_frame(b)])
    monkeypatch.chdir(tmp_path)
    alignment(a).save("a")
    b.save("b")
    refused = run("merge", "a", "b", "-o", "out")
    assert (refused.exit_code, Path("out").exists()) == (5, False)
    assert "--anchor-output" in refused.stderr
    assert "--force-config" in refused.stderr
    assert run("merge", "a", "b", "-o", "out", "--force-config").exit_code == 0
    stacked = {"merge_method": "passthrough", "models": [{"model": "a"}]}
    assert symfuse.merge_recipe(stacked)


def test_of_an_lm_and_its_base_the_universe_is_one() -> None:
    a, base, c = MODELS["gpt2-lm-untied"](0), MODELS["gpt2"](1), MODELS["gpt2-lm-untied"](2)
    found = symfuse.align([a, base, c], anchor="universe", axes="attention,ffn", rounds=2)
    assert all(symfuse.verify(m, g(m)).equal for m, g in zip((a, base, c), found.alignments, strict=True) if g)


def test_fixed_tables_decide_nothing() -> None:
    """Two seeds of a DistilBERT with sines for positions, which are the same in both and longer than all else."""
    a, b = (of("DistilBertForMaskedLM", "DistilBertConfig", DISTIL, sinusoidal_pos_embds=True)(seed) for seed in (0, 1))
    table = 50 * torch.sin(torch.arange(37 * 20, dtype=torch.float64)).reshape(37, 20)
    name = "distilbert.embeddings.position_embeddings.weight"
    a, b = (model.replace(tensors={**model, name: table}) for model in (a, b))
    assert abs(cosine(Model.of(a), Model.of(b))) < 0.1
