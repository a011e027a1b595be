"""Translations of biases: the ones that bring them nearest to the anchor's, given the element of their axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.groups import Element, Part
from symfuse.spec import Instance, Shift, Spec
from symfuse.stats import Read, features

# A constant that is added to keys or values is removed again later (by the softmax, or in the output bias). Rounding in
# between is relative to the sum, so a translation n times as long as what it is added to costs a factor n of precision.
LONGEST = 16
SMALL = 1e-24  # a sum of squares in which float32 may have lost terms by underflow


def translate(
    spec: Spec, instance: Instance, element: Element | None, rules: Sequence[Shift], anchor: Read, source: Read
) -> tuple[dict[str, Tensor], float]:
    """Name of a bias → its translation, float64; and the remaining squared distance of these biases.

    A free translation (keys) gives the anchor's bias. That of values minimises |t − (b_B − b_A)|² + |W t − (c_A −
    c_B)|², where c is the output bias and W the output projection, all in the aligned basis. The bias of a head whose
    translation would be too long (`_over`) is kept. Without an element there are no translations.
    """
    linear = Alignment(spec, {} if element is None else {instance: element})
    shifts: dict[str, Tensor] = {}
    left = 0.0
    for rule in rules:
        aligned_bias = linear.move(rule.bias, source(rule.bias).double())
        out, gap = torch.zeros_like(aligned_bias), anchor(rule.bias).double() - aligned_bias
        t, wanted, bias = (spec.part(rule.bias, tensor, rule.axis).view for tensor in (out, gap, aligned_bias))
        over = partial(_over, linear, instance, rule, source, bias)
        if rule.weight is None or rule.into is None:
            if element is not None:
                t.copy_(wanted * (over(wanted) <= 1)[..., None])
        else:
            c = linear.move(rule.into, source(rule.into)).double() - anchor(rule.into).double()
            if element is not None:
                w = spec.through(rule, source(rule.weight)).reshape(t.numel(), -1)
                g = element.part(_variance(spec, instance, rule)).to_dense()
                solution, c = _least(w, wanted, c.reshape(-1), over, g)
                t.copy_(solution)
            left += c.square().sum().item()
        left += (wanted - t).square().sum().item()
        shifts[rule.bias] = shifts[rule.bias] + out if rule.bias in shifts else out
    return ({} if element is None else shifts), left


def _over(linear: Alignment, instance: Instance, rule: Shift, source: Read, bias: Tensor, t: Tensor) -> Tensor:
    """The length of a translation relative to the longest that is allowed, for each element of the batch. That is
    LONGEST times the size of the outputs (of aligned weights and bias) to which it is added, for inputs with entries
    about 1, as a norm gives. bias: the aligned one; if it is long enough alone, weights are not read. 0 without a
    translation."""
    spec, size, length = linear.spec, bias.norm(dim=-1), t.norm(dim=-1)
    if not bool((length <= LONGEST * size).all()):
        square = size.square()
        for name in spec.movable[instance]:
            parts = spec.tensors[name].layout.parts
            if name not in (rule.weight, rule.bias) and any(str(atom) == rule.axis for part in parts for atom in part):
                for at, (vector,) in features(spec, instance, name, linear.move(name, source(name))):
                    if str(at.atom) == rule.axis:
                        square += torch.linalg.vector_norm(vector, dim=(-2, -1), dtype=torch.float64).square()
        size = square.sqrt()
    return torch.where(length == 0, 0.0, (length / (LONGEST * size)).nan_to_num(torch.inf))


def _variance(spec: Spec, instance: Instance, rule: Shift) -> Part:
    """The part of an element (primal, dual, plain) that acts on the bias of a rule."""
    atoms = (atom for part in spec.tensors[rule.bias].layout.parts for atom in part)
    return next(a.part for a in atoms if str(a) == rule.axis and a.name == instance.axis)


def _least(
    w: Tensor, wanted: Tensor, c: Tensor, over: Callable[[Tensor], Tensor], g: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """argmin over t, shaped [*b, n] as `wanted`, of |t − wanted|² + |W'ᵀ t − c|², and the residual c − W'ᵀ t, float64.
    Where t[b] would be too long it is set to 0, and the others are solved again.

    w: the output projection [*b n, k] before alignment. With W' = g⁻ᵀ W and u = g⁻¹ t the objective is |g u − wanted|²
    + |Wᵀ u − c|². g: [*b, n, n]. Every t leaves the function unchanged, so its error, which depends on the dtype of W,
    costs a little distance only.
    """
    flat = wanted.reshape(-1)
    metric, pull = (None, flat) if g is None else (g.mT @ g, _rows(flat, g))
    kept = torch.ones(wanted.shape[:-1], dtype=torch.bool, device=wanted.device)
    while True:
        mask = None if bool(kept.all()) else kept[..., None].expand(wanted.shape).reshape(-1)
        u = _ridge(w, pull, metric, c, mask, float(flat @ flat + c @ c))
        t = (u if g is None else _rows(u, g.mT)).reshape(wanted.shape)
        share = over(t)
        if bool((share <= 1).all()):
            out = (u.to(w.dtype) @ w).double()
            return t, c - (out if bool(out.isfinite().all()) else u @ w.double())
        kept.view(-1)[share.argmax()] = False  # one at a time: others may be long only to compensate for it


def _rows(t: Float[Tensor, " bn"], matrix: Float[Tensor, "*b n n"]) -> Float[Tensor, " bn"]:
    """Row vector times matrix, for each of a batch: four times as fast as matrix times column vector."""
    blocks = matrix.reshape(-1, *matrix.shape[-2:])
    return (t.reshape(len(blocks), 1, -1) @ blocks).reshape(-1)


def _ridge(
    w: Float[Tensor, "bn k"],
    pull: Float[Tensor, " bn"],
    metric: Float[Tensor, "*b n n"] | None,
    c: Float[Tensor, " k"],
    mask: Tensor | None,
    left: float,
) -> Float[Tensor, " bn"]:
    """argmin over u of u·Mu − 2 u·pull + |Wᵀ u − c|², with u = 0 where the mask is False. By conjugate gradients in the
    dtype of W: a few dozen products with W cost less than one factorisation.

    They stop when u is accurate to 10 eps, or, in float32, when the objective is accurate to eps. With a residual r it
    exceeds the minimum by less than |r|²/m, where m is the least entry of the diagonal of M, if g is a rotation with a
    scale. left: the objective at u = 0.
    """
    eps, like = torch.finfo(w.dtype).eps, w.dtype
    share = eps if like != torch.float64 else 0.0
    gram = None if metric is None else metric.to(like)
    least = 1.0 if gram is None else float(gram.diagonal(dim1=-2, dim2=-1).amin())
    residual = pull.to(like) + w @ c.to(like)
    if mask is not None:
        residual *= mask
    u, direction = torch.zeros_like(residual), residual.clone()
    square = float(residual @ residual)
    enough, small = (10 * eps) ** 2 * square, square < SMALL and left > 0
    for _ in range(2 * len(u)):
        if not square > max(enough, share * least * left):  # also if it is NaN
            break
        image = w @ (direction @ w)
        image += direction if gram is None else _rows(direction, gram)
        if mask is not None:
            image *= mask
        curvature = float(direction @ image)
        if not curvature > 0:  # underflow
            break
        step = square / curvature
        u.add_(direction, alpha=step)
        residual.sub_(image, alpha=step)
        before, square, left = square, float(residual @ residual), left - step * square
        direction.mul_(square / before).add_(residual)
    if like != torch.float64 and (small or not math.isfinite(square)):  # squares underflow or overflow in float32
        return _ridge(w.double(), pull, metric, c, mask, left)
    return u.double() if mask is None else torch.where(mask, u.double(), 0.0)
