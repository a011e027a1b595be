"""The adapter on A and the moved one on A' compute the same: real adapters of peft, in float64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from command import done, run
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, SymmetryError
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.transporting import transport
from transporting.trained import FOLDED, SCALED, base_folder, load, moved, outputs, train, with_adapter

pytest.importorskip("peft", reason="peft is not installed")

QKV = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*QKV, "gate_proj", "up_proj", "down_proj"]
BERT = ["query", "key", "value", "dense"]
IMAGES = ["q_proj", "v_proj", "o_proj", "fc1", "fc2"]  # names of memory; files have others
# Model, options of peft, frame. A folded frame of BERT does not exist, one of ViT neither without its head.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "bert": ("bert", {"r": 3, "lora_alpha": 5, "task_type": "SEQ_CLS", "target_modules": BERT}, ()),
    "bert, all biases": ("bert", {"r": 3, "task_type": "SEQ_CLS", "bias": "all", "target_modules": BERT}, ()),
    "bert, embedding": ("bert", {"r": 3, "target_modules": ["word_embeddings", "query"]}, ()),
    "bert, norms": (
        "bert", {"r": 3, "target_modules": ["value"], "modules_to_save": ["classifier", "LayerNorm", "output.dense"]},
        (),
    ),
    "gpt2": ("gpt2", {"r": 3, "lora_alpha": 7, "target_modules": ["c_attn", "c_proj", "c_fc"]}, ()),
    "gpt2, tied head": ("gpt2", {"r": 3, "target_modules": ["c_attn", "lm_head"]}, ()),
    "gpt2, folded": ("gpt2", {"r": 3, "target_modules": ["c_attn", "c_proj", "c_fc"]}, FOLDED),
    "gpt2, folded, head": ("gpt2", {"r": 3, "target_modules": ["c_attn", "lm_head"]}, FOLDED),
    "gpt2, folded, biases": ("gpt2", {"r": 3, "bias": "lora_only", "target_modules": ["c_proj"]}, FOLDED),
    "gpt2, centred only": ("gpt2", {"r": 3, "target_modules": ["c_attn", "c_proj"]}, ("untie", "centre")),
    "llama": ("llama", {"r": 3, "lora_alpha": 8, "use_rslora": True, "target_modules": [*ALL, "lm_head"]}, ()),
    "llama, patterns": (
        "llama",
        {"r": 4, "target_modules": ALL, "rank_pattern": {"q_proj": 2, "o_proj": 3}, "alpha_pattern": {"v_proj": 16}},
        (),
    ),
    "llama, folded": ("llama", {"r": 3, "target_modules": [*ALL, "embed_tokens", "lm_head"]}, FOLDED),
    "llama, saved": (
        "llama", {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, FOLDED,
    ),
    "llama, lora_bias": ("llama-bias", {"r": 2, "lora_alpha": 6, "lora_bias": True, "target_modules": QKV}, ()),
    "llama, folded, biases": ("llama-bias", {"r": 2, "bias": "lora_only", "target_modules": QKV}, FOLDED),
    "vit": ("vit", {"r": 3, "target_modules": ["projection", *IMAGES]}, ()),
    "dinov2": ("dinov2", {"r": 3, "target_modules": IMAGES}, ()),
    "dinov2, folded": ("dinov2", {"r": 3, "target_modules": IMAGES}, SCALED),
    "dinov2, folded, head": ("dinov2", {"r": 3, "target_modules": ["o_proj", "classifier"]}, SCALED),
    "dinov2, folded, biases": ("dinov2", {"r": 3, "bias": "lora_only", "target_modules": ["o_proj", "fc2"]}, SCALED),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_moved_adapter_computes_on_the_moved_model_what_it_did(case: str, tmp_path: Path) -> None:
    kind, options, frame = CASES[case]
    base = base_folder(kind, tmp_path / "base")
    expected = train(kind, options, base, tmp_path / "adapter")
    alignment = moved(base, tmp_path / "moved", frame, largest=True)
    transport(tmp_path / "adapter", alignment, base=base).save(tmp_path / "out")
    got = with_adapter(kind, tmp_path / "moved", tmp_path / "out")
    rms = kind.startswith("llama")  # whose norms compute in float32
    torch.testing.assert_close(got, expected, rtol=2e-4 if rms else 1e-9, atol=2e-4 if rms else 1e-10)
    assert float((expected - outputs(kind, load(kind, base))).abs().max()) > 1e-2  # the adapter does something
    wrong = with_adapter(kind, tmp_path / "moved", tmp_path / "adapter")
    assert float((wrong - expected).abs().max()) > 1e-2  # and does something else where it is not moved


def test_a_base_without_a_head_takes_that_of_the_adapter(tmp_path: Path) -> None:
    """A classifier that was trained on a masked language model, of which its config names the base only."""
    base = base_folder("bert", tmp_path / "base")
    options = {"r": 2, "task_type": "SEQ_CLS", "target_modules": ["query", "attention.output.dense"]}
    expected = train("bert", options, base, tmp_path / "adapter")
    alignment = moved(base, tmp_path / "moved")
    bare = {name.removeprefix("bert."): t for name, t in open_checkpoint(base).items() if name.startswith("bert.")}
    config = dict(open_checkpoint(base).config) | {"architectures": ["BertModel"]}
    for model in (bare, {f"bert.{name}": t for name, t in bare.items()}):
        encoder = open_checkpoint(model, config=config, name="encoder")
        result = transport(tmp_path / "adapter", alignment, base=encoder)
        assert any("a head that the adapter brings along" in note for note in result.notes)
        result.save(tmp_path / f"out{len(result.notes)}{model is bare}")
        got = with_adapter("bert", tmp_path / "moved", tmp_path / f"out{len(result.notes)}{model is bare}")
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_without_a_base_what_the_alignment_says_of_it_is_enough(tmp_path: Path) -> None:
    base = base_folder("bert", tmp_path / "base")
    expected = train("bert", {"r": 2, "target_modules": ["query", "dense"]}, base, tmp_path / "adapter")
    moved(base, tmp_path / "moved")
    base.rename(tmp_path / "gone")  # its config names a folder that is not there
    result = transport(tmp_path / "adapter", tmp_path / "moved")
    assert "the alignment moves biases" in result.notes[0]
    result.save(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == str(tmp_path / "moved")
    assert config["lora_bias"] is True
    torch.testing.assert_close(
        with_adapter("bert", tmp_path / "moved", tmp_path / "out"), expected, rtol=1e-9, atol=1e-10
    )


def test_a_translation_needs_a_bias_only_where_the_adapter_changes_what_it_goes_through(tmp_path: Path) -> None:
    base = base_folder("bert", tmp_path / "base")
    train("bert", {"r": 2, "target_modules": ["query", "value", "intermediate.dense"]}, base, tmp_path / "adapter")
    alignment = moved(base, tmp_path / "moved")
    names = load_file(
        transport(tmp_path / "adapter", alignment, base=base).save(tmp_path / "out") / "adapter_model.safetensors"
    )
    assert names.keys() == load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()


def test_leaving_out_what_the_translation_does_is_noticed(tmp_path: Path) -> None:
    """The negative control of lora_bias: without it the outputs differ."""
    base = base_folder("bert", tmp_path / "base")
    expected = train("bert", {"r": 2, "target_modules": ["attention.output.dense"]}, base, tmp_path / "adapter")
    out = transport(tmp_path / "adapter", moved(base, tmp_path / "moved"), base=base).save(tmp_path / "out")
    tensors = load_file(out / "adapter_model.safetensors")
    save_file({k: t * (0 if "lora_B.bias" in k else 1) for k, t in tensors.items()}, out / "adapter_model.safetensors")
    assert float((with_adapter("bert", tmp_path / "moved", out) - expected).abs().max()) > 1e-3


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    base = base_folder("bert", tmp_path / "base")
    train("bert", {"r": 2, "target_modules": ["query"]}, base, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    half = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(half, path)
    alignment = random_alignment(Model.of(open_checkpoint(base)).spec, 4, ["qk", "h", "residual"])
    small = dict(transport(tmp_path / "adapter", replace(alignment, shifts={}), base=base).tensors)
    save_file({name: tensor.double() for name, tensor in half.items()}, path)
    exact = transport(tmp_path / "adapter", replace(alignment, shifts={}), base=base).tensors
    assert all(torch.equal(small[name], exact[name].bfloat16()) for name in half)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"use_dora": True, "target_modules": ["q_proj"]}, CheckpointError, "DoRA"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [3]}, CheckpointError, "trainable tokens"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]}, SymmetryError,
            r"input_layernorm.weight' of a norm that the frame .* folds .*base\+adapter",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    base = base_folder("llama", tmp_path / "base")
    train("llama", {"r": 2, **options}, base, tmp_path / "adapter")
    alignment = moved(base, tmp_path / "moved", FOLDED)
    with pytest.raises(error, match=words):
        transport(tmp_path / "adapter", alignment, base=base)


def test_a_trained_layerscale_is_refused_where_it_is_folded(tmp_path: Path) -> None:
    base = base_folder("dinov2", tmp_path / "base")
    train("dinov2", {"r": 2, "target_modules": ["fc2"], "modules_to_save": ["layer_scale2"]}, base, tmp_path / "lora")
    alignment = moved(base, tmp_path / "moved", ("fold_scales",))
    with pytest.raises(SymmetryError, match=r"layer_scale2.lambda1' of a LayerScale that the frame .* folds"):
        transport(tmp_path / "lora", alignment, base=base)


def test_other_refusals_name_the_way_out(tmp_path: Path) -> None:
    base = base_folder("gpt2", tmp_path / "base")
    options = {"r": 2, "target_modules": ["wte", "attn.c_proj"]}
    train("gpt2", options, base, tmp_path / "embedding")
    train("gpt2", {"r": 2, "target_modules": ["c_attn"]}, base, tmp_path / "adapter")
    with pytest.raises(SymmetryError, match=r"peft has none for the embedding .*--no-biases"):
        transport(tmp_path / "embedding", moved(base, tmp_path / "moved"), base=base)
    folded = moved(base, tmp_path / "folded", FOLDED)
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(config | {"base_model_name_or_path": "some/model"}), "utf-8")
    with pytest.raises(OptionError, match=r"first rewrites the model \(untie, fold_norms.*--base"):
        transport(tmp_path / "adapter", folded)
    balanced = Alignment(folded.spec, {}, frame=(*FOLDED, "balance"))
    with pytest.raises(SymmetryError, match="balances heads first"):
        transport(tmp_path / "adapter", balanced, base=base)
    inexact = Alignment(folded.spec, {}, variants=("separate-qk",))
    with pytest.raises(SymmetryError, match="is inexact"):
        transport(tmp_path / "adapter", inexact, base=base)
    path.write_text(json.dumps(config | {"r": 3}), "utf-8")
    with pytest.raises(CheckpointError, match="expected a rank of 3"):
        transport(tmp_path / "adapter", folded, base=base)


def test_an_adapter_of_another_model_is_one_clear_error(tmp_path: Path) -> None:
    bert, gpt2 = (base_folder(kind, tmp_path / kind) for kind in ("bert", "gpt2"))
    train("bert", {"r": 2, "target_modules": ["query"]}, bert, tmp_path / "adapter")
    alignment = random_alignment(Model.of(open_checkpoint(gpt2)).spec, 0)
    with pytest.raises(IncompatibleError, match="is of a bert, this alignment of a gpt2"):
        transport(tmp_path / "adapter", alignment, base=bert)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(path.read_text("utf-8").replace(str(bert), "elsewhere"), "utf-8")
    with pytest.raises(CheckpointError, match="tensors that it changes are not in gpt2, as the alignment has it"):
        transport(tmp_path / "adapter", alignment)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a, _ = (base_folder("gpt2", tmp_path / name, seed) for seed, name in enumerate("ab"))
    expected = train("gpt2", {"r": 2, "target_modules": ["c_attn", "c_proj"]}, a, tmp_path / "lora")
    before = {path: path.read_bytes() for path in (tmp_path / "lora").iterdir()}
    done("align", "a", "--to", "b", "-o", "moved", "--axes", "all", "-q")
    result = done("transport", "lora", "--by", "moved", "-o", "lora-moved")
    assert "adapter of" in result.output
    assert "factors have a bias now" in result.output
    torch.testing.assert_close(
        with_adapter("gpt2", tmp_path / "moved", tmp_path / "lora-moved"), expected, rtol=1e-8, atol=1e-9
    )
    assert before == {path: path.read_bytes() for path in (tmp_path / "lora").iterdir()}
    card = ModelCard.load(tmp_path / "lora-moved" / "README.md")
    assert card.data.to_dict() == {"library_name": "peft", "tags": ["symfuse", "lora"]}  # no id of a hub
    assert str(tmp_path) not in card.text
    assert json.loads((tmp_path / "lora-moved" / "symfuse.json").read_text("utf-8"))["alignment"]["frame"]
    named = done("transport", "lora", "--by", "moved/alignment.symfuse", "-o", "other", "--new-base", "org/x", "--json")
    assert json.loads(named.stdout)["new_base"] == "org/x"
    assert ModelCard.load(tmp_path / "other" / "README.md").data.base_model == "org/x"
    wrong = run("transport", "lora", "--by", "moved", "-o", "out", "--axis", "residual")
    assert (wrong.exit_code, (tmp_path / "out").exists()) == (2, False)
