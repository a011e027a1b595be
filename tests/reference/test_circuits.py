"""Attention in circuit form computes what the class of transformers computes, and knows no basis inside of heads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import symfuse

sys.path.append(str(Path(__file__).parent))
import circuits
import rebasin
import spaces
from peer_cases import HEADS, batch, logits, tiny

KINDS = ("vit", "gpt2")


@torch.no_grad()
def outputs(model: torch.nn.Module, kind: str) -> torch.Tensor:
    inputs = batch(kind)
    found: torch.Tensor = model(**inputs).logits
    return found if kind == "vit" else found[inputs["attention_mask"].bool()]


def mixed(state: spaces.State, kind: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random invertible map in the queries and keys, and in the values, of each head."""
    rng = torch.Generator().manual_seed(seed)
    out = dict(state)
    for where in rebasin.by_space(state, kind).values():
        if where[0].word not in ("q", "k", "v"):
            continue
        n = len(where[0].units(state))
        parts = [
            torch.eye(n // HEADS, dtype=torch.float64)
            + 0.5 * torch.randn(n // HEADS, n // HEADS, generator=rng, dtype=torch.float64)
            for _ in range(HEADS)
        ]
        g = torch.block_diag(*parts)
        for place in where:
            dual = place.word == "k" or place.role == "reads"
            out = spaces.moved(out, [place], torch.linalg.inv(g).T if dual else g)
    return out


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("vit", {}),
        ("vit", {"qkv_bias": False}),
        ("gpt2", {}),
        ("gpt2", {"attn_implementation": "eager"}),  # its mask is added
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("names", ["memory", "file"])
def test_circuits_compute_what_the_class_computes(kind: str, more: dict[str, Any], names: str, tmp_path: Path) -> None:
    module = tiny(kind, 0, **more)
    state: spaces.State = module.state_dict()
    if names == "file":
        module.save_pretrained(tmp_path)
        state = symfuse.open(tmp_path)
    found = circuits.to_circuits(state, kind, HEADS)
    assert found["circuits.1.qk"].shape == found["circuits.1.vo"].shape == (HEADS, 21, 20)
    assert_close(
        outputs(circuits.circuit_module(tiny(kind, 3, **more), found, kind, HEADS), kind),
        logits(module, module.state_dict(), kind),
        rtol=1e-9,
        atol=1e-9,
    )
    for name in ("circuits.0.qk", "circuits.1.vo"):  # each, and its bias, matters
        less = {**found, name: found[name] * torch.tensor([1.0] * 20 + [0.0], dtype=torch.float64)[:, None]}
        changed = outputs(circuits.circuit_module(module, less, kind, HEADS), kind)
        same = torch.equal(changed, outputs(circuits.circuit_module(module, found, kind, HEADS), kind))
        assert same == (not more.get("qkv_bias", True))


@pytest.mark.parametrize("kind", KINDS)
def test_no_future_is_seen(kind: str) -> None:
    module = tiny(kind, 0)
    model = circuits.circuit_module(module, circuits.to_circuits(module.state_dict(), kind, HEADS), kind, HEADS)
    if kind == "vit":
        assert not any(part.causal for part in model.modules() if isinstance(part, circuits.CircuitAttention))
        return
    inputs = batch(kind, padded=False)
    later = inputs["input_ids"].clone()
    later[:, 6:] = 3
    with torch.no_grad():
        found = [model(input_ids=ids, labels=ids) for ids in (inputs["input_ids"], later)]
        expected = module(input_ids=later, labels=later).loss
    assert torch.equal(found[0].logits[:, :6], found[1].logits[:, :6])
    assert_close(found[1].loss, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_averages_do_not_depend_on_the_basis_inside_of_heads(kind: str) -> None:
    module = tiny(kind, 0)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    other = mixed(state, kind)
    expected = logits(module, state, kind)
    assert_close(logits(module, other, kind), expected, rtol=1e-8, atol=1e-8)
    pair = [circuits.to_circuits(s, kind, HEADS) for s in (state, other)]
    mean = circuits.circuit_module(module, circuits.interpolate(*pair, 0.5), kind, HEADS)
    assert_close(outputs(mean, kind), expected, rtol=1e-8, atol=1e-8)
    native = {name: (state[name] + other[name]) / 2 for name in state}
    assert float((logits(module, native, kind) - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_interpolation_runs_from_the_first_to_the_second(kind: str) -> None:
    states = [tiny(kind, seed).state_dict() for seed in (0, 1)]
    a, b = (circuits.to_circuits(state, kind, HEADS) for state in states)
    for weight, end in ((0.0, a), (1.0, b)):
        found = circuits.interpolate(a, b, weight)
        assert all(torch.equal(found[name], end[name]) for name in end)
    quarter = circuits.interpolate(a, b, 0.25)["circuits.0.vo"]
    assert_close(quarter, 0.75 * a["circuits.0.vo"] + 0.25 * b["circuits.0.vo"])
    with pytest.raises(ValueError, match="only one of the models"):
        circuits.interpolate(a, states[1], 0.5)
    with pytest.raises(ValueError, match="not of bert"):
        circuits.to_circuits(tiny("bert", 0).state_dict(), "bert", HEADS)
