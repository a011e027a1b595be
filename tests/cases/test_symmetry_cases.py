"""Symmetries of attention, and what only looks like one. Named after the cases; each move is exact on the real class,
and beside it stands the same move with one tensor left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cases.moved import BROKEN, EXACT, case_of, left_behind
from contract.tiny import DEBERTA, OWN_KEYS, VISION, Case, case, moving, of
from recovery.planted import EVERYTHING
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import (
    CheckpointError,
    SymfuseError,
    UnknownArchitectureError,
    VerificationError,
)
from symfuse.groups import (
    Element,
    Invertible,
    Linear,
    Similarity,
)
from symfuse.io import Checkpoint
from symfuse.spec import Instance


def ending(this: Case, *ends: str) -> list[str]:
    found = [name for name in this.checkpoint if name.endswith(ends)]
    assert found
    return found


# ---- C39: projections of positions, DeBERTa

POSITIONS: dict[str, dict[str, Any]] = {
    "shared": DEBERTA,
    "own": OWN_KEYS,
    "own, with a norm": OWN_KEYS | {"norm_rel_ebd": "layer_norm", "position_buckets": 8},
}
deberta_positions = pytest.mark.parametrize("kind", POSITIONS)


def deberta(kind: str, seed: int = 0) -> Checkpoint:
    return of("DebertaV2ForTokenClassification", "DebertaV2Config", POSITIONS[kind])(seed)


@deberta_positions
def test_c39_projections_of_positions_take_the_basis_of_their_head(kind: str) -> None:
    this = case_of(deberta(kind))
    g = random_alignment(this.spec, 1, {"qk"})
    assert this.error(g(this.checkpoint), g) < EXACT
    own = [name for name in this.checkpoint if "pos_key_proj.weight" in name or "pos_query_proj.weight" in name]
    assert len(own) == (0 if kind == "shared" else 4)
    for part in {name.rpartition("self.")[2] for name in own}:
        assert left_behind(this, g, ending(this, part)) > BROKEN
    assert left_behind(this, g, ending(this, "self.key_proj.weight")) > BROKEN


@deberta_positions
def test_c39_the_residual_permutation_covers_the_relative_table_and_its_norm(kind: str) -> None:
    this = case_of(deberta(kind))
    g = random_alignment(this.spec, 2, {"residual"})
    assert this.error(g(this.checkpoint), g) < EXACT
    norm = [name for name in this.checkpoint if "encoder.LayerNorm" in name]
    assert len(norm) == (0 if kind == "own" else 2)
    for name in [*ending(this, "rel_embeddings.weight"), *norm]:
        assert left_behind(this, g, [name]) > BROKEN


@deberta_positions
def test_c39_all_of_it_is_found_again(kind: str) -> None:
    a = deberta(kind)
    b = random_alignment(api.declare(a), 3)(a)
    alignment = api.match(b, a, axes=EVERYTHING)
    assert {"qk", "h", "residual"} <= {instance.axis for instance in alignment.elements}
    assert api.relate(alignment(b), a).distance.relative < 1e-6
    assert api.verify(b, alignment(b), alignment).equal


# ---- C40: maps of values and outputs


@pytest.mark.parametrize("label", ["bert", "deberta", "vit", "gpt2", "torch-relu-post"])
def test_c40_each_head_has_its_own_map_of_values_with_its_inverse_in_the_output(label: str) -> None:
    """Any invertible one; the transpose is no inverse. (That none crosses heads is tested with the contracts.)"""
    this = case(label)
    rng = torch.Generator().manual_seed(0)
    maps = [Invertible().random(5, (4,), rng) for _ in range(2)]
    right = Alignment(this.spec, {Instance("v", (layer,)): g for layer, g in enumerate(maps)})
    assert this.error(right(this.checkpoint), right) < EXACT
    transposed = [Linear(g.matrix, g.matrix.mT.contiguous()) for g in maps]
    wrong = Alignment(this.spec, {Instance("v", (layer,)): g for layer, g in enumerate(transposed)})
    assert this.error(wrong(this.checkpoint), wrong) > BROKEN


# ---- C41: biases move with their weights


@pytest.mark.parametrize("label", ["bert", "roberta", "distilbert", "electra", "deberta", "vit", "gpt2"])
@pytest.mark.parametrize("axis", ["h", "v"])
def test_c41_biases_move_with_the_heads_and_with_the_basis_of_values(label: str, axis: str) -> None:
    this = case(label)
    g = random_alignment(replace(this.spec, shifts=()), 1, {axis})
    assert this.error(g(this.checkpoint), g) < EXACT
    biases = {"distilbert": ["q_lin", "v_lin"], "deberta": ["query_proj", "key_proj", "value_proj"]}
    names = {"gpt2": ["c_attn"]}.get(label) or biases.get(label, ["query", "value"])
    for name in names[-1:] if axis == "v" else names:
        assert left_behind(this, g, ending(this, name + ".bias")) > BROKEN


# ---- C43: soft maps


def soft_map(heads: int, size: int) -> Tensor:
    """Doubly stochastic [h, n, n]: transport of entropy 0.1 for random scores (Sinkhorn)."""
    rng = torch.Generator().manual_seed(0)
    plan = torch.exp(torch.rand(heads, size, size, generator=rng, dtype=torch.float64) / 0.1)
    for _ in range(500):
        plan = plan / plan.sum(-1, keepdim=True)
        plan = plan / plan.sum(-2, keepdim=True)
    return plan


def nearest_permutation(plan: Tensor) -> Tensor:
    u, _, vt = torch.linalg.svd(plan)
    return Tensor(u @ vt)


SOFT: dict[str, Callable[[Tensor], Element]] = {
    "transposed for the inverse": lambda plan: Linear(plan, plan.mT.contiguous()),
    "as a rotation": lambda plan: Similarity(plan),
}


@pytest.mark.parametrize("kind", SOFT)
def test_c43_a_soft_map_of_queries_and_keys_is_no_alignment(kind: str, tmp_path: Path) -> None:
    """Nobody makes one here; a file that holds one is refused, and what it would make of the model is noticed."""
    this = case("vit-classification")
    plan = soft_map(4, 5)
    torch.testing.assert_close(plan.sum(-1), torch.ones(4, 5, dtype=torch.float64))
    soft = Alignment(this.spec, {Instance("qk", (0,)): SOFT[kind](plan)})
    assert this.error(soft(this.checkpoint)) > BROKEN
    with pytest.raises(VerificationError, match="nothing was written"):
        api.prove(this.checkpoint, soft)
    with pytest.raises(CheckpointError, match=r"qk\[0\]: not an element of the group"):
        Alignment.load(soft.save(tmp_path / "soft.safetensors"))
    hard = Alignment(this.spec, {Instance("qk", (0,)): Similarity(nearest_permutation(plan))})
    assert Alignment.load(hard.save(tmp_path / "hard.safetensors")).elements
    assert api.prove(this.checkpoint, hard).exact.equal


@pytest.mark.parametrize("data", [False, True], ids=["weights", "activations"])
def test_c43_all_that_is_matched_of_two_vits_is_hard(data: bool) -> None:
    a, b = (of("ViTForImageClassification", "ViTConfig", VISION)(seed) for seed in (0, 1))
    inputs = [{"pixel_values": torch.randn(4, 3, 12, 20, generator=torch.Generator().manual_seed(2))}]
    alignment = api.match(a, b, axes="attention,ffn,heads,residual", **({"data": inputs} if data else {}))
    for instance, element in alignment.elements.items():
        group = alignment.spec.axes[instance.axis].group
        assert group is not None
        assert group.contains(element, 1e-9), instance
    assert api.prove(a, alignment).exact.equal


# ---- C44: latent attention


def test_c44_heads_of_latent_attention_are_reordered_in_all_that_is_theirs() -> None:
    """The latents, and the turned part of the key, which all heads share, stay as they are."""
    this = case("latent-lm")
    g = moving(this.spec, 1, {"h"})
    moved = g(this.checkpoint)
    assert this.error(moved, g) < this.exact
    for end in ("q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight"):
        assert left_behind(this, g, ending(this, f"self_attn.{end}")) > BROKEN
    for name in ending(this, "q_a_proj.weight", "kv_a_proj_with_mqa.weight", "a_layernorm.weight"):
        assert torch.equal(moved[name], this.checkpoint[name])


def test_c44_latent_attention_that_is_not_declared_is_refused_and_nothing_written(tmp_path: Path) -> None:
    config = transformers.AXK1Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=7, q_lora_rank=9, qk_rope_head_dim=4,
        v_head_dim=6, qk_nope_head_dim=5,
    )  # fmt: skip
    for name in "ab":
        transformers.AXK1ForCausalLM(config).save_pretrained(tmp_path / name)
    for axes in ("attention", "heads", "all"):
        with pytest.raises(UnknownArchitectureError, match="axk1"):
            api.match(tmp_path / "a", tmp_path / "b", axes=axes)
    out = tmp_path / "out"
    with pytest.raises(SymfuseError, match="no declaration of"):
        api.merge_recipe(
            {
                "merge_method": "linear",
                "models": [{"model": str(tmp_path / name)} for name in "ab"],
                "align": {"axes": "attention"},
            }
        ).save(out)
    assert not out.exists()
