"""Opening folders: which files count, and each way in which a folder can be wrong."""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from symfuse.adapters import is_adapter
from symfuse.errors import CheckpointError
from symfuse.io import open as open_checkpoint
from symfuse.io.companions import companions
from symfuse.io.folder import read_json


def weights() -> dict[str, Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def folder(tmp_path: Path, config: object = {"model_type": "tiny"}) -> Path:
    out = tmp_path / "model"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    return out


def header_file(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def refused(path: Path, message: str) -> str:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors"])
def test_one_safetensors_file(tmp_path: Path, name: str) -> None:
    model = folder(tmp_path)
    save_file(weights(), model / name)
    checkpoint = open_checkpoint(model)
    assert (checkpoint.name, checkpoint.folder, checkpoint.where("a")) == ("model", model, name)
    assert (checkpoint.info("b").dtype, checkpoint.info("b").shape) == (torch.bfloat16, (4,))
    for key, tensor in weights().items():
        assert torch.equal(checkpoint[key], tensor)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "other.bin", "state_dict.pt", "model.pth"])
@pytest.mark.parametrize("zipped", [True, False])
def test_one_torch_file(tmp_path: Path, name: str, zipped: bool) -> None:
    model = folder(tmp_path)
    torch.save(weights(), model / name, _use_new_zipfile_serialization=zipped)
    torch.save({"step": 3}, model / "optimizer.pt")
    (model / "training_args.bin").write_bytes(pickle.dumps(object))
    checkpoint = open_checkpoint(model)
    for key, tensor in weights().items():
        assert torch.equal(checkpoint[key], tensor)
        assert checkpoint.info(key).shape == tensor.shape


def test_changing_a_tensor_in_memory_does_not_change_the_file(tmp_path: Path) -> None:
    model = folder(tmp_path)
    save_file(weights(), model / "model.safetensors")
    torch.save(weights(), model / "pytorch_model.bin")
    for prefer_bin, file in ((False, "model.safetensors"), (True, "pytorch_model.bin")):
        before = (model / file).read_bytes()
        open_checkpoint(model, prefer_bin=prefer_bin)["a"].zero_()
        assert (model / file).read_bytes() == before


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "not JSON"),
        ([1], b"", "not a JSON object"),
        ({"a": {"dtype": "F32"}}, b"", "entry for 'a' is not valid"),
        (
            {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
            b"1234",
            "entry for 'a' has negative numbers",
        ),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234", "expected 8 bytes.* 4"),
        ({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"1", "has dtype F4"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}, b"1234", "invalid header"),
        ({"__metadata__": {"format": "pt"}}, b"", "hold no tensors"),
    ],
)
def test_bad_headers(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    model = folder(tmp_path)
    header_file(model / "model.safetensors", header, data)
    refused(model, message)


@pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 64])
def test_not_a_safetensors_file(tmp_path: Path, content: bytes) -> None:
    model = folder(tmp_path)
    (model / "model.safetensors").write_bytes(content)
    refused(model, r"model\.safetensors is (empty|cut short|not a safetensors file)")


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_torch_file_cut_short(tmp_path: Path, cut: int) -> None:
    model = folder(tmp_path)
    path = model / "pytorch_model.bin"
    torch.save(weights(), path)
    path.write_bytes(path.read_bytes()[:-cut])
    refused(model, r"pytorch_model\.bin (was not loaded|cannot be read)")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "holds list, expected a dictionary"),
        ({}, "holds dict, expected a dictionary"),
        ({"epoch": 3, "a": torch.ones(2)}, "with other entries: epoch"),
        ({"model": {"a": torch.ones(1)}, "state_dict": {"a": torch.zeros(1)}}, "under each of"),
        ({"model": {"a": 3}}, "with other entries: model"),
        ({"a": torch.eye(3).to_sparse()}, "'a' is torch.sparse_coo, expected a dense tensor"),
        ({3: torch.eye(3)}, "the key 3 is not a tensor's name"),
    ],
)
def test_torch_files_with_something_else(tmp_path: Path, content: object, message: str) -> None:
    model = folder(tmp_path)
    torch.save(content, model / "pytorch_model.bin")
    refused(model, message)


def test_config_missing_or_unreadable(tmp_path: Path) -> None:
    model = folder(tmp_path)
    save_file(weights(), model / "model.safetensors")
    for content in ("{", "[1]", "\xff"):
        (model / "config.json").write_bytes(content.encode("latin-1"))
        refused(model, r"config\.json (cannot be read as JSON|holds list)")
    (model / "config.json").unlink()
    assert open_checkpoint(model).config == {}  # merged by names
    assert open_checkpoint(model, config={"a": 1}).config == {"a": 1}


def test_paths_that_are_no_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "is neither a file nor a folder")
    refused(tmp_path / "absent", "does not exist")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    refused(tmp_path / "link", "symbolic link to .*gone, which does not exist")
    with pytest.raises(CheckpointError, match=r"does not exist, and is not the id of a model on the hub"):
        open_checkpoint("./absent")


def test_no_weights(tmp_path: Path) -> None:
    model = folder(tmp_path)
    refused(model, r"holds no weights: expected .* found config\.json")
    (model / "adapter_model.safetensors").write_bytes(b"")
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    refused(
        model,
        r"holds an adapter of the model 'org/base', not a model\. As an input of a merge write .*: org/base\+",
    )
    with pytest.raises(CheckpointError, match=r"no \.bin file"):
        open_checkpoint(model, prefer_bin=True)


def test_several_files_without_order(tmp_path: Path) -> None:
    model = folder(tmp_path)
    save_file(weights(), model / "one.safetensors")
    save_file(weights(), model / "two.safetensors")
    refused(model, r"several weight files and no model\.safetensors\.index\.json: one\.safetensors, two")


def test_shards_without_index(tmp_path: Path) -> None:
    model = folder(tmp_path)
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for name, key in zip(names, "abc", strict=True):
        save_file({key: torch.ones(2)}, model / name)
    checkpoint = open_checkpoint(model)
    assert list(checkpoint) == ["a", "b", "c"]
    assert "index.json is missing; read the 3 shards" in checkpoint.notes[0]
    save_file({"a": torch.ones(2)}, model / names[1])
    refused(model, "repeats tensors of other shards .*: a")
    (model / names[1]).unlink()
    assert names[1] in refused(model, "holds 2 of 3 shards; absent")
    (model / names[2]).unlink()
    refused(model, "holds 1 of 3 shards")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {"a": 3}}, "has no weight_map"),
        ({"weight_map": {"a": "../model.safetensors"}}, "outside its folder"),
        ({"weight_map": {"a": "/model.safetensors"}}, "outside its folder"),
        ({"weight_map": {"a": "x.safetensors"}}, r"'b' of x\.safetensors is not in the index"),
    ],
)
def test_bad_indices(tmp_path: Path, index: object, message: str) -> None:
    model = folder(tmp_path)
    save_file(weights(), model / "x.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(model, message)


def test_a_key_in_two_shards(tmp_path: Path) -> None:
    model = folder(tmp_path)
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"a": torch.ones(2), name: torch.ones(1)}, model / name)
    mapping = {"a": "x.safetensors", "x.safetensors": "x.safetensors", "y.safetensors": "y.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    refused(model, r"'a' is mapped to x\.safetensors, found in x\.safetensors and y\.safetensors")


def test_what_is_ignored_is_said(tmp_path: Path) -> None:
    model = folder(tmp_path)
    save_file(weights(), model / "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    save_file({"a": torch.zeros(1)}, model / "consolidated.safetensors")
    expected = "model.safetensors.index.json, consolidated.safetensors ignored beside model.safetensors"
    assert open_checkpoint(model).notes == (expected,)


QUANTISED = [
    ({"layer.weight.quant_state.bitsandbytes__nf4": torch.uint8}, "bitsandbytes"),
    ({"h.weight": torch.int8, "h.SCB": torch.float32}, "bitsandbytes"),
    ({"h.weight_packed": torch.int32, "h.weight_scale": torch.float16}, "compressed-tensors"),
    ({"experts.gate_up_proj_blocks": torch.uint8, "experts.gate_up_proj_scales": torch.uint8}, "MXFP4"),
    ({"h.W_q": torch.uint8}, "HQQ"),
    ({"h.qweight": torch.int32}, "GPTQ or AWQ"),
]


@pytest.mark.parametrize(("tensors", "scheme"), QUANTISED)
def test_quantised_by_its_names(tmp_path: Path, tensors: dict[str, torch.dtype], scheme: str) -> None:
    model = folder(tmp_path)
    save_file({name: torch.ones(2, dtype=dtype) for name, dtype in tensors.items()}, model / "model.safetensors")
    refused(model, f"is quantised with {scheme}: found .* Use the original model")


@pytest.mark.parametrize("where", ["top", "nested"])
def test_quantised_by_its_config(tmp_path: Path, where: str) -> None:
    settings = {"quantization_config": {"quant_method": "fancy"}}
    model = folder(tmp_path, settings if where == "top" else {"text_config": settings})
    save_file(weights(), model / "model.safetensors")
    refused(model, r"its config has a quantization_config \(fancy\)")


def test_ordinary_names_are_not_taken_for_quantised(tmp_path: Path) -> None:
    model = folder(tmp_path, {"quantization_config": None})
    names = [
        "encoder.down_blocks",
        "norm.scale",
        "logit_scale",
        "q_weight",
        "absmax_pool.weight",
        "scales",
        "SCBs",
    ]
    save_file({name: torch.ones(2) for name in names}, model / "model.safetensors")
    assert set(open_checkpoint(model)) == set(names)


def test_companion_files(tmp_path: Path) -> None:
    taken = [
        "1_Pooling/config.json", "LICENSE", "LICENSE.txt", "added_tokens.json", "chat_template.jinja",
        "config_sentence_transformers.json", "generation_config.json", "merges.txt", "modules.json",
        "preprocessor_config.json", "processor_config.json", "sentence_bert_config.json",
        "sentencepiece.bpe.model", "special_tokens_map.json", "spiece.model", "tokenizer.json",
        "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    ]  # fmt: skip
    left = [
        "1_Pooling/model.safetensors", "2_Dense/pytorch_model.bin", "README.md", "config.json", "LICENSE.py",
        "model.safetensors", "modeling_x.py", "pytorch_model.bin", "tokenization_x.py", "tokenizer.py",
        "training_args.bin", "onnx/config.json", "optimizer.pt",
    ]  # fmt: skip
    for name in (*taken, *left):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    assert [path.as_posix() for path in companions(tmp_path)] == sorted(taken)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON: .*it is a pipe, expected a file"):
        read_json(tmp_path / "config.json")


def test_an_adapter_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(CheckpointError, match=rf"{tmp_path} cannot be read: .*Permission denied"):
        assert not is_adapter(tmp_path)


def test_a_message_on_a_file_url_has_the_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/none does not exist"):
        open_checkpoint(f"file://localhost{tmp_path}/none")
