"""Models of images and words, composed from their parts: what acts on both, what would only seem to, and their configs
and names by release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.test_must_fail import BROKEN, acting, applied, changed, undeclared
from contract.test_must_fail_encoders import relaid, rolled
from contract.tiny import LLAVA, MODELS, case, family, model_of, moving
from contract.tiny import of as made_of
from symfuse.architectures import ARCHITECTURES, resolve
from symfuse.architectures.base import declaration, is_declared
from symfuse.errors import SpecError, UnknownArchitectureError
from symfuse.groups import Group, Invertible, Orthogonal, Permutation, Rotary, Signed
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Axis

JOINED = [label for label in MODELS if label.endswith("-lm") and ARCHITECTURES[family(label)].parts]
MERGED = ("qwen2-5-seeing-lm", "qwen3-seeing-lm", "internvl-normed-lm", "idefics3-lm", "llama4-seeing-lm")


@pytest.mark.parametrize("label", ["llava-next-lm", "gemma3-seeing-lm", *MERGED])
def test_the_outputs_depend_on_the_images_and_on_their_encoder(label: str) -> None:
    this = case(label)
    pixels = {**this.inputs, "pixel_values": this.inputs["pixel_values"] + 0.1}
    assert replace(this, inputs=pixels).error(this.checkpoint) > BROKEN
    first = next(name for name in this.spec.tensors if "patch" in name and name.endswith("weight"))
    file = this.spec.file_name(first)
    assert changed(this, {file: this.checkpoint[file] * 1.1}) > BROKEN


@pytest.mark.parametrize("label", ["llava-next-lm", "gemma3-seeing-lm", "mistral3-lm", *MERGED])
def test_what_lies_between_writes_to_the_stream_of_the_words(label: str) -> None:
    """Left where it is, while the words' stream is moved, it breaks the model."""
    this = case(label)
    g = moving(this.spec, 3, {"residual"})
    between = [
        name
        for name in this.spec.movable[next(i for i in this.spec.movable if i.axis == "residual")]
        if not name.startswith(("language_model", "text_model", "lm_head"))
    ]
    assert between
    files = [this.spec.file_name(name) for name in between]
    moved = dict(applied(this, g)) | {file: this.checkpoint[file] for file in files}
    assert this.error(this.checkpoint.replace(tensors=moved), g) > BROKEN


@pytest.mark.parametrize("label", [*MERGED, "mistral3-lm"])
def test_one_element_acts_on_all_patches_that_are_read_side_by_side(label: str) -> None:
    """Those of one map may not be reordered across patches."""
    this = case(label)
    sizes = this.spec.sizes
    patches = next(name for name in sizes if name.endswith("patches"))
    whole = {f"({patches} vision_residual*)": "side*", f"(vision_residual* {patches})": "side*"}
    norms = {f"({patches} |vision_residual|)": "|side|", f"({patches} vision_residual)": "side"}
    side = Axis(sizes[patches] * sizes["vision_residual"], Permutation())
    spec = relaid(this.spec, whole | norms, {"side": side})
    assert undeclared(this, rolled(spec, "side")) > BROKEN


@pytest.mark.parametrize(
    ("label", "axis", "group"),
    [
        ("llava-base", "projector_ffn", Signed()),
        ("llava-base", "vision_residual", Signed()),
        ("llava-base", "residual", Orthogonal()),
        ("gemma3-seeing-lm", "vision_residual", Signed()),
        ("mistral3-lm", "vision_residual", Orthogonal()),
        ("mistral3-lm", "vision_c", Invertible()),
        ("qwen2-5-seeing-lm", "vision_c", Invertible()),
        ("qwen2-5-seeing-lm", "vision_residual", Orthogonal()),  # before its norms are folded
        ("qwen2-5-seeing-lm", "vision_merger_ffn", Signed()),
        ("qwen3-seeing-lm", "vision_deep_ffn", Signed()),
        ("qwen3-seeing-lm", "vision_residual", Signed()),
        ("qwen3-seeing-lm", "c", Rotary()),  # behind norms of queries and keys
        ("internvl-normed-lm", "vision_residual", Signed()),  # what lies between subtracts the mean
        ("internvl-normed-lm", "vision_qk", Invertible()),
        ("idefics3-lm", "vision_residual", Signed()),
        ("llama4-seeing-lm", "vision_c", Invertible()),
        ("llama4-seeing-lm", "vision_adapter_ffn", Signed()),
        ("llama4-seeing-lm", "vision_projection", Signed()),  # which has passed GELU
        ("qwen3-5-seeing-lm", "vision_merger_ffn", Signed()),
    ],
)
def test_larger_groups_break(label: str, axis: str, group: Group) -> None:
    this = case(label)
    g = acting(this.spec, axis, group)
    assert undeclared(this, replace(g, spec=relaid(this.spec, {f"|{axis}|": axis}, {}))) > BROKEN


@pytest.mark.parametrize("label", ["llava-qwen2-lm", "mistral3-lm", "qwen2-5-seeing-lm"])
def test_streams_are_rotated_once_their_norms_are_folded(label: str) -> None:
    """Both of them where the norms of both are RMSNorms, and all that reads the images' stream does so behind one."""
    this = case(label)
    folded = canonical(model_of(label), ["untie", "fold_norms"])
    rotated = {axis for axis in ("residual", "vision_residual") if folded.spec.axes[axis].group == Orthogonal()}
    assert rotated == ({"residual", "vision_residual"} if "2-5" in label else {"residual"})
    assert this.error(moving(folded.spec, 3, rotated).on(folded)) < this.exact


# ---- names and configs by release


def by_release(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    def name(old: str) -> str:
        return next((new + old.removeprefix(known) for known, new in names.items() if old.startswith(known)), old)

    return checkpoint.replace(tensors={name(old): tensor for old, tensor in checkpoint.items()})


MEMORY = {
    "language_model.lm_head.": "lm_head.", "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector.",
    "image_newline": "model.image_newline",
}  # fmt: skip


@pytest.mark.parametrize(
    ("label", "names"),
    [
        ("llava-next-lm", MEMORY),
        ("llava-next-lm", {"vision_tower.": "vision_tower.vision_model."}),
        ("gemma3-seeing-lm", MEMORY | {"vision_tower.": "model.vision_tower.vision_model."}),
        ("qwen2-5-seeing-lm", {"visual.": "model.visual.", "model.": "model.language_model."}),
    ],
)
def test_files_of_other_releases(label: str, names: Mapping[str, str]) -> None:
    this = case(label)
    other = by_release(this.checkpoint, names)
    assert other.keys() != this.checkpoint.keys()
    spec = Model.of(other).spec
    assert spec.tensors == this.spec.tensors
    assert spec.axes == this.spec.axes
    g = moving(spec, 4)
    torch.testing.assert_close(dict(g(other)), dict(by_release(g(this.checkpoint), names)), rtol=0, atol=0)


def test_experts_in_pieces_under_the_names_of_another_release() -> None:
    make = made_of("LlavaForConditionalGeneration", "LlavaConfig", LLAVA, text_config={
        **LLAVA["text_config"], "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2,
    })  # fmt: skip
    model = Model.of(make())
    assert any("experts.3" in name for name in model.checkpoint)
    assert model.spec.files.keys() == set(model.checkpoint)
    assert {"e", "ffn", "vision_ffn"} <= {instance.axis for instance in model.spec.movable}


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (
            {
                "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "vision_feature_layer": -2,
                "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
                "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096,
                                  "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336,
                                  "patch_size": 14},
            },
            {"residual": 4096, "l": 32, "ffn": 11008, "vision_residual": 1024, "vision_l": 24, "projector_ffn": 4096,
             "vision_positions": 577},
        ),
        (
            {
                "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                                "num_hidden_layers": 34, "sliding_window": 1024},
                "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                                  "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896,
                                  "patch_size": 14, "vision_use_head": False},
            },
            {"residual": 2560, "vocab": 262208, "kv": 4, "q": 2, "v": 256, "vision_positions": 4096},
        ),
        (
            {
                "model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "hidden_size": 1536,
                "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 28, "vocab_size": 151936,
                "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
                "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": True,
                "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
                                  "hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2},
            },
            {"residual": 1536, "l": 28, "kv": 2, "q": 6, "vision_residual": 1280, "vision_ffn": 5120,
             "vision_merger_ffn": 5120},
        ),
    ],
    ids=["llava-1.5", "gemma-3-4b", "qwen2-vl-2b"],
)  # fmt: skip
def test_published_configs_say_little(config: dict[str, Any], sizes: Mapping[str, int]) -> None:
    """What is absent is what its class takes; older files have the fields of the text among the others."""
    family, _ = declaration(config, [], "m")
    assert {name: family.axes[name].size for name in sizes} == sizes


def test_a_part_that_is_not_declared() -> None:
    """Its model is merged by names, and cannot be aligned; the error says which part."""
    model = case("llava-next-lm").checkpoint
    config = {**model.config, "text_config": {**model.config["text_config"], "model_type": "own"}}
    strange = model.replace(config=config)
    assert is_declared(model.config)
    assert not is_declared(config)
    with pytest.raises(UnknownArchitectureError, match=r"text_config.*model_type 'own'"):
        resolve(strange.config, strange)
    loose = Model.of(strange, undeclared=True)
    assert not loose.declared
    assert not loose.spec.movable


def test_an_image_encoder_that_is_missing_is_named() -> None:
    model = case("llava-next-lm").checkpoint
    text: dict[str, Tensor] = {name: tensor for name, tensor in model.items() if "vision" not in name}
    with pytest.raises(Exception, match=r"vision_tower\.embeddings"):
        Model.of(model.replace(tensors=text))


@pytest.mark.parametrize("label", ["internvl-lm", "mistral3-lm"])
def test_a_head_of_its_own_stays_where_the_config_does_not_say(label: str) -> None:
    """Their classes tie heads unless the config says otherwise, or the file has one."""
    this = case(label)
    silent = {key: value for key, value in this.checkpoint.config.items() if key != "tie_word_embeddings"}
    own = Model.of(this.checkpoint.replace(config=silent))
    assert own.spec.tied == {}
    assert "lm_head.weight" in own.spec.tensors
    head = this.spec.file_name("lm_head.weight")
    tied = this.checkpoint.replace(
        config=silent, tensors={name: tensor for name, tensor in this.checkpoint.items() if name != head}
    )
    assert "lm_head.weight" not in Model.of(tied).spec.tensors


@pytest.mark.parametrize("part", [[1], "x", {"model_type": ["llama"]}, {"model_type": None}, {"hidden_size": "20"}])
def test_a_part_that_is_no_config_is_one_error(part: object) -> None:
    for key in ("text_config", "vision_config"):
        with pytest.raises((SpecError, UnknownArchitectureError), match=r"config\.json"):
            declaration({**case("llava-next-lm").checkpoint.config, key: part}, [], "m")
