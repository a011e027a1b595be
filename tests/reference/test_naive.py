"""Batched matching equals the published per-head mathematics: so benchmarks compare equal work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.testing import assert_close

from symfuse.groups import Conformal, Moments, Monomial, Similarity, objective
from symfuse.io import open as open_checkpoint
from symfuse.matching import match_models
from symfuse.model import Model
from symfuse.spec import Instance

sys.path.append(str(Path(__file__).parent))
import naive

LAYERS, HEADS = 2, 4


@pytest.fixture(scope="module", params=["BertModel", "RobertaModel"])
def pair(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    """Two float64 models, far apart, of distinct sizes; neither in balance with the other."""
    cls = getattr(transformers, request.param)
    config = cls.config_class(
        vocab_size=61, hidden_size=20, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=29, max_position_embeddings=37,
    )  # fmt: skip
    models = []
    for seed in (0, 1):
        rng = torch.Generator().manual_seed(seed)
        module = cls(config).double()
        with torch.no_grad():
            for name, p in module.named_parameters():
                size = {"query": 0.6, "key": 0.2, "value": 0.4}.get(name.split(".")[-2], 0.3) if seed else 0.3
                p.copy_(torch.randn(p.shape, generator=rng, dtype=torch.float64) * size)
        models.append(Model.of(open_checkpoint(module, name=f"{request.param} {seed}")))
    return models[0], models[1]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_attention_equals_per_head_reference(pair: tuple[Model, Model], layer: int) -> None:
    source, anchor = pair
    found = match_models(source, anchor, axes="attention", one_pass=True, biases=False, threads=1)
    expected = naive.match_attention(source.checkpoint, anchor.checkpoint, layer, HEADS)
    moved = {name: found(source.checkpoint)[name] for name in source.spec.tensors}
    for axis, heads in zip(("qk", "v"), expected, strict=True):
        element = found.elements[Instance(axis, (layer,))]
        assert isinstance(element, Similarity)
        assert element.scale is not None
        assert_close(element.matrix, torch.stack([h.rotation for h in heads]), rtol=0, atol=1e-8)
        assert_close(element.scale, torch.tensor([h.scale for h in heads], dtype=torch.float64), rtol=1e-8, atol=0)
    for name, tensor in naive.apply_attention(source.checkpoint, layer, *expected).items():
        assert_close(moved[name], tensor, rtol=0, atol=1e-8)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_feed_forward_equals_dense_reference(pair: tuple[Model, Model], layer: int) -> None:
    source, anchor = pair
    found = match_models(source, anchor, axes="ffn", biases=False, threads=1)
    permutation = naive.match_ffn(source.checkpoint, anchor.checkpoint, layer)
    element = found.elements[Instance("ffn", (layer,))]
    assert isinstance(element, Monomial)
    assert torch.equal(element.index, permutation.argmax(1))
    moved = found(source.checkpoint)
    for name, tensor in naive.apply_ffn(source.checkpoint, layer, permutation).items():
        assert torch.equal(moved[name], tensor)


@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0, None], ids="noise={}".format)
@pytest.mark.parametrize("unbalance", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("n", [7, 32, 64])
def test_rotation_and_scale_in_turns_reach_what_an_svd_for_each_turn_reaches(
    n: int, unbalance: float, noise: float | None
) -> None:
    """Heads of two models, related up to noise or not at all, whose norms differ in balance."""
    rng = torch.Generator().manual_seed(n)
    heads, width = 6, 6 * n

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    anchor = [random(heads, n, width), 0.7 * random(heads, n, width)]
    if noise is None:
        source = [random(heads, n, width), random(heads, n, width)]
    else:
        q = torch.linalg.qr(random(heads, n, n))[0]
        source = [q @ (x + noise * random(heads, n, width)) for x in anchor]
    source = [unbalance * source[0], source[1] / unbalance]
    moments = {
        part: Moments(x @ y.mT, x.square().sum(-1), y.square().sum(-1))
        for part, x, y in zip(("primal", "dual"), anchor, source, strict=True)
    }
    reached = objective(Conformal().best(moments), moments)
    size = sum(m.xx.sum(-1) + m.yy.sum(-1) for m in moments.values())
    for head in range(heads):
        pair = [x[head] for x in anchor], [y[head] for y in source]
        expected = naive.distance(naive.match_head_in_turns(*pair), *pair)
        # Unrelated features have several stationary points, and the two begin at different scales.
        within = 2 * Conformal().rtol if noise is not None else 1e-3
        assert abs(float(reached[head]) - expected) <= within * float(size[head])
