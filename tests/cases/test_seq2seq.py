"""Encoders with decoders from files to files: one matrix under several names (C09), what is matched, the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import symfuse
from command import done, run
from contract.tiny import MODELS, Case, case
from symfuse.alignment import random_alignment
from symfuse.errors import OptionError, SpecError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.matching.axes import choose_axes
from symfuse.matching.problem import rotatable
from symfuse.model import Model
from symfuse.modules import live
from symfuse.rewriting import canonical
from symfuse.verification import random_inputs

ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
HEAD, SHARED = "lm_head.weight", "shared.weight"


def with_aliases(checkpoint: Checkpoint, names: tuple[str, ...], *, shared: bool = True) -> Checkpoint:
    """The checkpoint with copies of its embedding, and with or without the embedding itself."""
    tensors = {**checkpoint, **{name: checkpoint[SHARED].clone() for name in names}}
    return checkpoint.replace(tensors=tensors if shared else {n: t for n, t in tensors.items() if n != SHARED})


@pytest.mark.parametrize("shared", [True, False])
def test_c09_every_name_of_the_embedding_moves(shared: bool, tmp_path: Path) -> None:
    """Whichever of them a file has: all move alike, and the class takes the result."""
    this = case("t5-lm")
    source = with_aliases(this.checkpoint, (*ALIASES, HEAD) if shared else ALIASES[1:], shared=shared)
    g = random_alignment(this.spec, 1, largest=True)
    g(source).save(tmp_path / "moved")
    moved = open_checkpoint(tmp_path / "moved")
    assert set(moved) == set(source)
    for name in {*ALIASES, HEAD, SHARED} & moved.keys():
        assert torch.equal(moved[name], g(this.checkpoint)[SHARED])
    assert this.error(moved) < this.exact
    kind = transformers.T5ForConditionalGeneration
    _, report = kind.from_pretrained(tmp_path / "moved", output_loading_info=True)
    assert not any(report.values()), report


def test_c09_a_head_that_is_declared_and_not_there() -> None:
    """As v1.1 was published, with a head of its own; what `transformers` 5 writes of a model that never had one, says
    that it is tied."""
    published = MODELS["t5-lm-untied"]()
    without = published.replace(tensors={n: t for n, t in published.items() if n != HEAD})
    with pytest.raises(SpecError, match=r"lm_head\.weight is missing, and config\.json unties it from the embedding"):
        Model.of(without)
    assert HEAD not in Model.of(MODELS["t5-lm-unscaled"]()).spec.tensors


def test_c09_what_older_files_of_t5_and_bart_have_besides() -> None:
    this = case("t5-lm")
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    old = this.checkpoint.replace(tensors={**this.checkpoint, unread: torch.zeros(8, 4)})
    assert Model.of(old).spec.buffers == {unread}
    bart = case("bart-lm").checkpoint
    version = {"model.encoder.version": torch.tensor([3.0])}
    assert Model.of(bart.replace(tensors={**bart, **version})).spec.buffers == version.keys()


@pytest.mark.parametrize(("label", "broken"), [("t5-lm", {HEAD}), ("pegasus-lm", {HEAD, *ALIASES})])
def test_c09_what_untying_breaks(label: str, broken: set[str], tmp_path: Path) -> None:
    """Of T5 the head alone: encoder and decoder have one embedding whatever the config says. Of BART's relatives
    all."""
    this = case(label)
    model = Model.of(this.checkpoint)
    moved = canonical(model, rotatable(model.spec))
    moved.checkpoint.save(tmp_path / "moved")
    written = open_checkpoint(tmp_path / "moved")
    assert {name.removeprefix("model.") for name in set(written) - set(this.checkpoint)} == broken
    assert written.config["tie_word_embeddings"] is False
    assert this.error(written) < this.exact


def test_all_of_both_stacks_is_matched_by_the_usual_words() -> None:
    spec = case("t5-lm").spec
    parts = ("encoder", "decoder", "cross")
    assert set(choose_axes("attention", spec)) == {f"{part}_{axis}" for part in parts for axis in ("qk", "v")}
    assert set(choose_axes("heads", spec)) == {f"{part}_h" for part in parts}
    assert set(choose_axes("ffn", spec)) == {"encoder_ffn", "decoder_ffn"}
    assert set(choose_axes("all", spec)) >= {instance.axis for instance in spec.movable}
    assert choose_axes("cross_qk", spec) == ("cross_qk",)
    assert set(choose_axes("residual", case("whisper-lm").spec)) == {"encoder_residual", "decoder_residual"}
    assert "stem" in choose_axes("ffn", case("whisper-lm").spec)


def left(moved: Checkpoint, anchor: Checkpoint) -> float:
    return sum(float((moved[name] - anchor[name]).square().sum()) for name in anchor)


@pytest.mark.parametrize("label", ["t5-lm", "bart-lm", pytest.param("whisper-lm", marks=pytest.mark.slow)])
def test_all_axes_together_are_found(label: str) -> None:
    """With the streams, and of T5 with the heads that all layers share, in whose layers all is mixed besides."""
    this = case(label)
    anchor = random_alignment(this.spec, 5)(this.checkpoint)
    found = symfuse.match(this.checkpoint, to=anchor, axes="all", frame=())
    moved = found(this.checkpoint)
    assert left(moved, anchor) < 1e-10 * left(this.checkpoint, anchor)
    assert this.error(moved, found) < this.exact


def test_some_layers_of_both_stacks() -> None:
    """The order of the shared heads is of no layer; the last layer of the decoder is one that the encoder has not."""
    this = case("t5-lm")
    found = symfuse.match(this.checkpoint, to=MODELS["t5-lm"](1), axes="attention,heads", layers="2")
    layers = {(instance.axis, instance.index) for instance in found.elements}
    assert layers >= {("decoder_qk", (2,)), ("cross_v", (2,))}
    assert all(index in ((), (2,)) for _, index in layers)
    assert this.error(found(this.checkpoint)) < this.exact
    with pytest.raises(OptionError, match="the model has layers 0 to 2"):
        symfuse.match(this.checkpoint, to=MODELS["t5-lm"](1), axes="attention", layers="3")


@pytest.mark.parametrize(
    ("label", "field"), [("t5", "num_decoder_layers"), ("t5", "num_layers"), ("bart", "decoder_layers")]
)
def test_a_billion_layers_are_refused_before_they_are_listed(label: str, field: str) -> None:
    source = case(label).checkpoint
    with pytest.raises(SpecError, match=f"{field} is 1000000000, expected at most 10,000 layers"):
        Model.of(source.replace(config={**source.config, field: 10**9}))


@pytest.mark.parametrize("words", ["encodr_ffn,decoder_ffn", "vision_attention,ffn", "_ffn"])
def test_a_part_that_the_model_has_not_is_no_word(words: str) -> None:
    with pytest.raises(OptionError, match=words.split(",")[0]):
        choose_axes(words, case("t5-lm").spec)


def test_what_is_not_matched_of_them_is_refused() -> None:
    this = case("t5-lm")
    batch = random_inputs(live(this.checkpoint), this.checkpoint.config)
    with pytest.raises(OptionError, match=r"is an encoder with a decoder, .* match from weights"):
        symfuse.match(this.checkpoint, to=MODELS["t5-lm"](1), data=[batch])
    with pytest.raises(SpecError, match=r"separate-qk does not fit .* it has several stacks of layers"):
        symfuse.match(this.checkpoint, to=MODELS["t5-lm"](1), axes="attention", variants=["separate-qk"])


@pytest.mark.parametrize("label", ["t5", "bart-lm", "t5-sequence", "whisper"])
def test_inputs_for_both_stacks(label: str) -> None:
    this: Case = case(label)
    assert "logits" not in this.outputs or "encoder_last_hidden_state" not in this.outputs
    masks = {name: mask for name, mask in this.inputs.items() if name.endswith("attention_mask")}
    assert all(bool((mask == 0).any()) and bool((mask == 1).any()) for mask in masks.values())
    assert len({tuple(mask.shape) for mask in masks.values()}) == len(masks) > 0
    name = "decoder_attention_mask" if "decoder_attention_mask" in masks else "attention_mask"
    shown = [out for out in this.outputs.values() if out.shape[:2] == masks[name].shape]
    assert all(not bool(out[masks[name] == 0].any()) for out in shown)


@pytest.mark.parametrize("label", ["t5-lm", "bart-lm"])
def test_the_commands(label: str, tmp_path: Path) -> None:
    a, b, out, mean = (str(tmp_path / name) for name in ("a", "b", "out", "mean"))
    for seed, folder in enumerate((a, b)):
        MODELS[label](seed).save(folder)
    done("align", a, "--to", b, "-o", out, "--axes", "attention,ffn")
    verified = json.loads(done("verify", a, out, "--json").output)
    assert verified["equal"]
    assert run("verify", b, out).exit_code != 0
    done("merge", out, b, "-o", mean, "--method", "linear")
    aligned, anchor, merged = (open_checkpoint(folder) for folder in (out, b, mean))
    assert set(merged) == set(anchor)
    for name in anchor:
        torch.testing.assert_close(merged[name], (aligned[name] + anchor[name]) / 2)
    assert "cross_qk" in done("inspect", a).output
