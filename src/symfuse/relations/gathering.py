"""Evidence from the weights of two models of one shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.groups import Group, Monomial
from symfuse.groups.assignment import assign_batch
from symfuse.matching.axes import MATCHABLE
from symfuse.model import Model
from symfuse.relations.evidence import NEURONS, Change, Evidence, Units
from symfuse.relations.moving import Pair, in_place, matched
from symfuse.spec import Instance, Spec, anatomy, layer_of
from symfuse.stats import weight_moments

BLOCK = 512  # units that are compared with all others at a time
MOST = 4096  # units, above which margins and agreements are not computed
SHARE = 0.99  # of |D|²: the rank is the number of singular directions that have it
NEAR = 0.2  # of the root mean square of a matrix: smaller entries are nearly 0
GRIDS = (8, 4)  # bits
BLOCKS = (0, 32, 64, 128)  # numbers that share a step on a grid; 0: a row
ON_GRID, OFF = 0.99, 0.02  # the share of numbers that lie on a grid, and how far from it in steps


def gather(source: Model, anchor: Model, *, quick: bool = False, placed: bool = False) -> tuple[Evidence, Pair]:
    """The evidence of two models of one shape, compared in place (`placed`) or matched; quick: without what a verdict
    is not decided by."""
    start = in_place(source, anchor)
    pair = start if placed else matched(source, anchor, quick=quick)
    here = [*units_of(start, rich=False)]
    fixed, layers = _fixed(start)
    judged = Evidence("", tuple(here), (), 0.0).judged
    evidence = Evidence(
        "in place" if placed else "matched",
        tuple(units_of(pair, rich=not quick)),
        tuple(changes_of(pair)),
        sorted(one.cosine[1] for one in judged)[len(judged) // 2] if judged else math.nan,
        _vectors(pair),
        _equal(start),
        (_grid(source), _grid(anchor)),
        fixed,
        log10_bound(fixed, layers),
    )
    return evidence, pair


def kind_of(spec: Spec, instance: Instance) -> str | None:
    """ "neurons", "inside" or "stream"; None of axes that others are inside of, whose order alone is matched."""
    axis = spec.axes[instance.axis]
    if any(instance.axis in one.per for one in spec.axes.values()):
        return None
    if spec.is_shared(instance.axis):
        return "stream"
    assert axis.group is not None
    alone = isinstance(axis.group.identity(1, ()), Monomial) and anatomy(instance.axis) not in MATCHABLE["heads"]
    return NEURONS if alone else "inside"


def units_of(pair: Pair, *, rich: bool) -> Iterator[Units]:
    """How alike the units of each axis are. rich: with margins and agreements."""
    for instance in pair.spec.movable:
        kind = kind_of(pair.spec, instance)
        names = _matrices(pair, instance)
        if kind == "stream":
            names = [name for name in names if len(pair.spec.touched[name]) == 1]
        if kind is None or not names or pair.spec.sizes[instance.axis] < 2:
            continue
        neurons = kind == NEURONS and rich and pair.spec.sizes[instance.axis] <= MOST
        cosine, margin = _alike(pair, instance, names, margins=neurons)
        layer = layer_of(pair.spec.index_of(instance))
        yield Units(
            instance.axis, -1 if layer is None else layer, kind, cosine.numel(), _quantiles(cosine),
            None if margin is None else _quantiles(margin), _agreement(pair, instance, names) if neurons else None,
        )  # fmt: skip


def _quantiles(values: Tensor) -> tuple[float, float, float]:
    low, middle, high = torch.quantile(values.flatten().float(), torch.tensor([0.05, 0.5, 0.95])).tolist()
    return low, middle, high


def _matrices(pair: Pair, instance: Instance) -> list[str]:
    return [n for n in pair.spec.movable[instance] if n in pair.anchor and pair.dims(n) > 1]


def _rows(pair: Pair, instance: Instance, names: Sequence[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of all units in each part of these matrices, of length 1: anchor's and source's, [*b, n, k]."""
    for name in names:
        for at in pair.spec.occurrences[name, instance.axis]:
            x, y = (at.unfold(side[name]).float() for side in (pair.anchor, pair.source))
            if x.shape[-1] > 1:
                yield tuple(torch.nn.functional.normalize(side, dim=-1) for side in (x, y))  # type: ignore[misc]


def _alike(
    pair: Pair, instance: Instance, names: Sequence[str], *, margins: bool
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"] | None]:
    """For each unit the mean over matrices of the cosine with its own, and how much that is above the largest other."""
    parts = [*_rows(pair, instance, names)]
    cosine = torch.stack([(x * y).sum(-1) for x, y in parts]).mean(0)
    if not margins:
        return cosine, None
    others = []
    for start in range(0, cosine.shape[-1], BLOCK):
        block = torch.stack([x[..., start : start + BLOCK, :] @ y.mT for x, y in parts]).mean(0)
        block.diagonal(offset=start, dim1=-2, dim2=-1).fill_(-1)
        others.append(block.amax(-1))
    return cosine, cosine - torch.cat(others, -1)


def _agreement(pair: Pair, instance: Instance, names: Sequence[str]) -> float | None:
    """The least agreement of the elements that single matrices ask for: ⟨G, H⟩ / |G| |H|."""
    group = pair.spec.axes[instance.axis].group
    assert group is not None
    some = [name for name in names if pair.anchor[name].any() and pair.source[name].any()]  # zeros ask for nothing
    elements = [_from(pair, instance, group.usual().without_scaling(), [name]) for name in some]
    found = [float(torch.cosine_similarity(g.flatten(), h.flatten(), dim=0)) for g, h in combinations(elements, 2)]
    return min(found, default=None)


def _from(pair: Pair, instance: Instance, group: Group, names: Sequence[str]) -> Tensor:
    read = pair.anchor.__getitem__, pair.source.__getitem__
    return group.best(weight_moments(pair.spec, instance, *read, group, names=names)).to_dense()


def _fixed(pair: Pair) -> tuple[int, int]:
    """How many neurons the best assignment in place leaves at their index, and in how many instances."""
    count = instances = 0
    for instance in pair.spec.movable:
        names = _matrices(pair, instance)
        if kind_of(pair.spec, instance) != NEURONS or not names or pair.spec.sizes[instance.axis] > MOST:
            continue
        scores = torch.stack([x @ y.mT for x, y in _rows(pair, instance, names)]).sum(0)
        count += int((assign_batch(scores) == torch.arange(scores.shape[-1])).sum())
        instances += math.prod(scores.shape[:-2])
    return count, instances


def log10_bound(fixed: int, instances: int) -> float:
    """log₁₀ of a bound of the probability that so many units are matched to those of their own index, if the two models
    have nothing to do with each other.

    The initial order of one's units is exchangeable, and training commutes with it: so the matching is a uniformly
    random permutation, in each instance independently. Its number of fixed points S has E[binomial(S, k)] ≤ Lᵏ / k!,
    and by Markov's inequality P(S ≥ k) is at most that. (Zhu et al. 2025, Theorem 1, with this statistic.) Not for
    models that were moved, which this cannot tell from others.
    """
    if fixed <= instances:
        return 0.0
    return min(0.0, (fixed * math.log(instances) - math.lgamma(fixed + 1)) / math.log(10))


def changes_of(pair: Pair) -> Iterator[Change]:
    for name in pair.names:
        if pair.dims(name) < 2:
            continue
        a, b = pair.source[name], pair.anchor[name]
        if not b.is_floating_point() or 1 in (len(b), b.numel() // len(b)):
            continue
        a, b = (side.reshape(len(b), -1).double() for side in (a, b))
        layer = layer_of(pair.spec.tensors[name].index)
        size, d = float(b.norm()) or float(a.norm()), a - b
        rank, edge = spectrum(d)
        zeros = [float((one.abs() < NEAR * one.square().mean().sqrt()).double().mean()) for one in (a, b)]
        relative = float(d.norm()) / size if size else 0.0
        at = -1 if layer is None else layer
        yield Change(name, at, b.numel(), relative, rank, min(b.shape), edge, zeros[0] - zeros[1])


def spectrum(d: Float[Tensor, "n m"]) -> tuple[int, float]:
    """`rank` and `edge` of a `Change`."""
    n, m = d.shape
    values = torch.linalg.eigvalsh(d @ d.mT if n < m else d.mT @ d).flip(0).clamp_min(0)
    total = float(values.sum())
    if not total > 0:
        return 0, 1.0
    rank = int((values.cumsum(0) < SHARE * total).sum()) + 1
    noise = total / (n * m) * (math.sqrt(n) + math.sqrt(m)) ** 2
    return rank, float(values[0]) / noise


def _vectors(pair: Pair) -> float:
    """|D| / |B| over biases and gains."""
    names = [n for n in pair.names if pair.dims(n) < 2 and pair.anchor[n].is_floating_point()]
    difference = sum(float((pair.source[n] - pair.anchor[n]).double().square().sum()) for n in names)
    size = sum(float(pair.anchor[n].double().square().sum()) for n in names)
    return math.sqrt(difference / size) if size else float(difference > 0)


def _equal(pair: Pair) -> float:
    """The share of numbers that are equal in place; where both are zero or one is not counted, if there are others."""
    same, count = 0, 0
    for name in pair.names:
        a, b = pair.source[name], pair.anchor[name]
        equal = a == b
        kept = ~equal | ((b != 0) & (b != 1))
        same, count = same + int((equal & kept).sum()), count + int(kept.sum())
    return same / count if count else 1.0


def _grid(model: Model) -> int | None:
    """The bits of the grid that all matrices of the layers lie on, or of a dtype that is narrower than float32."""
    names = [n for n, d in model.spec.tensors.items() if len(d.layout.dims) > 1 and layer_of(d.index) is not None]
    found: int | None = None
    for name in names:
        tensor = model.scanned(name)
        narrow = 8 * tensor.dtype.itemsize
        bits = on_grid(tensor.reshape(len(tensor), -1).float()) or (narrow if narrow < 32 else None)
        if bits is None or (found is not None and bits != found):
            return None
        found = bits
    return found


def on_grid(matrix: Float[Tensor, "n m"]) -> int | None:
    """The bits of the coarsest symmetric grid, in steps of a row's or a block's largest number, on which it lies."""
    for bits in sorted(GRIDS):
        for block in BLOCKS:
            if block and matrix.shape[1] % block:
                continue
            groups = matrix.reshape(-1, block) if block else matrix
            steps = groups / (groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / (2 ** (bits - 1) - 1))
            if float(((steps - steps.round()).abs() < OFF).float().mean()) >= ON_GRID:
                return bits
    return None
