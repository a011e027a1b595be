"""Models that are one file: weights without a config, trainers' checkpoints, GGUF; and formats that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import symfuse
from command import done, everything, run
from contract.tiny import DECODER, of
from symfuse.errors import CheckpointError
from symfuse.io import Checkpoint
from symfuse.io.folder import CONVERTED_BY

STATE = {"0.weight": torch.arange(12.0).reshape(3, 4), "0.bias": torch.tensor([1.0, -2.0, 5.0])}
SAVED = {
    "a.safetensors": lambda path, state: save_file(state, path),
    "a.pt": lambda path, state: torch.save(state, path),
    "a.bin": lambda path, state: torch.save({"model": state}, path),
    # As Lightning writes it: other entries beside the weights.
    "a.ckpt": lambda path, state: torch.save(
        {"state_dict": state, "epoch": 3, "optimizer_states": [{"state": {}}], "hyper_parameters": {"lr": 0.1}}, path
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_file_without_a_config_is_merged_by_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SAVED[name](Path(name), STATE)
    SAVED[name](Path(f"b{Path(name).suffix}"), {key: 3 * value for key, value in STATE.items()})
    before = everything(tmp_path)
    result = done("merge", name, f"b{Path(name).suffix}", "-o", "out")  # beside its inputs
    assert "it has no config.json: its tensors are known by names and shapes alone" in result.stdout
    merged = symfuse.open("out")
    assert {key: merged[key].tolist() for key in merged} == {key: (2 * value).tolist() for key, value in STATE.items()}
    assert {key: value for key, value in everything(tmp_path).items() if not key.startswith("out/")} == before


def test_a_folder_without_a_config_is_merged_by_names(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    opened = symfuse.open(tmp_path)
    assert dict(opened.config) == {}
    assert any("no config.json" in note for note in opened.notes)
    with pytest.raises(symfuse.errors.UnknownArchitectureError, match=r"no config\.json"):
        symfuse.align([opened, opened])


def test_a_file_in_a_models_folder_is_that_model(tmp_path: Path) -> None:
    model = _llama()
    model.replace(files={"tokenizer.json": b"{}"}).save(tmp_path / "a")
    opened = symfuse.open(tmp_path / "a" / "model.safetensors")
    assert opened.config == symfuse.open(tmp_path / "a").config
    assert opened.companions() == {"tokenizer.json": b"{}"}
    assert symfuse.verify(opened, tmp_path / "a").equal


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    opened = symfuse.open(tmp_path / "a.safetensors")
    before = opened.state()
    save_file({key: value + 1 for key, value in STATE.items()}, tmp_path / "a.safetensors")
    assert opened.state() != before


@pytest.mark.parametrize("attribute", ["model.", "net."])
def test_weights_of_lightning_are_those_of_its_model(attribute: str, tmp_path: Path) -> None:
    """Its module gives all names the name of the attribute that the model is."""
    model = _llama()
    (tmp_path / "config.json").write_text(json.dumps(model.config), "utf-8")
    state = {attribute + name: tensor for name, tensor in model.items()}
    trained = {"state_dict": state, "epoch": 3, "global_step": 9, "loops": {"fit_loop": {}}, "lr_schedulers": [{}]}
    torch.save(trained | {"pytorch-lightning_version": "2.5.0"}, tmp_path / "last.ckpt")
    opened = symfuse.open(tmp_path / "last.ckpt")
    assert any(f"without the prefix {attribute[:-1]!r}" in note for note in opened.notes)
    assert symfuse.declare(opened) == symfuse.declare(model)
    assert all(torch.equal(opened[name], model[name]) for name in model)
    assert symfuse.align([opened, model], axes=("ffn",))
    torch.save(trained, tmp_path / "other.ckpt")  # of another trainer: names are what they are
    assert set(symfuse.open(tmp_path / "other.ckpt")) == set(state)
    several = {**state, "loss.weight": torch.ones(3)}
    torch.save(trained | {"state_dict": several, "pytorch-lightning_version": "2.5.0"}, tmp_path / "more.ckpt")
    assert set(symfuse.open(tmp_path / "more.ckpt")) == set(several)


def test_what_runs_code_is_not_loaded(tmp_path: Path) -> None:
    torch.save({"state_dict": STATE, "hyper_parameters": Path("x")}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="can run code"):
        symfuse.open(tmp_path / "a.ckpt")


def test_a_shard_is_no_model(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="is one of 2 shards of a model; give their folder"):
        symfuse.open(tmp_path / "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("suffix", CONVERTED_BY)
def test_other_formats_name_what_converts_them(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"x{suffix}"
    file.write_bytes(b"x")
    for place in (file, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            symfuse.open(place)
        assert f"x{suffix} is converted by {CONVERTED_BY[suffix]}" in str(caught.value)


def test_other_files_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"x\.txt is not a weight file .* Expected a folder, or a file that ends"):
        symfuse.open(tmp_path / "x.txt")


# ---- GGUF

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}
SIZES = DECODER | {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 96}


def _llama(seed: int = 0) -> Checkpoint:
    return of("LlamaForCausalLM", "LlamaConfig", SIZES | {"tie_word_embeddings": False})(seed).to(torch.float32)


def _interleaved(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of the rows of queries and keys: the two of each rotary plane are neighbours."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _write_gguf(path: Path, model: Checkpoint, kind: gguf.GGMLQuantizationType) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config["vocab_size"])
    for name in model:
        tensor, new = model[name], name
        for old, short in NAMES.items():
            new = new.replace(old, short)
        if "q_proj" in name or "k_proj" in name:
            tensor = _interleaved(tensor, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        blocks = kind if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(tensor.numpy()), blocks)
        writer.add_tensor(new, data, raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("kind", "error"), [("F32", 0.0), ("Q8_0", 0.005)])
def test_gguf_is_dequantised(kind: str, error: float, tmp_path: Path) -> None:
    model = _llama()
    _write_gguf(tmp_path / "a.gguf", model, gguf.GGMLQuantizationType[kind])
    for place in (tmp_path / "a.gguf", tmp_path):
        opened = symfuse.open(place)
        assert "dequantised to float32" in opened.notes
        assert set(opened) == set(model)
        for name in model:
            torch.testing.assert_close(opened[name], model[name], rtol=0, atol=error * float(model[name].abs().max()))
    assert symfuse.verify(opened, model).equal is (kind == "F32")


def test_gguf_is_merged_and_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("a", 0), ("b", 1)):
        _write_gguf(Path(f"{name}.gguf"), _llama(seed), gguf.GGMLQuantizationType.F32)
    done("merge", "a.gguf", "b.gguf", "-o", "out", "--align", "attention,ffn")
    assert json.loads(Path("out/config.json").read_text("utf-8"))["architectures"] == ["LlamaForCausalLM"]
    _llama(0).save("a")
    _llama(1).save("b")
    done("merge", "a", "b", "-o", "same", "--align", "attention,ffn")
    one, other = symfuse.open("out"), symfuse.open("same")
    torch.testing.assert_close({name: one[name] for name in one}, {name: other[name] for name in other})


def test_gguf_that_cannot_be_read_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _write_gguf(Path("a.gguf"), _llama(), gguf.GGMLQuantizationType.F32)
    whole = Path("a.gguf").read_bytes()
    for size in (0, 3, 100, len(whole) - 100):
        Path("a.gguf").write_bytes(whole[:size])
        result = run("inspect", "a.gguf")
        assert (result.exit_code, result.stderr.count("\n")) == (3, 1), result.output
    Path("a.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in run("inspect", "a.gguf").stderr
    Path("b.gguf").write_bytes(whole)
    assert "several GGUF files (a.gguf, b.gguf); give one of them" in run("inspect", ".").stderr
