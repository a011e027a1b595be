"""Rewrites around the norms of a pre-norm residual stream, after which it may be rotated (Ashkboos et al. 2024,
SliceGPT, Section 3; Theus et al. 2025, Section 3).

A LayerNorm computes γ ⊙ n(x) + β, with n(x) centred and scaled; an RMSNorm γ ⊙ n(x), with n(x) scaled, or (1 + γ) ⊙
n(x). The weights that read its output are linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symfuse.errors import SymmetryError
from symfuse.groups import Centred, Orthogonal
from symfuse.messages import some
from symfuse.model import Model
from symfuse.rewriting.computed import Formula, computed, reader
from symfuse.rewriting.scales import unfolded_scales
from symfuse.rewriting.ties import require_untied
from symfuse.spec import Atom, Declared, Layout, Spec, Variance, bias_of, parse
from symfuse.spec.layout import Concat, Node, Product

# In the least squares A δ = b, a residual below this share of |A| |δ| + |b| is rounding.
ROUNDING = 1e-12
# The ways out of models whose norms cannot be folded.
WITHOUT_FOLDING = "leave 'fold_norms' out and permute the residual stream only"
WITHOUT_ALL = "leave 'fold_norms', 'centre' and 'drop_gauges' out"


@dataclass(frozen=True)
class Norm:
    """A norm of the stream: the names of its gain and bias, and of the weights that read it, each → its bias."""

    gain: str
    bias: str | None
    readers: Mapping[str, str | None]
    outputs: tuple[str, ...]
    axis: str

    @property
    def takes_bias(self) -> bool:
        """Whether every reader has a bias, to which the norm's bias can be added."""
        return all(bias is not None for bias in self.readers.values())


def fold_norms(model: Model) -> Model:
    """Fold the gains and biases of all norms into the weights that read them: W ← W diag(γ), b ← b + W β, γ ← 1, β ← 0.

    Where a reader has no bias (a language-model head), the norm keeps a bias β/γ. The residual axis then has the group
    Centred, or with RMSNorm Orthogonal, and the gains, all ones, no longer have that axis. SymmetryError for post-norm
    models, tied heads, a final norm whose output is the model's, and where β/γ does not exist: γ_i = 0 and no δ with W
    diag(γ) δ = W β.
    """
    norms = [norm for norm in norms_of(model) if not is_folded(model.spec, norm)]
    require_untied(model, "folding the final norm into the head")
    if model.checkpoint.pooled():
        raise SymmetryError(
            f"{model.name}: modules of sentence-transformers (modules.json) read the output of its final norm, whose "
            f"gain would be folded into its head; {WITHOUT_FOLDING}"
        )
    rules: dict[str, Formula] = {}
    tensors = dict(model.spec.tensors)
    axes = dict(model.spec.axes)
    for norm in norms:
        if norm.outputs:
            raise SymmetryError(
                f"{model.name}: the output of the norm {norm.gain} is the model's ({some(norm.outputs)}), so "
                "that its gain cannot be folded; take the checkpoint with a head, whose class architectures in "
                f"config.json names, or {WITHOUT_FOLDING}"
            )
        rules |= fold_rules(model, norm)
        tensors[norm.gain] = Declared(parse(str(axes[norm.axis].size)), tensors[norm.gain].index)
        group = Centred() if model.spec.centred else Orthogonal()
        axes[norm.axis] = replace(axes[norm.axis], group=group)
    return computed(model, rules, replace(model.spec, tensors=tensors, axes=axes)) if norms else model


def fold_rules(model: Model, norm: Norm) -> dict[str, Formula]:
    """The rules for one norm; decisions that need its values are made now, not when tensors are read."""
    bias = norm.bias
    dims = {weight: _place(model.spec, weight, Atom(norm.axis, Variance.DUAL)) for weight in norm.readers}
    offset = model.spec.offset
    rules: dict[str, Formula] = {norm.gain: lambda read: torch.full_like(read(norm.gain), 1 - offset)}
    rules |= {weight: _scaled(weight, norm.gain, dim, offset) for weight, dim in dims.items()}
    if bias is None:
        return rules
    if not norm.takes_bias:
        left = _quotient(model, norm, bias)
        return rules | {bias: lambda _: left.clone()}
    rules[bias] = lambda read: torch.zeros_like(read(bias))
    return rules | {own: _taking(own, w, bias, dims[w]) for w, own in norm.readers.items() if own is not None}


def _quotient(model: Model, norm: Norm, bias: str) -> Tensor:
    """δ with W diag(γ) δ = W β for all readers W: β/γ, or where γ is zero the solution of least norm."""
    read = reader(model)
    gain, beta = model.spec.offset + read(norm.gain), read(bias)
    lost = ((gain == 0) & (beta != 0)).nonzero()[:, 0]
    kept = gain != 0
    delta = torch.where(kept, beta / torch.where(kept, gain, 1.0), 0.0)
    if len(lost) == 0:
        return delta
    dual = Atom(norm.axis, Variance.DUAL)
    sums = (_parts(read(name), _place(model.spec, name, dual)).sum(-2) for name in norm.readers)
    w = torch.cat([part.reshape(-1, len(gain)) for part in sums])
    a, b = (w * gain)[:, kept], w[:, lost] @ beta[lost]
    solution = torch.linalg.lstsq(a.cpu(), b.cpu()[:, None], driver="gelsd")  # implemented by LAPACK only
    more = solution.solution[:, 0].to(a.device)
    if torch.linalg.norm(a @ more - b) > ROUNDING * (torch.linalg.norm(a) * torch.linalg.norm(more) + b.norm()):
        raise SymmetryError(
            f"{model.name}: {model.spec.file_name(norm.gain)} is zero at {some(map(str, lost.tolist()))}, where the "
            f"norm's bias is not, and {some(norm.readers)} can take that bias in no other way: the norm cannot be "
            f"folded; {WITHOUT_FOLDING}"
        )
    delta[kept] += more
    return delta


def centre(model: Model) -> Model:
    """Subtract from all weights that write to the stream (embeddings, output projections, their biases) the mean over
    the stream's dimension, W ← (1 − 11ᵀ/d) W: the norms, the only readers of the stream, subtract it anyway.

    SymmetryError for post-norm models, tied heads, and where the stream itself is an output of the model. An RMSNorm
    does not subtract the mean: then nothing changes.
    """
    if not model.spec.centred:
        return model
    norms = norms_of(model)
    require_untied(model, "centring the embedding")
    spec, streams = model.spec, {Atom(norm.axis) for norm in norms}
    raw = not all(streams.isdisjoint(layout.atoms) for layout in spec.outputs.values())
    if raw and not spec.heads and not any(norm.outputs for norm in norms):
        raise SymmetryError(
            f"{model.name}: its output is the residual stream as it is, without a final norm, and centring would "
            "take the mean from it; leave 'centre' out"
        )
    biases = {norm.bias for norm in norms}
    rules = {
        name: _centred(name, _place(spec, name, atom))
        for name, declared in spec.tensors.items()
        for atom in declared.layout.atoms
        if atom in streams and name not in biases
    }
    return computed(model, rules)


def drop_gauges(model: Model) -> Model:
    """Remove from readers the component along the ones vector, W ← W (1 − 11ᵀ/d), where it has no effect because the
    output of a folded norm has no mean. Not where the norm keeps a bias β/γ. SymmetryError if the norms are not folded.

    Matching and distances would otherwise count a component on which no output depends. The output of an RMSNorm has a
    mean: then nothing changes.
    """
    if not model.spec.centred:
        return model
    norms = norms_of(model)
    if unfolded := [norm.gain for norm in norms if not is_folded(model.spec, norm)]:
        raise SymmetryError(
            f"{model.name}: the gain of {some(unfolded)} is not folded, and what it puts out has a mean, which is "
            "read; fold first (the rewrite 'fold_norms')"
        )
    rules: dict[str, Formula] = {}
    for norm in norms:
        if norm.bias is None or not bool(reader(model)(norm.bias).any()):
            dual = Atom(norm.axis, Variance.DUAL)
            rules |= {name: _centred(name, _place(model.spec, name, dual)) for name in norm.readers}
    return computed(model, rules)


def norms_of(model: Model) -> list[Norm]:
    """The norms of a pre-norm stream that is read only through norms; SymmetryError for other streams."""
    spec = model.spec
    norms = []
    for gain, readers in spec.reads.items():
        bias = _bias(spec, gain)
        weights = {name: _bias(spec, name) for name in readers if name in spec.tensors}
        own = {axis for name in (gain, bias) if name for axis in spec.tensors[name].layout.names}
        read = (spec.tensors[name].layout.dims for name in weights)  # of a folded norm all that is left
        nodes = ([_repeated(spec, dim) for dim in dims] for dims in read)
        duals = ({d.name for d in dims if isinstance(d, Atom) and d.variance is Variance.DUAL} for dims in nodes)
        (axis,) = {name for name in own if not name.isdigit()} or set.intersection(*duals)
        norms.append(Norm(gain, bias, weights, tuple(n for n in readers if n in spec.outputs), axis))
    if scales := unfolded_scales(spec):
        raise SymmetryError(
            f"{model.name}: {some(scales)} scale what is written to the stream, entry by entry: only permutations act "
            "on it; fold them first (the rewrite 'fold_scales')"
        )
    plain = {Atom(norm.axis, Variance.PLAIN) for norm in norms}
    others = [n for n, d in spec.tensors.items() if n not in spec.reads and not plain.isdisjoint(d.layout.atoms)]
    if not norms or others:
        raise SymmetryError(
            f"{model.name}: a {spec.family} like this has no declared pre-norm residual stream. That of a post-norm "
            "model passes through the gains of its norms, which cannot be folded: only permutations act on it; "
            f"{WITHOUT_ALL}"
        )
    return norms


def _bias(spec: Spec, weight: str) -> str | None:
    name = bias_of(weight)
    return name if name in spec.tensors else None


def is_folded(spec: Spec, norm: Norm) -> bool:
    return not any(atom.name == norm.axis for atom in spec.tensors[norm.gain].layout.atoms)


# The stored dimension of a tensor that is the axis alone, and how often the axis is repeated in it: a classifier may
# read the class token and the mean of the others, and a merger several patches side by side.
Place = tuple[int, int]


def _place(spec: Spec, name: str, atom: Atom) -> Place:
    for dim, node in enumerate(spec.tensors[name].layout.dims):
        if _repeated(spec, node) == atom:
            (size,), (whole,) = (Layout((one,)).shape(spec.sizes) for one in (atom, node))
            return dim, whole // size
    raise ValueError(f"{atom} is no whole dimension of {name}")


def _repeated(spec: Spec, node: Node) -> Node:
    """What a dimension repeats, once or several times one behind the other; any other dimension as it is."""
    if isinstance(node, Concat) and len(set(node.parts)) == 1:
        return node.parts[0]
    if isinstance(node, Product):
        times = {atom.name for atom in Layout(node.parts[:-1]).atoms}
        if all(name.isdigit() or spec.axes[name].group is None for name in times):
            return node.parts[-1]
    return node


def _parts(w: Tensor, place: Place) -> Tensor:
    """The tensor with the axis as its last dimension, and before it the number of repetitions."""
    dim, times = place
    w = w.movedim(dim, -1)
    return w.reshape(*w.shape[:-1], times, -1)


def _scaled(weight: str, gain: str, place: Place, offset: float) -> Formula:
    """W diag(γ)."""
    return lambda read: _whole(_parts(read(weight), place) * (offset + read(gain)), place)


def _taking(own: str, weight: str, bias: str, place: Place) -> Formula:
    """b + W β."""
    return lambda read: (b := read(own)) + (_parts(read(weight), place) @ read(bias)).sum(-1).reshape(b.shape)


def _centred(name: str, place: Place) -> Formula:
    """W without its mean over that axis."""
    return lambda read: _whole((w := _parts(read(name), place)) - w.mean(-1, keepdim=True), place)


def _whole(parts: Tensor, place: Place) -> Tensor:
    return parts.flatten(-2).movedim(-1, place[0])
