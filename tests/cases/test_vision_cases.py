"""Encoders of images, alone and beside one of texts: LayerScale, tokens that are no patches, towers that meet. Named
after the cases; each move is exact on the real class, and beside it stands what breaks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from cases.moved import BROKEN, EXACT, left_behind
from command import done, run
from contract.tiny import CLIP, MODELS, SQUARE, TOWER_TEXT, TOWER_VISION, Case, case, of
from recovery.planted import EVERYTHING, planted, size
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import IncompatibleError, OptionError, SpecError, SymmetryError
from symfuse.groups import Centred, Monomial, Permutation, Similarity
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.matching import choose_axes
from symfuse.matching.problem import ROTATABLE, rotatable
from symfuse.model import Model
from symfuse.modules import live
from symfuse.rewriting import canonical, fold_norms, fold_scales
from symfuse.spec import Declared, Instance, parse

# ---- C55: LayerScale

SCALED = ["dinov2-masked", "dinov2-gated", "dinov2-registers-masked", "beit-masked"]
TURNED = ["dinov2-classification", "dinov2-registers-classification", "beit-classification", "beit-codes-masked"]


def scales_of(this: Case) -> list[str]:
    return [this.spec.file_name(gain) for gain in this.spec.scales]


@pytest.mark.parametrize("label", SCALED)
def test_c55_a_permutation_of_the_stream_permutes_the_scales(label: str) -> None:
    this = case(label)
    g = random_alignment(this.spec, 5, {"residual"})
    assert this.error(g(this.checkpoint), g) < EXACT
    assert len(scales_of(this)) == 4  # two in each of two layers
    for name in scales_of(this):
        assert left_behind(this, g, [name]) > BROKEN, name


@pytest.mark.parametrize("label", [*SCALED, *TURNED])
def test_c55_scales_are_folded_into_weight_and_bias(label: str) -> None:
    this = case(label)
    model = Model.of(this.checkpoint)
    folded = fold_scales(model)
    assert this.error(folded.checkpoint) < EXACT
    for gain, weight in model.spec.scales.items():
        assert bool((folded.read(gain) == 1).all())
        bias = model.spec.file_name(weight.removesuffix("weight") + "bias")
        forgotten = {**folded.checkpoint, bias: this.checkpoint[bias]}
        assert this.error(folded.checkpoint.replace(tensors=forgotten)) > BROKEN
    again = fold_scales(folded)
    assert again is folded
    assert fold_scales(Model.of(case("vit").checkpoint)).spec == case("vit").spec


@pytest.mark.parametrize("label", TURNED)
def test_c55_behind_folded_scales_the_stream_is_turned(label: str) -> None:
    this = case(label)
    frame = rotatable(this.spec)
    assert frame == ("fold_scales", *ROTATABLE)
    spec = canonical(Model.of(this.checkpoint), frame).spec
    assert spec.axes["residual"].group == Centred()
    g = replace(random_alignment(spec, 3, largest=True), frame=frame)
    assert this.error(g(this.checkpoint), g) < EXACT


@pytest.mark.parametrize("label", TURNED)
def test_c55_before_scales_are_folded_a_turn_is_refused_and_would_break(label: str) -> None:
    this = case(label)
    model = Model.of(this.checkpoint)
    for name in ("fold_norms", "centre", "drop_gauges"):
        with pytest.raises(SymmetryError, match=r"lambda.* scale what is written.*'fold_scales'"):
            canonical(model, (name,))
    # As though the scales were of no axis, so that nothing is refused.
    tensors = dict(model.spec.tensors)
    tensors |= {gain: Declared(parse("20"), tensors[gain].index) for gain in model.spec.scales}
    forced = fold_norms(replace(model, spec=replace(model.spec, tensors=tensors)))
    assert this.error(forced.checkpoint) < EXACT
    g = random_alignment(forced.spec, 3, {"residual"})
    assert this.error(g.on(forced), g) > BROKEN


def test_c55_a_planted_rotation_behind_scales_is_found() -> None:
    plant = planted("dinov2-classification")
    found = plant.match()
    assert found.frame == ("fold_scales", *ROTATABLE)
    turned = found.elements[Instance("residual", ())]
    assert isinstance(turned, Similarity)
    assert plant.left(found) < 1e-12 * size(plant.home.checkpoint)
    assert api.prove(plant.moved, found).exact.equal


# ---- C56: class, position, register and mask tokens


@pytest.mark.parametrize(
    ("label", "tokens"),
    [
        ("dinov2-masked", {"cls_token", "mask_token", "position_embeddings"}),
        ("dinov2-registers-masked", {"cls_token", "mask_token", "position_embeddings", "register_tokens"}),
        ("beit-masked", {"cls_token", "mask_token", "position_embeddings"}),
        ("clip-vision", {"class_embedding", "position_embedding.weight"}),
        ("siglip-vision", {"position_embedding.weight"}),
    ],
)
def test_c56_a_residual_move_covers_every_token_and_the_patches(label: str, tokens: set[str]) -> None:
    this = case(label)
    g = random_alignment(this.spec, 5, {"residual"})
    assert this.error(g(this.checkpoint), g) < EXACT
    embedded = {name.partition("embeddings.")[2] for name in this.checkpoint if "embeddings." in name}
    assert embedded - {name for name in embedded if name.startswith("patch_embedding")} == tokens
    names = [name for name in this.checkpoint if "embeddings." in name]
    names += ["head.probe"] if label == "siglip-vision" else []
    for name in names:
        assert left_behind(this, g, [name]) > BROKEN, name


@pytest.mark.parametrize(
    ("make", "positions"),
    [
        (lambda size: of("Dinov2Model", "Dinov2Config", SQUARE | {"mlp_ratio": 3, "image_size": size}), "10 and 17"),
        (lambda size: of("CLIPVisionModel", "CLIPVisionConfig", TOWER_VISION | {"image_size": size}), "10 and 17"),
        (lambda size: of("SiglipVisionModel", "SiglipVisionConfig", TOWER_VISION | {"image_size": size}), "9 and 16"),
    ],
)
def test_c56_other_numbers_of_positions_are_refused(make: object, positions: str) -> None:
    small, large = (make(side)() for side in (15, 20))  # type: ignore[operator]
    for verb in (api.match, lambda a, b: api.relate(a, b).distance, lambda a, b: api.merge([a, b])):
        with pytest.raises(IncompatibleError, match=f"numbers of positions differ: {positions}"):
            verb(small, large)


# ---- C17: names of towers in files of two generations


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_c17_a_tower_under_its_old_and_its_new_name(order: tuple[int, int]) -> None:
    """Up to `transformers` 4 a text encoder alone had `text_model.` before all names."""
    new, other = (MODELS["clip-text"](seed) for seed in (0, 1))
    old = Checkpoint({f"text_model.{name}": tensor for name, tensor in other.items()}, other.config, name="old")
    assert Model.of(old).spec.tensors == Model.of(new).spec.tensors
    models = [(new, old)[i] for i in order]
    found = api.match(models[1], to=models[0], axes="attention,ffn")
    merged = api.merge([models[0], found(models[1])])
    assert set(merged) == set(models[0])
    assert api.prove(models[1], found).exact.equal


def test_c17_old_files_hold_position_ids() -> None:
    this = case("clip")
    ids = {f"{part}_model.embeddings.position_ids": torch.arange(9)[None] for part in ("text", "vision")}
    spec = Model.of(this.checkpoint.replace(tensors={**this.checkpoint, **ids})).spec
    assert spec.buffers == set(ids)


# ---- Towers


def test_each_tower_has_axes_of_its_own() -> None:
    this = case("clip")
    words = {
        "text_attention": {"text_qk", "text_v"},
        "attention": {"text_qk", "text_v", "vision_qk", "vision_v"},
        "vision_h": {"vision_h"},
        "residual": {"text_residual", "vision_residual"},
        "projection": {"projection"},
    }
    for word, axes in words.items():
        assert set(choose_axes(word, this.spec)) == axes
    other = MODELS["clip"](seed=1)
    found = api.match(other, to=this.checkpoint, axes="vision_attention,vision_ffn", layers="2")
    assert {str(i) for i in found.elements} == {"vision_qk[2]", "vision_v[2]", "vision_ffn[2]"}
    with pytest.raises(OptionError, match="layers 0 to 2"):
        api.match(other, to=this.checkpoint, layers="3")
    with pytest.raises(OptionError, match="has no such axis"):
        api.match(other, to=this.checkpoint, axes="decoder_attention")


def test_the_space_where_towers_meet_is_turned_and_the_logits_stay() -> None:
    this = case("clip")
    g = random_alignment(this.spec, 3, {"projection"})
    outputs = api.verify(this.checkpoint, g(this.checkpoint)).errors
    assert outputs["logits_per_image"] < EXACT
    assert outputs["image_embeds"] > BROKEN
    assert this.error(g(this.checkpoint), g) < EXACT
    for name in ("text_projection.weight", "visual_projection.weight"):
        assert left_behind(this, g, [name]) > BROKEN


@pytest.mark.parametrize("label", ["clip", "siglip"])
def test_the_stream_of_texts_is_turned_and_that_of_images_is_not(label: str) -> None:
    """It begins with a norm (CLIP), or a probe is read as it is (SigLIP): gains that stay."""
    spec = canonical(Model.of(case(label).checkpoint), ROTATABLE).spec
    assert spec.axes["text_residual"].group == Centred()
    assert spec.axes["vision_residual"].group == Permutation()
    g = replace(random_alignment(spec, 3, largest=True), frame=ROTATABLE)
    assert case(label).error(g(case(label).checkpoint), g) < EXACT


def test_planted_elements_of_both_towers_are_found() -> None:
    plant = planted("clip")
    found = plant.match()
    assert found.frame == ROTATABLE
    kinds = {part: type(found.elements[Instance(f"{part}_residual", ())]) for part in ("text", "vision")}
    assert kinds == {"text": Similarity, "vision": Monomial}
    assert plant.left(found) < 1e-12 * size(plant.home.checkpoint)
    assert api.prove(plant.moved, found).exact.equal


@pytest.mark.slow
def test_heads_that_share_a_table_have_one_order() -> None:
    this = case("beit-shared")
    assert this.spec.axes["h"].per == ()
    plant = planted("beit-shared")
    found = plant.match()
    assert {str(i) for i in found.elements} >= {"h", "qk[0]", "qk[1]"}
    assert plant.left(found) < 1e-12 * size(plant.home.checkpoint)


def test_a_class_with_two_norms_of_one_name_is_refused() -> None:
    both = MODELS["beit-codes-masked"]()
    with pytest.raises(SpecError, match="two norms called layernorm"):
        Model.of(both.replace(config={**both.config, "use_mean_pooling": False}))


def test_sizes_that_a_config_does_not_say_are_those_of_the_class() -> None:
    """Files of other tools name only what is not usual."""
    this = case("clip")
    part = {key: value for key, value in TOWER_TEXT.items() if key != "num_hidden_layers"}
    config = {**this.checkpoint.config, "text_config": part}
    with pytest.raises(SpecError, match=r"missing: text_model\.encoder\.layers\.2\."):  # of twelve
        Model.of(this.checkpoint.replace(config=config))
    with pytest.raises(SpecError, match=r"text_config\.hidden_size is 0, expected a positive integer"):
        Model.of(this.checkpoint.replace(config={**config, "text_config": {**part, "hidden_size": 0}}))
    vision = {**this.checkpoint.config["vision_config"], "hidden_act": "gelu"}
    other = this.checkpoint.replace(config={**this.checkpoint.config, "vision_config": vision})
    with pytest.raises(IncompatibleError, match=r"vision_config\.hidden_act: 'quick_gelu' and 'gelu'"):
        api.match(this.checkpoint, to=other)


# ---- The command line


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a, and b: a with noise, then moved."""
    root = tmp_path_factory.mktemp("clips")
    model = of("CLIPModel", "CLIPConfig", CLIP)()
    live(model, torch.float32).save_pretrained(root / "a")
    rng = torch.Generator().manual_seed(0)
    shaken = {name: t + 1e-2 * torch.randn(t.shape, generator=rng, dtype=t.dtype) for name, t in model.items()}
    moved = random_alignment(case("clip").spec, 5, {"text_ffn", "text_h", "vision_ffn", "vision_h"})
    live(moved(model.replace(tensors=shaken)), torch.float32).save_pretrained(root / "b")
    return root


def test_two_towers_from_the_command_line(clips: Path, tmp_path: Path) -> None:
    axes = "attention,ffn,heads,residual"
    done("align", f"{clips}/b", "--to", f"{clips}/a", "--axes", axes, "-o", f"{tmp_path}/c")
    done("verify", f"{clips}/b", f"{tmp_path}/c")
    assert run("verify", f"{clips}/a", f"{clips}/b").exit_code == 7
    assert Alignment.load(tmp_path / "c/alignment.symfuse").frame == ROTATABLE
    shown = done("inspect", f"{clips}/a").output
    assert "vision_ffn" in shown
    assert "text_residual: may be rotated in a frame" in shown
    words = ["--align", "text_ffn,vision_ffn,heads", "--anchor", "1"]
    done("merge", f"{clips}/a", f"{clips}/b", *words, "-o", f"{tmp_path}/m")
    for folder in ("c", "m"):
        _, report = transformers.CLIPModel.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values()), report
    a, m = (open_checkpoint(folder) for folder in (clips / "a", tmp_path / "m"))
    gaps = sum(float((a[name] - m[name]).square().sum()) for name in a)
    assert gaps < 1e-3 * size(a)  # half of the noise; as they are, most weights differ


@pytest.mark.slow
def test_all_axes_of_each_family_from_end_to_end() -> None:
    for label in ("siglip", "dinov2-gated"):
        one, other = MODELS[label](3), MODELS[label](4)
        found = api.match(one, to=other, axes=EVERYTHING, starts=1)
        assert api.prove(one, found).exact.equal
