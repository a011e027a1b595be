"""LayerScale: a gain on the output of a block before it is added to the stream, entry by entry (Touvron et al. 2021,
CaiT)."""

from __future__ import annotations

from dataclasses import replace

import torch

from symfuse.model import Model
from symfuse.rewriting.computed import Formula, computed
from symfuse.spec import Declared, Spec, Variance, parse


def fold_scales(model: Model) -> Model:
    """Fold the gains of all LayerScales into the linear maps that they scale: W ← diag(λ) W, b ← λ ⊙ b, λ ← 1.

    A gain allows only permutations of the stream; once it is one, it no longer has that axis, and the block is an
    ordinary one. A model without LayerScale is not changed.
    """
    rules: dict[str, Formula] = {}
    tensors = dict(model.spec.tensors)
    for gain in unfolded_scales(model.spec):
        weight = model.spec.scales[gain]
        (scaled,) = model.spec.tensors[gain].layout.atoms
        rules[gain] = _ones(gain)
        for name in (weight, weight.removesuffix("weight") + "bias"):
            if name in tensors:
                dims = tensors[name].layout.dims
                dim = dims.index(replace(scaled, variance=Variance.PRIMAL))
                rules[name] = _scaled(name, gain, dim)
        size = model.spec.axes[scaled.name].size
        tensors[gain] = Declared(parse(str(size)), tensors[gain].index)
    return computed(model, rules, replace(model.spec, tensors=tensors)) if rules else model


def unfolded_scales(spec: Spec) -> list[str]:
    """The gains that still have the stream's axis."""
    return [gain for gain in spec.scales if any(not a.name.isdigit() for a in spec.tensors[gain].layout.atoms)]


def _ones(gain: str) -> Formula:
    return lambda read: torch.ones_like(read(gain))


def _scaled(name: str, gain: str, dim: int) -> Formula:
    """diag(λ) W."""
    return lambda read: (read(name).movedim(dim, -1) * read(gain)).movedim(-1, dim)
