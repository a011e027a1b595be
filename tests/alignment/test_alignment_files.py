"""Alignment files that were damaged or made up: each is one error that names the file and the key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import symfuse
from contract.tiny import MODELS
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError

Change = Callable[[dict[str, Tensor], dict[str, Any]], object]

BIAS = "shift/encoder.layer.0.attention.self.value.bias"
NEURONS = "ffn[0]/monomial/index"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = symfuse.declare(MODELS["bert-mlm"]())
    return random_alignment(spec, 1).save(tmp_path_factory.mktemp("saved") / "good.safetensors")


def changed(saved: Path, folder: Path, change: Change) -> Path:
    """A copy in which tensors and metadata (parsed) were changed, without a checksum, as files were once."""
    with safe_open(saved, framework="pt") as file:
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        meta = dict(file.metadata())
    parsed = {key: json.loads(text) for key, text in meta.items() if key not in ("format", "sha256")}
    change(tensors, parsed)
    path = folder / "damaged.safetensors"
    texts = {key: str(value) if key == "symfuse" else json.dumps(value) for key, value in parsed.items()}
    save_file(tensors, path, {"format": "pt", **texts})
    return path


def tensor(key: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors, meta: tensors.update({key: make(tensors[key])})  # noqa: ARG005


def data(path: str, value: object) -> Change:
    *way, last = path.split(".")

    def change(tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        inside = meta
        for key in way:
            inside = inside[key]
        inside[last] = value

    return change


def renamed(old: str, new: str) -> Change:
    return lambda tensors, meta: tensors.update({new: tensors.pop(old)})  # noqa: ARG005


def test_a_copy_in_which_nothing_changed_is_loaded(saved: Path, tmp_path: Path) -> None:
    found = Alignment.load(changed(saved, tmp_path, lambda tensors, meta: None))  # noqa: ARG005
    assert found.to_bytes() == saved.read_bytes()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.bool, torch.float32])
def test_an_index_is_of_int64(saved: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    path = changed(saved, tmp_path, tensor(NEURONS, lambda t: t.to(dtype)))
    with pytest.raises(
        CheckpointError, match=rf"damaged\.safetensors: .*'ffn\[0\]/monomial/index' is {str(dtype)[6:]}"
    ):
        Alignment.load(path)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.int64])
@pytest.mark.parametrize("key", [BIAS, "v[0]/similarity/matrix"])
def test_what_acts_on_weights_is_real(saved: Path, tmp_path: Path, key: str, dtype: torch.dtype) -> None:
    path = changed(saved, tmp_path, tensor(key, lambda t: t.to(dtype)))
    with pytest.raises(CheckpointError) as caught:
        Alignment.load(path)
    assert f"{key!r} is {str(dtype)[6:]}" in str(caught.value)
    assert str(path) in str(caught.value)


WRONG: list[tuple[str, object, str]] = [
    ("provenance", [], "'provenance' is [], expected an object"),
    ("provenance", None, "'provenance' is null, expected an object"),
    ("provenance", "x", "'provenance' is \"x\", expected an object"),
    ("spec.names", None, "'spec.names' is null, expected an object"),
    ("spec.names", [], "'spec.names' is [], expected an object"),
    ("spec.names", "x", "'spec.names' is \"x\", expected an object"),
    ("spec.names", {"a": 1}, "'spec.names.a' is 1, expected a text"),
    ("spec.tied", [["a", "b"]], "'spec.tied' is"),
    ("spec.tied", {"a": None}, "'spec.tied.a' is null, expected a text"),
    ("spec.heads", "classifier", "'spec.heads' is \"classifier\", expected a list"),
    ("spec.heads", [1], "'spec.heads[0]' is 1, expected a text"),
    ("spec.buffers", {}, "'spec.buffers' is {}, expected a list"),
    ("spec.family", None, "'spec.family' is null, expected a text"),
    ("spec.family", [], "'spec.family' is [], expected a text"),
    ("spec.family", {}, "'spec.family' is {}, expected a text"),
    ("spec.shifts", [["a", "v", None]], "'spec.shifts[0]' is"),
    ("spec.axes.ffn.size", True, "'spec.axes.ffn.size' is true, expected a whole number"),
    ("spec.axes.ffn.size", -1, "'spec.axes.ffn' is of size -1"),
    ("spec.axes.ffn.group", "none", "'spec.axes.ffn' is of size 29 with group 'none'"),
    ("spec.axes.ffn.per", "l", "'spec.axes.ffn.per' is \"l\", expected a list"),
    ("spec.axes.ffn", {"size": 29}, "'spec.axes.ffn' has no 'group'"),
    ("spec.reads", {"a": "b"}, "'spec.reads.a' is \"b\", expected a list"),
    ("spec.tensors", {"a": ["nowhere", {}]}, "'spec.tensors.a': axis 'nowhere' is not declared"),
    ("spec.tensors", {"a": ["(ffn", {}]}, "'spec.tensors.a': layout does not parse: this '(' is never closed"),
    ("spec", [], "'spec' is [], expected an object"),
    ("frame", "untie", "'frame' is \"untie\", expected a list"),
    ("frame", [["untie"]], "'frame[0]' is [\"untie\"], expected a text"),
    ("variants", "heads", "'variants' is \"heads\", expected a list"),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG, ids=[f"{k} {v}"[:40] for k, v, _ in WRONG])
def test_data_of_another_type(saved: Path, tmp_path: Path, key: str, value: object, message: str) -> None:
    path = changed(saved, tmp_path, data(key, value))
    with pytest.raises(CheckpointError) as caught:
        Alignment.load(path)
    assert f"{path}: says that it is an alignment, but is damaged ({message}" in str(caught.value)
    assert "make it again with `symfuse align`" in str(caught.value)


def test_metadata_that_are_missing(saved: Path, tmp_path: Path) -> None:
    path = changed(saved, tmp_path, lambda tensors, meta: meta.pop("frame"))  # noqa: ARG005
    with pytest.raises(CheckpointError, match="its metadata has no 'frame'"):
        Alignment.load(path)


@pytest.mark.parametrize("name", ["ffn", "ffn[0]", "", "ffn[0]/index", "ffn[0]/nothing/index"])
def test_names_that_are_of_no_element(saved: Path, tmp_path: Path, name: str) -> None:
    path = changed(saved, tmp_path, renamed(NEURONS, name))
    with pytest.raises(CheckpointError) as caught:
        Alignment.load(path)
    assert f"damaged ({name!r} is no name of a tensor of an alignment)" in str(caught.value)


def test_elements_with_other_parts_or_of_two_kinds(saved: Path, tmp_path: Path) -> None:
    path = changed(saved, tmp_path, renamed("v[0]/similarity/matrix", "v[0]/similarity/map"))
    with pytest.raises(CheckpointError, match=r"'v\[0\]/similarity' has the parts 'scale', 'map'|'map', 'scale'"):
        Alignment.load(path)
    matrix = {"ffn[0]/similarity/matrix": torch.eye(29, dtype=torch.float64)}
    path = changed(saved, tmp_path, lambda tensors, meta: tensors.update(matrix))  # noqa: ARG005
    with pytest.raises(CheckpointError, match=r"two elements of 'ffn\[0\]'"):
        Alignment.load(path)
