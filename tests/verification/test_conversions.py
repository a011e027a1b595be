"""Conversions between libraries, formats and names: what is equal is told as equal, and the place of what is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import symfuse
from command import run
from contract.tiny import MODELS, TEXT, of
from reference.libraries import MODEL, OpenClip, TimmViT, random, saved, timm_config
from symfuse.architectures.resnet import build
from symfuse.errors import CheckpointError, LayoutError, OptionError
from symfuse.io import Checkpoint

State = dict[str, Tensor]
QUERY, KEY = (f"vit.encoder.layer.1.attention.attention.{name}." for name in ("query", "key"))


def vit() -> tuple[State, Checkpoint]:
    """Weights by timm's names, and the model of transformers that they are."""
    state = random(TimmViT(), 0).state_dict()
    return state, symfuse.open(state, config=timm_config()).replace(before_save=(), name="vit")


def edited(checkpoint: Checkpoint, changed: Mapping[str, Tensor | None]) -> Checkpoint:
    """With other tensors, or without those that are None."""
    tensors = {name: checkpoint[name] for name in checkpoint} | dict(changed)
    return checkpoint.replace(tensors={n: t for n, t in tensors.items() if t is not None}, infos=None, name="edited")


def bare(state: Mapping[str, Tensor]) -> Checkpoint:
    """Without a config, as a file beside nothing."""
    return Checkpoint(dict(state), {}, name="file")


def in_torch(state: Mapping[str, Tensor], layer: str, prefix: str) -> State:
    """The layers of a BERT by the names of torch.nn.TransformerEncoder."""
    names = {
        "attention.output.dense": "self_attn.out_proj", "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "linear1", "output.dense": "linear2", "output.LayerNorm": "norm2",
    }  # fmt: skip
    out = {}
    for number in range(2):
        for end in ("weight", "bias"):
            qkv = [state[f"{layer}{number}.attention.self.{name}.{end}"] for name in ("query", "key", "value")]
            out[f"{prefix}{number}.self_attn.in_proj_{end}"] = torch.cat(qkv)
            out |= {
                f"{prefix}{number}.{new}.{end}": state[f"{layer}{number}.{old}.{end}"] for old, new in names.items()
            }
    return out


# -- equal ----------------------------------------------------------------------------------------


def test_timm_without_a_config_is_read_as_the_other_model() -> None:
    state, model = vit()
    result = symfuse.verify(bare(state), model)
    assert result.equal
    assert result.worst == 0
    assert result.notes[0] == "file: read with the config of vit"
    assert "those of timm" in result.notes[1]
    assert symfuse.verify(model, bare(state)).worst == 0


def test_open_clip_without_a_config_is_read_as_the_other_model() -> None:
    state = random(OpenClip(), 0).state_dict()
    model = symfuse.open(state, config={"model_cfg": MODEL}).replace(before_save=())
    assert symfuse.verify(bare(state), model).worst == 0
    swapped = {
        **state,
        "transformer.resblocks.2.attn.in_proj_weight": state["transformer.resblocks.2.attn.in_proj_weight"].roll(24, 0),
    }
    result = symfuse.verify(bare(swapped), model)
    assert not result.equal
    assert next(iter(result.tensors)).startswith("text_model.encoder.layers.2.self_attn.")


@pytest.mark.parametrize("prefix", ["", "net."])
def test_torchs_encoder_is_a_bert(prefix: str) -> None:
    model = of("BertForMaskedLM", "BertConfig", {**TEXT, "num_hidden_layers": 2})(0)
    layers = in_torch(dict(model), "bert.encoder.layer.", "body.layers.")
    body = nn.TransformerEncoder(nn.TransformerEncoderLayer(20, 4, 29), 2, enable_nested_tensor=False)
    assert {f"body.{name}" for name in body.state_dict()} == layers.keys()
    own = {name: model[name] for name in model if ".layer." not in name}
    own["tokens.weight"] = own.pop("bert.embeddings.word_embeddings.weight")
    own |= {f"norm.{end}": own.pop(f"bert.embeddings.LayerNorm.{end}") for end in ("weight", "bias")}
    own |= {f"out.{end}": own.pop(f"cls.predictions.transform.dense.{end}") for end in ("weight", "bias")}
    result = symfuse.verify(bare({prefix + name: tensor for name, tensor in (layers | own).items()}), model)
    assert result.worst == 0
    assert any("those of torch.nn.TransformerEncoder" in note for note in result.notes)
    (said,) = (note for note in result.notes if "read by their shapes alone" in note)
    for pair in ("norm.bias as bert.embeddings.LayerNorm.bias", "out.bias as cls.predictions.transform.dense.bias"):
        assert f"{prefix}{pair}" in said


def test_torchvisions_resnet_is_that_of_transformers() -> None:
    config: dict[str, Any] = {
        "layer_type": "basic", "hidden_sizes": [6, 10], "depths": [2, 1], "embedding_size": 6, "num_labels": 5,
    }  # fmt: skip
    torch.manual_seed(0)
    module = build({"model_type": "torchvision_resnet", **config}).double().eval()
    names = {"layer1.": "encoder.stages.0.layers.", "layer2.": "encoder.stages.1.layers.", "fc.": "classifier.1."}
    names |= {"downsample.0": "shortcut.convolution", "downsample.1": "shortcut.normalization"}
    names |= {f".conv{i}.": f".layer.{i - 1}.convolution." for i in (1, 2)}
    names |= {f".bn{i}.": f".layer.{i - 1}.normalization." for i in (1, 2)}
    names |= {"conv1.": "embedder.embedder.convolution.", "bn1.": "embedder.embedder.normalization."}
    state = module.state_dict()
    theirs = {}
    for name, tensor in state.items():
        new = name
        for old, now in names.items():
            new = new.replace(old, now)
        theirs[new if new.startswith("classifier") else f"resnet.{new}"] = tensor
    model = symfuse.open(
        theirs, config={"model_type": "resnet", "architectures": ["ResNetForImageClassification"], **config}
    )
    assert symfuse.verify(symfuse.open(module), model).worst < 1e-12
    changed = edited(
        model, {"resnet.encoder.stages.1.layers.0.shortcut.normalization.running_var": torch.full((10,), 2.0)}
    )
    assert not symfuse.verify(symfuse.open(module), changed).equal


def test_other_dtypes_and_shards_are_equal_to_the_rounding(tmp_path: Path) -> None:
    state, model = vit()
    model.to(torch.bfloat16).save(tmp_path / "half", max_shard_size="6KB")
    assert len([*(tmp_path / "half").glob("*.safetensors")]) > 1
    half = symfuse.verify(bare(state), tmp_path / "half")
    assert half.equal
    assert half.worst == 0  # a rounded copy is that of the same numbers
    assert not half.tensors
    assert half.notes[-1].startswith("file: 40 tensors are rounded to bfloat16, as in half")
    moved = symfuse.verify(tmp_path / "half", edited(model, {f"{QUERY}bias": model[f"{QUERY}bias"] * 1.02}))
    assert moved.worst > 0
    assert moved.tolerance == 3e-2
    assert [*moved.tensors] == [f"{QUERY}bias"]


def test_a_lightning_checkpoint_with_more_than_the_model() -> None:
    state, model = vit()
    trained = {f"net.{name}": tensor for name, tensor in state.items()} | {"loss.weight": torch.ones(3)}
    result = symfuse.verify(bare(trained), model)
    assert result.worst == 0
    assert any(note.endswith("left out: loss.weight") for note in result.notes)


def test_two_files_are_read_like_a_third_model() -> None:
    state, model = vit()
    other = {f"net.{name}": tensor for name, tensor in state.items()}
    with pytest.raises(CheckpointError, match=r"no config\.json; name a model of the same class .*--like MODEL"):
        symfuse.verify(bare(state), bare(other))
    assert symfuse.verify(bare(state), bare(other), like=model).worst == 0
    with pytest.raises(OptionError, match=r"like: vit and vit have configs of their own; leave bert out"):
        symfuse.verify(model, model, like=MODELS["bert"](0).replace(name="bert"))


MAPS = [f"transformer.h.{{l}}.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]


def test_names_may_be_given_with_what_is_transposed() -> None:
    """As nanoGPT has GPT-2: its maps are stored [out, in]."""
    model = MODELS["gpt2-lm"](0)
    ends = tuple(name.partition("}")[2] for name in MAPS)
    state = {name: model[name].mT if name.endswith(ends) else model[name] for name in model}
    names = {name: {"transposed": name} for name in MAPS}
    assert symfuse.verify(bare(state), model, names=names).worst == 0
    with pytest.raises(LayoutError):
        symfuse.verify(bare(state), model)
    result = symfuse.verify(bare(state), model, names={**names, MAPS[1]: MAPS[1]})  # the one that is square
    assert not result.equal
    assert result.tensors["transformer.h.0.attn.c_proj.weight"].endswith("it is transposed")


def test_another_prefix_is_no_difference() -> None:
    model = MODELS["bert"](0)
    other = Checkpoint({f"bert.{name}": model[name] for name in model}, model.config, name="prefixed")
    assert symfuse.verify(model, other).worst == 0
    key = "encoder.layer.1.attention.self.key.weight"
    result = symfuse.verify(edited(model, {key: 2 * model[key]}), other)
    assert [*result.tensors] == [key]


# -- different -------------------------------------------------------------------------------------


def test_swapped_queries_and_keys_are_named() -> None:
    state, model = vit()
    swap = {
        f"{one}{end}": model[f"{other}{end}"]
        for one, other in ((QUERY, KEY), (KEY, QUERY))
        for end in ("weight", "bias")
    }
    result = symfuse.verify(bare(state), edited(model, swap))
    assert not result.equal
    assert len(result.tensors) == 4
    assert result.tensors[f"{QUERY}weight"].endswith(f"edited has it as {KEY}weight")


@pytest.mark.parametrize("reverse", [False, True])
def test_a_dropped_bias_is_named(reverse: bool) -> None:
    state, model = vit()
    less = edited(model, {f"{QUERY}bias": None})
    result = symfuse.verify(*((less, bare(state)) if reverse else (bare(state), less)))
    assert not result.equal
    assert result.differences == [f"tensors are missing, so that it cannot be run: {QUERY}bias is missing in edited"]
    assert json.dumps(result.to_dict(), allow_nan=False)
    other = "vit.encoder.layer.0.intermediate.dense.bias"
    assert symfuse.verify(bare(state), edited(model, {other: None})).tensors == {other: "is missing in edited"}
    assert repr(result).startswith("Verification(different, ")


def test_a_bias_that_a_file_lacks_is_zero_only_where_the_others_is() -> None:
    state, model = vit()
    proj = "blocks.1.attn.proj.bias"
    less = {name: tensor for name, tensor in state.items() if name != proj}
    other = "vit.encoder.layer.1.attention.output.dense.bias"
    assert symfuse.verify(bare(less), model).tensors == {other: "is missing in file"}
    zeroed = symfuse.verify(bare(less), edited(model, {other: torch.zeros(20, dtype=torch.float64)}))
    assert zeroed.equal
    assert any("taken as zero as in edited" in note for note in zeroed.notes)


def test_rows_in_another_order_are_told() -> None:
    _, model = vit()
    name = f"{QUERY}weight"
    order = torch.arange(20).reshape(4, 5).flip(1).flatten()  # within each head
    result = symfuse.verify(model, edited(model, {name: model[name][order]}))
    assert result.tensors == {name: result.tensors[name]}
    assert result.tensors[name].endswith("its rows are in another order")


def test_an_aligned_model_is_equal_though_its_tensors_differ() -> None:
    one, two = (MODELS["bert"](seed) for seed in (0, 1))
    result = symfuse.verify(one, symfuse.match(one, two, axes="attention,ffn")(one))
    assert result.equal
    assert result.tensors


# -- errors, and the command line ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ({"a": 3}, r"names: 'a' is 3; expected a name, a list of names, or transposed: NAME"),
        ({"a": {"rotated": "b"}}, r"expected a name"),
        ({"a": []}, r"expected a name"),
        ({}, r"names has no names"),
        ({"a.weight": "b.weight"}, r"names: a\.weight is in neither model"),
    ],
)
def test_names_that_are_none(names: dict[str, Any], why: str) -> None:
    state, model = vit()
    with pytest.raises(OptionError, match=why):
        symfuse.verify(bare(state), model, names=names)


def test_no_name_in_common() -> None:
    _, model = vit()
    with pytest.raises(CheckpointError, match=r"file: its names \(x0\) are not those of vit .*--names FILE"):
        symfuse.verify(bare({"x0": torch.ones(3)}), model)


Broken = Callable[[State], State]


@pytest.mark.parametrize("code", [0, 7, 2, 3])
def test_the_exit_code(code: int, tmp_path: Path) -> None:
    state, model = vit()
    model.save(tmp_path / "model")
    changed = {0: {}, 7: {"norm.bias": state["norm.bias"] + 1}}.get(code, {})
    torch.save({**state, **changed}, tmp_path / "vit.pt")
    (tmp_path / "names.yml").write_text("body: [1]\n", "utf-8")
    options = {2: ["--names", str(tmp_path / "names.yml")]}.get(code, [])
    other = tmp_path / ("gone.pt" if code == 3 else "vit.pt")
    result = run("verify", str(other), str(tmp_path / "model"), "--json", *options)
    assert result.exit_code == code, result.output
    if code in (0, 7):
        document = json.loads(result.stdout)
        assert document["equal"] == (code == 0)
        assert [*document["tensors"]] == ([] if code == 0 else ["vit.layernorm.bias"])
        assert document["notes"][0].endswith(f"read with the config of {tmp_path / 'model'}")


def test_the_first_tensor_is_printed(tmp_path: Path) -> None:
    _, model = vit()
    model.save(tmp_path / "model")
    saved(random(TimmViT(), 0), tmp_path / "timm", timm_config())
    weights = load_file(tmp_path / "timm" / "model.safetensors")
    fused = weights["blocks.0.attn.qkv.weight"]
    save_file(
        {**weights, "blocks.0.attn.qkv.weight": fused.roll(20, 0).contiguous()}, tmp_path / "timm" / "model.safetensors"
    )
    result = run("verify", str(tmp_path / "model"), str(tmp_path / "timm"))
    assert result.exit_code == 7
    assert "tensors: vit.encoder.layer.0.attention.attention." in result.stdout
    quiet = run("verify", str(tmp_path / "model"), str(tmp_path / "timm"), "-q")
    assert "attention.query.weight" in quiet.stderr


def test_integers_are_compared_and_a_file_of_names_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = MODELS["bert"]()
    model.save("a")
    model.save("b")
    name = "encoder.layer.0.intermediate.dense.weight"
    save_file({**dict(model.items()), name: (model[name] * 40).to(torch.int8)}, "b/model.safetensors")
    found = run("verify", "a", "b")
    assert (found.exit_code, isinstance(found.exception, SystemExit)) == (7, True)
    assert f"{name} differs by" in found.output
    Path("names.yml").write_text("hi", "utf-8")
    found = run("verify", "a", "a", "--names", "names.yml")
    assert found.exit_code == 2
    assert "names.yml: expected a mapping" in found.output
