"""The best element of one axis instance for recorded activations."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from symfuse.device import CPU
from symfuse.groups import Element, Group, Linear, Moments, Monomial, Part, PartMoments, Scaling, Sinkhorn
from symfuse.groups.scale import LIMIT
from symfuse.matching.blocks import improve
from symfuse.spec import Instance, Spec
from symfuse.stats.activations import Covariances, inverse_deviations, moments_of
from symfuse.stats.taps import Tap


def best(
    spec: Spec, instance: Instance, recorded: Mapping[Tap, Covariances], group: Group, kind: str, device: torch.device
) -> Element:
    """The best element. If the group has scales, first the permutation or rotation, then scales that give the anchor's
    standard deviations.

    The scale that fits activations best does not take the weights that read the unit into account. device: of the
    solver; the recorded moments and the element are on the processor.
    """
    moments = {part: m.to(device) for part, m in alike(spec, instance, recorded, group, kind).items()}
    return _best(spec, instance, recorded, group, moments).to(CPU)


def _best(
    spec: Spec, instance: Instance, recorded: Mapping[Tap, Covariances], group: Group, moments: PartMoments
) -> Element:
    if isinstance(group, Sinkhorn):  # without `improve`, which would replace a plan by the identity
        return group.best(moments)
    if not _rescales(group):
        return improve(group, moments)[0]
    if isinstance(group, Scaling):  # without scales it is the identity
        xy = next(iter(moments.values())).xy
        unscaled: Element = group.identity(xy.shape[-1], tuple(xy.shape[:-2])).to(xy.device)
    else:
        unscaled = improve(group.without_scaling(), moments)[0]
    covariances = moments_of(spec, instance, recorded, group, "covariance")
    scale = _scale(unscaled, {part: m.to(unscaled.device) for part, m in covariances.items()})
    tensors = dict(unscaled.tensors())
    return unscaled.rebuild(tensors | {"scale": scale * tensors.get("scale", 1)})  # which has signs


def _rescales(group: Group) -> bool:
    """Whether its elements are a permutation or rotation followed by scales."""
    if isinstance(group.identity(1, ()), Linear):
        return False
    return isinstance(group, Scaling) or group.without_scaling() != group


def alike(
    spec: Spec,
    instance: Instance,
    recorded: Mapping[Tap, Covariances],
    group: Group,
    kind: str,
    *,
    pairs: str | None = None,
    without: Collection[str] = (),
) -> PartMoments:
    """The moments that determine an element up to its scales; pairs, without: as in `moments_of`.

    For rotations with a scale they are divided by the norms of the parts. So all heads have equal weight, and so have
    queries and keys, however a model divides the norm of its scores between them.
    """
    moments = moments_of(spec, instance, recorded, group, kind, pairs=pairs, without=without)
    if isinstance(group.identity(1, ()), Monomial) or not _rescales(group):
        return moments
    out: dict[Part, Moments] = {}
    for part, m in moments.items():
        sx, sy = (inverse_deviations(norms.mean(-1, keepdim=True)) for norms in (m.x_norms, m.y_norms))
        out[part] = Moments(m.xy * (sx * sy)[..., None], m.x_norms * sx.square(), m.y_norms * sy.square())
    return out


def _scale(element: Element, moments: PartMoments) -> Tensor:
    """The ratio of the standard deviations of each unit, or of all units that a rotation mixes: the geometric mean over
    the parts, with the inverse for the dual part. 1 if no part varies in both models.

    Swapping the models inverts it. The slope of least squares, which is this ratio times the correlation, would be too
    small in both directions for units that are similar but not equal.
    """
    logs = []
    for part, m in moments.items():
        if part == "plain":  # scales do not act on it
            continue
        by_unit = isinstance(element, Monomial)
        x, y = (m.x_norms, element.forget().act(m.y_norms, -1)) if by_unit else (m.x_norms.sum(-1), m.y_norms.sum(-1))
        ratio = inverse_deviations(y) / inverse_deviations(x)
        logs.append(-ratio.log() if part == "dual" else ratio.log())
    each = torch.stack(logs)
    mean = each.where(each.isfinite(), 0).sum(0) / each.isfinite().sum(0).clamp_min(1)
    return mean.exp().clamp(1 / LIMIT, LIMIT)
