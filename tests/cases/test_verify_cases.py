"""`verify` reports only what it has seen: near-misses are distinguished, equal pairs stay equal, coverage is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.tiny import DECODER, MODELS, TEXT, of
from symfuse import api
from symfuse.alignment import random_alignment
from symfuse.io import Checkpoint
from symfuse.verification import compare, coverage

Edit = Callable[[Checkpoint], Checkpoint]
BIG = DECODER | {"vocab_size": 1009}  # more rows than are run by `few_tokens`


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


@cache
def model(label: str) -> Checkpoint:
    made = {
        "bert-wide": of("BertForMaskedLM", "BertConfig", TEXT, tie_word_embeddings=False),
        "llama-words": of("LlamaForCausalLM", "LlamaConfig", BIG),
        "llama-dynamic": of("LlamaForCausalLM", "LlamaConfig", DECODER, rope_parameters=DYNAMIC),
        "roberta-unpadded": of("RobertaForMaskedLM", "RobertaConfig", TEXT, pad_token_id=1),
    }  # fmt: skip
    return (MODELS | made)[label](0)


def tensor(end: str, change: Callable[[Tensor], Tensor]) -> Edit:
    """The one tensor whose name ends so, changed."""

    def edit(checkpoint: Checkpoint) -> Checkpoint:
        (name,) = [name for name in checkpoint if name.endswith(end)]
        changed = change(checkpoint[name].clone())
        assert not torch.equal(changed, checkpoint[name])
        return checkpoint.replace(tensors={**dict(checkpoint), name: changed})

    return edit


def row(end: str, number: int | slice, by: float = 0.1) -> Edit:
    def change(t: Tensor) -> Tensor:
        rng = torch.Generator().manual_seed(0)  # one number for all entries is taken out again by the norm behind
        t[number] += by * torch.randn(t[number].shape, generator=rng, dtype=t.dtype)
        return t

    return tensor(end, change)


def config(**fields: Any) -> Edit:
    return lambda checkpoint: checkpoint.replace(config={**checkpoint.config, **fields})


def without(field: str) -> Edit:
    return lambda checkpoint: checkpoint.replace(config={k: v for k, v in checkpoint.config.items() if k != field})


def swapped_heads(t: Tensor) -> Tensor:
    return torch.cat([t[10:20], t[:10], t[20:]])


def outside_the_probe(t: Tensor) -> Tensor:
    """All rows but a hundred made anew."""
    t[100:] = torch.randn(t[100:].shape, generator=torch.Generator().manual_seed(1), dtype=t.dtype)
    return t


def one_bf16(checkpoint: Checkpoint) -> Checkpoint:
    """In float32, with one norm in bfloat16."""
    narrow = checkpoint.to(torch.float32)
    norm = "model.norm.weight"
    return narrow.replace(tensors={**dict(narrow), norm: narrow[norm].bfloat16()}, infos=None)


NEAR: dict[str, tuple[str, Edit]] = {
    "token type": ("bert-mlm", row("token_type_embeddings.weight", 1)),
    "embedding row 0": ("llama-lm", row("embed_tokens.weight", 0, 1.0)),
    "rows outside of the probe": ("llama-words", tensor("embed_tokens.weight", outside_the_probe)),
    "one row of many": ("llama-words", row("embed_tokens.weight", 871)),
    "dynamic rope": ("llama-lm", config(rope_parameters=DYNAMIC)),
    "limit of dynamic rope": ("llama-dynamic", config(max_position_embeddings=74)),
    "positions from 16 on": ("bert-mlm", row("position_embeddings.weight", slice(16, None))),
    "last position": ("gpt2-lm", row("wpe.weight", 36, 1e-6)),
    "epsilon of RMSNorm": ("llama-lm", config(rms_norm_eps=1e-5)),
    "epsilon of LayerNorm": ("bert-mlm", config(layer_norm_eps=1e-11)),
    "one entry of a bias": ("bert-mlm", row("layer.1.intermediate.dense.bias", 3, 1e-6)),
    "two heads swapped": ("llama-lm", tensor("layers.1.self_attn.q_proj.weight", swapped_heads)),
    "scale of scores": ("granite-lm", config(attention_multiplier=0.31)),
    "scale of queries": ("bert-mlm", tensor("layer.0.attention.self.query.weight", lambda t: t * (1 + 1e-7))),
    "window": ("mistral-lm", config(sliding_window=12)),
    "window by default": ("mistral-lm", without("sliding_window")),
    "activation": ("bert-mlm", config(hidden_act="gelu_new")),
    "theta": ("llama-lm", config(rope_parameters={"rope_type": "default", "rope_theta": 10001.0})),
    "one row of an expert": ("mixtral-lm", row("layers.0.block_sparse_moe.experts.7.w2.weight", 3, 1e-2)),
    "a router's row": ("mixtral-lm", row("layers.0.block_sparse_moe.gate.weight", 4)),
    "soft cap": ("gemma2-lm", config(final_logit_softcapping=29.0)),
    "position of a patch": ("vit", tensor("position_embeddings", lambda t: torch.cat([t[:, :7], t[:, 7:] * 1.01], 1))),
    "bias of patches": ("vit", row("patch_embeddings.projection.bias", 2, 1e-6)),
    "table of the decoder alone": ("bart-lm", row("decoder.embed_positions.weight", 37)),
    "last position of a decoder": ("whisper-lm", row("decoder.embed_positions.weight", 18)),
    "bucket of distances": ("t5-lm", row("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", 7)),
    "last layer": ("gpt2-lm", row("h.1.mlp.c_proj.bias", 0, 1e-6)),
    "where positions start": ("roberta-unpadded", config(pad_token_id=3)),
    "head": ("llama-lm", row("lm_head.weight", 60, 1e-3)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a large model: not all of a vocabulary is run."""
    monkeypatch.setattr(coverage, "TOKENS", (64, 300))


@pytest.mark.parametrize("what", NEAR)
def test_d15_near_misses_differ(what: str) -> None:
    label, edit = NEAR[what]
    one = model(label)
    assert not api.verify(one, edit(one)).equal


def test_d15_one_bf16_tensor_does_not_loosen_what_a_float32_head_is_held_to() -> None:
    one = one_bf16(model("llama-lm"))
    other = tensor("lm_head.weight", lambda t: t * 1.02)(one)
    result = api.verify(one, other)
    assert not result.equal
    assert result.tolerance == 2e-5
    narrow = tensor("model.norm.weight", lambda t: (t.float() * 1.004).bfloat16())(one)  # its last bit
    assert api.verify(one, narrow).tolerance == 3e-2


def test_d15_windows_that_are_wider_than_all_inputs_differ() -> None:
    one, other = (config(sliding_window=wide)(model("mistral-lm")) for wide in (5000, 6000))
    result = api.verify(one, other)
    assert result.worst == 0
    assert result.differences == ["config.json differs in sliding_window: 5000 and 6000"]


def test_d15_a_broken_tie_is_no_difference_and_another_head_is() -> None:
    tied = model("llama-tied")
    head = tied["model.embed_tokens.weight"]
    untied = {**tied.config, "tie_word_embeddings": False}
    same, other = (
        tied.replace(tensors={**dict(tied), "lm_head.weight": t}, config=untied) for t in (head, head.roll(1, 0))
    )
    assert api.verify(tied, same).equal
    assert not api.verify(tied, other).equal


@pytest.mark.parametrize("label", ["bert-mlm", "llama-words"])
def test_d15_moved_copies_are_equal_and_what_is_changed_in_them_is_not(label: str) -> None:
    one = model(label)
    g = random_alignment(api.declare(one), 1, largest=True)
    moved = g(one)
    assert api.verify(one, moved).equal
    assert api.verify(one, moved, g).equal
    changed = row("word_embeddings.weight" if "bert" in label else "embed_tokens.weight", 4)(moved)
    assert not api.verify(one, changed, g).equal


SAME: dict[str, Any] = {
    "bos_token_id": 7, "use_cache": False, "_name_or_path": "elsewhere", "transformers_version": "4.0.0",
    "attention_dropout": 0.5, "initializer_range": 0.3, "dtype": "float32", "temperature": 0.7, "max_length": 99,
    "max_position_embeddings": 74, "eos_token_id": [1, 2], "num_beams": 4,
}  # fmt: skip


@pytest.mark.parametrize("field", SAME)
def test_d15_fields_that_change_nothing_are_no_difference(field: str) -> None:
    one = model("llama-lm")
    result = api.verify(one, config(**{field: SAME[field]})(one))
    assert result.equal
    assert result.worst == 0


QUICK = {
    "bert-choice", "deberta", "gpt2-sequence", "gemma2-lm", "mixtral-lm", "opt-lm", "clip", "dinov2-masked",
    "whisper-lm", "bart-sequence", "marian-lm-apart",
}  # fmt: skip
EVERY = [label for label in MODELS if label != "sceptr"]  # which transformers does not have


@pytest.mark.parametrize("label", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in EVERY])
def test_d15_moved_copies_of_every_family_are_equal(label: str) -> None:
    one = model(label)
    g = random_alignment(api.declare(one), 1, largest=True)
    result = api.verify(one, g(one), g)
    assert result.equal, result.differences
    assert "none longer" not in result.inputs


def test_d15_the_result_says_how_much_was_seen() -> None:
    bert = api.verify(model("bert-mlm"), model("bert-mlm"))
    assert bert.coverage == {
        "positions": (37, 37),
        "bert.embeddings.word_embeddings.weight": (61, 61),
        "bert.embeddings.position_embeddings.weight": (37, 37),
        "bert.embeddings.token_type_embeddings.weight": (3, 3),
    }
    words = api.verify(model("llama-words"), model("llama-words"))
    read, of_all = words.coverage["model.embed_tokens.weight"]
    assert 200 < read < of_all == 1009
    assert f"{read} of 1009 rows of model.embed_tokens.weight" in words.seen
    mixture = api.verify(model("mixtral-lm"), model("mixtral-lm")).coverage
    assert mixture["model.layers.1.mlp.experts.down_proj"] == (9, 9)
    masked = api.verify(model("dinov2-masked"), model("dinov2-masked"))
    assert "nothing of embeddings.mask_token" in masked.seen


def test_d15_rows_that_no_input_reads_are_named() -> None:
    """On inputs of one's own: equal outputs say nothing of the other rows."""
    one = model("bert-mlm")
    inputs: Mapping[str, Tensor] = {"input_ids": torch.tensor([[5, 6, 7]])}
    other = row("position_embeddings.weight", 30)(one)
    result = api.verify(one, other, inputs=inputs)
    assert result.worst == 0
    assert result.unread == ("30 of bert.embeddings.position_embeddings.weight",)
    assert result.differences == ["rows differ that no input reads: 30 of bert.embeddings.position_embeddings.weight"]
    assert api.verify(one, row("position_embeddings.weight", 30, 1e-14)(one), inputs=inputs).equal


def test_d15_a_large_row_does_not_hide_what_differs_in_another() -> None:
    before = {"logits": torch.tensor([[1e6, 1.0], [1.0, -2.0]], dtype=torch.float64)}
    after = {"logits": before["logits"] + torch.tensor([[0.0, 0.0], [0.0, 0.04]])}
    large = {"logits": torch.tensor([[1e3, 1.0], [1.0, -2.0]], dtype=torch.float64)}
    assert compare(before, after)["logits"] < 1e-7
    assert compare(large, {"logits": large["logits"] + (after["logits"] - before["logits"])}, by_row=True) == {
        "logits": pytest.approx(0.02)
    }
