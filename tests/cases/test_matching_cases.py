"""Matching on all axes: inputs that broke other tools, and the right behaviour. Named after the cases; those of
attention and feed-forward alone are in test_align.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from command import done
from contract.tiny import GPT2, MODELS, of, real
from recovery.planted import EVERYTHING, planted
from symfuse import api, reports
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import SymfuseError
from symfuse.io import Checkpoint
from symfuse.matching.problem import ROTATABLE
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.verification import random_inputs

slow = pytest.mark.slow
Batches = list[dict[str, Tensor]]


def families(quick: tuple[str, ...]) -> pytest.MarkDecorator:
    """One model of each family; the rest of them are slow."""
    labels = ("torch-relu-post", "bert-mlm", "roberta-mlm", "distilbert-mlm", "electra-discriminator", "deberta-mlm",
              "vit-classification", "gpt2-lm")  # fmt: skip
    return pytest.mark.parametrize("label", [pytest.param(x, marks=[] if x in quick else slow) for x in labels])


# ---- C42: heads that were reordered are put back


@pytest.mark.parametrize("label", ["bert-mlm", "gpt2-lm", "torch-relu-post", "vit-classification", "deberta-mlm"])
def test_c42_planted_heads_are_put_back_bit_for_bit(label: str) -> None:
    a = MODELS[label]()
    b = random_alignment(api.declare(a), 1, {"h"})(a)
    found = api.match(b, a, axes="heads")(b)
    assert any(not torch.equal(b[name], a[name]) for name in a)
    assert all(torch.equal(found[name], a[name]) for name in a)


# ---- C50: rotations of the residual stream, in half precision


def deep() -> tuple[Checkpoint, Alignment]:
    """A GPT-2 of 8 layers in bfloat16, and a rotation of its stream with moves inside of all layers."""
    make = of("GPT2LMHeadModel", "GPT2Config", GPT2 | {"n_layer": 8}, tie_word_embeddings=False)
    source = make(0).to(torch.bfloat16)
    spec = canonical(Model.of(source), ROTATABLE).spec
    return source, replace(random_alignment(spec, 3), frame=ROTATABLE)


def test_c50_a_folded_and_rotated_weight_is_rounded_once() -> None:
    """Each entry is the nearest in bfloat16 to what folding and rotating give, however many rewrites there were."""
    source, g = deep()
    moved, exact = g(source), g(source.to(torch.float64))
    half_unit = torch.finfo(torch.bfloat16).eps / 2
    wrong = []
    for name in moved:
        assert moved[name].dtype == torch.bfloat16
        gap = (moved[name].double() - exact[name]).abs()
        if not bool((gap <= half_unit * 1.001 * exact[name].abs() + 1e-7).all()):
            wrong.append(name)
    assert wrong == []


def test_c50_what_rounding_changes_is_said_and_there_and_back_is_no_drift() -> None:
    source, g = deep()
    proof = api.prove(source, g)
    assert proof.exact.worst < 1e-12
    assert 1e-5 < proof.rounding < 3e-2
    home = g.in_frame(source)
    back = g.inverse()(g(source))
    unit = torch.finfo(torch.bfloat16).eps
    for name in home:
        at_most = 4 * unit * float(home[name].double().abs().max())
        torch.testing.assert_close(back[name].double(), home[name].double(), rtol=0, atol=at_most)
    assert api.verify(source, back, tolerance=3e-2).equal


# ---- C51: alignment that hurts


def fine_tunes(label: str, seed: int = 0) -> tuple[Checkpoint, Checkpoint]:
    """Two of one base: the base with noise of 1e-2."""

    def tuned(own: int) -> Checkpoint:
        rng = torch.Generator().manual_seed(own)
        base = MODELS[label]()
        noisy = {n: t + 1e-2 * torch.randn(t.shape, generator=rng, dtype=t.dtype) for n, t in base.items()}
        return base.replace(tensors=noisy, name=f"fine-tune {own}")

    return tuned(2 * seed + 1), tuned(2 * seed + 2)


@families(("torch-relu-post", "bert-mlm", "gpt2-lm"))
@pytest.mark.parametrize("frame", [(), None], ids=["in place", "by default"])
@pytest.mark.parametrize("axes", ["residual", EVERYTHING])
def test_c51_fine_tunes_are_not_permuted_and_never_further_apart(
    label: str, frame: tuple[str, ...] | None, axes: str
) -> None:
    """Residual alignment on. A stream that may be rotated is turned a little; one that is permuted stays."""
    a, b = fine_tunes(label)
    alignment = api.match(a, b, axes=axes, frame=frame)
    plain, anchor = alignment.in_frame(a), alignment.in_frame(b)
    assert api.relate(alignment(a), anchor).distance.whole.squared <= api.relate(plain, anchor).distance.whole.squared
    permuted = {"h", "ffn"} - ({"ffn"} if label == "torch-relu-post" else set())  # whose neurons are rescaled a little
    permuted |= set() if alignment.frame else {"residual"}
    assert not permuted & {instance.axis for instance in alignment.elements}
    run = reports.alignment_run(a, b, alignment, None)
    moved = {row["axis"]: row["moved"] for row in run["matched"]}
    assert moved["residual"] == (1 if alignment.frame else 0)  # the identity is kept, and said to be


@cache
def teacher(label: str) -> tuple[Batches, list[Tensor]]:
    """Inputs for a model, in float32, and what the base of the fine-tunes says of them."""
    base = MODELS[label]()
    module = real(base)
    inputs = [random_inputs(module, base.config, seed=seed) for seed in range(8)]
    with torch.inference_mode():
        targets = [module(**x).logits.softmax(-1) for x in inputs]
    floats = [{k: t.float() if t.is_floating_point() else t for k, t in x.items()} for x in inputs]
    return floats, targets


def divergence(label: str) -> Callable[[nn.Module], float]:
    """How far a model says something else than the base: mean Kullback-Leibler divergence in nats."""
    batches, targets = teacher(label)

    def loss(module: nn.Module) -> float:
        dtype = next(module.parameters()).dtype
        total = 0.0
        for x, p in zip(batches, targets, strict=True):
            with torch.no_grad():
                said = module(**{k: t.to(dtype) if t.is_floating_point() else t for k, t in x.items()})
            gap = (p * (p.clamp_min(1e-300).log() - said.logits.double().log_softmax(-1))).sum(-1)
            total += float(gap[x["attention_mask"].bool()].mean() if "attention_mask" in x else gap.mean())
        return total / len(batches)

    return loss


@pytest.mark.parametrize(
    ("label", "data"),
    [
        pytest.param(label, data, id=f"{label}-{'activations' if data else 'weights'}",
                     marks=slow if data and label in ("deberta-mlm", "vit-classification") else ())
        for label in ("bert-mlm", "deberta-mlm", "gpt2-lm-untied", "vit-classification")
        for data in (False, True)
    ],
)  # fmt: skip
def test_c51_no_barrier_comes_from_aligning_fine_tunes(label: str, data: bool) -> None:
    """The path between fine-tunes of one base has none, and keeps to that with the residual stream aligned."""
    for seed in (0, 3) if data else (0,):
        a, b = fine_tunes(label, seed)
        options: dict[str, Any] = {"data": teacher(label)[0]} if data else {}
        alignments: dict[str, Any] = {
            axes: api.match(a, b, axes=axes, **options) for axes in ("residual", "heads", EVERYTHING)
        }
        found = api.barrier(a, b, divergence(label), alignments, points=3, refine=0, dtype=torch.float64)
        plain = found.curves["none"]
        assert plain.barrier == 0
        for name, curve in found.curves.items():
            assert curve.barrier == 0, name
            middle, before = (c.points[1].score.loss for c in (curve, plain))
            assert middle < 1.05 * before, name


def test_c51_the_identity_of_the_stream_is_reported(tmp_path: Path) -> None:
    a, b = (model.save(tmp_path / name) for name, model in zip("ab", fine_tunes("bert-mlm"), strict=True))
    result = done("align", str(a), "--to", str(b), "-o", str(tmp_path / "out"), "--axes", "residual,heads")
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "0 of 1" in rows["residual"]
    assert "0 of 2" in rows["h"]


# ---- C52: another function


@families(("torch-relu-post", "bert-mlm", "gpt2-lm"))
def test_c52_aligned_on_all_axes_to_a_random_partner_it_is_the_same_function(label: str) -> None:
    a, b = MODELS[label](0), MODELS[label](1)
    alignment = api.match(a, b, axes=EVERYTHING)
    assert {"residual", "h", "qk", "v", "ffn"} <= {instance.axis for instance in alignment.elements}
    inputs: dict[str, Tensor] | None = None
    if "vocab_size" in a.config:  # 64 tokens
        ids = torch.randint(5, 61, (4, 16), generator=torch.Generator().manual_seed(0))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert api.prove(a, alignment, inputs=inputs).exact.worst < 1e-11
    assert not api.verify(a, b, inputs=inputs).equal


# ---- C53: matching that does nothing, or reports nonsense


@families(("torch-relu-post", "bert-mlm", "gpt2-lm"))
def test_c53_planted_moves_of_all_axes_are_undone(label: str) -> None:
    """All neurons of all layers, and every other axis as far as it is determined: what is left is rounding."""
    plant = planted(label)
    alignment = plant.match()
    back, home = alignment(plant.moved), plant.home.checkpoint
    assert max(float((back[name] - home[name]).abs().max()) for name in home) < 1e-5
    undone = alignment @ replace(random_alignment(plant.home.spec, 3), frame=plant.frame)
    for instance, element in undone.elements.items():
        if instance.axis == "ffn":
            assert torch.equal(element.tensors()["index"], torch.arange(29)), instance


@families(("torch-relu-post", "bert-mlm", "gpt2-lm"))
def test_c53_an_unchanged_model_has_nothing_to_move_on_any_axis(label: str) -> None:
    a = MODELS[label]()
    alignment = api.match(a, a, axes=EVERYTHING)
    assert (len(alignment.elements), len(alignment.shifts)) == (0, 0)
    run = reports.alignment_run(a, a, alignment, None)
    assert (run["distance"]["before"], run["distance"]["after"], run["distance"]["left"]) == (0, 0, 1)
    assert all(row["moved"] == 0 < row["units"] for row in run["matched"])


def test_c53_what_each_axis_and_layer_gained_is_said_and_how_long_it_took(tmp_path: Path) -> None:
    plant = planted("bert-mlm")
    a, b = plant.home.checkpoint.save(tmp_path / "a"), plant.moved.save(tmp_path / "b")
    out = tmp_path / "out"
    result = done("align", str(b), "--to", str(a), "-o", str(out), "--axes", EVERYTHING)
    for axis in ("residual", "h", "qk", "v", "ffn"):
        assert any(line.split()[:1] == [axis] for line in result.stdout.splitlines()), axis
    assert f"written to {out} in " in result.stdout
    run = json.loads((out / "symfuse.json").read_text("utf-8"))
    assert run["seconds"] > 0
    layers = run["distance"]["by_layer"]
    assert [row["layer"] for row in layers] == [-1, 0, 1]
    assert all(row["before"] > 1 and row["after"] < 1e-9 for row in layers)


# ---- C57: batch statistics


def stem(seed: int, steps: int = 3) -> nn.Module:
    """A ResNet of `transformers`, whose statistics come from images."""
    config = transformers.ResNetConfig(
        embedding_size=6, hidden_sizes=[10, 14], depths=[1, 1], layer_type="basic", num_labels=5
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.ResNetForImageClassification(config).train()
        with torch.no_grad():
            for _ in range(steps):
                model(pixel_values=1 + 3 * torch.randn(4, 3, 32, 32))
    evaluated: nn.Module = model.eval()
    return evaluated


def image_loss() -> Callable[[nn.Module], float]:
    rng = torch.Generator().manual_seed(7)
    images, labels = 1 + 3 * torch.randn(8, 3, 32, 32, generator=rng), torch.randint(5, (8,), generator=rng)

    def loss(module: nn.Module) -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(module(pixel_values=images).logits, labels))

    return loss


@pytest.mark.parametrize("steps", [3, 4], ids=["as many batches", "more batches"])
def test_c57_the_ends_of_a_path_keep_their_own_statistics(steps: int, tmp_path: Path) -> None:
    """However many batches each has seen."""
    modules, loss = (stem(0), stem(1, steps)), image_loss()
    own = [loss(module) for module in modules]
    states = [{name: t.clone() for name, t in module.state_dict().items()} for module in modules]
    assert own[0] != own[1]
    for name, module in zip("ab", modules, strict=True):
        module.save_pretrained(tmp_path / name)  # type: ignore[operator]
    for pair in (modules, (tmp_path / "a", tmp_path / "b")):
        curve = api.barrier(*pair, loss, points=3, refine=0).curves["none"]
        assert curve.ends == (own[1], own[0])
    for module, state in zip(modules, states, strict=True):
        assert all(torch.equal(module.state_dict()[name], t) for name, t in state.items())


def test_c57_a_family_without_a_declaration_is_not_aligned(tmp_path: Path) -> None:
    config = transformers.RegNetConfig(embedding_size=6, hidden_sizes=[10, 14], depths=[1, 1], groups_width=2)
    transformers.RegNetModel(config).save_pretrained(tmp_path / "a")
    with pytest.raises(SymfuseError, match="model_type 'regnet'"):
        api.match(tmp_path / "a", tmp_path / "a")
