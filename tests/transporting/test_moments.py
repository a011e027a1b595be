"""One step of the real AdamW from A and its moments, then aligned, is one from A' and the moved moments."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError, OptionError, SymmetryError
from symfuse.groups import Monomial, Similarity
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.spec import Instance
from symfuse.transporting import transport
from symfuse.transporting.moments import _grouped
from transporting.trained import base_folder, load

# Axes on which permutations and signs act, and nothing translates.
AXES = {
    "bert": ("h", "ffn", "residual", "pool"),
    "gpt2": ("h", "ffn", "residual"),
    "llama": ("kv", "q", "ffn", "residual"),
}


def signs_only(alignment: Alignment) -> Alignment:
    """With the scales of neurons off, their signs left."""
    elements = {
        i: Monomial(g.index, g.scale.sign()) if isinstance(g, Monomial) and g.scale is not None else g
        for i, g in alignment.elements.items()
    }
    return replace(alignment, elements=elements)


def chosen(kind: str, base: Path) -> Alignment:
    return signs_only(random_alignment(Model.of(open_checkpoint(base)).spec, 3, AXES[kind]))


def optimizer(module: torch.nn.Module, groups: int, **options: Any) -> torch.optim.Optimizer:
    named = dict(module.named_parameters())
    if groups == 1:
        return torch.optim.AdamW(list(named.values()), lr=1e-2, **options)
    names = _grouped(module, named)
    decay = [n for n in names if not ("bias" in n or "norm" in n.lower() or ".ln_" in n)]
    assert names[: len(decay)] == decay
    both = [{"params": [named[n] for n in part]} for part in (decay, names[len(decay) :])]
    both[1]["weight_decay"] = 0.0
    return torch.optim.AdamW(both, lr=1e-2, **options)


def step(module: Any, optim: torch.optim.Optimizer, seed: int) -> None:
    """One step on real gradients."""
    rng = torch.Generator().manual_seed(seed)
    optim.zero_grad()
    logits = module(input_ids=torch.randint(3, 61, (3, 9), generator=rng)).logits
    (logits * torch.randn(logits.shape, generator=rng, dtype=torch.float64)).mean().backward()
    optim.step()


def files(kind: str, base: Path, folder: Path, groups: int, **options: Any) -> tuple[Path, Path]:
    """A model that was trained for two steps, and its optimizer.pt beside it, as trainers leave them."""
    module = load(kind, base)
    optim = optimizer(module, groups, **options)
    step(module, optim, 0)
    step(module, optim, 1)
    module.save_pretrained(folder)
    torch.save(optim.state_dict(), folder / "optimizer.pt")
    return folder, folder / "optimizer.pt"


def resumed(kind: str, folder: Path, state: Path, groups: int, **options: Any) -> dict[str, Tensor]:
    module = load(kind, folder)
    optim = optimizer(module, groups, **options)
    optim.load_state_dict(torch.load(state, weights_only=True))
    step(module, optim, 2)
    return module.state_dict()


@pytest.mark.parametrize(
    ("kind", "groups", "options"),
    [("bert", 2, {"weight_decay": 0.1}), ("gpt2", 1, {"weight_decay": 0.0}), ("llama", 2, {"amsgrad": True})],
)
def test_one_step_then_aligned_is_aligned_then_one_step(
    kind: str, groups: int, options: dict[str, Any], tmp_path: Path
) -> None:
    trained, state = files(kind, base_folder(kind, tmp_path / "base"), tmp_path / "trained", groups, **options)
    alignment = chosen(kind, trained)
    alignment(trained).save(tmp_path / "moved")
    out = transport(state, alignment).save(tmp_path / "out")
    assert [path.name for path in out.iterdir()] == ["optimizer.pt"]
    after = open_checkpoint(resumed(kind, trained, state, groups, **options), config=open_checkpoint(trained).config)
    expected = dict(alignment(after))
    got = resumed(kind, tmp_path / "moved", out / "optimizer.pt", groups, **options)
    names = [name for name in expected if name in got]
    assert len(names) >= 20
    rms = kind == "llama"  # whose norms, and so whose gradients, are computed in float32
    for name in names:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-6 if rms else 1e-11)
    wrong = resumed(kind, tmp_path / "moved", state, groups, **options)
    assert max(float((wrong[name] - expected[name]).abs().max()) for name in names) > 1e-3


def test_scales_divide_the_first_moment_and_the_second_by_their_squares(tmp_path: Path) -> None:
    """Where W' = a W, gradients are 1/a of what they were."""
    base = base_folder("llama", tmp_path / "base")
    alignment = random_alignment(Model.of(open_checkpoint(base)).spec, 3, ("ffn",))
    up = "model.layers.0.mlp.up_proj.weight"
    g = torch.randn(open_checkpoint(base)[up].shape, dtype=torch.float64)
    save_file(
        {f"{up}.exp_avg": g, f"{up}.exp_avg_sq": g**2, f"{up}.step": torch.tensor(3.0)}, tmp_path / "m.safetensors"
    )
    got = transport(tmp_path / "m.safetensors", alignment)
    element = alignment.elements[Instance("ffn", (0,))]
    assert isinstance(element, Monomial)
    assert element.scale is not None
    expected = g[element.index] / element.scale[:, None]
    torch.testing.assert_close(got[f"{up}.exp_avg"], expected)
    torch.testing.assert_close(got[f"{up}.exp_avg_sq"], expected**2)
    assert float(got[f"{up}.step"]) == 3
    assert "ffn: rescaled, which AdamW's steps are not" in got.notes[0]


def state_of(tensors: dict[str, Any], **group: Any) -> dict[str, Any]:
    state = {0: {"step": torch.tensor(1.0), **tensors}}
    return {"state": state, "param_groups": [{"params": [0], "param_names": ["classifier.bias"], **group}]}


GOOD = {"exp_avg": torch.ones(7), "exp_avg_sq": torch.ones(7)}


class Code:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch was-run",)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (state_of({**GOOD, "exp_avg": torch.ones(8)}), r"'classifier.bias.exp_avg' is \[8\], expected \[7\]"),
        (state_of({"momentum_buffer": torch.ones(7)}), "'classifier.bias.momentum_buffer' is no state of AdamW"),
        (state_of({**GOOD, "exp_avg": "x"}), "'exp_avg' of parameter 0 is no dense tensor"),
        ({"state": {}, "param_groups": []}, "no state of an optimizer"),
        (state_of(GOOD, params=3), "no state of an optimizer"),
        (state_of(GOOD, param_names=3), "no state of an optimizer"),
        (state_of(GOOD, param_names=[3]), "no state of an optimizer"),
        ([1, 2], "no state of an optimizer"),
        (state_of(GOOD, params=[0, 1]), "has 2 parameters"),
        (state_of(GOOD, params=[1]), "are in no group"),
        (state_of(GOOD, param_names=["other.bias"]), "other.bias"),
        (state_of({**GOOD, "exp_avg": torch.ones(7) / 0}), "infinite values"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit(data: Any, words: str, tmp_path: Path) -> None:
    base = base_folder("bert", tmp_path / "base")
    torch.save(data, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=words):
        transport(tmp_path / "optimizer.pt", chosen("bert", base), base=open_checkpoint(base)).save(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "optimizer.pt"]


def test_a_state_with_code_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alignment = chosen("bert", base_folder("bert", tmp_path / "base"))
    (tmp_path / "raw.pt").write_bytes(pickle.dumps({"state": Code()}))
    torch.save({"state": Code(), "param_groups": []}, tmp_path / "zip.pt")
    torch.save(state_of(GOOD), tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:-200])
    for name in ("raw.pt", "zip.pt", "cut.pt"):
        with pytest.raises(CheckpointError, match=name):
            transport(tmp_path / name, alignment)
    assert not (tmp_path / "was-run").exists()


def test_what_moments_cannot_follow_is_refused_with_the_axis_and_the_way_out(tmp_path: Path) -> None:
    base = base_folder("bert", tmp_path / "base")
    torch.save(state_of(GOOD), tmp_path / "optimizer.pt")
    spec = Model.of(open_checkpoint(base)).spec
    with pytest.raises(SymmetryError, match=r"translates .*value.bias through .*--no-biases"):
        transport(tmp_path / "optimizer.pt", random_alignment(spec, 0))
    rotated = replace(random_alignment(spec, 0), shifts={})
    with pytest.raises(SymmetryError, match=r"axis (qk|v)\[\d\] is rotated.*--group AXIS=permutation"):
        transport(tmp_path / "optimizer.pt", rotated)
    with pytest.raises(SymmetryError, match="rewrites the model first"):
        transport(tmp_path / "optimizer.pt", replace(chosen("bert", base), frame=("untie",)))
    torch.save({**state_of(GOOD), "param_groups": [{"params": [0]}]}, tmp_path / "optimizer.pt")
    with pytest.raises(OptionError, match="knows parameters by number"):
        transport(tmp_path / "optimizer.pt", chosen("bert", base))
    named = transport(tmp_path / "optimizer.pt", chosen("bert", base), names=["classifier.bias"])
    assert torch.equal(named["0.exp_avg"], torch.ones(7))


def test_a_rotation_by_signs_and_order_alone_is_no_rotation(tmp_path: Path) -> None:
    """As of planes of rotary positions, whose elements are matrices also where they only flip."""
    base = base_folder("llama", tmp_path / "base")
    spec = Model.of(open_checkpoint(base)).spec
    flip = Similarity(-torch.eye(2, dtype=torch.float64).expand(*spec.batch("c"), 2, 2))
    q = "model.layers.0.self_attn.q_proj.weight"
    save_file(
        {f"{q}.exp_avg": open_checkpoint(base)[q], f"{q}.exp_avg_sq": open_checkpoint(base)[q]},
        tmp_path / "m.safetensors",
    )
    got = transport(tmp_path / "m.safetensors", Alignment(spec, {Instance("c", (0,)): flip}))
    assert torch.equal(got[f"{q}.exp_avg"], -open_checkpoint(base)[q])
    assert torch.equal(got[f"{q}.exp_avg_sq"], open_checkpoint(base)[q])
