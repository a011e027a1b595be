"""Proofs before rounding: mistakes that half precision hides are found, and what is right passes in every dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from contract.tiny import MODELS, WINDOW, encoder, of, real
from covering import covering
from matched import match
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, VerificationError
from symfuse.groups import Similarity
from symfuse.io import Checkpoint
from symfuse.spec import Declared, Instance, parse
from symfuse.verification import TOLERANCE, random_inputs, run

MATCHED = {"qk", "v", "ffn"}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# BERT's and ViT's layers end alike.
LABELS = ["bert-mlm", "vit-classification"]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@dataclass(frozen=True, eq=False)
class Tampered(Alignment):
    """An alignment that moves the tensors whose names have these ends as another one does."""

    other: Alignment | None = None
    ends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        hits = [name for name in self.spec.tensors if name.endswith(self.ends)]
        assert len(hits) == 2 * len(self.ends), "one for each layer"

    def _by(self, name: str) -> Alignment | None:
        return self.other if name.endswith(self.ends) else None

    def move(self, name: str, tensor: Tensor) -> Tensor:
        other = self._by(name)
        return super().move(name, tensor) if other is None else other.move(name, tensor)

    def shift(self, name: str, moved: Tensor, weight: Callable[[str], Tensor]) -> Tensor:
        other = self._by(name)
        return super().shift(name, moved, weight) if other is None else other.shift(name, moved, weight)


def tampered(g: Alignment, other: Alignment, *ends: str) -> Alignment:
    return Tampered(g.spec, g.elements, g.shifts, g.provenance, other=other, ends=ends)


def without(g: Alignment, axis: str) -> Alignment:
    return replace(g, elements={i: e for i, e in g.elements.items() if i.axis != axis})


def one_head_replaced(g: Alignment) -> Alignment:
    """The third head of layer 0 turned by another rotation."""
    instance = Instance("qk", (0,))
    element = g.elements[instance]
    assert isinstance(element, Similarity)
    matrix = element.matrix.clone()
    matrix[2] = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)).Q
    return replace(g, elements={**g.elements, instance: Similarity(matrix, element.scale)})


QUERY = ("query.weight", "query.bias")
WRONG: dict[str, Callable[[Alignment], Alignment]] = {
    "the value bias is not folded": lambda g: tampered(g, replace(g, shifts={}), "attention.output.dense.bias"),
    "the neurons' bias stays": lambda g: tampered(g, without(g, "ffn"), "intermediate.dense.bias"),
    "the queries stay": lambda g: tampered(g, without(g, "qk"), *QUERY),
    "one head of the queries turns otherwise": lambda g: tampered(g, one_head_replaced(g), *QUERY),
}


@every_dtype
@pytest.mark.parametrize("label", [*LABELS, "gpt2-lm", "deberta", "torch-relu-post"])
def test_what_is_right_is_proved_and_its_rounding_told(label: str, dtype: torch.dtype) -> None:
    source, anchor = (MODELS[label](seed).to(dtype) for seed in (0, 1))
    for g in (match(source, anchor), random_alignment(api.declare(source), 1, MATCHED)):
        proof = api.prove(source, g)
        assert proof.exact.worst <= 1e-12
        assert proof.exact.tolerance == TOLERANCE[torch.float64]
        assert proof.exact.inputs == "seeded random inputs, run in float64"
        moved = api.verify(source, g(source), g, inputs=random_inputs(real(source), source.config))
        assert 0 < proof.rounding <= moved.worst * (1 + 1e-6)  # which is relative to a row
        assert torch.finfo(dtype).eps / 100 < proof.rounding < TOLERANCE[dtype]


def test_what_is_stored_in_float64_is_hardly_rounded() -> None:
    source = MODELS["bert-mlm"]()
    proof = api.prove(source, random_alignment(api.declare(source), 1))
    assert max(proof.exact.worst, proof.rounding) < 1e-13


@pytest.mark.parametrize(("mistake", "label", "dtype"), covering(list(WRONG), LABELS, DTYPES))
def test_what_is_wrong_is_not_proved(mistake: str, label: str, dtype: torch.dtype) -> None:
    source, anchor = (MODELS[label](seed).to(dtype) for seed in (0, 1))
    for g in (match(source, anchor), random_alignment(api.declare(source), 1, MATCHED)):
        wrong = WRONG[mistake](g)
        with pytest.raises(VerificationError, match=r"after alignment: output 'logits' differs by .*nothing was"):
            api.prove(source, wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mistake", ["the value bias is not folded", "the queries stay"])
def test_mistakes_that_rounding_hides_are_found(mistake: str, dtype: torch.dtype) -> None:
    """Small ones, of an alignment that is near to the identity: running the rounded models does not tell them."""
    source = MODELS["bert-mlm"]().to(dtype)
    wrong = WRONG[mistake](near_the_identity(source))
    assert api.verify(source, wrong(source), wrong).equal
    with pytest.raises(VerificationError):
        api.prove(source, wrong)


def near_the_identity(source: Checkpoint) -> Alignment:
    g = random_alignment(api.declare(source), 1, {"qk", "v"})
    elements = {}
    for instance, element in g.elements.items():
        assert isinstance(element, Similarity)
        turn = torch.linalg.matrix_exp(1e-4 * (element.matrix - element.matrix.mT))
        elements[instance] = Similarity(turn, element.scale**1e-4)
    return replace(g, elements=elements, shifts={name: 1e-4 * t for name, t in g.shifts.items()})


def test_outputs_in_a_moved_space_follow() -> None:
    for source in (MODELS["bert"](), MODELS["gpt2"](), encoder()):
        g = random_alignment(api.declare(source), 2)
        assert not g.elements[Instance("residual")].is_identity()
        assert api.prove(source.to(torch.bfloat16), g).exact.worst < 1e-12


def test_by_a_runner_and_on_given_inputs() -> None:
    source = MODELS["bert-mlm"]()
    g = random_alignment(api.declare(source), 3, MATCHED)
    inputs = {"input_ids": torch.tensor([[5, 17, 33]])}
    assert api.prove(source, g, inputs=inputs).exact.inputs == "the given inputs, run in float64"
    with pytest.raises(
        OptionError, match=r"'token_type_ids': None}; expected a mapping \(each value a tensor\) or None"
    ):
        api.prove(source, g, inputs=inputs | {"token_type_ids": None})  # type: ignore[dict-item]
    first = "bert.encoder.layer.0.attention."

    def scores(model: Checkpoint) -> dict[str, Tensor]:
        q, k = (model[f"{first}self.{part}.weight"].reshape(4, 5, 20) for part in ("query", "key"))
        assert q.dtype == torch.float64
        return {"scores": q.mT @ k}

    assert api.prove(source.to(torch.float64), g, runner=scores).exact.worst < 1e-13
    with pytest.raises(VerificationError, match="'scores' differs"):
        api.prove(source, tampered(g, without(g, "qk"), *QUERY), runner=scores)


def test_what_moves_by_a_wrong_declaration_is_not_proved() -> None:
    source = MODELS["bert-mlm"]().to(torch.bfloat16)
    g = random_alignment(api.declare(source), 4, MATCHED)
    bias = "encoder.layer.0.intermediate.dense.bias"
    still = replace(g.spec, tensors={**g.spec.tensors, bias: Declared(parse("29"), {"l": 0})})
    with pytest.raises(IncompatibleError, match=r"is laid out as 'ffn' by its config\.json, and as '29'"):
        api.prove(source, replace(g, spec=still))


@pytest.mark.parametrize("label", ["llama-lm", "cohere-lm", "mistral3-lm", "latent-v2-lm", "gpt2-lm"])
def test_what_classes_compute_in_float32_is_proved_in_float64(label: str) -> None:
    """Norms, the softmax and the angles of positions: a change that float32 would hide is one."""
    source = MODELS[label]()
    g = random_alignment(api.declare(source), 1, largest=True)
    exact = api.prove(source, g).exact
    assert exact.tolerance == TOLERANCE[torch.float64]
    assert exact.worst < 1e-13
    name = next(name for name in source if name.endswith("norm.weight") or name.endswith("ln_f.weight"))
    slightly = source.replace(tensors={**source, name: source[name] * (1 + 1e-9)})
    assert not api.verify(source, slightly, tolerance=TOLERANCE[torch.float64]).equal


class Casting(torch.nn.Module):
    """One tenth, in every way in which classes ask for float32, and in what the module has."""

    def __init__(self) -> None:
        super().__init__()
        self.tenth = torch.nn.Parameter(torch.full((6,), 0.1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.log(torch.arange(1, 3).float() / torch.tensor(10.0)).to(x)
        third = torch.nn.functional.softmax(scores[:1].expand(10), 0, dtype=torch.float32)[:1]
        casts = [x[:1].float(), x[:1].to(torch.float32), x[:1].type(torch.float32), torch.zeros(1) + 1 / 10, third]
        return torch.cat([*casts, torch.full((1,), 0.1, dtype=torch.float32)]) - self.tenth


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_only_a_module_in_float64_is_widened_and_only_while_it_runs(dtype: torch.dtype) -> None:
    module = Casting().to(dtype)
    (output,) = run(module, {"x": module.tenth.detach()}).values()
    assert output.dtype == dtype
    assert output.abs().max() < 1e-16 + (1e-7 if dtype == torch.float32 else 0)
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(TypeError):
        run(module, {"y": module.tenth})
    assert torch.get_default_dtype() == torch.float32


def test_padding_may_be_wider_than_the_window_of_a_model() -> None:
    """A row of scores without a key is NaN where a class masks by the least number of float64, and computes the softmax
    in float32."""
    checkpoint = of("Gemma2ForCausalLM", "Gemma2Config", {**WINDOW, "sliding_window": 3, "query_pre_attn_scalar": 13})()
    module = real(checkpoint)
    inputs = random_inputs(module, checkpoint.config)
    assert (inputs["attention_mask"] == 0).sum() > 3
    assert all(bool(value.isfinite().all()) for value in run(module, inputs).values())


def test_a_model_that_puts_out_nan_by_itself() -> None:
    checkpoint = MODELS["vit"]()
    pixels = random_inputs(real(checkpoint), checkpoint.config)["pixel_values"] * math.nan
    with pytest.raises(CheckpointError, match=r"has NaN before anything is aligned\. .*sliding window"):
        api.verify(checkpoint, checkpoint, inputs={"pixel_values": pixels})
