"""Models that do not fit into memory: layer by layer they compute the same, and wrong alignments are still found."""

from __future__ import annotations

import pytest
import torch

from contract.tiny import MODELS
from symfuse import api
from symfuse.alignment import random_alignment
from symfuse.errors import CheckpointError, VerificationError
from symfuse.io import Checkpoint
from symfuse.modules import live
from symfuse.modules.paging import paged
from symfuse.verification import bench as verification
from symfuse.verification import random_inputs, run

LABELS = ["llama-lm", "gpt2-lm", "bert-mlm", "vit-classification", "mixtral-lm"]
ANY = 1  # bytes: whatever a model takes, it is more


@pytest.mark.parametrize("label", LABELS)
def test_layer_by_layer_the_outputs_are_the_same(label: str) -> None:
    source = MODELS[label]()
    whole, part = (build(source, torch.float64) for build in (live, paged))
    inputs = random_inputs(whole, source.config)
    expected, found = run(whole, inputs), run(part, inputs)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


# A head of its own that the class would tie, a bias that is a buffer, torch's attention.
@pytest.mark.parametrize("label", ["t5-lm-untied", "bart-lm", "siglip-vision"])
def test_what_is_no_parameter_of_a_part_that_runs_is_there_too(label: str) -> None:
    source = MODELS[label]()
    proof = api.prove(source, random_alignment(api.declare(source), 3), memory=ANY)
    assert proof.exact.inputs.endswith("layer by layer")
    whole, part = (build(source, torch.float64) for build in (live, paged))
    inputs = random_inputs(whole, source.config)
    expected, found = run(whole, inputs), run(part, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_there_is_never_more_than_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    source = MODELS["llama-lm"]()
    module = paged(source, torch.float64)
    here: list[int] = []
    for layer in module.model.layers:  # type: ignore[union-attr]
        layer.self_attn.register_forward_hook(
            lambda *_: here.append(sum(p.numel() for p in module.parameters() if p.device.type == "cpu" and p.ndim > 1))
        )
    run(module, random_inputs(module, source.config))
    one = sum(source.info(name).numel for name in source if ".layers.0." in name and "norm" not in name)
    assert here == [one, one]
    assert all(p.device.type == "meta" for p in module.parameters() if p.ndim > 1)


@pytest.mark.parametrize("label", LABELS)
def test_a_proof_in_little_memory_is_that_in_much(label: str) -> None:
    source = MODELS[label]().to(torch.bfloat16)
    g = random_alignment(api.declare(source), 3)
    little, much = (api.prove(source, g, memory=memory) for memory in (ANY, 2**40))
    assert little.exact.inputs == f"{much.exact.inputs}, layer by layer"
    assert (little.exact.errors, little.rounding) == (much.exact.errors, much.rounding)
    assert little.rounded_to == "bfloat16"
    assert little.rounding > 1000 * little.exact.worst


# Of a classifier the token behind the last word matters, and of BART the one that ends a text: at 47 here.
SPECIAL = {"llama-sequence": "pad_token_id", "bart-sequence": "eos_token_id"}


@pytest.mark.parametrize("label", SPECIAL)
def test_special_tokens_are_among_the_words(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MODELS[label]()
    source = source.replace(config={**source.config, SPECIAL[label]: 47})
    monkeypatch.setattr(verification, "WORDS", 20)
    proof = api.prove(source, random_alignment(api.declare(source), 3), memory=ANY)
    assert "on 20 of a vocabulary of 61" in proof.exact.inputs


@pytest.mark.parametrize("label", LABELS[:2])
def test_of_a_large_vocabulary_some_words_are_enough(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MODELS[label]()
    monkeypatch.setattr(verification, "WORDS", 20)
    for seed in range(2):  # the residual stream is moved too
        proof = api.prove(source, random_alignment(api.declare(source), seed), memory=ANY)
        assert proof.exact.inputs.endswith("layer by layer, on 20 of a vocabulary of 61")


@pytest.mark.parametrize("axis", ["v", "ffn"])
@pytest.mark.parametrize("layer", [0, 1])
def test_one_wrong_layer_is_not_proved(axis: str, layer: int) -> None:
    """An element by which not all of its tensors move."""
    source = MODELS["llama-lm"]().to(torch.bfloat16)
    g = random_alignment(api.declare(source), 1, axes=("c", "v", "ffn"))
    end = {"v": "self_attn.o_proj.weight", "ffn": "mlp.down_proj.weight"}[axis]
    name = next(n for n in g.spec.tensors if f"layers.{layer}." in n and n.endswith(end))
    moved = g.move

    class Wrong(type(g)):  # type: ignore[misc]
        def move(self, which: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor if which == name else moved(which, tensor)

        def acting(self, which: str) -> dict[str, object]:
            return {} if which == name else super().acting(which)

    wrong = Wrong(**{key: getattr(g, key) for key in g.__dataclass_fields__})
    with pytest.raises(VerificationError, match="layer by layer"):
        api.prove(source, wrong, memory=ANY)
    assert api.prove(source, g, memory=ANY).exact.equal


def test_a_tensor_that_is_missing_is_named() -> None:
    source = MODELS["llama-lm"]()
    tensors = {name: t for name, t in source.items() if not name.endswith("layers.1.mlp.up_proj.weight")}
    less = Checkpoint(tensors, source.config, name="less")
    with pytest.raises(CheckpointError, match=r"less: .* does not have model.layers.1.mlp.up_proj.weight as"):
        paged(less, torch.float64)


def test_weights_are_given_back_when_a_part_fails() -> None:
    source = MODELS["llama-lm"]()
    module = paged(source, torch.float64)
    inputs = random_inputs(module, source.config)
    with pytest.raises(IndexError):
        run(module, {**inputs, "input_ids": inputs["input_ids"] + 1000})
    assert all(p.device.type == "meta" for p in module.parameters() if p.ndim > 1)
