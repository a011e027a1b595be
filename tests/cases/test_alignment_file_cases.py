"""Alignment files that were damaged, or that belong to another model, are refused when they are read or applied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from contract.tiny import MODELS
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError, IncompatibleError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Permutations, rotations with scales, and translations."""
    g = random_alignment(api.declare(MODELS["bert-mlm"]()), 1)
    return g.save(tmp_path_factory.mktemp("saved") / "alignment.safetensors")


def rewritten(saved: Path, path: Path, **changed: Tensor) -> Path:
    """A copy without a checksum, as earlier versions wrote it, with other tensors."""
    with safe_open(saved, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        meta = {key: text for key, text in file.metadata().items() if key != "sha256"}
    save_file(tensors | {key.replace("__", "/"): t for key, t in changed.items()}, path, meta)
    return path


def test_j8_a_flipped_byte_is_refused_wherever_it_is(saved: Path, tmp_path: Path) -> None:
    data, path = saved.read_bytes(), tmp_path / "flipped.safetensors"
    header = 8 + int.from_bytes(data[:8], "little")
    places = [*range(8, header, 211), *range(header, len(data), 997), data.index(b"sha256") + 3, len(data) - 1]
    for place in places:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=r"flipped\.safetensors"):
            Alignment.load(path)
    path.write_bytes(data)
    assert Alignment.load(path).to_bytes() == data


def test_j8_a_changed_number_is_refused_in_one_sentence(saved: Path, tmp_path: Path) -> None:
    data, path = bytearray(saved.read_bytes()), tmp_path / "flipped.safetensors"
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"flipped\.safetensors: its contents do not match the checksum in its meta"
    ):
        Alignment.load(path)


def test_j8_files_without_a_checksum_are_still_read(saved: Path, tmp_path: Path) -> None:
    assert Alignment.load(rewritten(saved, tmp_path / "old.safetensors")).to_bytes() == saved.read_bytes()


@pytest.mark.parametrize(("key", "shape", "expected"), [
    ("qk[0]/similarity/scale", (3,), "[4]"), ("qk[0]/similarity/scale", (4, 1), "[4]"),
    ("qk[1]/similarity/matrix", (4, 5, 6), "[4, 5, 5]"), ("ffn[0]/monomial/index", (28,), "[29]"),
    ("v[0]/similarity/scale", (), "[4]"),
])  # fmt: skip
def test_d27_parts_of_another_shape(
    saved: Path, tmp_path: Path, key: str, shape: tuple[int, ...], expected: str
) -> None:
    dtype = torch.int64 if key.endswith("index") else torch.float64
    path = rewritten(saved, tmp_path / "wrong.safetensors", **{key: torch.ones(shape, dtype=dtype)})
    with pytest.raises(CheckpointError) as caught:
        Alignment.load(path)
    assert str(path) in str(caught.value)
    assert f"{key!r} has the shape {list(shape)}, expected {expected} by its axis" in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [
    ("ffn[0]/monomial/index", torch.zeros(29, dtype=torch.int64)),
    ("qk[0]/similarity/scale", torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)),
    ("qk[0]/similarity/scale", torch.tensor([1.0, torch.inf, 1.0, 1.0], dtype=torch.float64)),
    ("v[0]/similarity/matrix", torch.eye(5, dtype=torch.float64).expand(4, 5, 5) * 1.001),
    ("v[0]/similarity/matrix", torch.full((4, 5, 5), torch.nan, dtype=torch.float64)),
])  # fmt: skip
def test_d27_parts_that_are_of_no_element(saved: Path, tmp_path: Path, key: str, value: Tensor) -> None:
    path = rewritten(saved, tmp_path / "wrong.safetensors", **{key: value.contiguous()})
    with pytest.raises(CheckpointError) as caught:
        Alignment.load(path)
    assert str(path) in str(caught.value)
    assert key.partition("/")[0] in str(caught.value)


def test_j8_an_alignment_is_refused_for_other_layers_without_positions() -> None:
    source = MODELS["smollm3-lm"]()  # no_rope_layers [0, 1]
    g = random_alignment(api.declare(source), 1, {"c", "p", "ffn"})
    other = source.replace(config={**source.config, "no_rope_layers": [1, 0]})
    assert api.verify(source, g(source), g).equal
    with pytest.raises(IncompatibleError, match=r"layers\.0\.self_attn\..* is laid out as .* by its config\.json"):
        g(other)
    fewer = random_alignment(api.declare(source), 1, {"ffn"})  # what these layers do not concern
    assert api.verify(other, fewer(other), fewer).equal
