"""A fine-tune on another base: exact where that is the old one moved, and said to be something else where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

import symfuse
from command import data, everything, run
from contract.tiny import MODELS, model_of, moving
from rewriting.test_vocabulary import COMMON, tokenizer
from symfuse.alignment import random_alignment
from symfuse.errors import IncompatibleError, OptionError, SymfuseError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.rebasing import relation
from symfuse.widths import expand
from widths.wider import double, like

FAST = ["bert", "gpt2-lm", "llama-lm", "vit-classification"]  # the first half with the outputs of the real class
SLOW = [
    "roberta", "distilbert", "electra", "deberta-mlm", "deit", "mistral-lm", "qwen2-lm", "qwen3-lm", "gemma2-lm",
    "mixtral", "neox-lm", "falcon", "opt", "bloom", "t5", "bart", "whisper", "albert", "dinov2-classification",
    "latent-lm",
]  # fmt: skip


def trained(checkpoint: Checkpoint, seed: int = 5, size: float = 0.1) -> Checkpoint:
    """With random numbers added to every tensor."""
    rng = torch.Generator().manual_seed(seed)

    def more(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor
        return tensor + size * torch.randn(tensor.shape, generator=rng, dtype=tensor.dtype)

    return Checkpoint({name: more(checkpoint[name]) for name in checkpoint}, checkpoint.config, name=f"tuned {seed}")


def error(got: Checkpoint, want: Checkpoint, base: Checkpoint) -> float:
    """|got − want|² as a share of |want − base|², where base is in the frame of all."""
    squares = {name: (want[name] - base[name]).square().sum() for name in want if want[name].is_floating_point()}
    wrong = sum((got[name] - want[name]).square().sum() for name in squares)
    return float(wrong / sum(squares.values()))


@pytest.mark.parametrize("label", [*FAST, *(pytest.param(label, marks=pytest.mark.slow) for label in SLOW)])
def test_it_is_exact_on_the_base_moved_by_any_element(label: str) -> None:
    """By a random element of the largest group of every axis, whose alignment is given."""
    a = model_of(label).checkpoint
    tuned, g = trained(a), moving(model_of(label).spec, 3)
    b, want = g(a), g(tuned)
    done = symfuse.rebase(tuned, a, b, alignment=g, prove=label in FAST)
    assert done.relation.kind == "moved"
    assert error(done.checkpoint, want, b) <= 1e-10
    plain = b.replace(tensors={name: b[name] + tuned[name] - a[name] for name in b})
    assert error(plain, want, b) > 0.5
    assert done.verified is None or done.verified.equal
    assert label not in FAST or done.verified is not None


@pytest.mark.parametrize(
    "label", ["bert", *(pytest.param(label, marks=pytest.mark.slow) for label in [*FAST[1:], *SLOW])]
)
def test_it_is_exact_on_a_moved_base_that_is_matched(label: str) -> None:
    a = model_of(label).checkpoint
    tuned, g = trained(a), random_alignment(model_of(label).spec, 3)
    done = symfuse.rebase(tuned, a, g(a), axes="all")
    frame = done.alignment.in_frame
    assert done.relation.kind == "moved"
    assert "is" in done.expect
    assert "computes what the fine-tune does" in done.expect
    assert error(done.checkpoint, frame(g(tuned)), frame(g(a))) <= 1e-10


def test_the_dial_goes_from_the_new_base_to_the_fine_tune() -> None:
    a, b = MODELS["gpt2-lm"](0), MODELS["gpt2-lm"](1)
    tuned = trained(a)
    done = symfuse.rebase(tuned, a, b, towards=1.0, axes=("ffn", "residual"), prove=True)
    assert done.relation.kind == "trained apart"
    assert done.verified is not None
    assert done.verified.equal
    g = done.alignment
    nothing = symfuse.rebase(tuned, a, b, alpha=0.0, alignment=g).checkpoint
    assert all(torch.equal(nothing[name], g.in_frame(b)[name]) for name in nothing)
    half = symfuse.rebase(tuned, a, b, alpha=0.5, towards=0.25, alignment=g, prove=True)
    assert half.verified is None
    parts = [g.in_frame(b), g(a), g(tuned)]
    for name in half.checkpoint:
        own, old, new = (part[name] for part in parts)
        torch.testing.assert_close(half.checkpoint[name], own + 0.25 * (old - own) + 0.5 * (new - old))


def test_a_head_that_the_fine_tune_added_is_moved_with_the_stream() -> None:
    tuned = MODELS["bert-sequence"](0)
    a = Checkpoint(dict(MODELS["bert"](0)), MODELS["bert"](0).config, name="a")
    g = moving(Model.of(a).spec, 3)
    done = symfuse.rebase(tuned, a, g(a), alignment=g, prove=True)
    assert done.checkpoint.config["architectures"] == tuned.config["architectures"]
    assert done.verified is not None
    assert done.verified.equal
    head = "classifier.weight"
    wrong = done.checkpoint.replace(tensors={**dict(done.checkpoint), head: tuned[head]})
    assert not symfuse.verify(tuned, wrong).equal


def test_a_wider_base_gets_the_widened_fine_tune() -> None:
    narrow = model_of("gpt2-lm")
    a, tuned = narrow.checkpoint, trained(narrow.checkpoint)
    wide = expand(narrow, like(narrow, double))
    b = random_alignment(wide.spec, 3, {"ffn", "h"})(wide.checkpoint)
    done = symfuse.rebase(tuned, a, b, prove=True)
    assert any("widened" in note for note in done.notes)
    assert done.relation.kind == "moved"
    assert done.verified is not None
    assert done.verified.equal


def with_tokens(checkpoint: Checkpoint, folder: Path, tokens: list[str], rows: torch.Tensor) -> Checkpoint:
    """Saved with a tokenizer; the vocabulary has these rows of the checkpoint's, and -1 a random one."""
    rng = torch.Generator().manual_seed(len(tokens))

    def picked(tensor: torch.Tensor) -> torch.Tensor:
        new = torch.randn((len(rows), *tensor.shape[1:]), generator=rng, dtype=tensor.dtype)
        return torch.where((rows < 0)[:, None], new, tensor[rows])

    tables = {name: picked(checkpoint[name]) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    config = {**checkpoint.config, "vocab_size": len(rows), "tie_word_embeddings": False}
    Checkpoint({**dict(checkpoint), **tables}, config, name=folder.name).save(folder)
    tokenizer(tokens[:53], [AddedToken(token) for token in tokens[53:]]).save_pretrained(folder)
    return open_checkpoint(folder)


def test_rows_of_the_vocabulary_are_carried_by_token(tmp_path: Path) -> None:
    """B has other ids and a token of its own, the fine-tune added one."""
    model = model_of("llama-lm").checkpoint
    tuned, g = trained(model), random_alignment(model_of("llama-lm").spec, 3, {"ffn", "h", "residual"})
    ids = torch.arange(53)
    order = torch.cat([ids[:3], ids[3:].flip(0)])
    a = with_tokens(model, tmp_path / "a", COMMON, ids)
    ft = with_tokens(tuned, tmp_path / "ft", [*COMMON, "new"], torch.cat([ids, torch.tensor([53])]))
    turned = [COMMON[i] for i in order]
    b = with_tokens(g(model), tmp_path / "b", [*turned, "own"], torch.cat([order, torch.tensor([-1])]))
    done = symfuse.rebase(ft, a, b, alignment=g)
    assert any("by token" in note for note in done.notes)
    folder = done.save(tmp_path / "out")
    out, want = open_checkpoint(folder), g(ft)
    tokens = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    known = {**tokens["model"]["vocab"], **{one["content"]: one["id"] for one in tokens["added_tokens"]}}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        for row, token in enumerate(COMMON):
            torch.testing.assert_close(out[name][known[token]], want[name][row])
        torch.testing.assert_close(out[name][known["new"]], want[name][53])
        torch.testing.assert_close(out[name][known["own"]], b[name][53])
    matched = symfuse.rebase(ft, a, b, axes="all")  # from the tokens that both have
    assert matched.relation.kind == "moved"
    with pytest.raises(IncompatibleError, match="rows are carried by token"):
        symfuse.rebase(ft, Checkpoint(dict(a), a.config, name="a"), b, alignment=g)


def test_it_says_how_the_bases_are_related() -> None:
    a, g = model_of("llama-lm"), moving(model_of("llama-lm").spec, 3)
    kinds = {}
    for name, other in {
        "moved": g(a.checkpoint),
        "near": trained(a.checkpoint, size=0.02),
        "far": MODELS["llama-lm"](1),
    }.items():
        kinds[name] = relation(a if name != "moved" else Model.of(g(a.checkpoint)), Model.of(other)).kind
    told = {
        alpha: symfuse.rebase(trained(a.checkpoint), a.checkpoint, a.checkpoint, alpha=alpha) for alpha in (1.0, 0.5)
    }
    assert told[1.0].expect.endswith("the result computes what the fine-tune does")
    assert told[0.5].expect.endswith("the result has 0.5 of what the fine-tune changed")
    assert kinds == {"moved": "moved", "near": "trained on", "far": "trained apart"}


def test_bad_input_is_one_error() -> None:
    a, tuned = model_of("llama-lm").checkpoint, trained(model_of("llama-lm").checkpoint)
    with pytest.raises(IncompatibleError, match="one is a gpt2, the other a llama; a fine-tune moves between models"):
        symfuse.rebase(tuned, a, MODELS["gpt2-lm"](0))
    with pytest.raises(IncompatibleError, match="one is a llama, the other a gpt2"):
        symfuse.rebase(MODELS["gpt2-lm"](0), a, a)
    b = MODELS["llama-lm"](1)
    back = symfuse.match(b, a, axes="ffn")
    with pytest.raises(IncompatibleError, match=r"as its source, found .* symfuse align BASE --to ONTO"):
        symfuse.rebase(tuned, a, b, alignment=back)
    with pytest.raises(OptionError):
        symfuse.rebase(tuned, a, b, axes="nothing")
    for alpha in (float("nan"), float("inf")):
        with pytest.raises(OptionError, match="expected a finite number"):
            symfuse.rebase(tuned, a, b, alpha=alpha)
    other = symfuse.rebase(b, a, b, alpha=0.0, axes="ffn")
    assert any("does not look like a fine-tune" in note for note in other.notes)


def test_the_command_writes_what_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a = MODELS["gpt2-lm"](0)
    for name, checkpoint in {"a": a, "tuned": trained(a), "b": MODELS["gpt2-lm"](1)}.items():
        checkpoint.save(name)
    before = everything(tmp_path)
    document = data("rebase", "tuned", "--from", "a", "--onto", "b", "-o", "out", "--alpha", "0.5", "--axes", "ffn")
    assert document["relation"]["kind"] == "trained_apart"
    assert "expect little" in document["expect"]
    assert "verified" not in document
    written = json.loads(Path("out/symfuse.json").read_text("utf-8"))
    assert (written["kind"], written["alpha"]) == ("rebase", 0.5)
    card = Path("out/README.md").read_text("utf-8")
    assert "# tuned, moved from a onto b" in card
    assert "expect little" in card
    python = symfuse.rebase("tuned", "a", "b", alpha=0.5, alignment="out/alignment-bases.symfuse").checkpoint
    assert all(torch.equal(symfuse.open("out")[name], python[name]) for name in python)
    for words, message in {
        ("--by", "out/alignment-bases.symfuse", "--axes", "ffn"): "leave --data and --axes out",
        ("--limit", "3"): "--limit: only with --data",
        ("--towards", "2"): "2.0 is not in the range",
        ("--by", "none"): "none does not exist; expected an alignment",
    }.items():
        result = run("rebase", "tuned", "--from", "a", "--onto", "b", "-o", "new", *words)
        assert result.exit_code != 0
        assert message in result.output, result.output
    assert not Path("new").exists()
    assert {name: content for name, content in everything(tmp_path).items() if name in before} == before


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    a = MODELS["llama-lm"](0)
    bad: dict[str, Any] = {**dict(a), "lm_head.weight": a["lm_head.weight"] * float("nan")}
    done = symfuse.rebase(trained(a), a, Checkpoint(bad, a.config, name="b"), alignment=moving(Model.of(a).spec, 1))
    with pytest.raises(SymfuseError, match="lm_head"):
        done.save(tmp_path / "out")
    assert not any(tmp_path.iterdir())
