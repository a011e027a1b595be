"""How the base of a fine-tune is related to the model that the fine-tune is moved onto, and what to expect of that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from symfuse.model import Model
from symfuse.spec import layer_of

Kind = Literal["moved", "trained on", "unclear", "trained apart"]

# Medians of the cosines of matched units: at least that of a model that was trained on, at most that of another seed.
# Between small models that were trained on, and between seeds on the same data: docs/rebase.md.
TRAINED_ON, TRAINED_APART = 0.9, 0.7
# In float32; of other dtypes their own rounding.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Relation:
    """Of g(A) with B, over the tensors of their layers. relative: their Euclidean distance as a share of the norm of B;
    units: the median cosine of the rows of all matrices; rounding: a relative distance that counts as none."""

    relative: float
    units: float
    rounding: float

    @property
    def kind(self) -> Kind:
        if self.relative <= self.rounding:
            return "moved"
        if self.units >= TRAINED_ON:
            return "trained on"
        return "trained apart" if self.units <= TRAINED_APART else "unclear"

    def says(self, base: str, onto: str, alpha: float = 1.0) -> str:
        """What to expect of B + alpha g(τ), in words."""
        there = f"after alignment {base} is {self.relative:.1%} of its size from {onto}"
        units = f"the median cosine of units is {self.units:.2f}"
        does = "computes what the fine-tune does" if alpha == 1 else f"has {alpha:g} of what the fine-tune changed"
        return f"{there}, {units}: {_EXPECT[self.kind].format(base=base, onto=onto, does=does)}"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind.replace(" ", "_"), "relative": self.relative, "units": self.units}


# The mean share of a fine-tune's gain that moved, by kind, in the study of docs/rebase.md (a test compares its rows).
SHARES: Mapping[str, float] = {"trained on": 0.96, "trained apart": 0.17}
_EXPECT: Mapping[Kind, str] = {
    "moved": "{onto} is {base} moved, up to rounding, and the result {does}",
    "trained on": f"{{onto}} looks like {{base}} trained on; there {SHARES['trained on']:.0%} of a fine-tune's gain "
    "moved in the study of docs/rebase.md, on small models",
    "unclear": "{onto} and {base} are neither near nor far; measure the result before you use it (docs/rebase.md)",
    "trained apart": f"{{onto}} looks trained apart from {{base}}; there {SHARES['trained apart']:.0%} of a fine-tune's"
    " gain moved in the study of docs/rebase.md, less than 30 steps of training on 64 samples gave: expect little, "
    "measure the result, or begin between the two (towards)",
}


def relation(base: Model, onto: Model) -> Relation:
    """Of models of one shape and frame, which are read tensor by tensor, the tables of the vocabulary aside."""
    squared, norm, cosines = 0.0, 0.0, list[Tensor]()
    shared = [name for name in onto.spec.tensors if onto.spec.shares(name, base.spec)]
    layers = [name for name in shared if layer_of(onto.spec.tensors[name].index) is not None]
    infos = [onto.whole.info(onto.spec.file_name(name)) for name in layers or shared]
    for name, info in zip(layers or shared, infos, strict=True):
        if not info.dtype.is_floating_point:
            continue
        x, y = base.read(name).double(), onto.read(name).double()
        squared, norm = squared + float((x - y).square().sum()), norm + float(y.square().sum())
        if x.ndim > 1:
            cosines.append(torch.cosine_similarity(x.flatten(1), y.flatten(1), dim=1))
    units = float(torch.cat(cosines).median()) if cosines else math.nan
    dtypes = {info.dtype for info in infos if info.dtype.is_floating_point}
    rounding = max([ROUNDING, *(torch.finfo(dtype).eps for dtype in dtypes)])
    return Relation(math.sqrt(squared / norm) if norm else 0.0, units, rounding)
