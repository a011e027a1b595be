"""Moments of an axis from the weights alone. With all other axes fixed, the objective of an axis depends only on its
cross-Gram, the sum over tensors of unfold(anchor) unfold(source)ᵀ (Git Re-Basin, Eq. 3; Zhang et al. 2025, Theorem
4.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial, reduce
from operator import attrgetter
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.errors import CheckpointError
from symfuse.groups import Group, Moments, Part, PartMoments, assignment
from symfuse.io import is_finite
from symfuse.spec import Instance, Occurrence, Spec, Variance

Read = Callable[[str], Tensor]


def features(
    spec: Spec, instance: Instance, name: str, *tensors: Tensor
) -> Iterator[tuple[Occurrence, tuple[Tensor, ...]]]:
    """The features of the units of an axis in each part of a tensor: the part that has the axis, and a view [*b, n, k]
    of each tensor.

    Where the axis occurs twice in one part (a square map of a space to itself) moments are quadratic in the element.
    Then there are features for each occurrence, with the other one fixed: the moments are linear in the element, to
    first order around the identity, and the caller has to check whether an element is better.
    """
    for at in spec.occurrences[name, instance.axis]:
        yield at, tuple(at.unfold(tensor) for tensor in tensors)


def weight_moments(
    spec: Spec,
    instance: Instance,
    anchor: Read,
    source: Read,
    group: Group,
    skip: Collection[tuple[str, str]] = (),
    only: Collection[tuple[str, str]] | None = None,
    names: Sequence[str] | None = None,
    scanned: tuple[Read, Read] | None = None,
) -> PartMoments:
    """The moments of one axis instance over all tensors that it acts on, or those of `names`, without the parts (name,
    atom) in `skip`, or over the parts in `only` alone.

    anchor, source: read a tensor by canonical name; the elements of other axes have already been applied to the source.
    NaN and infinity are detected in the moments; scanned: readers that then report the tensor, if other than these. The
    dtype is the group's, or that of the tensors if it is wider; xx and yy are matrices or diagonals, as the group needs
    (`Group.gram`). If elements of the group equal their duals, primal and dual parts are summed. Raises CheckpointError
    if a moment overflows.
    """
    out: dict[Part, Moments] = {}
    names = spec.movable[instance] if names is None else names
    streams = group.streams(spec.axes[instance.axis].size) and not spec.batch_axes(instance.axis)
    wide = Widened()
    for name in names:
        tensors = anchor(name), source(name)
        for at in spec.occurrences[name, instance.axis]:
            atom = at.atom
            if (skip and (name, str(atom)) in skip) or (only is not None and (name, str(atom)) not in only):
                continue
            part: Part = "primal" if group.self_dual and atom.variance is Variance.DUAL else atom.part
            fx, fy = map(at.unfold, tensors)
            if streams:
                here = Streamed.of(partial(_read, at, name, anchor, source), fx, fy)
                out[part] = out[part] + here if part in out else here
                continue
            first = part not in out
            if first:
                *batch, n, _ = fx.shape
                own = (n, n) if group.gram else (n,)
                dtype = reduce(torch.promote_types, (fx.dtype, fy.dtype), group.moments_dtype)
                xx, yy = fx.new_zeros(*batch, *own, dtype=dtype), fx.new_zeros(*batch, *own, dtype=dtype)
                out[part] = Moments(fx.new_empty(*batch, n, n, dtype=dtype), xx, yy)
            _add(out[part], fx, fy, wide, first=first)
    for m in out.values():
        # Solvers multiply two moments with each other, in float64. No entry of xy exceeds the norms.
        x, y = m.x_norms.double(), m.y_norms.double()
        fits = streams or bool((x.sum() * y.sum()).sqrt() < torch.finfo(m.dtype).max / 2)
        products = (x * x, y * y) if fits else (m.xy, x * x, y * y)
        require_products(instance, products, m.dtype, names, *(scanned or (anchor, source)))
    return out


def workspace(spec: Spec, instance: Instance, group: Group) -> int:
    """An estimate of the bytes that solving one axis instance takes: the tensors read from both models, the moments,
    and scores with their copy in float64 and the prices of an assignment."""
    n, batch = spec.axes[instance.axis].size, math.prod(spec.batch(instance.axis))
    read = [2 * 4 * math.prod(spec.tensors[name].layout.shape(spec.sizes)) for name in spec.movable[instance]]
    if group.streams(n) and not spec.batch_axes(instance.axis):
        # Measured; the tensors that were read are freed when scores are assigned.
        return max(sum(read) + 4 * n * n, 5 * n * n + assignment.workspace(n))
    variances = {a.variance for name in spec.movable[instance] for a in spec.tensors[name].layout.atoms}
    moments = batch * n * n * group.moments_dtype.itemsize * (3 if group.gram else 1)
    return len(variances) * moments + max(2 * max(read), 3 * moments)


def _read(at: Occurrence, name: str, anchor: Read, source: Read) -> tuple[Tensor, Tensor]:
    """The features of one part of a tensor, read again."""
    return at.unfold(anchor(name)), at.unfold(source(name))


class Streamed(Moments):
    """Moments without the cross-Gram: its rows and entries are computed from the features, which are read on demand and
    not kept. pairs: each reads the features X and Y, [n, k], of one part."""

    pairs: Sequence[Callable[[], tuple[Tensor, Tensor]]]
    full: ClassVar[bool] = False
    x_norms, y_norms = property(attrgetter("xx")), property(attrgetter("yy"))

    def __init__(self, pairs: Sequence[Callable[[], tuple[Tensor, Tensor]]], xx: Tensor, yy: Tensor) -> None:
        for key, value in {"pairs": pairs, "xx": xx, "yy": yy}.items():
            object.__setattr__(self, key, value)  # the base class is frozen

    @classmethod
    def of(cls, pair: Callable[[], tuple[Tensor, Tensor]], x: Tensor, y: Tensor) -> Streamed:
        """The moments of one part. pair: reads x and y again."""
        return cls([pair], *(torch.cat([torch.linalg.vecdot(b, b) for b in _blocks(rows)]) for rows in (x, y)))

    @property
    def xy(self) -> Tensor:
        """The whole cross-Gram, for callers that need it."""
        return torch.cat(list(self.rows(self.dtype, BLOCK)))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.xx), len(self.yy))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def rows(self, dtype: torch.dtype, step: int) -> Iterator[Tensor]:
        features = [(x, y.to(dtype).T) for x, y in (pair() for pair in self.pairs)]
        for start in range(0, len(self.xx), step):
            out = self.xx.new_zeros(min(step, len(self.xx) - start), len(self.yy), dtype=dtype)
            for x, y in features:
                out.addmm_(x[start : start + step].to(dtype), y)
            yield out

    def picked(self, index: Tensor) -> Tensor:
        out = torch.zeros_like(self.xx, dtype=torch.float64)
        for pair in self.pairs:
            x, y = pair()
            places = zip(_blocks(x), torch.split(index, BLOCK), strict=True)
            out += torch.cat([torch.linalg.vecdot(block, y[at].double()) for block, at in places])
        return out

    def __add__(self, other: Moments) -> Moments:
        if not isinstance(other, Streamed):
            return super().__add__(other)
        return Streamed([*self.pairs, *other.pairs], self.xx + other.xx, self.yy + other.yy)


BLOCK = 512  # units that are widened at a time


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    return (block.double() for block in torch.split(rows, BLOCK))


def require_products(
    instance: Instance, products: Sequence[Tensor], dtype: torch.dtype, names: Sequence[str], anchor: Read, source: Read
) -> None:
    """CheckpointError unless products of weights are finite. It names the tensor with the largest weights and the dtype
    of the sums; with readers that check values, the tensor with NaN or infinity."""
    if all(map(is_finite, products)):
        return
    models = (("anchor", anchor), ("source", source))
    largest, name, which = max((read(name).abs().max().item(), name, which) for which, read in models for name in names)
    wider = "" if dtype == torch.float64 else "convert both models to float64 (`symfuse.open(…).to(torch.float64)`) or "
    raise CheckpointError(
        f"{instance}: products of these weights overflow in {str(dtype).removeprefix('torch.')}; the largest weight is "
        f"{largest:.3g}, in {name!r} of the {which}. Look at that tensor: weights of such size are rarely meant. Else "
        f"{wider}leave this axis out"
    )


# What is widened at once: so many entries that both copies fit in a processor's cache, but so many columns at least
# that reading and writing the sum does not slow the product.
ENTRIES, COLUMNS = 1 << 17, 1 << 10


class Widened:
    """Blocks of two tensors in a wider dtype, in memory that is reused: the system provides new memory page by page,
    which takes longer than the widening."""

    def __init__(self) -> None:
        self._kept: dict[object, Tensor] = {}

    def __call__(self, side: int, block: Float[Tensor, "b n k"], dtype: torch.dtype) -> Float[Tensor, "b n k"]:
        """The block, overwritten by the next of that side and shape. Row-major blocks stay row-major, which is
        faster."""
        if block.dtype == dtype:
            return block
        rows = block.stride(-1) <= block.stride(-2)
        key = side, block.shape, dtype, rows
        if key not in self._kept:
            new = torch.empty((block if rows else block.mT).shape, dtype=dtype, device=block.device)
            self._kept[key] = new if rows else new.mT
        return self._kept[key].copy_(block)


def _add(m: Moments, fx: Tensor, fy: Tensor, wide: Widened, *, first: bool) -> None:
    """Add the moments of features [*b, n, k] in place, a block at a time; the first call overwrites xy."""
    n, k = fx.shape[-2:]
    own, dtype, full = m.xx.shape[fx.ndim - 2 :], m.dtype, m.full
    as_is = fx.dtype == fy.dtype == dtype
    columns = COLUMNS if fx.is_cpu and not as_is else max(1, k)
    units = max(1, ENTRIES // max(1, n * min(k, columns))) if fx.is_cpu else max(1, math.prod(fx.shape[:-2]))
    sums = m.xy.view(-1, n, n), m.xx.view(-1, *own), m.yy.view(-1, *own), fx.reshape(-1, n, k), fy.reshape(-1, n, k)
    blocks = [sums] if units >= sums[0].shape[0] else zip(*(torch.split(t, units) for t in sums), strict=True)
    for xy, xx, yy, x, y in blocks:
        beta = 0 if first else 1
        for a, b in zip(*(torch.split(t, columns, -1) for t in (x, y)), strict=True) if k > columns else ((x, y),):
            if not as_is:
                a, b = wide(0, a, dtype), wide(1, b, dtype)
            xy.baddbmm_(a, b.mT, beta=beta)
            beta = 1
            for moment, block in ((xx, a), (yy, b)):
                if full:
                    moment.baddbmm_(block, block.mT)
                elif block.stride(-1) == 1:
                    norms = torch.linalg.vector_norm(block, dim=-1)
                    moment.addcmul_(norms, norms)
                else:  # a norm over columns takes three times as long
                    moment.add_(block.square().sum(-1))
