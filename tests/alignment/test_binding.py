"""Alignments of one checkpoint applied to another: other heads, prefixes and sources. Nothing is dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from contract.tiny import GPT2, MODELS, TEXT, encoder, of
from matched import match
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError, IncompatibleError, SpecError, SymfuseError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint

MATCHED = {"qk", "v", "ffn"}

# label of the bare model → of one with a head on the same base, and the prefix that the base has in it.
WITH_HEAD = {
    "bert": ("bert-sequence", "bert."),
    "roberta": ("roberta-choice", "roberta."),
    "distilbert": ("distilbert-sequence", "distilbert."),
    "electra": ("electra-discriminator", "electra."),
    "vit": ("vit-classification", "vit."),
    "gpt2": ("gpt2-lm-untied", "transformer."),
}


def base_and_head(label: str, seed: int = 0) -> tuple[Checkpoint, Checkpoint, str]:
    """A bare model, and one with a head that has the same weights, as far as it has them."""
    other, prefix = WITH_HEAD[label]
    base, head = MODELS[label](seed), MODELS[other](seed + 10)
    shared = {prefix + name: tensor for name, tensor in base.items()}
    return base, head.replace(tensors={name: shared.get(name, tensor) for name, tensor in head.items()}), prefix


def same(a: Checkpoint | dict[str, Tensor], b: Checkpoint | dict[str, Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


# ---- another head, another prefix


@pytest.mark.parametrize("label", WITH_HEAD)
def test_the_alignment_of_a_bare_model_moves_one_with_a_head(label: str) -> None:
    base, head, prefix = base_and_head(label)
    g = match(base, MODELS[label](5))
    assert {instance.axis for instance in g.elements} == MATCHED
    moved, alone = g(head), g(base)
    assert set(moved) == set(head)
    assert api.prove(head, g).exact.worst < 1e-12
    for name in moved:
        body = name.removeprefix(prefix)
        wanted = alone[body] if name.startswith(prefix) and body in base else head[name]
        assert torch.equal(moved[name], wanted), name
    assert any(not torch.equal(moved[name], head[name]) for name in head)


@pytest.mark.parametrize("label", WITH_HEAD)
def test_the_alignment_of_a_model_with_a_head_moves_the_bare_one(label: str) -> None:
    base, head, prefix = base_and_head(label)
    g = match(head, base_and_head(label, 5)[1])
    moved, whole = g(base), g(head)
    assert set(moved) == set(base)
    assert api.prove(base, g).exact.worst < 1e-12
    for name in moved:
        assert torch.equal(moved[name], whole[prefix + name] if prefix + name in whole else base[name]), name
    assert same(match(base, MODELS[label](5))(base), moved)


@pytest.mark.parametrize("label", WITH_HEAD)
def test_a_head_follows_the_spaces_that_it_reads(label: str) -> None:
    """Residual streams and poolers are moved too: the head must move along, though the alignment never saw it."""
    base, head, _ = base_and_head(label)
    g = random_alignment(api.declare(base), 1)
    assert api.prove(base, g).exact.worst < 1e-12
    assert api.prove(head, g).exact.worst < 1e-12
    spec = api.declare(head)
    files = {spec.file_name(name) for name in spec.heads if name.endswith("weight")}
    assert any(not torch.equal(g(head)[name], head[name]) for name in files)
    back = g.inverse()(g(head))
    torch.testing.assert_close(dict(back), dict(head), rtol=0, atol=1e-12)


def test_old_names_and_buffers_of_the_source(tmp_path: Path) -> None:
    base, head, _ = base_and_head("bert")
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
           for n, t in head.items()}  # fmt: skip
    ids = {"bert.embeddings.position_ids": torch.arange(37)[None]}
    source = open_checkpoint(old | ids, config=head.config)
    g = random_alignment(api.declare(base), 2)
    moved = g(source)
    assert set(moved) == set(old)
    for name, tensor in g(head).items():
        old_name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        assert torch.equal(moved[old_name], tensor)


def test_folders_modules_and_checkpoints_are_moved_alike(tmp_path: Path) -> None:
    base, head, _ = base_and_head("bert")
    g = match(base, MODELS["bert"](5))
    folder = head.save(tmp_path / "head")
    module = api.to_module(head, torch.float64)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    wanted = dict(g(head))
    assert same(g(module), wanted)
    assert same(g(folder), dict(g(open_checkpoint(folder))))
    for source in (folder, str(folder)):  # in a file the same numbers lie elsewhere, and are added in another order
        torch.testing.assert_close(dict(g(source)), wanted, rtol=0, atol=1e-14)
    assert same(dict(module.state_dict()), before)
    out = g(folder).save(tmp_path / "moved")
    _, report = transformers.BertForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report


def test_an_alignment_from_a_file_is_bound_as_well(tmp_path: Path) -> None:
    base, head, _ = base_and_head("bert")
    g = match(base, MODELS["bert"](5))
    loaded = Alignment.load(g.save(tmp_path / "g.safetensors"))
    torch.testing.assert_close(dict(loaded(head)), dict(g(head)), rtol=0, atol=1e-14)


# ---- refusals


def bert(**options: object) -> Checkpoint:
    return of("BertModel", "BertConfig", TEXT, **options)(0)


REFUSED = {
    "gpt2 on bert": ("gpt2", MODELS["bert"], "of a bert, this alignment of a gpt2"),
    "bert on gpt2": ("bert", MODELS["gpt2"], "of a gpt2, this alignment of a bert"),
    "bert on roberta": ("bert", MODELS["roberta"], "of a roberta, this alignment of a bert"),
    "neurons": ("bert", lambda: bert(intermediate_size=31), "'ffn' is of size 29 .* and of size 31"),
    "heads": ("bert", lambda: bert(num_attention_heads=5), "'h' is of size 4 .* and of size 5"),
    "layers": ("bert", lambda: bert(num_hidden_layers=3), "'l' is of size 2 .* and of size 3"),
    "activation": ("bert", lambda: bert(hidden_act="relu"), "'ffn' is of size 29 .* and of size 29"),
    "heads behind equal shapes": (
        "gpt2", lambda: of("GPT2Model", "GPT2Config", GPT2, n_head=5)(0), "'h' is of size 4 .* and of size 5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_another_family_or_size_is_refused(case: str) -> None:
    label, make, message = REFUSED[case]
    g = random_alignment(api.declare(MODELS[label]()), 1, MATCHED)
    with pytest.raises(IncompatibleError, match=message):
        g(make())


def test_another_size_of_a_space_that_is_not_moved_does_not_matter() -> None:
    g = random_alignment(api.declare(MODELS["bert"]()), 1, MATCHED)
    other = bert(vocab_size=67)
    assert set(g(other)) == set(other)
    assert api.prove(other, g).exact.worst < 1e-12
    g = random_alignment(api.declare(MODELS["bert"]()), 1)
    assert api.prove(other, g).exact.worst < 1e-12


def test_unknown_tensors_are_refused_and_never_dropped(tmp_path: Path) -> None:
    base, head, _ = base_and_head("bert")
    for model in (base, head):
        g = random_alignment(api.declare(model), 1, MATCHED)
        extra = open_checkpoint({**model, "adapter.weight": torch.zeros(3, 5).double()}, config=model.config)
        with pytest.raises(SpecError, match=r"not declared: adapter\.weight"):
            g(extra)
        missing = open_checkpoint({n: t for n, t in model.items() if "layer.1.output" not in n}, config=model.config)
        with pytest.raises(SpecError, match=r"missing: .*layer\.1\.output"):
            g(missing)


def test_integers_are_refused() -> None:
    base = MODELS["bert"]()
    name = "encoder.layer.0.output.dense.weight"
    whole = open_checkpoint({**base, name: (10 * base[name]).long()}, config=base.config)
    with pytest.raises(CheckpointError, match="expected floating-point weights"):
        random_alignment(api.declare(base), 1, MATCHED)(whole)


def test_every_refusal_is_of_the_tree_and_comes_before_anything_is_read(tmp_path: Path) -> None:
    g = random_alignment(api.declare(MODELS["bert"]()), 1, MATCHED)
    folder = MODELS["gpt2"]().save(tmp_path / "gpt2")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"\xff" * 8)  # NaN
    for source in (folder, str(tmp_path / "nowhere"), encoder()):
        with pytest.raises(SymfuseError):
            g(source)


# ---- files of alignments


@pytest.mark.parametrize("label", ["torch-relu-post", "bert-mlm", "gpt2-lm"])
def test_two_matches_of_the_same_files_are_the_same_bytes(tmp_path: Path, label: str) -> None:
    folders = [MODELS[label](seed).save(tmp_path / str(seed)) for seed in (0, 1)]
    one, other = (match(*folders, threads=threads) for threads in (1, 2))
    first = one.to_bytes()
    for i in range(6):  # the order of metadata was another one each time
        assert other.to_bytes() == first
        assert Alignment.load(one.save(tmp_path / f"{i}.safetensors")).to_bytes() == first
        assert (tmp_path / f"{i}.safetensors").read_bytes() == first
    assert match(folders[1], folders[0]).to_bytes() != first


def test_provenance_says_from_what_and_nothing_of_the_clock(tmp_path: Path) -> None:
    a, b = (MODELS["bert-mlm"](seed).save(tmp_path / name) for seed, name in enumerate("ab"))
    seconds: list[float] = []
    g = match(a, b, progress=lambda step, _total: seconds.append(step.seconds))
    assert g.provenance["source"] == open_checkpoint(a).lineage()
    assert g.provenance["anchor"] == open_checkpoint(b).lineage()
    assert g.provenance["source"].keys() == {"name", "folder", "sha256", "sha256_of"}
    assert len(seconds) == len(g.provenance["steps"])
    assert min(seconds) > 0
    for step in g.provenance["steps"]:
        assert step.keys() == {"instance", "group", "before", "after", "units", "moved"}
    assert json.loads(json.dumps(g.provenance)) == g.provenance
    assert not hasattr(g, "only")
