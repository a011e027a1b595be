"""Matching from weights: for each axis instance the best element, given all the others.

Attention and feed-forward axes do not meet each other in any tensor part, so with the residual stream fixed one pass
in any order is the optimum; the instances are solved in parallel threads, one BLAS thread each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from symfuse import __version__
from symfuse.alignment import Alignment
from symfuse.architectures import Model, require_same_shape
from symfuse.groups import Conformal, Element, Group, PartMoments, objective
from symfuse.matching.axes import choose_axes, choose_layers
from symfuse.spec import Instance, Shift, Spec
from symfuse.stats import features, weight_moments


@dataclass(frozen=True)
class Step:
    """What matching one axis instance gave.

    before, after: the squared distance over the tensors that the axis touches. units: how many elements (heads, or
    blocks of neurons) it has; moved: how many of them are not the identity. seconds: of its own thread.
    """

    instance: str
    group: str
    before: float
    after: float
    units: int
    moved: int
    seconds: float


Progress = Callable[[Step, int], None]  # a step that is done, and how many there are in all


def match_models(
    source: Model,
    anchor: Model,
    *,
    axes: str | tuple[str, ...] = "all",
    layers: str | tuple[int, ...] | None = None,
    scaling: bool = True,
    one_pass: bool = False,
    biases: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Alignment:
    """The alignment that moves `source` towards `anchor`, from the weights.

    axes: what to match ("attention", "ffn", "qk", …). layers: which (see choose_layers). scaling: rescaling beside
    rotations and permutations where the group has it. one_pass: the rotation, then the scale, once, as in Zhang et
    al. 2025 (instead of in turns). biases: also translate the biases that may be. threads: workers, default all cores.
    An element that does not lower its objective is replaced by the identity, which is left out of the alignment.
    Raises IncompatibleError, OptionError, CheckpointError (NaN or infinity, naming the tensor).
    """
    require_same_shape([source, anchor])
    spec = source.spec
    chosen_axes = choose_axes(axes, spec)
    chosen_layers = choose_layers(layers, spec.axes["l"].size)
    instances = [i for i in spec.movable if i.axis in chosen_axes and (not i.index or i.index[0] in chosen_layers)]
    rules = [rule for rule in spec.shifts if biases and _instance_of(spec, rule) in instances]
    # A bias that a translation will move has no say in the rotation: what it is worth is a matter of gauge.
    free = {(rule.bias, rule.axis) for rule in rules}

    def solve(instance: Instance) -> tuple[Instance, Element | None, Step]:
        start = time.perf_counter()
        group = spec.axes[instance.axis].group
        assert group is not None
        group = group if scaling else group.without_scaling()
        group = replace(group, one_pass=True) if one_pass and isinstance(group, Conformal) else group
        moments = weight_moments(spec, instance, anchor.read, source.read, group, free)
        element, before, after = _improve(group, moments)
        units = before.numel()
        step = Step(
            str(instance), group.name, before.sum().item(), after.sum().item(), units,
            int((after < before).sum()), time.perf_counter() - start,
        )  # fmt: skip
        return instance, element if step.moved else None, step

    elements: dict[Instance, Element] = {}
    steps: list[Step] = []
    with _workers(threads) as pool:
        for instance, element, step in pool.map(solve, instances):
            if element is not None:
                elements[instance] = element
            steps.append(step)
            if progress is not None:
                progress(step, len(instances))
        linear = Alignment(spec, elements)
        names = list(dict.fromkeys(rule.bias for rule in rules))
        translations = pool.map(lambda name: _translation(linear, name, rules, source, anchor), names)
        shifts = {name: t for name, t in zip(names, translations, strict=True) if bool(t.any())}
    options = {
        "axes": list(chosen_axes), "layers": sorted(chosen_layers), "scaling": scaling,
        "one_pass": one_pass, "biases": biases,
    }  # fmt: skip
    provenance = {
        "symfuse": __version__, "source": source.name, "anchor": anchor.name, "from": "weights",
        "options": options, "steps": [asdict(step) for step in steps],
    }  # fmt: skip
    return Alignment(spec, elements, shifts, provenance)


def _improve(group: Group, moments: PartMoments) -> tuple[Element, Tensor, Tensor]:
    """The best element with the objective before and after, [*b]; the identity wherever that is as good."""
    best = group.best(moments)
    identity = group.identity(best.size, best.batch)
    before, after = objective(identity, moments), objective(best, moments)
    # What rounding alone explains: a unit of the moments, and a few of the sums over them, which are in float64.
    eps = torch.finfo(group.moments_dtype).eps + 16 * torch.finfo(torch.float64).eps
    rounding = eps * sum(m.xx.sum(-1).double() + m.yy.sum(-1).double() for m in moments.values())
    better = after < before - rounding
    if not bool(better.all()):
        unit = identity.tensors()
        kept = {
            key: torch.where(
                better.reshape(*better.shape, *[1] * (t.ndim - better.ndim)),
                t,
                unit.get(key, torch.ones_like(t)),
            )
            for key, t in best.tensors().items()
        }
        best = best.rebuild(kept)
    return best, before, torch.where(better, after, before)


def _instance_of(spec: Spec, rule: Shift) -> Instance:
    return spec.instance(rule.axis.strip("*"), spec.tensors[rule.bias].index)


def _translation(linear: Alignment, name: str, rules: list[Shift], source: Model, anchor: Model) -> Tensor:
    """The translation of a bias that brings it, and the bias that it moves on into, nearest to the anchor's.

    Free (keys): the anchor's bias itself. Values: the least squares of t − (b_B − b_A) and W t − (c_A − c_B), where
    c is the output bias and W the output projection, all in the moved basis.
    """
    spec = linear.spec
    out = torch.zeros_like(source.read(name), dtype=torch.float64)
    gap = anchor.read(name).double() - linear.move(name, source.read(name).double())
    for rule in rules:
        if rule.bias != name:
            continue
        t, wanted = (spec.part(name, tensor, rule.axis).view for tensor in (out, gap))
        if rule.weight is not None and rule.into is not None:
            # The dtype of the weights is enough: any t is exact, a rounded one is merely not quite the nearest.
            weight = source.read(rule.weight)
            weight = linear.move(rule.weight, weight.to(torch.promote_types(weight.dtype, torch.float32)))
            ((_, (w,)),) = features(spec, _instance_of(spec, rule), rule.weight, weight)
            w = w.reshape(t.numel(), -1)
            c = linear.move(rule.into, source.read(rule.into)).double() - anchor.read(rule.into).double()
            wanted = _ridge(w, wanted.reshape(-1).to(w.dtype) + w @ c.reshape(-1).to(w.dtype))
        t.copy_(wanted.reshape(t.shape))
    return out


def _ridge(w: Tensor, right: Tensor) -> Tensor:
    """(1 + W Wᵀ)⁻¹ right, by conjugate gradients: a few dozen products with W cost less than one factorisation."""
    t, residual, direction = torch.zeros_like(right), right, right
    square = right @ right
    enough = (10 * torch.finfo(right.dtype).eps) ** 2 * square
    for _ in range(2 * len(right)):
        if square <= enough:
            break
        image = direction + w @ (w.T @ direction)
        step = square / (direction @ image)
        t, residual = t + step * direction, residual - step * image
        before, square = square, residual @ residual
        direction = residual + square / before * direction
    return t


@contextmanager
def _workers(threads: int | None) -> Iterator[ThreadPoolExecutor]:
    """Worker threads with one BLAS thread each: parallel by module, never by both."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads or before) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)
