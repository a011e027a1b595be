"""A LoRA adapter on another base does what it did, where that is the old one moved: real adapters of peft, float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import symfuse
from command import data
from symfuse.adapters.lora import open_adapter
from symfuse.alignment import random_alignment
from symfuse.errors import IncompatibleError, OptionError, SymmetryError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.transporting.declared import atoms_of
from symfuse.transporting.frames import Frame
from transporting.trained import FOLDED, SCALED, base_folder, load, outputs, train, with_adapter

pytest.importorskip("peft", reason="peft is not installed")

CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "bert": ("bert", {"r": 3, "lora_alpha": 5, "target_modules": ["query", "value", "dense"]}, ()),
    "bert, saved": ("bert", {"r": 2, "target_modules": ["query"], "modules_to_save": ["classifier"]}, ()),
    "gpt2, folded": ("gpt2", {"r": 3, "target_modules": ["c_attn", "c_proj", "c_fc"]}, FOLDED),
    "llama, folded": ("llama", {"r": 3, "target_modules": ["q_proj", "o_proj", "up_proj", "lm_head"]}, FOLDED),
    "dinov2, folded": ("dinov2", {"r": 3, "target_modules": ["q_proj", "o_proj", "fc1"]}, SCALED),
}  # fmt: skip


def unfolded(checkpoint: Checkpoint, frame: tuple[str, ...]) -> Checkpoint:
    """A folded model with gains and biases of norms again, which computes the same."""
    model = Model.of(checkpoint)
    rng, new = torch.Generator().manual_seed(9), dict(checkpoint)

    def random(name: str) -> torch.Tensor:
        return 1 + torch.rand(new[name].shape, generator=rng, dtype=new[name].dtype)

    for norm in Frame(model, frame).norms:
        gain = random(model.spec.file_name(norm.gain))
        new[model.spec.file_name(norm.gain)] = gain - model.spec.offset
        beta = None if norm.bias is None else random(model.spec.file_name(norm.bias))
        if beta is not None and norm.bias is not None:
            file = model.spec.file_name(norm.bias)
            new[file] = beta if norm.takes_bias else gain * new[file]
        for reader in norm.readers:
            file = model.spec.file_name(reader)
            dims = model.spec.tensors[reader].layout.dims
            dim = next(i for i, one in enumerate(dims) if norm.axis in {atom.name for atom in atoms_of((one,))})
            shape = [-1 if i == dim else 1 for i in range(new[file].ndim)]
            beside = new[file].shape[dim] // len(gain)
            new[file] = new[file] / gain.repeat(beside).reshape(shape)
            bias = file.removesuffix("weight") + "bias"
            if beta is not None and norm.takes_bias:
                new[bias] = new[bias] - torch.tensordot(new[file], beta.repeat(beside), ([dim], [0]))
    return Checkpoint(new, checkpoint.config, name="b")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * case.startswith(("gpt2", "llama"))) for case in CASES]
)
def test_an_adapter_stays_one_of_its_rank_on_a_moved_base(case: str, tmp_path: Path) -> None:
    kind, options, frame = CASES[case]
    base = base_folder(kind, tmp_path / "base")
    expected = train(kind, options, base, tmp_path / "adapter")
    model = canonical(Model.of(open_checkpoint(base)), frame)
    g = replace(random_alignment(model.spec, 3, largest=True), frame=frame, gauges={})
    b = g(base)
    (unfolded(b, frame) if frame else b).save(tmp_path / "b")
    rms = kind.startswith("llama")  # whose norms compute in float32
    near = {"rtol": 2e-4, "atol": 2e-4} if rms else {"rtol": 1e-7, "atol": 1e-8}
    torch.testing.assert_close(outputs(kind, load(kind, tmp_path / "b")), outputs(kind, load(kind, base)), **near)
    done = symfuse.rebase(tmp_path / "adapter", base, tmp_path / "b", alignment=g)
    assert done.relation.kind == "moved"
    folder = done.save(tmp_path / "out")
    torch.testing.assert_close(with_adapter(kind, tmp_path / "b", folder), expected, **near)
    wrong = with_adapter(kind, tmp_path / "b", tmp_path / "adapter")
    assert float((wrong - expected).abs().max()) > 1e-2
    old = open_adapter(tmp_path / "adapter", base)
    whole = symfuse.rebase(old, base, tmp_path / "b", alignment=g)
    assert symfuse.verify(old, whole.checkpoint, tolerance=1e-4).equal


def test_alpha_scales_an_adapter_and_bad_input_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base_folder("bert", Path("a"))
    train("bert", {"r": 2, "target_modules": ["query"]}, Path("a"), Path("adapter"))
    document = data("rebase", "adapter", "--from", "a", "--onto", "a", "--alpha", "0.5", "-o", "half")
    assert document["adapter"] == "adapter"
    half, whole = (open_adapter(name, "a") for name in ("half", "adapter"))
    name = next(name for name in whole if name.endswith("0.attention.self.query.weight"))
    plain = symfuse.open("a")[name]
    torch.testing.assert_close(half[name] - plain, 0.5 * (whole[name] - plain))
    with pytest.raises(OptionError, match="towards: an adapter leaves its base as it is"):
        symfuse.rebase("adapter", "a", "a", towards=0.5)
    base_folder("llama", Path("other"))
    with pytest.raises((IncompatibleError, SymmetryError), match="bert"):
        symfuse.rebase("adapter", "a", "other")
    base_folder("vit", Path("vit"))
    with pytest.raises(symfuse.SymfuseError, match=r"query|fit"):
        symfuse.rebase("adapter", "vit", "vit")
    with pytest.raises(OptionError, match="an adapter; save it"):
        _ = symfuse.rebase("adapter", "a", "a").checkpoint
