"""Which unit is a copy of which: exact against brute force, and found again where it was planted."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import symfuse
from contract.tiny import DECODER, GPT2, OPT, TEXT, VISION, of
from symfuse.alignment import random_alignment
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import anatomy
from symfuse.widths import Duplication, assign_copies, expand, match_widths, widened
from symfuse.widths.match import _distance, _frame

PAIRS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", TEXT | {"num_hidden_layers": 1}, {"hidden_size": 40,
        "num_attention_heads": 8}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, {"n_embd": 30, "n_inner": 41, "n_head": 6}),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION, {"hidden_size": 30, "num_attention_heads": 6}),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT, {"hidden_size": 30, "num_attention_heads": 6, "ffn_dim": 41,
        "word_embed_proj_dim": 30}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, {"hidden_size": 36, "num_attention_heads": 9,
        "num_key_value_heads": 3}),
}  # fmt: skip


def pair(label: str) -> tuple[Model, Model]:
    """A narrow model, and a wide one of other weights."""
    kind, config, narrow, wide = PAIRS[label]
    wide = {"intermediate_size": 41, **wide} if "intermediate_size" in narrow else wide
    return Model.of(of(kind, config, narrow)(0)), Model.of(of(kind, config, narrow | wide)(1))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 4), more=st.integers(0, 2), seed=st.integers(0, 999))
def test_no_other_copies_are_worth_more(n: int, more: int, seed: int) -> None:
    m = n + more
    scores = torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    onto = [s for s in product(range(n), repeat=m) if len(set(s)) == n]
    best = max(sum(float(scores[i, j]) for i, j in enumerate(s)) for s in onto)
    found = assign_copies(scores)
    assert set(found.tolist()) == set(range(n))
    assert abs(float(scores.gather(1, found[:, None]).sum()) - best) < 1e-12


def planted(narrow: Model, like: Model, seed: int = 0) -> Model:
    """The narrow model with copies of random units, uneven in neurons and heads, moved by a random alignment."""
    rng = torch.Generator().manual_seed(seed)
    frame = _frame(narrow, like)
    small, large = canonical(narrow, frame), canonical(like, frame)
    copies = {}
    for instance, widening in widened(small, large).items():
        if isinstance(widening, Duplication) and anatomy(instance.axis) in ("ffn", "h", "kv"):
            m, n = widening.index.shape[-1], widening.size
            index = torch.cat([torch.arange(n), torch.randint(n, (m - n,), generator=rng)])
            copies[instance] = Duplication.of(index[torch.randperm(m, generator=rng)], n)
    expanded = expand(small, large, copies)
    moved = random_alignment(expanded.spec, seed + 3).on(expanded)
    return Model.of(moved.replace(tensors=dict(moved)))


@pytest.mark.parametrize(
    "label", [pytest.param(name, marks=pytest.mark.slow) if name != "bert" else name for name in PAIRS]
)
def test_planted_copies_are_found(label: str) -> None:
    narrow, like = pair(label)
    wide = planted(narrow, like)
    size = sum(float(tensor.double().square().sum()) for tensor in wide.checkpoint.values())
    expanded, evenly = match_widths(narrow, wide, rounds=0, threads=1)
    assert _distance(expanded, evenly, canonical(wide, evenly.frame)) > 0.01 * size
    expanded, alignment = match_widths(narrow, wide, threads=1)
    assert _distance(expanded, alignment, canonical(wide, alignment.frame)) < 1e-10 * size


@pytest.mark.slow
@pytest.mark.parametrize("label", ["vit", "gpt2"])
def test_more_rounds_are_never_farther_away(label: str) -> None:
    narrow, wide = pair(label)
    distances = []
    for rounds in range(3):
        expanded, alignment = match_widths(narrow, wide, rounds=rounds, threads=1)
        distances.append(_distance(expanded, alignment, canonical(wide, alignment.frame)))
    assert distances == sorted(distances, reverse=True)
    assert distances[0] < _distance(expanded, symfuse.Alignment(expanded.spec, {}), canonical(wide, alignment.frame))


def test_a_midpoint_of_two_widths_saves_and_loads(tmp_path: Path) -> None:
    narrow, wide = pair("bert")
    expanded, alignment = match_widths(narrow, wide, axes="ffn,heads", rounds=1, threads=1)
    moved, anchor = alignment(expanded.checkpoint), alignment.in_frame(wide.checkpoint)
    assert symfuse.verify(narrow.checkpoint, moved).equal
    symfuse.merge([moved, anchor]).save(tmp_path / "midpoint")
    model, loading = transformers.BertForMaskedLM.from_pretrained(tmp_path / "midpoint", output_loading_info=True)
    assert not any(loading.values()), loading
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    half = (moved[name] + anchor[name]) / 2
    torch.testing.assert_close(model.state_dict()[name].double(), half, rtol=1e-6, atol=1e-7)
