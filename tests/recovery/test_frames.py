"""The frame of an alignment: saved with it, applied before it, the same for all models that it brings together."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from contract.tiny import MODELS, case
from recovery.planted import EVERYTHING, planted, size, squared
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError, IncompatibleError, SymmetryError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.matching import match_models
from symfuse.matching.problem import ROTATABLE
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Instance
from symfuse.verification import prove, verify

FRAMED = [
    "gpt2-lm",
    pytest.param("gpt2-lm-untied", marks=pytest.mark.slow),
    pytest.param("vit-classification", marks=pytest.mark.slow),
]


@cache
def pair(label: str) -> tuple[Checkpoint, Checkpoint]:
    return MODELS[label](seed=3), MODELS[label](seed=4)


@cache
def found(label: str) -> Alignment:
    return match_models(*map(Model.of, pair(label)), axes=EVERYTHING, starts=1, threads=1)


def at_random(label: str, seed: int) -> Alignment:
    spec = canonical(Model.of(pair(label)[0]), ROTATABLE).spec
    return replace(random_alignment(spec, seed), frame=ROTATABLE)


def assert_same(a: Checkpoint, b: Checkpoint, share: float = 1e-24) -> None:
    assert set(a) == set(b)
    assert squared(a, b) <= share * size(b)


# Saved and loaded.


@pytest.mark.parametrize("label", FRAMED)
def test_a_file_keeps_the_frame(label: str, tmp_path: Path) -> None:
    alignment = found(label)
    loaded = Alignment.load(alignment.save(tmp_path / "alignment.safetensors"))
    assert loaded.frame == alignment.frame == ROTATABLE
    assert loaded.spec == alignment.spec
    one, other = (g(pair(label)[0]) for g in (alignment, loaded))
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert_same(loaded.in_frame(pair(label)[1]), alignment.in_frame(pair(label)[1]), 0)


def test_a_file_of_rewrites_that_there_are_not(tmp_path: Path) -> None:
    path = found("gpt2-lm").save(tmp_path / "alignment.safetensors")
    with safe_open(path, framework="pt") as file:
        tensors, meta = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    meta.pop("sha256")  # as of files from before there were checksums
    save_file(tensors, path, {**meta, "frame": json.dumps(["untie", "fold_nroms"])})
    with pytest.raises(CheckpointError, match="fold_nroms"):
        Alignment.load(path)


# Applied.


@pytest.mark.parametrize("label", FRAMED)
def test_a_source_that_is_in_the_frame_is_moved_alike(label: str) -> None:
    source = pair(label)[0]
    alignment = found(label)
    ready = alignment.in_frame(source)
    saved = ready.replace(tensors=dict(ready))
    moved = alignment(source)
    assert_same(alignment(saved), moved)
    assert_same(alignment.on(canonical(Model.of(source), alignment.frame)), moved)
    assert moved.config["architectures"] == source.config["architectures"]
    assert prove(source, alignment).exact.equal


@pytest.mark.parametrize("label", FRAMED)
def test_the_anchor_in_the_frame_is_rewritten_and_not_moved(label: str) -> None:
    anchor = pair(label)[1]
    ready = found(label).in_frame(anchor)
    assert verify(anchor, ready).equal
    assert_same(found(label).in_frame(ready), ready)
    assert squared(anchor, ready) > 0.01 * size(anchor)


def test_without_a_frame_the_anchor_is_itself() -> None:
    alignment = match_models(*map(Model.of, pair("gpt2-lm")), axes="attention", threads=1)
    assert alignment.in_frame(pair("gpt2-lm")[1]) is pair("gpt2-lm")[1]


def test_after_a_folder(tmp_path: Path) -> None:
    """What is written loads again as a model of its class, in the frame."""
    folder = found("gpt2-lm")(pair("gpt2-lm")[0]).save(tmp_path / "moved")
    back = open_checkpoint(folder)
    assert back.config["tie_word_embeddings"] is False
    assert verify(pair("gpt2-lm")[0], back).equal
    assert_same(found("gpt2-lm").in_frame(back), back)


# Composed.


@pytest.mark.parametrize("label", FRAMED)
def test_in_one_frame_alignments_compose_and_have_inverses(label: str) -> None:
    source = pair(label)[0]
    first, then = at_random(label, 1), at_random(label, 2)
    both = then @ first
    assert both.frame == ROTATABLE
    assert_same(both(source), then(first(source)), 1e-20)
    back = first.inverse()
    assert back.frame == ROTATABLE
    assert_same(back(first(source)), first.in_frame(source), 1e-20)
    assert_same((back @ first)(source), first.in_frame(source), 1e-20)


def test_a_second_without_a_frame_follows_one_with() -> None:
    source, first = pair("gpt2-lm")[0], at_random("gpt2-lm", 1)
    then = random_alignment(first.spec, 2)
    assert then.frame == ()
    assert (then @ first).frame == ROTATABLE
    assert_same((then @ first)(source), then.on(Model(first(source), first.spec)), 1e-20)


def test_a_second_in_a_frame_does_not_follow_one_without() -> None:
    """The rewrites would come in between."""
    then = at_random("gpt2-lm", 1)
    with pytest.raises(SymmetryError, match="cannot follow one in none"):
        then @ random_alignment(then.spec, 2)
    with pytest.raises(SymmetryError, match="cannot follow one in untie"):
        then @ replace(random_alignment(then.spec, 2), frame=("untie",))


def test_alignments_of_other_axes_do_not_compose() -> None:
    """As it is, the stream is permuted; in the frame it is rotated."""
    plain = random_alignment(Model.of(pair("gpt2-lm")[0]).spec, 1)
    for one, other in ((plain, at_random("gpt2-lm", 1)), (at_random("gpt2-lm", 1), plain)):
        with pytest.raises(IncompatibleError, match="residual"):
            one @ other


# Refused.


@pytest.mark.parametrize(("base", "label"), [("gpt2", "gpt2-lm"), ("vit", "vit-classification")])
def test_a_base_model_whose_final_norm_is_its_output(base: str, label: str) -> None:
    source, anchor = MODELS[base](seed=3), MODELS[base](seed=4)
    with pytest.raises(SymmetryError, match=r"the output of the norm .* take the checkpoint with a head"):
        found(label)(source)["wte.weight" if base == "gpt2" else "embeddings.cls_token"]
    with pytest.raises(SymmetryError, match="permute the residual stream only"):
        match_models(Model.of(source), Model.of(anchor), axes="residual", frame=ROTATABLE, threads=1)
    plain = match_models(Model.of(source), Model.of(anchor), axes="residual", threads=1)
    assert plain.frame == ()
    assert "permute the residual stream only" in plain.provenance["options"]["not_rotated"]
    assert prove(source, plain).exact.equal


def test_a_post_norm_model_has_no_such_frame() -> None:
    source, anchor = (Model.of(MODELS["bert-mlm"](seed=s)) for s in (3, 4))
    with pytest.raises(SymmetryError, match="no declared pre-norm residual stream"):
        match_models(source, anchor, axes="residual", frame=ROTATABLE, threads=1)


# Brought together.


def test_align_brings_both_into_one_frame() -> None:
    sources = pair("gpt2-lm")
    together = api.align(sources, axes="residual,attention", threads=1, starts=1)
    assert together.anchor == 1
    for before, after in zip(sources, together.checkpoints, strict=True):
        assert verify(before, after).equal
        assert after.config["tie_word_embeddings"] is False
    first, second = together.checkpoints
    plain = [canonical(Model.of(c), ROTATABLE).checkpoint for c in sources]
    assert squared(first, second) < squared(*plain)
    middle = api.merge(list(together.checkpoints))
    assert middle.config["tie_word_embeddings"] is False
    for name in ("transformer.wte.weight", "lm_head.weight", "transformer.h.1.mlp.c_fc.weight"):
        torch.testing.assert_close(middle[name], (first[name] + second[name]) / 2)
    for weights, end in (([1.0, 0.0], sources[0]), ([0.0, 1.0], sources[1])):
        assert verify(end, api.merge(list(together.checkpoints), weights=weights)).equal


def test_three_models_in_one_frame() -> None:
    sources = [*pair("gpt2-lm"), MODELS["gpt2-lm"](seed=5)]
    together = api.align(sources, anchor=0, axes="residual", threads=1, starts=1)
    assert [g is None for g in together.alignments] == [True, False, False]
    for before, after in zip(sources, together.checkpoints, strict=True):
        assert verify(before, after).equal


RECIPE = {"merge_method": "linear", "align": {"axes": ["residual", "attention", "heads", "ffn"]}}


@pytest.mark.parametrize("weights", [(1.0, 0.0), pytest.param((0.0, 1.0), marks=pytest.mark.slow)])
def test_a_recipe_keeps_the_function_of_both_ends(weights: tuple[float, float]) -> None:
    names = dict(zip(("a", "b"), pair("gpt2-lm"), strict=True))
    models = [{"model": name, "parameters": {"weight": w}} for name, w in zip(names, weights, strict=True)]
    merged = api.merge_recipe(RECIPE | {"models": models}, names)
    assert verify(pair("gpt2-lm")[weights.index(1.0)], merged).equal
    assert merged.config["tie_word_embeddings"] is False


def test_a_recipe_averages_in_the_frame() -> None:
    """A planted pair: the average is the anchor again, which without the alignment it is not."""
    plant = planted("gpt2-lm")
    names = {"a": plant.moved, "b": case("gpt2-lm").checkpoint}
    models = [{"model": name, "parameters": {"weight": 0.5}} for name in names]
    merged = api.merge_recipe(RECIPE | {"models": models}, names)
    assert verify(case("gpt2-lm").checkpoint, merged, tolerance=1e-6).equal


def test_the_stream_of_an_alignment_in_a_frame_is_rotated() -> None:
    element = found("gpt2-lm").elements[Instance("residual")]
    matrix = element.to_dense()
    ones = torch.ones(20, dtype=torch.float64)
    torch.testing.assert_close((matrix @ ones).abs(), ones)
    assert (matrix.abs() > 1e-3).sum() > 100
