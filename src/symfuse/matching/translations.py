"""The translations of biases that bring them nearest to the anchor's, for an element of the axis that they are on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.groups import Element
from symfuse.spec import Instance, Shift, Spec
from symfuse.stats import Read, features

# What is added to keys or values is taken off again behind them (by the softmax, in the output bias), in numbers that
# are rounded: a translation that is so many times longer than what it is added to loses that many times the precision.
LONGEST = 16


def translate(
    spec: Spec, instance: Instance, element: Element | None, rules: Sequence[Shift], anchor: Read, source: Read
) -> tuple[dict[str, Tensor], float]:
    """Translations by name of the bias, float64, with the squared distance over these biases that is left.

    Free ones (keys): the anchor's bias itself. Values: the least squares of t − (b_B − b_A) and W t − (c_A − c_B),
    where c is the output bias and W the output projection, all in the moved basis. Of a head whose translation would be
    too long (`_over`) the bias stays. Without an element: nothing moves.
    """
    linear = Alignment(spec, {} if element is None else {instance: element})
    shifts: dict[str, Tensor] = {}
    left = 0.0
    for rule in rules:
        moved = linear.move(rule.bias, source(rule.bias).double())
        out, gap = torch.zeros_like(moved), anchor(rule.bias).double() - moved
        t, wanted, bias = (spec.part(rule.bias, tensor, rule.axis).view for tensor in (out, gap, moved))
        over = partial(_over, linear, instance, rule, source, bias)
        if rule.weight is None or rule.into is None:
            if element is not None:
                t.copy_(wanted * (over(wanted) <= 1)[..., None])
        else:
            c = linear.move(rule.into, source(rule.into)).double() - anchor(rule.into).double()
            if element is not None:
                weight = linear.move(rule.weight, source(rule.weight))
                w = spec.through(rule, weight).reshape(t.numel(), -1)
                t.copy_(_least(w, wanted, c.reshape(-1), over))
                c = c.reshape(-1) - w.T.double() @ t.reshape(-1)
            left += c.square().sum().item()
        left += (wanted - t).square().sum().item()
        shifts[rule.bias] = shifts[rule.bias] + out if rule.bias in shifts else out
    return ({} if element is None else shifts), left


def _over(linear: Alignment, instance: Instance, rule: Shift, source: Read, bias: Tensor, t: Tensor) -> Tensor:
    """The length of a translation over the longest that is allowed, for each element of the batch: LONGEST times the
    size of what it is added to, the moved outputs of weights and bias together for inputs whose entries are about 1, as
    those of a norm. bias: the moved one, which often is long enough by itself. 0 without a translation."""
    spec, size, length = linear.spec, bias.norm(dim=-1), t.norm(dim=-1)
    if not bool((length <= LONGEST * size).all()):
        square = size.square()
        for name in spec.movable[instance]:
            parts = spec.tensors[name].layout.parts()
            if name not in (rule.weight, rule.bias) and any(str(atom) == rule.axis for part in parts for atom in part):
                for atom, (moved,) in features(spec, instance, name, linear.move(name, source(name))):
                    if str(atom) == rule.axis:
                        square += torch.linalg.vector_norm(moved, dim=(-2, -1), dtype=torch.float64).square()
        size = square.sqrt()
    return torch.where(length == 0, 0.0, (length / (LONGEST * size)).nan_to_num(torch.inf))


def _least(w: Tensor, wanted: Tensor, c: Tensor, over: Callable[[Tensor], Tensor]) -> Tensor:
    """The t of the shape [*b, n] of `wanted` that has the least |t − wanted|² + |Wᵀ t − c|²: 0 in those of the batch in
    which it would be too long, the least of all others.

    Any t is exact, one that is not quite the least too: it is as near as float32 tells.
    """
    eps, w = min(torch.finfo(dtype).eps for dtype in (w.dtype, torch.float32)), w.double()
    kept = torch.ones(wanted.shape[:-1], dtype=torch.bool)
    while True:
        mask = kept[..., None].expand(wanted.shape).reshape(-1)
        right = (wanted.reshape(-1) + w @ c) * mask
        t = _ridge(w if bool(kept.all()) else w * mask[:, None], right, eps)
        t = torch.where(mask, t, 0.0).reshape(wanted.shape)
        share = over(t)
        if bool((share <= 1).all()):
            return t
        kept.view(-1)[share.argmax()] = False  # one by one: others may be long only to make up for it


def _ridge(w: Tensor, right: Tensor, eps: float) -> Tensor:
    """(1 + W Wᵀ)⁻¹ right to 10 eps, by conjugate gradients: a few dozen products with W cost less than one
    factorisation."""
    t, residual, direction = torch.zeros_like(right), right, right
    square = right @ right
    enough = (10 * eps) ** 2 * square
    for _ in range(2 * len(right)):
        if square <= enough:
            break
        image = direction + w @ (w.T @ direction)
        step = square / (direction @ image)
        t, residual = t + step * direction, residual - step * image
        before, square = square, residual @ residual
        direction = residual + square / before * direction
    return t
