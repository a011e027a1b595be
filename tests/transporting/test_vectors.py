"""Steering vectors, probes and sparse auto-encoders at a place of the real model, on A and moved on A'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError, OptionError, SymmetryError
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.spec import Instance
from symfuse.transporting import transport
from transporting.trained import FOLDED, base_folder, load, moved, outputs


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def changed(kind: str, folder: Path, module: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The outputs when what a module puts out is changed."""

    def hook(_module: Any, _inputs: Any, out: Any) -> Any:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    model = load(kind, folder)
    handle = model.get_submodule(module).register_forward_hook(hook)
    try:
        return outputs(kind, model)
    finally:
        handle.remove()


def seen(kind: str, folder: Path, module: str) -> Tensor:
    """What a module puts out."""
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    changed(kind, folder, module, keep)
    return kept[0]


# Model, frame, axis, module whose output is in that space, and its size. (RMSNorm in float32: see below.)
PLACES: dict[str, tuple[str, tuple[str, ...], str, str, int]] = {
    "bert stream": ("bert", (), "residual", "bert.encoder.layer.0", 20),
    "bert neurons": ("bert", (), "ffn[1]", "bert.encoder.layer.1.intermediate", 29),
    "bert queries": ("bert", (), "qk[0]", "bert.encoder.layer.0.attention.self.query", 20),
    "bert values": ("bert", (), "v[1]", "bert.encoder.layer.1.attention.self.value", 20),
    "bert pooler": ("bert", (), "pool", "bert.pooler", 20),
    "gpt2 stream": ("gpt2", (), "residual", "transformer.h.0", 20),
    "gpt2 rotated": ("gpt2", FOLDED, "residual", "transformer.h.0", 20),
    "gpt2 neurons": ("gpt2", FOLDED, "ffn[0]", "transformer.h.0.mlp.act", 29),
    "llama stream": ("llama", (), "residual", "model.layers.0", 24),
    "llama rotated": ("llama", FOLDED, "residual", "model.layers.0", 24),
    "llama queries": ("llama", (), "c[1]", "model.layers.1.self_attn.q_proj", 60),
    "llama keys": ("llama", (), "c[0]", "model.layers.0.self_attn.k_proj", 20),
    "llama values": ("llama", (), "v[0]", "model.layers.0.self_attn.v_proj", 20),
}


def place(label: str, tmp_path: Path, **options: Any) -> tuple[str, Path, Path, Alignment, str, str, int]:
    kind, frame, axis, module, size = PLACES[label]
    base = base_folder(kind, tmp_path / "base")
    return kind, base, tmp_path / "moved", moved(base, tmp_path / "moved", frame, **options), axis, module, size


@pytest.mark.parametrize("label", PLACES)
def test_a_steering_vector_steers_the_moved_model_alike(label: str, tmp_path: Path) -> None:
    kind, base, there, alignment, axis, module, size = place(label, tmp_path, largest=True)
    vector = randn(size)
    save_file({"v": vector, "both": randn(2, size, seed=1)}, tmp_path / "v.safetensors")
    keys = label == "llama keys"  # which move by the dual: as a linear form on queries
    got = transport(tmp_path / "v.safetensors", alignment, axis=axis, kind="probe" if keys else "vector")["v"]
    expected = changed(kind, base, module, lambda x: x + vector)
    tolerance = 2e-4 if kind == "llama" else 1e-9
    found = changed(kind, there, module, lambda x: x + got)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert float((expected - outputs(kind, load(kind, base))).abs().max()) > 1e-3
    assert float((changed(kind, there, module, lambda x: x + vector) - expected).abs().max()) > 1e-3


def test_a_vector_of_one_head_goes_with_its_head(tmp_path: Path) -> None:
    kind, base, there, alignment, _, module, _ = place("bert values", tmp_path, largest=True)
    vector, (head,) = randn(5), (2,)
    save_file({"v": vector}, tmp_path / "v.safetensors")
    result = transport(tmp_path / "v.safetensors", alignment, axis=f"v[1,{head}]")
    after = Instance.parse(str(result.details["axis"])).index[1]
    assert after != head
    assert result.notes == (f"v[1]: head {head} is {after} now",)

    def at(number: int, v: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: x + torch.nn.functional.pad(v, (5 * number, 15 - 5 * number))

    expected, got = changed(kind, base, module, at(head, vector)), changed(kind, there, module, at(after, result["v"]))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("label", ["bert stream", "bert neurons", "bert pooler", "gpt2 stream", "llama rotated"])
def test_a_probe_reads_the_same(label: str, tmp_path: Path) -> None:
    kind, base, there, alignment, axis, module, size = place(label, tmp_path, largest=True)
    weight, bias = randn(3, size), randn(3, seed=1)
    save_file({"weight": weight, "bias": bias}, tmp_path / "probe.safetensors")
    got = transport(tmp_path / "probe.safetensors", alignment, kind="probe", axis=axis)
    torch.testing.assert_close(got["bias"], bias, rtol=0, atol=0)
    expected, found = seen(kind, base, module) @ weight.T, seen(kind, there, module) @ got["weight"].T
    tolerance = 2e-4 if kind == "llama" else 1e-10
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_probe_of_a_centred_stream_must_not_read_its_mean(tmp_path: Path) -> None:
    kind, base, there, alignment, axis, module, size = place("gpt2 rotated", tmp_path)
    weight = randn(3, size)
    save_file({"weight": weight}, tmp_path / "raw.safetensors")
    with pytest.raises(
        SymmetryError, match=r"subtracts the mean from the stream \(residual\).*--group residual=permutation"
    ):
        transport(tmp_path / "raw.safetensors", alignment, kind="probe", axis=axis)
    weight = weight - weight.mean(1, keepdim=True)
    save_file({"weight": weight}, tmp_path / "centred.safetensors")
    got = transport(tmp_path / "centred.safetensors", alignment, kind="probe", axis=axis)["weight"]
    torch.testing.assert_close(seen(kind, there, module) @ got.T, seen(kind, base, module) @ weight.T)


def test_a_probe_of_a_translated_space_is_refused(tmp_path: Path) -> None:
    *_, alignment, axis, _, size = place("bert values", tmp_path)
    save_file({"weight": randn(3, size)}, tmp_path / "p.safetensors")
    with pytest.raises(SymmetryError, match=r"translates v\[1\] by a constant.*--no-biases"):
        transport(tmp_path / "p.safetensors", alignment, kind="probe", axis=axis)


def autoencoder(form: str, d: int, m: int) -> dict[str, Tensor]:
    rows, decoder = randn(m, d) / 4, randn(m, d, seed=1) / 4
    encoder = {"W_enc": rows.T.contiguous()} if form == "sae-lens" else {"encoder.weight": rows}
    bias = "b_enc" if form == "sae-lens" else "encoder.bias"
    return encoder | {bias: randn(m, seed=2), "W_dec": decoder, "b_dec": randn(d, seed=3)}


def reconstruct(sae: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    rows = sae["W_enc"].T if "W_enc" in sae else sae["encoder.weight"]
    latents = torch.relu((x - sae["b_dec"]) @ rows.T + sae.get("b_enc", sae.get("encoder.bias")))
    return latents, latents @ sae["W_dec"] + sae["b_dec"]


@pytest.mark.parametrize("form", ["sae-lens", "sparsify"])
@pytest.mark.parametrize(("label", "m"), [("bert stream", 33), ("bert neurons", 29), ("llama rotated", 51)])
def test_a_sparse_autoencoder_has_the_same_latents_and_writes_the_same(
    form: str, label: str, m: int, tmp_path: Path
) -> None:
    kind, base, there, alignment, axis, module, size = place(label, tmp_path, largest=True)
    sae = autoencoder(form, size, m)
    folder = tmp_path / "sae"
    folder.mkdir()
    save_file(sae, folder / "sae.safetensors")
    (folder / "cfg.json").write_text('{"hook_name": "x"}', "utf-8")
    said = "columns" if m == size and form == "sae-lens" else None
    out = transport(folder, alignment, axis=axis, encoder=said).save(tmp_path / "out")
    got = load_file(out / "sae.safetensors")
    assert (out / "cfg.json").read_text("utf-8") == '{"hook_name": "x"}'
    tolerance = 2e-4 if kind == "llama" else 1e-9
    latents, after = reconstruct(sae, seen(kind, base, module))[0], reconstruct(got, seen(kind, there, module))[0]
    torch.testing.assert_close(after, latents, rtol=tolerance, atol=tolerance)
    assert float((latents > 0).double().mean()) > 0.1
    expected = changed(kind, base, module, lambda x: reconstruct(sae, x)[1])
    found = changed(kind, there, module, lambda x: reconstruct(got, x)[1])
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_an_encoder_that_could_lie_both_ways_is_told_how(tmp_path: Path) -> None:
    *_, alignment, axis, _, size = place("bert neurons", tmp_path)
    sae = autoencoder("sae-lens", size, size)
    save_file(sae, tmp_path / "sae.safetensors")
    with pytest.raises(OptionError, match=r"W_enc is \[29, 29\], and both of its dimensions could be ffn\[1\]"):
        transport(tmp_path / "sae.safetensors", alignment, axis=axis)
    both = [
        transport(tmp_path / "sae.safetensors", alignment, axis=axis, encoder=e)["W_enc"] for e in ("rows", "columns")
    ]
    assert not torch.equal(*both)


def test_an_autoencoder_that_normalises_needs_norms_that_stay(tmp_path: Path) -> None:
    *_, alignment, axis, _, size = place("llama rotated", tmp_path)
    folder = tmp_path / "sae"
    folder.mkdir()
    save_file(autoencoder("sae-lens", size, 51), folder / "sae.safetensors")
    (folder / "cfg.json").write_text('{"normalize_activations": "layer_norm"}', "utf-8")
    with pytest.raises(SymmetryError, match="normalize_activations is 'layer_norm'"):
        transport(folder, alignment, axis=axis)
    (folder / "cfg.json").write_text('{"normalize_activations": "constant_norm_rescale"}', "utf-8")
    assert transport(folder, alignment, axis=axis).kind == "sae"


def test_npz_stays_npz_and_dtypes_stay(tmp_path: Path) -> None:
    *_, alignment, axis, _, size = place("bert stream", tmp_path)
    vector = randn(2, size).float()
    np.savez(tmp_path / "v.npz", v=vector.numpy())
    save_file({"v": vector.bfloat16()}, tmp_path / "v.safetensors")
    out = transport(tmp_path / "v.npz", alignment, axis=axis).save(tmp_path / "out")
    with np.load(out / "v.npz", allow_pickle=False) as file:
        got = torch.from_numpy(file["v"])
    assert got.dtype == torch.float32
    half = transport(tmp_path / "v.safetensors", alignment, axis=axis)["v"]
    assert torch.equal(half, got.bfloat16())


def spec_alignment(tmp_path: Path) -> Alignment:
    return random_alignment(Model.of(open_checkpoint(base_folder("bert-mlm", tmp_path / "b"))).spec, 0)


@pytest.mark.parametrize(
    ("axis", "kind", "words"),
    [
        ("residaul", OptionError, r"no axis is called 'residaul' \(did you mean 'residual'\?\)"),
        ("ffn", OptionError, r"there is no 'ffn'; expected one of ffn\[0\], ffn\[1\]"),
        ("ffn[2]", OptionError, r"there is no 'ffn\[2\]'"),
        ("ffn[0]", OptionError, r"vectors of ffn\[0\] have the size 29 \(ffn\); found 20"),
        ("ffn[0", OptionError, "is not an axis instance"),
        ("v[0,4]", OptionError, "its last index, of 'h', is 0 to 3"),
        ("v[0,1,1]", OptionError, "names no head"),
        ("v[0,1]", OptionError, "one head, have the size 5; found 20"),
        ("pool", OptionError, "none: no tensor of this model has that axis"),
        ("vocab", SymmetryError, "'vocab' is never transformed"),
    ],
)
def test_a_space_that_is_not_there(axis: str, kind: type[Exception], words: str, tmp_path: Path) -> None:
    save_file({"v": randn(20)}, tmp_path / "v.safetensors")
    with pytest.raises(kind, match=words):
        transport(tmp_path / "v.safetensors", spec_alignment(tmp_path), axis=axis)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"W_enc": randn(20, 33), "W_dec": randn(33, 20), "x": randn(20)}, r"'x' \[20\] is not known"),
        ({"W_enc": randn(20, 33), "W_dec": randn(34, 20)}, r"W_dec is \[34, 20\], expected \[33, 20\]"),
        ({"W_enc": randn(20, 33), "W_dec": randn(33, 20), "b_dec": randn(33)}, r"b_dec is \[33\], expected \[20\]"),
        ({"W_enc": randn(20), "W_dec": randn(33, 20)}, "expected matrices"),
        ({"W_dec": randn(33, 20)}, "expected one of W_enc or encoder.weight"),
        ({"W_enc": randn(20, 33) / 0, "W_dec": randn(33, 20)}, "NaN and"),
        ({"W_enc": randn(20, 33).long(), "W_dec": randn(33, 20)}, "expected floating-point numbers"),
    ],
)
def test_what_is_no_autoencoder(tensors: dict[str, Tensor], words: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "sae.safetensors")
    with pytest.raises(CheckpointError, match=words):
        transport(tmp_path / "sae.safetensors", spec_alignment(tmp_path), axis="residual", kind="sae").save(
            tmp_path / "o"
        )
    assert not (tmp_path / "o").exists()


def test_files_that_are_none(tmp_path: Path) -> None:
    alignment = spec_alignment(tmp_path)
    np.savez(tmp_path / "code.npz", v=np.array([print], dtype=object))
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04")
    save_file({"v": randn(20)}, tmp_path / "whole.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-9])
    (tmp_path / "v.txt").write_text("1 2 3", "utf-8")
    for name in ("code.npz", "cut.npz", "cut.safetensors", "v.txt", "absent.npz"):
        with pytest.raises(CheckpointError, match=name):
            transport(tmp_path / name, alignment, axis="residual")
    with pytest.raises(OptionError, match="a vector needs the axis"):
        transport(tmp_path / "whole.safetensors", alignment)
    with pytest.raises(OptionError, match="--encoder is for sae, this is a vector"):
        transport(tmp_path / "whole.safetensors", alignment, axis="residual", encoder="rows")


def test_the_run_and_the_card_tell_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from command import done, run

    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        base_folder("bert-mlm", tmp_path / name, seed)
    done("align", "a", "--to", "b", "-o", "moved", "--no-verify", "-q")
    save_file({"v": randn(20)}, "v.safetensors")
    said = done("transport", "v.safetensors", "--by", "moved", "--axis", "residual", "-o", "out")
    assert "vector of 1 tensors transformed by moved, written to out" in said.output
    document = json.loads(Path("out/symfuse.json").read_text("utf-8"))
    assert (document["kind"], document["thing"], document["axis"]) == ("transport", "vector", "residual")
    assert (document["alignment"]["source"]["name"], document["alignment"]["anchor"]["name"]) == ("a", "b")
    assert "of `a` to `b`" in Path("out/README.md").read_text("utf-8")
    again = run("transport", "v.safetensors", "--by", "moved", "--axis", "residual", "-o", "out")
    assert again.exit_code == 8
    wrong = run("transport", "v.safetensors", "--by", "moved", "--axis", "residual", "-o", "moved/out")
    assert wrong.exit_code == 8
    assert not Path("moved/out").exists()
