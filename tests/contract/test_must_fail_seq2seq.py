"""Encoders with decoders: what is one element for both or for all layers, and what may not move at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from contract.test_must_fail import BROKEN, acting, undeclared
from contract.tiny import EXACT, case, moving
from symfuse.alignment import Alignment
from symfuse.groups import Orthogonal, Permutation, Scaling, Signed
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.modules import live
from symfuse.spec import Declared, Layout, Spec
from symfuse.spec.layout import Atom

TABLES = tuple(f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder"))


def in_layers(spec: Spec, axis: str, layers: str) -> Spec:
    """The declaration with an element of its own on that axis in each layer."""
    return replace(spec, axes={**spec.axes, axis: replace(spec.axes[axis], per=(layers,))})


@pytest.mark.parametrize(("axis", "layers"), [("encoder_h", "encoder_l"), ("decoder_h", "decoder_l")])
def test_heads_reordered_by_layer_break_where_layers_share_a_relative_bias(axis: str, layers: str) -> None:
    this = case("t5-lm")
    assert this.spec.axes[axis].per == ()
    assert this.error(acting(this.spec, axis, Permutation())(this.checkpoint)) < this.exact
    assert undeclared(this, acting(in_layers(this.spec, axis, layers), axis, Permutation())) > BROKEN


def test_heads_of_cross_attention_and_of_umt5_have_an_order_in_each_layer() -> None:
    for label, axis in [("t5-lm", "cross_h"), ("umt5-lm", "encoder_h"), ("umt5-lm", "decoder_h")]:
        this = case(label)
        assert len(this.spec.axes[axis].per) == 1
        assert this.error(moving(this.spec, 1, {axis})(this.checkpoint)) < this.exact


def decoders_own(spec: Spec) -> Spec:
    """The declaration with a stream of the decoder's own; the embedding, and what the cross-attention reads, are the
    encoder's."""
    tensors = {}
    for name, declared in spec.tensors.items():
        memory = ".EncDecAttention.k." in name or ".EncDecAttention.v." in name
        own = name.startswith("decoder.") and not memory
        dims = tuple(
            replace(dim, name="own") if own and isinstance(dim, Atom) and dim.name == "residual" else dim
            for dim in declared.layout.dims
        )
        tensors[name] = Declared(Layout(dims), declared.index)
    return replace(spec, axes={**spec.axes, "own": spec.axes["residual"]}, tensors=tensors)


def test_the_streams_of_encoder_and_decoder_move_alike_where_they_share_an_embedding() -> None:
    this = case("t5-lm")
    spec = decoders_own(this.spec)
    assert undeclared(this, acting(spec, "own", Signed())) > BROKEN
    both = acting(spec, "residual", Signed())
    (element,) = both.elements.values()
    (instance,) = (i for i in spec.movable if i.axis == "own")
    assert undeclared(this, replace(both, elements={**both.elements, instance: element})) < this.exact
    assert case("whisper-lm").spec.axes.keys() > {"encoder_residual", "decoder_residual"}
    assert case("bart-lm-untied").spec.axes.keys() > {"encoder_residual", "decoder_residual"}


@pytest.mark.parametrize(
    ("label", "axis"), [("t5-lm", "residual"), ("bart-lm", "residual"), ("whisper-lm", "encoder_residual")]
)
@pytest.mark.parametrize("group", [Orthogonal(), Scaling()], ids=lambda g: g.name)
def test_rotated_and_rescaled_streams_break(label: str, axis: str, group: Orthogonal | Scaling) -> None:
    """Gains of norms stay: no such element acts on them."""
    this = case(label)
    g = acting(this.spec, axis, group)
    moved = {
        file: g.move(name, this.checkpoint[file])
        for name, declared in this.spec.tensors.items()
        if f"|{axis}|" not in str(declared.layout) and (file := this.spec.file_name(name)) in this.checkpoint
    }
    assert this.error(this.checkpoint.replace(tensors={**this.checkpoint, **moved})) > BROKEN


def with_tables(this: Checkpoint) -> Checkpoint:
    """A Marian whose file has its sines."""
    state = live(this).state_dict()
    return this.replace(tensors={**this, **{name: state[name].clone() for name in TABLES}})


def permuted(this: Checkpoint, spec: Spec) -> Checkpoint:
    """All of a Marian moved by one permutation of its stream, with the tables that its file has."""
    spec = replace(spec, axes={**spec.axes, "residual": replace(spec.axes["residual"], group=Permutation())})
    g: Alignment = acting(spec, "residual", Permutation())
    files = {name: spec.file_name(name) for name in spec.tensors if spec.file_name(name) in this}
    return this.replace(tensors={file: g.move(name, this[file]) for name, file in files.items()})


def test_the_stream_of_marian_stays_where_its_sines_are(tmp_path: Path) -> None:
    """`transformers` makes them anew. It takes those of a file that has them, and does not save them: what was right
    when it was loaded, would be wrong after training."""
    this = case("marian-lm")
    assert this.spec.axes["residual"].group is None
    assert this.error(permuted(this.checkpoint, this.spec)) > BROKEN

    stored = Model.of(with_tables(this.checkpoint))
    moved = permuted(stored.checkpoint, stored.spec)
    assert this.error(moved) < EXACT
    live(moved).save_pretrained(tmp_path / "saved")
    saved = open_checkpoint(tmp_path / "saved")
    assert not set(TABLES) & saved.keys()
    assert this.error(saved) > BROKEN


@pytest.mark.parametrize("label", ["whisper-lm", "pegasus-lm", "marian"])
def test_sines_that_are_saved_are_read_from_the_file(label: str, tmp_path: Path) -> None:
    this = case(label)
    name = next(name for name in this.checkpoint if name.endswith("encoder.embed_positions.weight"))
    changed = this.checkpoint.replace(tensors={**this.checkpoint, name: this.checkpoint[name].flip(0)})
    changed.save(tmp_path / "changed")
    kind = getattr(transformers, this.checkpoint.name)
    loaded = kind.from_pretrained(tmp_path / "changed", dtype=torch.float64)
    torch.testing.assert_close(loaded.state_dict()[name], changed[name], rtol=0, atol=0)
    loaded.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(open_checkpoint(tmp_path / "again")[name], changed[name], rtol=0, atol=0)
