"""The streams of GPT-NeoX, GPT-J, Falcon, OPT and MPT may be rotated once their norms are folded; of BLOOM, and of some
OPT, never."""

from __future__ import annotations

import pytest
import torch

from contract.tiny import case, moving
from rewriting.kit import ALL, changed
from symfuse.errors import SymmetryError
from symfuse.groups import Centred
from symfuse.model import Model
from symfuse.rewriting import canonical

# One norm that both blocks read, two, blocks in turn, readers without biases, gains without biases, projected heads.
ROTATED = (
    *("neox-lm", "neox-lm-tied", "neox-sequence-in-turn", "gptj-lm", "gptj-lm-tied", "falcon-lm"),
    *("falcon-grouped-untied", "falcon-grouped-one-norm", "falcon-by-head-alibi", "falcon-token", "opt-lm"),
    *("opt-lm-unbiased", "opt-narrow-untied", "opt-sequence", "mpt-lm", "mpt-lm-clipped"),
)


@pytest.mark.parametrize("label", ROTATED)
def test_the_stream_is_rotated_in_its_frame(label: str) -> None:
    this = case(label)
    out = canonical(Model.of(this.checkpoint), ALL)
    assert out.spec.axes["residual"].group == Centred()
    assert this.error(out.checkpoint) < this.exact
    for axes in ({"residual"}, None):
        g = moving(out.spec, 3, axes)
        files = {name: out.spec.file_name(name) for name in out.spec.tensors}
        moved = {file: g.move(name, out.checkpoint[file]) for name, file in files.items()}
        assert this.error(changed(out.checkpoint, moved)) < this.exact


def test_a_norm_that_both_blocks_read_is_folded_into_both() -> None:
    """C27."""
    source = Model.of(case("falcon-grouped-one-norm").checkpoint)
    folded = canonical(source, ("untie", "fold_norms"))
    gain = source.read("h.0.input_layernorm.weight")
    for reader in ("h.0.self_attention.query_key_value.weight", "h.0.mlp.dense_h_to_4h.weight"):
        torch.testing.assert_close(folded.read(reader), source.read(reader) * gain, rtol=1e-15, atol=0)


@pytest.mark.parametrize("label", ["bloom-lm", "opt-post-lm", "opt-lm-without-last", "opt-lm-without-gains"])
def test_a_stream_that_passes_gains_or_is_read_as_it_is_is_not_folded(label: str) -> None:
    with pytest.raises(SymmetryError, match="no declared pre-norm residual stream"):
        canonical(Model.of(case(label).checkpoint), ("untie", "fold_norms"))


def test_norms_without_gains_need_no_folding() -> None:
    this = case("opt-lm-without-gains")
    assert this.spec.axes["residual"].group == Centred()
    g = moving(this.spec, 1, {"residual"})
    assert this.error(g(this.checkpoint), g) < this.exact


def test_a_space_that_is_the_output_is_not_balanced() -> None:
    """The projected output of a bare OPT, whose basis is that of its embedding."""
    bare, whole = (Model.of(case(label).checkpoint) for label in ("opt-post", "opt-narrow-untied"))
    kept, moved = (canonical(model, ("balance",)) for model in (bare, whole))
    name = "decoder.embed_tokens.weight"
    assert torch.equal(kept.read(name), bare.read(name))
    assert not torch.equal(moved.read(name), whole.read(name))
