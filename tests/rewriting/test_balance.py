"""Balanced heads: the same circuits, both sides of one weight, one form for all bases of a head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contract.tiny import case
from rewriting.kit import FRAMES, LABELS, case_for, changed, model_of, pre_norm, randn, toy
from symfuse.alignment import Alignment
from symfuse.groups import Group, Invertible, Monomial, Permutation, PositiveMonomial, SignedMonomial
from symfuse.groups.monomial import random_scales, random_signs
from symfuse.model import Model
from symfuse.rewriting import balance, canonical
from symfuse.spec import Axis, Instance, Shift

RESCALED: list[Group] = [PositiveMonomial(), SignedMonomial()]

LAYOUTS = {"q": "(h n) a*", "q_bias": "(h n)", "k": "b* (h n*)", "k_bias": "(h n*)", "k2": "(h n*) c*"}


def pair(heads: int, n: int, a: int, b: int, c: int, rank: int, seed: int, *, free: bool = False) -> Model:
    """Two tensors on one side, three on the other, with biases; queries of that rank."""
    low = randn(heads, n, min(rank, n), seed=seed) @ randn(heads, min(rank, n), a + 1, seed=seed + 1)
    tensors = {
        "q": low[..., 1:].reshape(-1, a),
        "q_bias": low[..., 0].reshape(-1),
        "k": randn(b, heads * n, seed=seed + 2),
        "k_bias": randn(heads * n, seed=seed + 3),
        "k2": randn(heads * n, c, seed=seed + 4),
    }
    axes = {"h": Axis(heads, Permutation()), "n": Axis(n, Invertible(), per=("h",))}
    axes |= {"a": Axis(a), "b": Axis(b), "c": Axis(c)}
    return toy(tensors, LAYOUTS, axes, shifts=(Shift("k_bias", "n*"),) if free else ())


def sides(model: Model) -> tuple[Tensor, Tensor]:
    """[h, n, a + 1] and [h, n, b + c + 1]."""
    heads, n = (model.spec.axes[name].size for name in ("h", "n"))
    q = torch.cat([model.read("q"), model.read("q_bias")[:, None]], 1)
    k = torch.cat([model.read("k").T, model.read("k2"), model.read("k_bias")[:, None]], 1)
    return q.reshape(heads, n, -1), k.reshape(heads, n, -1)


shapes = st.tuples(st.integers(1, 3), *(st.integers(1, 6) for _ in range(5)))


@settings(deadline=None)
@given(shapes, st.integers(0, 99))
def test_circuits_stay_and_both_sides_weigh_the_same(shape: tuple[int, ...], seed: int) -> None:
    model = pair(*shape, seed)
    after = balance(model)
    (q, k), (x, y) = sides(model), sides(after)
    circuit = q.mT @ k
    size = circuit.abs().max().item()
    torch.testing.assert_close(x.mT @ y, circuit, rtol=0, atol=1e-12 * size)
    values = torch.linalg.svdvals(circuit)[:, : model.spec.axes["n"].size]
    weights = torch.nn.functional.pad(values, (0, model.spec.axes["n"].size - values.shape[-1]))
    for side in (x, y):
        torch.testing.assert_close(side @ side.mT, torch.diag_embed(weights), rtol=0, atol=1e-12 * size)
    again = balance(after)
    for name in LAYOUTS:
        torch.testing.assert_close(again.read(name), after.read(name), rtol=0, atol=1e-10 * max(1, size))


@settings(deadline=None)
@given(shapes, st.integers(0, 99))
def test_all_bases_have_one_balanced_form(shape: tuple[int, ...], seed: int) -> None:
    heads, n, *rest = shape
    model = pair(heads, n, *rest[:3], n, seed)
    g = {
        i: Invertible().random(n, (heads,), torch.Generator().manual_seed(seed))
        for i in model.spec.movable
        if i.axis == "n"
    }
    alignment = Alignment(model.spec, g)
    moved = Model(
        changed(model.checkpoint, {name: alignment.move(name, model.read(name)) for name in LAYOUTS}), model.spec
    )
    (x, y), (u, v) = sides(balance(model)), sides(balance(moved))
    gaps = torch.linalg.svdvals(x)
    if bool((gaps[:, 1:] / gaps[:, :-1] < 0.99).all()) and bool((gaps[:, -1] / gaps[:, 0] > 1e-3).all()):
        torch.testing.assert_close(u, x, rtol=0, atol=1e-8)
        torch.testing.assert_close(v, y, rtol=0, atol=1e-8)


def test_a_free_bias_follows_and_has_no_say() -> None:
    one = pair(3, 4, 5, 3, 2, 4, seed=7, free=True)
    other = Model(changed(one.checkpoint, {"k_bias": randn(12, seed=8)}), one.spec)
    a, b = balance(one), balance(other)
    for name in ("q", "q_bias", "k", "k2"):
        assert torch.equal(a.read(name), b.read(name))
    assert not torch.equal(a.read("k_bias"), b.read("k_bias"))
    (q, k), (x, y) = sides(one), sides(a)
    torch.testing.assert_close(x.mT @ y, q.mT @ k, rtol=0, atol=1e-12)


@pytest.mark.parametrize("label", LABELS)
def test_heads_that_do_nothing(label: str) -> None:
    """A key that is zero, values that are zero but for their bias, queries that are zero."""
    this = pre_norm(label)
    spec, values = this.spec, {}
    for name in spec.tensors:
        tensor = this.checkpoint[spec.file_name(name)].clone()
        for segment in spec.segments(name, tensor):
            atoms = [str(atom) for atom in segment.atoms]
            index = spec.tensors[name].index.get("l")
            for atom, layer, head in (("qk*", 0, 1), ("v", 0, 2), ("qk", 1, 0)):
                if atom in atoms and index == layer and tensor.ndim == 2:
                    segment.view.select(atoms.index("h"), head).zero_()
        values[spec.file_name(name)] = tensor
    checkpoint = changed(this.checkpoint, values)
    out = canonical(Model.of(checkpoint), FRAMES[label])
    assert case_for(checkpoint).error(out.checkpoint) < 1e-12


@pytest.mark.parametrize("label", LABELS)
def test_only_heads_change_and_the_declaration_stays(label: str) -> None:
    model = model_of(label)
    after = balance(model)
    assert after.spec == model.spec
    changed_names = {n for n in model.spec.tensors if not torch.equal(model.read(n), after.read(n))}
    expected = {n for i, names in model.spec.movable.items() if i.axis in ("qk", "v") for n in names}
    assert changed_names == expected


# Neurons that may be rescaled.

NEURONS = {"gate": "|n| a*", "up": "n a*", "up_bias": "n", "down": "b n*", "fused": "(|n| + n) a*"}


def neurons(n: int, a: int, b: int, group: Group, seed: int) -> Model:
    shapes = {"gate": (n, a), "up": (n, a), "up_bias": (n,), "down": (b, n), "fused": (2 * n, a)}
    tensors = {name: randn(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}
    return toy(tensors, NEURONS, {"n": Axis(n, group), "a": Axis(a), "b": Axis(b)})


def of_neurons(model: Model) -> tuple[Tensor, Tensor, Tensor]:
    """What is not rescaled, up with its bias, and down, each [n, …]."""
    fixed, up = model.read("fused").chunk(2)
    ups = torch.cat([model.read("up"), model.read("up_bias")[:, None], up], 1)
    return torch.cat([model.read("gate"), fixed], 1), ups, model.read("down").T


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 5), st.sampled_from(RESCALED), st.integers(0, 99))
def test_both_sides_of_a_neuron_weigh_the_same(n: int, a: int, b: int, group: Group, seed: int) -> None:
    model = neurons(n, a, b, group, seed)
    after = balance(model)
    (gate, up, down), (g, x, y) = of_neurons(model), of_neurons(after)
    assert torch.equal(g, gate)
    torch.testing.assert_close(x[:, :, None] * y[:, None], up[:, :, None] * down[:, None], rtol=1e-12, atol=0)
    torch.testing.assert_close(x.norm(dim=1), y.norm(dim=1))
    rng = torch.Generator().manual_seed(seed)
    scale = random_scales((n,), rng) * (random_signs((n,), rng) if group == SignedMonomial() else 1)
    g = Alignment(model.spec, {Instance("n"): Monomial(torch.arange(n), scale)})
    other = balance(
        Model(changed(model.checkpoint, {name: g.move(name, model.read(name)) for name in NEURONS}), model.spec)
    )
    for name in NEURONS:
        torch.testing.assert_close(other.read(name), after.read(name))
        torch.testing.assert_close(balance(after).read(name), after.read(name))


def test_a_neuron_that_does_nothing_keeps_its_size() -> None:
    model = neurons(3, 4, 2, SignedMonomial(), seed=5)
    down = model.read("down").clone()
    down[:, 1] = 0
    model = Model(changed(model.checkpoint, {"down": down}), model.spec)
    for before, after in zip(of_neurons(model), of_neurons(balance(model)), strict=True):
        assert torch.equal(after[1].abs(), before[1].abs())


def test_neurons_behind_another_activation_are_left() -> None:
    model = neurons(3, 4, 2, Permutation(), seed=5)
    assert all(torch.equal(balance(model).read(name), model.read(name)) for name in NEURONS)


@pytest.mark.parametrize("label", ["llama-biased", "phi3-partly", "opt-lm"])
def test_balanced_neurons_compute_the_same(label: str) -> None:
    this = case(label)
    model = Model.of(this.checkpoint)
    after = balance(model)
    assert this.error(after.checkpoint) < this.exact
    moved = {name for name in model.spec.tensors if not torch.equal(model.read(name), after.read(name))}
    touched = {n for i, names in model.spec.movable.items() if i.axis == "ffn" for n in names if "gate_proj" not in n}
    assert touched <= moved
