"""Encoders of text, images and sounds: maps that look like symmetries and are not, beside those that are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from contract.test_must_fail import BROKEN, acting, applied, changed, noise, undeclared, with_axis
from contract.tiny import EXACT, case, moving
from symfuse.alignment import Alignment
from symfuse.architectures import ARCHITECTURES, Config
from symfuse.errors import SpecError, SymmetryError
from symfuse.groups import Group, Monomial, Orthogonal, Permutation, Rotary, Scaling, Signed
from symfuse.model import Model
from symfuse.modules import live
from symfuse.rewriting import canonical
from symfuse.spec import Axis, Declared, Spec, parse
from symfuse.verification import compare, run

SPEECH = ("wav2vec2-biased", "wav2vec2-ctc")


def relaid(spec: Spec, pieces: Mapping[str, str], axes: Mapping[str, Axis]) -> Spec:
    """The declaration with pieces of all layouts replaced."""
    tensors = {}
    for name, declared in spec.tensors.items():
        text = str(declared.layout)
        for old, new in pieces.items():
            text = text.replace(old, new)
        tensors[name] = Declared(parse(text), declared.index)
    return replace(spec, tensors=tensors, axes={**spec.axes, **axes})


def rolled(spec: Spec, axis: str) -> Alignment:
    """An axis in another order, the same wherever it is."""
    order = Monomial(torch.arange(spec.sizes[axis]).roll(1))
    return Alignment(spec, {i: order for i in spec.movable if i.axis == axis})


@pytest.mark.parametrize("label", SPEECH)
def test_a_stream_is_not_reordered_across_the_blocks_of_its_positions(label: str) -> None:
    this = case(label)
    whole = {"(blocks residual) residual*": "stream 16", "(blocks residual*)": "stream*", "(blocks residual)": "stream"}
    spec = relaid(this.spec, whole | {"(|blocks| |residual|)": "|stream|"}, {"stream": Axis(48, Permutation())})
    assert undeclared(this, rolled(spec, "stream")) > BROKEN
    for axis in ("blocks", "residual"):
        g = moving(this.spec, 3, {axis})
        assert this.error(g(this.checkpoint), g) < EXACT


@pytest.mark.parametrize(
    ("label", "axis", "group"),
    [
        ("wav2vec2-biased", "conv0_stem", Scaling()),  # which is Signed
        ("wav2vec2-biased", "conv1_stem", Signed()),
        ("wav2vec2-ctc", "conv0_stem", Signed()),  # behind a norm over channels
        ("wav2vec2-sequence", "residual", Signed()),
        ("wav2vec2-pretraining", "entries", Signed()),
    ],
)
def test_larger_groups_on_what_speech_encoders_have_break(label: str, axis: str, group: Group) -> None:
    this = case(label)
    g = acting(this.spec, axis, group)
    assert this.error(applied(this, g), g) > BROKEN


def test_the_gates_of_wavlm_keep_heads_and_stream_in_their_order() -> None:
    this = case("wavlm-frames")
    for axis in ("h", "blocks", "residual"):
        assert axis not in {instance.axis for instance in this.spec.movable}
        per = ("blocks",) if axis == "residual" else ()
        free = {axis: Axis(this.spec.sizes[axis], Permutation(), per)}
        spec = replace(this.spec, axes={**this.spec.axes, **free})
        assert undeclared(this, acting(spec, axis, Permutation())) > BROKEN


@pytest.mark.parametrize("label", ["esm-mlm", "dinov3-masked"])
def test_turned_planes_of_encoders_are_not_reflected(label: str) -> None:
    this = case(label)
    assert this.error(applied(this, acting(this.spec, "c", Rotary()))) < this.exact
    assert this.error(applied(this, acting(this.spec, "c", Orthogonal()))) > BROKEN


@pytest.mark.parametrize(
    ("label", "at"),
    [
        ("longformer-sequence", ("attention.self.value", "attention.output.dense")),
        ("led-lm", ("self_attn.longformer_self_attn.value", "self_attn.output")),
    ],
)
def test_a_value_bias_is_not_free_where_other_tokens_have_another(label: str, at: tuple[str, str]) -> None:
    this = case(label)
    names = list(this.checkpoint)
    value, output = (next(n for n in names if ".0." in n and n.endswith(f"{end}.bias")) for end in at)
    weight = this.checkpoint[output.replace(".bias", ".weight")]
    assert all(this.spec.file_name(rule.bias) != value for rule in this.spec.shifts)
    both = {value: this.checkpoint[value] + noise(), output: this.checkpoint[output] - weight @ noise()}
    assert changed(this, both) > BROKEN
    other = value.replace(".bias", "_global.bias")
    assert changed(this, both | {other: this.checkpoint[other] + noise()}) < this.exact


def test_heads_that_share_a_table_move_alike_in_all_layers() -> None:
    this = case("mpnet-sequence")
    at = "encoder.layer.0.attention.attn."
    layouts = {f"{at}{name}.{end}": "(first 5)" for name in "qkv" for end in ("weight", "bias")}
    layouts = {end: text + " residual*" * end.endswith("weight") for end, text in layouts.items()}
    layouts[at + "o.weight"] = "residual (first 5)"
    first = with_axis(this.spec, "first", Axis(4, Permutation()), layouts)
    assert undeclared(this, rolled(first, "first")) > BROKEN
    assert this.error(rolled(this.spec, "h")(this.checkpoint)) < EXACT


ROTATED = [
    ("albert-pretraining", "residual"), ("prelayernorm-mlm", "residual"), ("ast-classification", "residual"),
    ("swin", "stage1_residual"), ("xlnet-lm", "residual"), ("mae-pretraining", "decoder_residual"),
    ("longformer-sequence", "residual"), ("rembert-mlm", "embedding"),
]  # fmt: skip


@pytest.mark.parametrize(("label", "axis"), ROTATED)
def test_streams_of_encoders_are_not_rotated(label: str, axis: str) -> None:
    """Gains of norms stay: no such element acts on them."""
    this = case(label)
    g = acting(this.spec, axis, Orthogonal())
    moved = {
        file: g.move(name, this.checkpoint[file])
        for name, declared in this.spec.tensors.items()
        if f"|{axis}|" not in str(declared.layout) and (file := this.spec.file_name(name)) in this.checkpoint
    }
    assert changed(this, moved) > BROKEN


@pytest.mark.parametrize("label", ["xl-mlm-untied", "megatron-token", "esm-token", "msn-classification"])
def test_streams_behind_norms_alone_are_rotated_once_these_are_folded(label: str) -> None:
    this = case(label)
    folded = canonical(Model(this.checkpoint, this.spec), ("fold_norms", "centre"))
    g = replace(moving(folded.spec, 4, {"residual"}), shifts={})
    found = run(live(g.on(folded)), this.inputs)
    assert max(compare(this.outputs, found).values()) < max(this.exact, 1e-11)


@pytest.mark.parametrize("label", ["prelayernorm-mlm", "ast-classification", "swin"])
def test_streams_with_a_gain_in_them_are_not_folded(label: str) -> None:
    this = case(label)
    with pytest.raises(SymmetryError, match="no declared pre-norm residual stream"):
        canonical(Model(this.checkpoint, this.spec), ("untie", "fold_norms"))


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        ("esm", "is_folding_model"), ("deberta", "talking_head"), ("wav2vec2", "add_adapter"),
        ("hubert", "conv_pos_batch_norm"),
    ],
)  # fmt: skip
def test_what_is_not_declared_is_refused_by_the_name_of_its_field(model_type: str, field: str) -> None:
    with pytest.raises(SpecError, match=f"{field} is true"):
        ARCHITECTURES[model_type].declare(Config({"model_type": model_type, field: True}, model_type))
