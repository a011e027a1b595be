"""timm's ViT and DeiT and open_clip's CLIP: read as declared families, proved, and written under their own names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import symfuse
from command import done
from reference.libraries import MODEL, SIZES, TEXT, VISION, OpenClip, TimmViT, random, saved, timm_config
from symfuse.architectures.timm import PLAIN
from symfuse.errors import OutputError, UnknownArchitectureError
from symfuse.io import Checkpoint, naming

IMAGES = torch.randn(3, 3, 12, 20, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
WORDS = torch.randint(0, 61, (4, 7), generator=torch.Generator().manual_seed(6))
DISTILLED = timm_config("deit_tiny_distilled_patch16_224")
QKV = "blocks.1.attn.qkv.weight"


@dataclass(frozen=True)
class Library:
    """make: its class, here or in the package itself. heads: outputs in transformers."""

    make: Callable[[], nn.Module]
    config: dict[str, Any]
    model_type: str
    logits: str
    inputs: dict[str, Tensor]
    weights: str = "model.safetensors"

    def run(self, module: nn.Module) -> Tensor:
        with torch.no_grad(), _double():
            found: Tensor = module(*self.inputs.values())
        return found


class _double:  # noqa: N801
    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


LIBRARIES = {
    "vit": Library(TimmViT, timm_config(), "vit", "logits", {"pixel_values": IMAGES}),
    "vit-unbiased": Library(lambda: TimmViT(biased=False), timm_config(), "vit", "logits", {"pixel_values": IMAGES}),
    "deit": Library(lambda: TimmViT(distilled=True), DISTILLED, "deit", "logits", {"pixel_values": IMAGES}),
    "clip": Library(
        OpenClip,
        {"model_cfg": MODEL, "preprocess_cfg": {"mean": [0.5] * 3}},
        "clip",
        "logits_per_image",
        {"pixel_values": IMAGES[:, :, :, :12], "input_ids": WORDS},
        "open_clip_model.safetensors",
    ),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    return LIBRARIES[request.param]


@pytest.fixture
def folders(library: Library, tmp_path: Path) -> list[Path]:
    return [saved(random(library.make(), seed), tmp_path / name, library.config) for seed, name in enumerate("ab")]


def loaded(library: Library, folder: Path) -> nn.Module:
    module = library.make().double().eval()
    module.load_state_dict(load_file(folder / library.weights))
    return module


def test_it_is_the_model_of_transformers(library: Library, folders: list[Path]) -> None:
    opened = symfuse.open(folders[0])
    assert opened.config["model_type"] == library.model_type
    assert any(f"read as a {library.model_type} of transformers" in note for note in opened.notes)
    with torch.no_grad():
        found = symfuse.to_module(opened, dtype=torch.float64)(**library.inputs)
    expected = library.run(loaded(library, folders[0]))
    torch.testing.assert_close(found[library.logits], expected, rtol=1e-12, atol=1e-12)


def test_what_is_moved_computes_the_same_in_its_own_class(
    library: Library, folders: list[Path], tmp_path: Path
) -> None:
    done("align", str(folders[0]), "--to", str(folders[1]), "-o", str(tmp_path / "moved"))
    before, after = (load_file(folder / library.weights) for folder in (folders[0], tmp_path / "moved"))
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in before.items()}
    changed = [name for name in before if not torch.allclose(before[name], after[name], atol=1e-3)]
    assert sum("qkv.weight" in name or "in_proj_weight" in name for name in changed) in (2, 5)  # in every layer
    config = "open_clip_config.json" if library.model_type == "clip" else "config.json"
    assert json.loads((tmp_path / "moved" / config).read_text("utf-8")) == library.config
    expected, found = (library.run(loaded(library, folder)) for folder in (folders[0], tmp_path / "moved"))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_it_is_written_as_it_was_read(library: Library, folders: list[Path], tmp_path: Path) -> None:
    symfuse.open(folders[0]).save(tmp_path / "out")
    before, after = (load_file(folder / library.weights) for folder in (folders[0], tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    symfuse.open(folders[1]).save(tmp_path / "out", overwrite=True)
    assert symfuse.open(tmp_path / "out").config == symfuse.open(folders[0]).config


@pytest.mark.parametrize("order", [1, -1])
def test_models_of_both_libraries_are_merged_under_the_names_of_the_first(
    library: Library, folders: list[Path], tmp_path: Path, order: int
) -> None:
    theirs = symfuse.open(folders[1])
    theirs.replace(before_save=()).save(tmp_path / "transformers")
    assert set(load_file(tmp_path / "transformers" / "model.safetensors")) == set(theirs)
    done("merge", *map(str, [folders[0], tmp_path / "transformers"][::order]), "-o", str(tmp_path / "out"))
    merged, one = symfuse.open(tmp_path / "out"), symfuse.open(folders[0])
    assert (tmp_path / "out" / library.weights).is_file() == (order == 1 or library.weights == "model.safetensors")
    assert merged.config.keys() >= one.config.keys()
    assert ("written under the names of" in str(merged.notes)) == (order == 1)
    for name in theirs:
        torch.testing.assert_close(merged[name], (one[name] + theirs[name]) / 2)


def test_another_order_of_queries_keys_and_values_is_noticed(
    library: Library, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the reference is equal says something: of the nearest other reading it is not."""
    swapped = [{file: (*names[1:], *names[:1]) for file, names in one.names.items()} for one in naming.NAMINGS]
    namings = [replace(one, names=names) for one, names in zip(naming.NAMINGS, swapped, strict=True)]
    monkeypatch.setattr(naming, "NAMINGS", namings)
    with torch.no_grad():
        found = symfuse.to_module(symfuse.open(folders[0]), dtype=torch.float64)(**library.inputs)[library.logits]
    assert not torch.allclose(found, library.run(loaded(library, folders[0])), atol=1e-6)


def test_state_dictionaries_and_single_files(tmp_path: Path) -> None:
    module = random(TimmViT(), 0)
    in_memory = symfuse.open(module.state_dict(), config=timm_config())
    assert in_memory.config["model_type"] == "vit"
    assert in_memory.finished().keys() == module.state_dict().keys()
    torch.testing.assert_close(in_memory.finished()[QKV], module.state_dict()[QKV], rtol=0, atol=0)
    torch.save({"state_dict": module.state_dict()}, tmp_path / "vit.pth")
    (tmp_path / "config.json").write_text(json.dumps(timm_config()), "utf-8")
    assert symfuse.open(tmp_path / "vit.pth").config == in_memory.config
    part = in_memory.part("vit.encoder.layer.1.attention.attention.key.weight", 7, 19)
    torch.testing.assert_close(part, module.state_dict()[QKV].flatten()[400 + 7 : 400 + 19], rtol=0, atol=0)


def test_a_base_model_has_no_pooler(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in random(TimmViT(), 0).state_dict().items() if not name.startswith("head")}
    opened = symfuse.open(state, config=timm_config())
    outputs = symfuse.to_module(opened, dtype=torch.float64)(pixel_values=IMAGES)
    assert outputs.pooler_output is None
    assert outputs.last_hidden_state.shape == (3, 13, 20)


SCALES = {f"blocks.{i}.ls1.gamma": torch.ones(20) for i in range(2)}


@pytest.mark.parametrize(
    ("config", "more", "why"),
    [
        (timm_config(), SCALES, r"blocks\.0\.ls1\.gamma, .* is no tensor of it"),
        (timm_config("vit_base_patch16_rope_224", model_args={}), {}, "no plain ViT or DeiT"),
        (timm_config(model_args={**SIZES, "global_pool": "avg"}), {}, "global_pool is 'avg'"),
        (timm_config(model_args={**SIZES, "fc_norm": True}), {}, "fc_norm is True"),
        (timm_config(model_args={**SIZES, "act_layer": "elu"}), {}, "act_layer is 'elu'"),
        (timm_config(model_args={**SIZES, "img_size": 24}), {}, "12 patches"),
        (timm_config("deit_tiny_distilled_patch16_224"), {"dist_token": torch.zeros(1, 1, 20)}, "11 patches"),
    ],
)
def test_other_models_of_the_library_are_merged_by_names_and_it_says_why(
    config: dict[str, Any], more: dict[str, Tensor], why: str
) -> None:
    opened = symfuse.open(random(TimmViT(), 0).state_dict() | more, config=config)
    assert opened.config == config
    assert opened.keys() >= {QKV}
    with pytest.raises(UnknownArchitectureError):
        symfuse.declare(opened)
    (note,) = opened.notes
    assert "merged by names and shapes" in note
    assert re.search(why, note)


def test_what_its_config_does_not_say_is_not_written(tmp_path: Path) -> None:
    folder = saved(random(TimmViT(), 0), tmp_path / "a", timm_config())
    model = {"model": str(folder), "layer_range": [0, 1]}
    recipe = {"merge_method": "passthrough", "slices": [{"sources": [model]}]}
    shorter = symfuse.merge_recipe(recipe)
    with pytest.raises(OutputError, match=r"timm.*num_hidden_layers: 1.*replace\(before_save=\(\)\)"):
        shorter.save(tmp_path / "out")
    shorter.replace(before_save=()).save(tmp_path / "out")
    assert symfuse.open(tmp_path / "out").config["num_hidden_layers"] == 1


def test_a_part_of_a_tensor_is_not_written_as_the_whole() -> None:
    opened = symfuse.open(random(TimmViT(), 0).state_dict(), config=timm_config())
    key = "vit.encoder.layer.1.attention.attention.key.weight"
    with pytest.raises(OutputError, match=rf"{key} \(missing\)"):
        opened.replace(tensors={name: tensor for name, tensor in opened.items() if name != key}).finished()
    with pytest.raises(OutputError, match=r"timm, .*: own"):
        opened.replace(tensors={**opened, "own": opened[key]}).finished()


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_the_reference_is_that_of_timm(name: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    library = LIBRARIES[name]
    module, ours = timm.create_model(library.config["architecture"], **SIZES, num_classes=7), random(library.make(), 0)
    module.double().eval().load_state_dict(ours.state_dict())
    torch.testing.assert_close(library.run(module), library.run(ours), rtol=1e-12, atol=1e-12)
    timm.models.save_for_hf(module, tmp_path, safe_serialization=True)
    assert symfuse.open(tmp_path).config == symfuse.open(ours.state_dict(), config=library.config).config


@pytest.mark.slow
def test_the_heads_of_the_plain_models_of_timm() -> None:
    """They are in no tensor of a file, and in its config only where they are not those of the name."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    names = [name for name in timm.list_models(["vit_*", "deit_*"]) if PLAIN.fullmatch(name)]
    assert len(names) > 20
    for name in names:
        with torch.device("meta"):
            module = timm.create_model(name)
        config = {"architecture": name, "pretrained_cfg": {"input_size": list(module.pretrained_cfg["input_size"])}}
        shapes = {key: torch.empty(tensor.shape, device="meta") for key, tensor in module.state_dict().items()}
        opened = Checkpoint(shapes, config, name=name)
        assert naming.as_family(opened).config["num_attention_heads"] == module.blocks[0].attn.num_heads


def test_the_reference_is_that_of_open_clip() -> None:
    package = pytest.importorskip("open_clip.model", reason="open_clip is not installed")
    vision, text, ours = package.CLIPVisionCfg(**VISION), package.CLIPTextCfg(**TEXT), random(OpenClip(), 0)
    with _double():  # its causal mask
        module = package.CLIP(MODEL["embed_dim"], vision, text, quick_gelu=True).eval()
    module.load_state_dict(ours.state_dict())
    library = LIBRARIES["clip"]
    with torch.no_grad():
        image, words, scale = module(*library.inputs.values())
    torch.testing.assert_close(scale * image @ words.mT, library.run(ours), rtol=1e-12, atol=1e-12)
