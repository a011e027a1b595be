"""What the rewrites of a frame (`symfuse.rewriting`) do to a change of one weight, all else of the model being fixed.

They are linear in each weight: a folded LayerScale scales what it writes; a folded norm scales what it reads, and puts
W β into its bias; centring takes the mean off what it writes, dropping gauges off what it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from symfuse.errors import SymmetryError
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.rewriting.computed import reader
from symfuse.rewriting.residual import Norm, norms_of
from symfuse.spec import Atom

WAY_OUT = (
    "Merge the adapter into its base and align that (base+adapter), or make an alignment without a frame (--axes "
    "attention,ffn, or --group residual=permutation)"
)


@dataclass(frozen=True)
class Rewrite:
    """Of a change of one weight: scale [out], by which what it writes is scaled; gain [in], by which what it reads is
    scaled, and bias [in], whose image moves on into the bias of the weight; whether the mean is taken off what it
    reads, and off what it writes. What it reads may be several vectors [in] side by side."""

    scale: Tensor | None = None
    gain: Tensor | None = None
    bias: Tensor | None = None
    drops: bool = False
    centres: bool = False


class Frame:
    """The rewrites of a frame for the weights of a model, untied already, which is read as far as it takes."""

    def __init__(self, model: Model, frame: Iterable[str]) -> None:
        self.names = frozenset(frame)
        if "balance" in self.names:
            raise SymmetryError(
                "this alignment balances heads first ('balance'): by maps that depend on all of the weights, and that "
                f"a change of them changes too. {WAY_OUT}"
            )
        self.scales = (
            {weight: gain for gain, weight in model.spec.scales.items()} if "fold_scales" in self.names else {}
        )
        self.unfolded = model
        self.model = canonical(model, self.names & {"fold_scales"})
        folds = self.names & {"fold_norms", "centre", "drop_gauges"}
        self.norms = norms_of(self.model) if folds else []

    def of(self, name: str) -> Rewrite:
        """Of a weight, by its canonical name. SymmetryError where a folded norm leaves its bias in a way that only
        suits the unchanged weight."""
        out = Rewrite()
        layer, spec = self.model.spec.centred, self.model.spec
        for norm in self.norms:
            if name in norm.readers and "fold_norms" in self.names:
                out = self._read(norm, name)
        streams = {Atom(norm.axis) for norm in self.norms}
        centres = layer and "centre" in self.names and not streams.isdisjoint(spec.tensors[name].layout.atoms)
        scale = reader(self.unfolded)(self.scales[name]) if name in self.scales else None
        return replace(out, scale=scale, centres=centres)

    def _read(self, norm: Norm, name: str) -> Rewrite:
        read = reader(self.model)
        gain = self.model.spec.offset + read(norm.gain)
        bias = None if norm.bias is None else read(norm.bias)
        if bias is None or not bool(bias.any()):
            return Rewrite(gain=gain, drops=self._drops)
        if norm.takes_bias:
            return Rewrite(gain=gain, bias=bias, drops=self._drops)
        if bool(((gain == 0) & (bias != 0)).any()):
            raise SymmetryError(
                f"{self.model.name}: {norm.gain} is zero where the norm's bias is not, and {name} reads it: the rest "
                f"of that bias was made up for the weight as it is, and not as the adapter changes it. {WAY_OUT}"
            )
        return Rewrite(gain=gain)  # β/γ stays as the norm's, and what reads it may be anything

    @property
    def _drops(self) -> bool:
        return "drop_gauges" in self.names and self.model.spec.centred

    def require_kept(self, whole: Collection[str]) -> None:
        """SymmetryError if an adapter holds the gain or bias of a norm that is folded, or the gain of a LayerScale:
        then the fold of the model is not that of the changed one."""
        folded = {part for norm in self.norms for part in (norm.gain, norm.bias) if "fold_norms" in self.names}
        if trained := [name for name in whole if name in {*folded, *self.scales.values()}]:
            what = "LayerScale" if trained[0] in self.scales.values() else "norm"
            raise SymmetryError(
                f"the adapter holds {trained[0]!r} of a {what} that the frame of this alignment folds into the weights "
                f"{'before' if what == 'LayerScale' else 'that read'} it; with another {what} all of these change, and "
                f"not by low rank. {WAY_OUT}"
            )
