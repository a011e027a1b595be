"""OT fusion of the peers: hard maps are permutations, and symfuse's own transport where both mean the same."""

from __future__ import annotations

import sys
from pathlib import Path

import ot
import pytest
import torch
from torch.testing import assert_close

import symfuse

sys.path.append(str(Path(__file__).parent))
import otfusion
import rebasin
import spaces
from peer_cases import HEADS, KINDS, logits, random_permutations, tiny


@pytest.mark.parametrize("cost", ["writers", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_hard_maps_inside_of_layers_keep_the_function(kind: str, cost: str) -> None:
    module, anchor = (tiny(kind, seed) for seed in (1, 2))
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    moved = otfusion.transport(state, anchor.state_dict(), kind, HEADS, cost=cost)
    assert spaces.distance(moved, state, kind) > 10
    assert_close(logits(module, moved, kind), logits(module, state, kind), rtol=1e-10, atol=1e-10)
    soft = otfusion.transport(state, anchor.state_dict(), kind, HEADS, solver="sinkhorn", regularisation=0.5, cost=cost)
    assert float((logits(module, soft, kind) - logits(module, state, kind)).abs().max()) > 1e-3


@pytest.mark.parametrize("residual", ["stream", "one"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_permutation_is_found(kind: str, residual: str) -> None:
    anchor = tiny(kind, 0).state_dict()
    planted = random_permutations(anchor, kind)
    moved = otfusion.transport(rebasin.permute(anchor, kind, planted), anchor, kind, HEADS, residual=residual)
    assert_close(moved, dict(anchor), rtol=0, atol=1e-12)
    inner = {space: index for space, index in planted.items() if space != "residual"}
    moved = otfusion.transport(rebasin.permute(anchor, kind, inner), anchor, kind, HEADS)
    assert_close(moved, dict(anchor), rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [HEADS, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_published_formula_for_one_layer(kind: str, heads: int) -> None:
    """Neurons of the first layer, and values, by W ← T W, W ← W Tᵀ with dense matrices written out."""
    source, anchor = (tiny(kind, seed).state_dict() for seed in (1, 2))
    moved = otfusion.transport(source, anchor, kind, heads, solver="sinkhorn", regularisation=0.1)
    where = rebasin.by_space(source, kind)["0.ffn"]
    w1, bias, w2 = (
        next(p for p in where if p.role == role and p.name.endswith(end))
        for role, end in (("writes", "weight"), ("writes", "bias"), ("reads", "weight"))
    )
    rows = [torch.cat([w1.units(s), bias.units(s)], 1) for s in (anchor, source)]
    cost = ((rows[0][:, None] - rows[1]) ** 2).sum(2)
    n = len(cost)
    weights = [1 / n] * n
    plan = n * torch.as_tensor(
        ot.bregman.sinkhorn_log(weights, weights, cost.numpy(), 0.1 * float(cost.mean()), 1000, 1e-8)
    )
    assert_close(w1.units(moved), plan @ w1.units(source), rtol=1e-7, atol=1e-9)
    assert_close(bias.units(moved), plan @ bias.units(source), rtol=1e-7, atol=1e-9)
    assert_close(w2.units(moved), (w2.units(source).T @ plan.T).T, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("solver", ["emd", "sinkhorn"])
@pytest.mark.parametrize("kind", KINDS)
def test_symfuse_transports_the_same(kind: str, solver: str) -> None:
    """Neurons, and units inside of heads where it has these in the same order, by all weights that touch them."""
    source, anchor = (symfuse.open(tiny(kind, seed)) for seed in (1, 2))
    name = "emd" if solver == "emd" else "sinkhorn:0.5"
    found = symfuse.match(
        source, anchor, axes=["qk", "v", "h", "ffn"], groups=dict.fromkeys(("qk", "v", "ffn"), name), biases=False,
        variants=["transport"],
    )  # fmt: skip
    ours = dict(found(source))
    theirs = otfusion.transport(dict(source), dict(anchor), kind, HEADS, solver=solver, regularisation=0.5, cost="all")
    where = {place.name for place in spaces.places(theirs, kind) if solver == "emd" or place.space.endswith("ffn")}
    assert len(where) > 5
    for tensor in where:
        # Sinkhorn's iterations end at other errors.
        assert_close(ours[tensor], theirs[tensor], rtol=0, atol=1e-10 if solver == "emd" else 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_maps_of_the_stream_are_averaged(kind: str) -> None:
    """M₀ of the embeddings, then M ← (M + B) / 2 with B of the branch, seen at what moves along or reads there; "one":
    the mean of all."""
    source, anchor = (tiny(kind, seed).state_dict() for seed in (1, 2))
    where = [place for place in spaces.places(source, kind) if place.space == "residual"]
    maps: list[torch.Tensor] = []
    for point in range(5):
        writers = [place for place in where if place.point == point and place.role == "writes"]
        x, y = (torch.cat([place.units(s) for place in writers], 1) for s in (anchor, source))
        index, _ = rebasin.assign(-((x[:, None] - y) ** 2).sum(2))
        hard = torch.eye(len(index), dtype=torch.float64)[index]
        maps.append((maps[-1] + hard) / 2 if maps else hard)
    mean = sum(maps) / 5
    for residual, expected in (("stream", maps), ("one", [mean] * 5)):
        found = otfusion.transport(source, anchor, kind, HEADS, residual=residual, attention=False, ffn=False)
        for place in where:
            if source[place.name].ndim == 1 or place.role == "reads" or place.point == 0:
                other = [p for p in where if p.name == place.name and p != place]
                at = {place.name: source[place.name]}
                for p in (place, *other):
                    at = spaces.moved(at, [p], expected[p.point or 0])
                assert_close(found[place.name], at[place.name], rtol=0, atol=1e-12)
