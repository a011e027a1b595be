"""Batched matching equals the published per-head mathematics: so benchmarks compare equal work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.testing import assert_close

from symfuse.architectures import Model
from symfuse.groups import Monomial, Similarity
from symfuse.io import open as open_checkpoint
from symfuse.matching import match_models
from symfuse.spec import Instance

sys.path.append(str(Path(__file__).parent))
import naive

LAYERS, HEADS = 2, 4


@pytest.fixture(scope="module", params=["BertModel", "RobertaModel"])
def pair(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    """Two float64 models, far apart, of distinct sizes; neither in balance with the other."""
    cls = getattr(transformers, request.param)
    config = cls.config_class(
        vocab_size=61, hidden_size=20, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=29,
        max_position_embeddings=37,
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
