"""The next larger group on the axes of latent attention, linear attention and short convolutions: each must change the
function. What theory says to be allowed once a gain is folded is shown to be so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contract.test_must_fail import BROKEN, acting, applied, changed, forced, rewritten
from contract.test_must_fail_decoders import larger
from contract.tiny import Case, case, moving
from symfuse.groups import Group, Invertible, Orthogonal, Scaling, SignedMonomial
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Atom

ATTENTION = "layers.{l}.self_attn."
LATENTS = {"q_latent", "kv_latent"}


@pytest.mark.parametrize(
    ("label", "axis", "groups"),
    [
        ("latent-lm", "c", (Orthogonal(), Invertible())),
        ("latent-lm", "q_latent", (Scaling(), SignedMonomial())),
        ("latent-lm", "kv_latent", (Scaling(), SignedMonomial())),
        ("latent-v2-lite", "kv_latent", (Scaling(), SignedMonomial())),
    ],
)
def test_a_larger_group_breaks(label: str, axis: str, groups: tuple[Group, ...]) -> None:
    for group in groups:
        assert larger(case(label), axis, group) > BROKEN, group


@pytest.mark.parametrize("label", ["latent-lm", "latent-halves", "latent-v2-lm", "minicpm3-lm"])
def test_all_heads_share_the_planes_of_their_key(label: str) -> None:
    """An element for each head acts on its queries; the key that it meets is that of all heads."""
    this = case(label)
    spec = replace(this.spec, axes={**this.spec.axes, "c": replace(this.spec.axes["c"], per=("l", "h", "f"))})
    keys = {name: d for name, d in spec.tensors.items() if "kv_a_proj" not in name}
    g = moving(replace(spec, tensors=keys), 1, {"c"})
    files = {name: spec.file_name(name) for name in keys}
    assert (
        changed(
            this, {file: g.move(name, this.checkpoint[file]) for name, file in files.items() if file in this.checkpoint}
        )
        > BROKEN
    )


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [("latent-lm", "f c", "c f"), ("latent-halves", "c f", "f c"), ("minicpm3-lm", "c f", "f c")],
)
def test_halves_of_the_turned_part_are_not_neighbours(label: str, right: str, wrong: str) -> None:
    this = case(label)
    keys = {one: one.replace("c", "c*") for one in (right, wrong)}
    pieces = {right: wrong, keys[right]: keys[wrong]}
    layouts = {}
    for name, declared in this.spec.tensors.items():
        text = str(declared.layout)
        for old, new in pieces.items():
            text = text.replace(old, new)
        if text != str(declared.layout):
            layouts[name] = text
    assert layouts
    assert this.error(applied(this, moving(rewritten(this.spec, layouts), 1, {"c"}))) > BROKEN


@pytest.mark.parametrize("label", ["latent-lm", "latent-v2-lite", "youtu-lm"])
def test_latents_are_rotated_once_the_gains_are_folded_and_not_before(label: str) -> None:
    this = case(label)
    latents = LATENTS & this.spec.axes.keys()
    for axis in latents:
        inert = forced(this.spec, lambda a: Atom(str(this.spec.sizes[a.name])) if a.name in LATENTS else a)
        assert this.error(applied(this, acting(inert, axis, Orthogonal()))) > BROKEN
    folded = canonical(Model(this.checkpoint, this.spec), ("untie", "fold_norms"))
    after = Case(folded.checkpoint, folded.spec, this.inputs, this.outputs)
    assert after.error(folded.checkpoint) < this.exact
    for axis in latents:
        assert folded.spec.axes[axis].group == Orthogonal()
        assert after.error(moving(folded.spec, 1, {axis}).on(folded)) < this.exact
        assert larger(after, axis, Scaling()) > BROKEN
