"""D34, D35: files that hold something else than their names promise."""

from __future__ import annotations

import gzip
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from command import everything, run
from symfuse.alignment import Alignment
from symfuse.errors import CheckpointError, DataError
from symfuse.evaluation.data.reading import read_records
from symfuse.io import open as open_checkpoint
from symfuse.stats.statistics import Statistics
from symfuse.transporting.files import read_arrays

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 17209920\n"


@pytest.fixture
def place(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(sharded, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- D34: pointers of git-LFS


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "tokenizer.json", "tokenizer.model", "vocab.txt", "1_Pooling/config.json"],
)
def test_d34_a_pointer_in_a_model_folder_is_named(place: Path, name: str) -> None:
    path = place / "b" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(POINTER)
    before = everything(place)
    result = run("merge", "a", "b", "-o", "out")
    assert result.exit_code == 3, result.output
    assert f"{path.name} " in result.stderr
    assert "git-LFS pointer" in result.stderr
    assert "git lfs pull" in result.stderr
    assert "b/" in result.stderr
    assert everything(place) == before


def test_d34_a_shard_and_a_pickle(place: Path) -> None:
    shard = sorted((place / "shards").glob("*.safetensors"))[1]
    shard.write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=rf"{shard.name} .*git lfs pull"):
        open_checkpoint(place / "shards")
    torch.save({"w": torch.ones(2)}, place / "b" / "pytorch_model.bin")
    open_checkpoint(place / "b", prefer_bin=True)
    (place / "b" / "pytorch_model.bin").write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin .*git lfs pull"):
        open_checkpoint(place / "b", prefer_bin=True)


def test_d34_pointers_that_nobody_reads_are_let_be(place: Path) -> None:
    """As after `git lfs pull --include model.safetensors`."""
    for name in ("pytorch_model.bin", "flax_model.msgpack", "onnx-model.onnx"):
        (place / "b" / name).write_bytes(POINTER)
    assert run("merge", "a", "b", "-o", "out", "-q").exit_code == 0


def test_d34_wherever_files_are_read(place: Path) -> None:
    def pointer(name: str) -> Path:
        path = place / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(POINTER)
        return path

    for read, name in (
        (Alignment.load, "alignment.safetensors"),
        (read_arrays, "vector.npz"),
        (read_arrays, "vector.safetensors"),
        (lambda path: Statistics.load(path.parent), "statistics/statistics.json"),
    ):
        with pytest.raises(CheckpointError, match="git lfs pull"):
            read(pointer(name))
    for name in ("data.txt", "data.jsonl", "data.csv", "data.parquet"):
        with pytest.raises(DataError, match="git lfs pull"):
            read_records(pointer(name))
    adapter = place / "adapter"
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        adapter.mkdir(exist_ok=True)
        (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
        pointer(f"adapter/{name}")
        result = run("merge", "a", "b+adapter", "-o", "out")
        assert result.exit_code == 3, result.output
        assert "git lfs pull" in result.stderr


# ---- D35: other substitutes


def text(path: Path) -> None:
    """A link to a text that is nobody's business."""
    secret = path.parent.parent / "secret"
    secret.write_text("root:x:0:0:root:/root:/bin/bash\n")
    path.unlink()
    path.symlink_to(secret)


def page(path: Path) -> None:
    path.write_text("\n<!DOCTYPE html><html><body>403 Forbidden</body></html>")


def gzipped(path: Path) -> None:
    path.write_bytes(gzip.compress(path.read_bytes()))


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x", "y")


def saved(path: Path) -> None:
    torch.save({"w": torch.ones(3)}, path)


def gguf(path: Path) -> None:
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(100))


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


SUBSTITUTES: dict[Callable[[Path], None], str] = {
    text: "it is text",
    page: "a web page",
    gzipped: "compressed by gzip: unpack it",
    zipped: "a zip archive",
    saved: "name it pytorch_model.bin",
    gguf: "a GGUF file",
    nothing: "is empty",
    zeros: "full of zeros",
    cut: "is cut short",
}


@pytest.mark.parametrize("how", SUBSTITUTES, ids=lambda how: how.__name__)
def test_d35_what_a_file_is_instead(place: Path, how: Callable[[Path], None]) -> None:
    shard = sorted((place / "shards").glob("*.safetensors"))[-1]
    how(shard)
    result = run("merge", "a", "shards", "-o", "out")
    assert result.exit_code == 3, result.output
    assert shard.name in result.stderr
    assert SUBSTITUTES[how] in result.stderr
    assert "root" not in result.stderr.replace("pytest-of-root", "")
    assert str(int.from_bytes(b"root:x:0", "little")) not in result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize("how", [page, gzipped, nothing, text], ids=lambda how: how.__name__)
def test_d35_in_other_formats(place: Path, how: Callable[[Path], None]) -> None:
    torch.save({"w": torch.ones(2)}, place / "b" / "pytorch_model.bin")
    how(place / "b" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=SUBSTITUTES[how].split(":")[0].removeprefix("is ")):
        open_checkpoint(place / "b", prefer_bin=True)
    how(place / "a" / "config.json")
    with pytest.raises(CheckpointError, match="cannot be read as JSON") as caught:
        open_checkpoint(place / "a")
    if how is not text:
        assert SUBSTITUTES[how] in str(caught.value)
    assert "root:x" not in str(caught.value)
