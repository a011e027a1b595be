"""Files, disk, process: inputs that broke other tools, and the right behaviour. Named after the cases."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cases.disks import small_disk
from symfuse.errors import CheckpointError, OutputError, SymfuseError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
UP = "model.layers.0.mlp.up_proj.weight"


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
    return model


@pytest.fixture(scope="module")
def model() -> Checkpoint:
    return open_checkpoint(llama(), name="tiny")


@pytest.fixture
def saved(model: Checkpoint, tmp_path: Path) -> Path:
    return model.save(tmp_path / "a")


@pytest.fixture
def sharded(model: Checkpoint, tmp_path: Path) -> Path:
    out = model.save(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(out.glob("*.safetensors"))) == 2
    return out


def bare(tmp_path: Path, name: str = "a", **config: Any) -> Path:
    """A model folder with a config and no weights yet."""
    out = tmp_path / name
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **config}), encoding="utf-8")
    return out


def same(first: Checkpoint, second: Checkpoint) -> None:
    assert set(first) == set(second)
    for name in first:
        assert torch.equal(first[name], second[name]), name


def refused(path: Path, message: str) -> str:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    return str(caught.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def read_index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("where", ["safetensors", "bin", "memory"])
def test_c16_wrapper_prefixes(model: Checkpoint, tmp_path: Path, prefix: str, where: str) -> None:
    weights = {prefix + name: tensor for name, tensor in model.items()}
    folder = bare(tmp_path)
    if where == "safetensors":
        save_file(weights, folder / "model.safetensors")
    elif where == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    source = weights if where == "memory" else folder
    checkpoint = open_checkpoint(source, config=model.config)
    same(checkpoint, model)
    assert f"the prefix {prefix} was stripped from all names" in checkpoint.notes


def test_c16_half_prefixed(model: Checkpoint, tmp_path: Path) -> None:
    names = list(model)
    weights = {("_orig_mod." if i % 2 else "") + name: model[name] for i, name in enumerate(names)}
    folder = bare(tmp_path)
    save_file(weights, folder / "model.safetensors")
    message = refused(folder, rf"{len(names) // 2} of {len(names)} tensors have the prefix")
    assert "('_orig_mod.model." in message
    assert "the others not ('_orig_mod." not in message
    with pytest.raises(CheckpointError, match="have the prefix"):
        open_checkpoint(weights, config=model.config)


@pytest.mark.parametrize("key", ["state_dict", "model", "module"])
def test_c23_nested_weights(model: Checkpoint, tmp_path: Path, key: str) -> None:
    folder = bare(tmp_path)
    torch.save({key: dict(model), "epoch": 3}, folder / "pytorch_model.bin")
    checkpoint = open_checkpoint(folder)
    same(checkpoint, model)
    assert checkpoint.notes[0] == f"pytorch_model.bin: the weights were read from under the key {key!r}"


def test_c23_other_nesting_is_refused(model: Checkpoint, tmp_path: Path) -> None:
    folder = bare(tmp_path)
    torch.save({"network": dict(model), "epoch": 3}, folder / "pytorch_model.bin")
    refused(folder, r"pytorch_model\.bin holds tensors with other entries: network, epoch; expected tensors only")
    torch.save({"model": {"inner": dict(model)}}, folder / "pytorch_model.bin")
    refused(folder, "with other entries: model")


def test_c24_placeholders_show_in_the_header(model: Checkpoint, tmp_path: Path) -> None:
    """What the declaration of a family then refuses: the shape is known from the header, not invented."""
    folder = bare(tmp_path)
    save_file(dict(model) | {UP: torch.zeros(0)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.info(UP).shape, checkpoint.where(UP)) == ((0,), "model.safetensors")


def test_c84_truncated_or_extended(saved: Path) -> None:
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    for damaged, fault in (
        (whole[:-100], "cut short: expected"),
        (whole[:100], "cut short inside its header: expected at least"),
        (whole + b"x" * 100, "longer than its header says: expected"),
    ):
        path.write_bytes(damaged)
        message = refused(saved, rf"model\.safetensors is {fault}")
        assert f"found {len(damaged)}" in message
        if "inside" not in fault:
            assert f"expected {len(whole)} bytes" in message


def test_c84_one_shard_truncated(sharded: Path) -> None:
    path = sharded / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(sharded, r"model-00002-of-00002\.safetensors is cut short")


def test_c85_absent_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, r"1 are absent from .*: model-00002-of-00002\.safetensors")


def test_c86a_mapped_to_the_wrong_shard(sharded: Path) -> None:
    index = read_index(sharded)
    first, second = sorted(set(index["weight_map"].values()))
    moved = [name for name, file in index["weight_map"].items() if file == first][:2]
    index["weight_map"] |= dict.fromkeys(moved, second)
    write_index(sharded, index)
    message = refused(sharded, "disagree")
    for name in moved:
        assert f"{name!r} is mapped to {second}, found in {first}" in message


def test_c86b_unknown_key(sharded: Path) -> None:
    index = read_index(sharded)
    index["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    write_index(sharded, index)
    refused(sharded, r"'ghost\.weight' is in no file")


def test_c86_key_that_the_index_lacks(sharded: Path) -> None:
    index = read_index(sharded)
    del index["weight_map"][UP]
    write_index(sharded, index)
    refused(sharded, f"'{UP}' of .* is not in the index")


def test_c86c_no_index(sharded: Path, model: Checkpoint) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    checkpoint = open_checkpoint(sharded)
    same(checkpoint, model)
    assert "model.safetensors.index.json is missing; read the 2 shards" in checkpoint.notes[0]


def test_c86d_odd_names(sharded: Path, model: Checkpoint) -> None:
    index = read_index(sharded)
    new = {name: f"odd ({i}) é.safetensors" for i, name in enumerate(sorted(set(index["weight_map"].values())))}
    for old, odd in new.items():
        (sharded / old).rename(sharded / odd)
    index["weight_map"] = {name: new[file] for name, file in index["weight_map"].items()}
    write_index(sharded, index)
    save_file({"stale": torch.ones(1)}, sharded / "model-00001-of-00030.safetensors")
    checkpoint = open_checkpoint(sharded)
    same(checkpoint, model)
    ignored = "model-00001-of-00030.safetensors ignored, not named by model.safetensors.index.json"
    assert checkpoint.notes == (ignored,)


def two_bin_shards(folder: Path, weights: dict[str, Tensor]) -> None:
    names = list(weights)
    weight_map = {}
    for n, part in enumerate((names[:7], names[7:]), 1):
        file = f"pytorch_model-{n:05d}-of-00002.bin"
        torch.save({name: weights[name].clone() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_c88_layouts_and_formats(model: Checkpoint, tmp_path: Path) -> None:
    one = open_checkpoint(model.save(tmp_path / "one"))
    five = open_checkpoint(model.save(tmp_path / "five", max_shard_size="20KB"))
    assert len({five.where(name) for name in five}) >= 5
    folder = bare(tmp_path, "two")
    two_bin_shards(folder, dict(model))
    two = open_checkpoint(folder)
    assert {two.where(name) for name in two} == {f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)}
    (folder / "pytorch_model.bin.index.json").rename(tmp_path / "gone.json")
    by_name = open_checkpoint(folder)
    for other in (five, two, by_name):
        same(other, one)


def test_c88_bin_shard_absent(model: Checkpoint, tmp_path: Path) -> None:
    folder = bare(tmp_path)
    two_bin_shards(folder, dict(model))
    (folder / "pytorch_model-00001-of-00002.bin").unlink()
    refused(folder, r"absent from .*: pytorch_model-00001-of-00002\.bin")
    (folder / "pytorch_model.bin.index.json").unlink()
    refused(folder, r"holds 1 of 2 shards; absent: pytorch_model-00001-of-00002\.bin")


def test_c89_two_formats_side_by_side(saved: Path, model: Checkpoint) -> None:
    torch.save({name: torch.zeros_like(tensor) for name, tensor in model.items()}, saved / "pytorch_model.bin")
    safe = open_checkpoint(saved)
    same(safe, model)
    assert safe.notes == ("pytorch_model.bin ignored beside model.safetensors",)
    old = open_checkpoint(saved, prefer_bin=True)
    assert not any(tensor.any() for tensor in old.values())
    assert old.notes == ("model.safetensors ignored, as prefer_bin asks",)


def test_c90_repeated_layers_are_cloned(model: Checkpoint, tmp_path: Path) -> None:
    deeper = dict(model)
    for name in model:
        if name.startswith("model.layers.0."):
            deeper[name.replace("layers.0", "layers.2")] = deeper[name]  # the same memory
    config = {**model.config, "num_hidden_layers": 3}
    out = open_checkpoint(deeper, config=config).save(tmp_path / "out")
    again = open_checkpoint(out)
    assert torch.equal(again[UP.replace("layers.0", "layers.2")], model[UP])
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert loaded.config.num_hidden_layers == 3


def test_c90_true_ties_are_written_once(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    tied = transformers.LlamaForCausalLM(config)
    for source in (open_checkpoint(tied), open_checkpoint(tied.state_dict(), config=config)):
        out = source.save(tmp_path / "out", overwrite=True)
        assert "lm_head.weight" not in open_checkpoint(out)
        loaded, report = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(report.values())
        assert torch.equal(loaded.lm_head.weight, tied.model.embed_tokens.weight)


def test_c91_not_contiguous(model: Checkpoint, tmp_path: Path) -> None:
    turned = {name: tensor.T.contiguous().T if tensor.ndim == 2 else tensor for name, tensor in model.items()}
    assert not turned[UP].is_contiguous()
    same(open_checkpoint(model.replace(tensors=turned).save(tmp_path / "out")), model)


def test_c92_metadata(model: Checkpoint, tmp_path: Path) -> None:
    folder = bare(tmp_path)
    save_file(dict(model), folder / "model.safetensors")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() is None
    for size in ("5GB", "20KB"):
        out = open_checkpoint(folder).save(tmp_path / size, max_shard_size=size)
        for path in out.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                assert file.metadata() == {"format": "pt"}


def packed(scheme: str) -> dict[str, Tensor]:
    base = UP.removesuffix("weight")
    if scheme == "bitsandbytes":
        return {UP: torch.zeros(768, 1, dtype=torch.uint8), UP + ".absmax": torch.ones(24)}
    if scheme == "bitsandbytes 8 bit":
        return {UP: torch.zeros(48, 32, dtype=torch.int8), base + "SCB": torch.ones(48)}
    rows, columns = (4, 48) if scheme == "gptq" else (32, 6)
    return {
        base + "qweight": torch.zeros(rows, columns, dtype=torch.int32),
        base + "qzeros": torch.zeros(1, 6, dtype=torch.int32),
        base + "scales": torch.ones(1, 48, dtype=torch.float16),
    }


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        ("bitsandbytes", "bitsandbytes"),
        ("bitsandbytes 8 bit", "bitsandbytes"),
        ("gptq", "GPTQ"),
        ("awq", "AWQ"),
    ],
)
def test_c93_quantised(model: Checkpoint, tmp_path: Path, scheme: str, named: str) -> None:
    weights = {name: tensor for name, tensor in model.items() if name != UP} | packed(scheme)
    by_names = bare(tmp_path, "names")
    save_file(weights, by_names / "model.safetensors")
    assert "or load it dequantised" in refused(by_names, f"is quantised with {named}: found")
    with pytest.raises(CheckpointError, match=f"is quantised with {named}:"):
        open_checkpoint(weights, config=model.config)
    method = scheme.split()[0]
    by_config = bare(tmp_path, "config", quantization_config={"quant_method": method})
    save_file(dict(model), by_config / "model.safetensors")
    refused(by_config, rf"its config has a quantization_config \({method}\)")


def test_c93_gguf(tmp_path: Path) -> None:
    folder = bare(tmp_path)
    (folder / "tiny.Q4_K_M.gguf").write_bytes(b"GGUF" + b"\0" * 64)
    refused(folder, r"tiny\.Q4_K_M\.gguf: transformers cannot read this GGUF file: ")


def test_c94_8_bit_floats(model: Checkpoint, tmp_path: Path) -> None:
    small = dict(model) | {UP: model[UP].to(torch.float8_e4m3fn)}
    without, scaled = bare(tmp_path, "without"), bare(tmp_path, "scaled")
    save_file(small, without / "model.safetensors")
    save_file(small | {UP + "_scale_inv": torch.ones(1, 1)}, scaled / "model.safetensors")
    assert "convert them to bfloat16" in refused(without, f"8-bit floats without scales: '{UP}'")
    assert "dequantised" in refused(scaled, f"8-bit floats with separate scales such as '{UP}_scale_inv'")


LARGE = {f"w{i}": torch.ones(250, 500) for i in range(4)}  # 2 MB


@pytest.mark.skipif(shutil.which("mount") is None, reason="needs mount")
def test_c95_disk_full() -> None:
    large = Checkpoint(LARGE, {}, name="large")
    with small_disk("1m") as disk:
        with pytest.raises(OutputError, match=r"needs 2\.0 MB and its disk has 1\.0 MB free"):
            large.save(disk / "out")
        assert list(disk.iterdir()) == []


@pytest.mark.skipif(shutil.which("mount") is None, reason="needs mount")
def test_c95_disk_that_fills_up_in_spite_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symfuse.io.writer.check_space", lambda *_: None)
    with small_disk("1m") as disk:
        with pytest.raises(OutputError, match="No space left on device"):
            Checkpoint(LARGE, {}, name="large").save(disk / "out")
        assert list(disk.iterdir()) == []


def test_c95_last_write_fails(model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    pwrite = os.pwrite

    def full_in_the_end(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == len(model) + 1:  # the header, then the tensors
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", full_in_the_end)
    with pytest.raises(OutputError, match="No space left on device"):
        model.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert calls == len(model) + 1


def test_c97_output_is_an_input(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(saved)
    checkpoint = open_checkpoint(saved)
    (tmp_path / "link").symlink_to(saved)
    (tmp_path / "parent").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for target in (saved, "a", "./a/../a", "a/", "link", "parent/a", "a/sub", "parent/a/sub"):
        with pytest.raises(OutputError, match="the input"):
            checkpoint.save(target, overwrite=True)
    assert contents(saved) == before


def test_c98_link_farms(saved: Path, tmp_path: Path, model: Checkpoint) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "1234"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(saved.iterdir())):
        path.rename(blobs / f"{i:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{i:040x}")
    (snapshot / "tokenizer.json").symlink_to(blobs / "tok")
    (blobs / "tok").write_text("{}")
    (tmp_path / "folder link").symlink_to(snapshot)
    before = contents(blobs)
    for source in (snapshot, tmp_path / "folder link"):
        checkpoint = open_checkpoint(source)
        same(checkpoint, model)
    out = checkpoint.save(tmp_path / "out")
    assert not any(path.is_symlink() for path in out.iterdir())
    assert (out / "tokenizer.json").read_text() == "{}"
    target = tmp_path / "output link"
    target.symlink_to(blobs)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="is a symbolic link, through which nothing is written"):
            checkpoint.save(target, overwrite=overwrite)
    assert contents(blobs) == before


def test_c98_dangling_link(saved: Path, tmp_path: Path) -> None:
    (saved / "model.safetensors").rename(tmp_path / "elsewhere")
    (saved / "model.safetensors").symlink_to("../blobs/gone")
    refused(saved, r"model\.safetensors is a symbolic link to \.\./blobs/gone, which does not exist")


@pytest.mark.parametrize("name", ["модель", "模型", "🦙", "with space", 'it\'s "quoted"', "-rf", "$(touch x)", "a\nb"])
def test_c99_odd_paths(model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)  # so that a leading dash leads
    model.save(name, max_shard_size="60KB", extra={"symfuse.json": json.dumps({"name": name}, ensure_ascii=False)})
    checkpoint = open_checkpoint(name)
    same(checkpoint, model)
    assert checkpoint.name == name
    assert json.loads((Path(name) / "symfuse.json").read_text(encoding="utf-8")) == {"name": name}
    out = checkpoint.save(Path(name + " 2") / name)
    same(open_checkpoint(out), model)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, name + " 2"])


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_c100_unwritable_output(model: Checkpoint, tmp_path: Path) -> None:
    def computed(name: str) -> Tensor:
        raise AssertionError(f"{name} was computed")

    class Lazy(dict[str, Tensor]):
        __getitem__ = staticmethod(computed)  # type: ignore[assignment]

    infos = {name: model.info(name) for name in model}
    lazy = model.replace(tensors=Lazy(), infos=infos)
    file = tmp_path / "file"
    file.write_text("mine")
    for target in (file, file / "below"):
        with pytest.raises(OutputError, match=r"is a file|is not a folder"):
            lazy.save(target, overwrite=True)
    assert file.read_text() == "mine"
    locked = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    try:
        locked.chmod(0o555)
        for target in (locked / "out", locked / "new" / "out"):
            with as_ordinary_user(), pytest.raises(OutputError, match=f"{locked} is not writable"):
                lazy.save(target)
        assert list(locked.iterdir()) == []
    finally:
        locked.rmdir()


def test_c100_an_old_output_that_cannot_be_removed(model: Checkpoint) -> None:
    """It could be moved aside all the same; the new one would be there, and the old one left beside it."""
    parent = Path(tempfile.mkdtemp())
    try:
        model.save(parent / "out")
        before = contents(parent / "out")
        (parent / "out").chmod(0o555)
        parent.chmod(0o777)
        with as_ordinary_user(), pytest.raises(OutputError, match="is not writable, so it cannot be replaced"):
            model.save(parent / "out", overwrite=True)
        assert contents(parent / "out") == before
        assert [path.name for path in parent.iterdir()] == ["out"]
    finally:
        (parent / "out").chmod(0o755)
        shutil.rmtree(parent)


def tokenizer_files(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "merge": 1, "models": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(folder)


def test_c101_complete_output(saved: Path, tmp_path: Path) -> None:
    tokenizer_files(saved)
    (saved / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    (saved / "preprocessor_config.json").write_text(json.dumps({"size": 3, "auto_map": {"AutoProcessor": "x.X"}}))
    (saved / "modeling_custom.py").write_text("raise SystemExit('never run')")
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling_custom.X"}}))
    checkpoint = open_checkpoint(saved)
    assert any("auto_map" in note for note in checkpoint.notes)
    out = checkpoint.save(tmp_path / "out")
    for path in saved.iterdir():
        assert (out / path.name).exists() == (path.suffix != ".py"), path.name
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (saved / name).read_bytes(), name
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    assert json.loads((out / "preprocessor_config.json").read_text()) == {"size": 3}
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert loaded.generation_config.max_new_tokens == 7
    assert transformers.AutoTokenizer.from_pretrained(out)("merge models")["input_ids"] == [1, 2]


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize("how", ["torch.save", "old torch.save", "bare pickle", "nested"])
def test_c103_code_in_pickles(model: Checkpoint, tmp_path: Path, how: str) -> None:
    folder, marker = bare(tmp_path), tmp_path / "marker"
    path = folder / "pytorch_model.bin"
    content = dict(model) | {"extra": Payload(marker)}
    if how == "bare pickle":
        path.write_bytes(pickle.dumps({"extra": Payload(marker)}, protocol=2))
    else:
        value = {"state_dict": dict(model), "args": Payload(marker)} if how == "nested" else content
        torch.save(value, path, _use_new_zipfile_serialization=how != "old torch.save")
    refused(folder, r"pytorch_model\.bin was not loaded: .* can run code")
    assert not marker.exists()
    save_file(dict(model), folder / "model.safetensors")  # which is preferred: the .bin is not even opened
    same(open_checkpoint(folder), model)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker)))  # the control: this payload does work
    assert marker.exists()


def test_c104_remote_code(model: Checkpoint, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()"
    folder = bare(tmp_path, model_type="nobody_knows", auto_map={"AutoConfig": "configuration_x.X"})
    for name in ("configuration_x.py", "modeling_x.py", "__init__.py", "setup.py"):
        (folder / name).write_text(code)
    save_file(dict(model), folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    same(checkpoint, model)
    out = checkpoint.save(tmp_path / "out")
    assert list(out.glob("*.py")) == []
    assert json.loads((out / "config.json").read_text())["model_type"] == "nobody_knows"
    assert not marker.exists()


def test_every_refusal_is_one_of_the_tree() -> None:
    assert (CheckpointError.exit_code, OutputError.exit_code) == (3, 8)
    assert issubclass(CheckpointError, SymfuseError)
