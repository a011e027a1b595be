"""Monomial maps: permute, then scale each row. One element class serves four groups.

Permutation       index only
Signed            index and ±1
Scaling           scales > 0 only
PositiveMonomial  index and scales > 0: the neurons of a ReLU feed-forward
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symfuse.groups.assignment import assign_batch
from symfuse.groups.base import Element, Group, Moments, PartMoments, row_norms, total
from symfuse.groups.scale import best_scale, least_cost

# How many pairs of units are scored at once: what bounds the memory of scoring.
PAIRS = 1 << 20


@dataclass(frozen=True, eq=False)
class Monomial(Element):
    """w[i] → scale[i] · w[index[i]]; without a scale a permutation."""

    index: Int[Tensor, "*b n"]
    scale: Float[Tensor, "*b n"] | None = None

    @property
    def size(self) -> int:
        return self.index.shape[-1]

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.index.shape[:-1])

    def act(self, w: Tensor, dim: int) -> Tensor:
        dim %= w.ndim
        if self.batch:
            shape = [*self.batch, *[1] * (w.ndim - len(self.batch))]
            shape[dim] = self.size
            out = torch.take_along_dim(w, self.index.reshape(shape), dim)
        else:
            shape = [1] * w.ndim
            shape[dim] = self.size
            out = w.index_select(dim, self.index)
        return out if self.scale is None else out * self.scale.reshape(shape).to(out.dtype)

    def dual(self) -> Monomial:
        return Monomial(self.index, None if self.scale is None else 1 / self.scale)

    def forget(self) -> Monomial:
        return Monomial(self.index)

    def inverse(self) -> Monomial:
        inverse = torch.argsort(self.index, dim=-1)
        if self.scale is None:
            return Monomial(inverse)
        return Monomial(inverse, 1 / torch.take_along_dim(self.scale, inverse, -1))

    def __matmul__(self, other: Monomial) -> Monomial:
        index = torch.take_along_dim(other.index, self.index, -1)
        scale = None if other.scale is None else torch.take_along_dim(other.scale, self.index, -1)
        if self.scale is not None:
            scale = self.scale if scale is None else self.scale * scale
        return Monomial(index, scale)

    def inner(self, c: Tensor) -> Tensor:
        picked = torch.take_along_dim(c, self.index[..., None], -1)[..., 0].double()
        return (picked if self.scale is None else picked * self.scale.double()).sum(-1)

    def gain(self, yy: Tensor) -> Tensor:
        yy = row_norms(yy, self.batch)
        if self.scale is None:
            return yy.sum(-1)
        return (torch.take_along_dim(yy, self.index, -1) * self.scale.to(yy.dtype) ** 2).sum(-1)

    def tensors(self) -> dict[str, Tensor]:
        return {"index": self.index} | ({} if self.scale is None else {"scale": self.scale})

    def rebuild(self, tensors: Mapping[str, Tensor]) -> Monomial:
        return Monomial(tensors["index"], tensors.get("scale"))

    @property
    def reorders_only(self) -> bool:
        return self.scale is None

    def condition(self) -> Tensor:
        sizes = torch.ones(self.index.shape, dtype=torch.float64) if self.scale is None else self.scale.double().abs()
        return sizes.amax(-1) / sizes.amin(-1)

    def is_identity(self) -> bool:
        fixed = bool((self.index == torch.arange(self.size)).all())
        return fixed and (self.scale is None or bool((self.scale == 1).all()))


def _identity(n: int, batch: tuple[int, ...]) -> Tensor:
    return torch.arange(n).expand(*batch, n)


def _random(n: int, batch: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.argsort(torch.rand(*batch, n, generator=rng), dim=-1)


def _is_permutation(g: Element) -> bool:
    if not isinstance(g, Monomial):
        return False
    return torch.equal(g.index.sort(dim=-1).values, _identity(g.size, g.batch))


def random_scales(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Log-uniform in [½, 2], float64."""
    return torch.exp2(2 * torch.rand(shape, generator=rng, dtype=torch.float64) - 1)


def positive(scale: Tensor) -> bool:
    """All of it in (0, ∞)."""
    return bool(((scale > 0) & scale.isfinite()).all())


class Permutation(Group):
    """Reorders the units: g has one 1 in each row and column.

    best: the linear assignment that maximises ⟨g, C⟩, C the sum of all cross-Grams.
    """

    moments_dtype: ClassVar[torch.dtype] = torch.float32
    self_dual: ClassVar[bool] = True

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Monomial:
        return Monomial(_random(n, batch, rng))

    def identity(self, n: int, batch: tuple[int, ...]) -> Monomial:
        return Monomial(_identity(n, batch))

    def contains(self, g: Element, atol: float) -> bool:
        return (
            _is_permutation(g)
            and isinstance(g, Monomial)
            and (g.scale is None or bool(((g.scale - 1).abs() <= atol).all()))
        )

    def best(self, moments: PartMoments) -> Monomial:
        return Monomial(assign_batch(total(moments).xy))


class Signed(Group):
    """Reorders the units and flips signs: the units of an odd activation, such as a tanh pooler's.

    best: assignment on |C| for the parts that feel signs plus C for those that do not; then the signs of C.
    """

    moments_dtype: ClassVar[torch.dtype] = torch.float32
    self_dual: ClassVar[bool] = True
    below: ClassVar[tuple[str, ...]] = ("permutation",)

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Monomial:
        signs = torch.randint(0, 2, (*batch, n), generator=rng, dtype=torch.float64) * 2 - 1
        return Monomial(_random(n, batch, rng), signs)

    def identity(self, n: int, batch: tuple[int, ...]) -> Monomial:
        return Monomial(_identity(n, batch))

    def contains(self, g: Element, atol: float) -> bool:
        return (
            _is_permutation(g)
            and isinstance(g, Monomial)
            and (g.scale is None or bool(((g.scale.abs() - 1).abs() <= atol).all()))
        )

    def best(self, moments: PartMoments) -> Monomial:
        felt: PartMoments = {part: m for part, m in moments.items() if part != "plain"}
        c = total(felt).xy if felt else torch.zeros_like(moments["plain"].xy)
        plain = moments["plain"].xy if "plain" in moments else 0
        index = assign_batch(c.abs() + plain)
        chosen = torch.take_along_dim(c, index[..., None], -1)[..., 0].double()
        return Monomial(index, torch.where(chosen < 0, -1.0, 1.0).double())


class Scaling(Group):
    """Rescales each unit by a positive factor: w[i] → a[i] w[i], and the dual by 1/a[i].

    best: for each unit the positive root of a quartic with the least objective (Zhang et al. 2025, Eq.
    11–12).
    """

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Monomial:
        return Monomial(_identity(n, batch), random_scales((*batch, n), rng))

    def identity(self, n: int, batch: tuple[int, ...]) -> Monomial:
        return Monomial(_identity(n, batch))

    def contains(self, g: Element, atol: float) -> bool:  # noqa: ARG002 - any positive scale belongs
        return (
            isinstance(g, Monomial)
            and torch.equal(g.index, _identity(g.size, g.batch))
            and (g.scale is None or positive(g.scale))
        )

    def best(self, moments: PartMoments) -> Monomial:
        n, batch = _shape(moments)
        p, q = _terms(moments.get("primal"), diagonal=True)
        r, s = _terms(moments.get("dual"), diagonal=True)
        p, q, r, s = (t.expand(*batch, n) for t in (p, q, r, s))
        return Monomial(_identity(n, batch), best_scale(p, q, r, s))

    def reach(self, c: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b"]:
        return torch.diagonal(c, dim1=-2, dim2=-1).double().sum(-1)  # the identity alone keeps norms


class PositiveMonomial(Group):
    """Reorders the units and rescales each by a positive factor: the neurons of a ReLU feed-forward.

    best: every pair of units is scored at its own best scale, then assigned: the exact joint optimum.
    """

    below: ClassVar[tuple[str, ...]] = ("permutation", "scaling")

    @property
    def name(self) -> str:
        return "monomial"

    @property
    def label(self) -> str:
        return "permutation, scale"

    def without_scaling(self) -> Permutation:
        return Permutation()

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Monomial:
        return Monomial(_random(n, batch, rng), random_scales((*batch, n), rng))

    def identity(self, n: int, batch: tuple[int, ...]) -> Monomial:
        return Monomial(_identity(n, batch))

    def contains(self, g: Element, atol: float) -> bool:  # noqa: ARG002 - any positive scale belongs
        return _is_permutation(g) and isinstance(g, Monomial) and (g.scale is None or positive(g.scale))

    def best(self, moments: PartMoments) -> Monomial:
        n, batch = _shape(moments)
        p, q = _terms(moments.get("primal"))
        r, s = _terms(moments.get("dual"))
        terms = [t.expand(*batch, n, n) for t in (p, q, r, s)]
        rows = zip(*(torch.split(t, PAIRS // n + 1, dim=-2) for t in terms), strict=True)
        cost = torch.cat([least_cost(*block) for block in rows], dim=-2)
        if "plain" in moments:
            cost -= 2 * moments["plain"].xy.double()
        index = assign_batch(-cost)
        return Monomial(index, best_scale(*(torch.take_along_dim(t, index[..., None], -1)[..., 0] for t in terms)))


def _shape(moments: PartMoments) -> tuple[int, tuple[int, ...]]:
    xy = next(iter(moments.values())).xy
    return xy.shape[-1], tuple(xy.shape[:-2])


def _terms(m: Moments | None, diagonal: bool = False) -> tuple[Tensor, Tensor]:
    """|y|² and ⟨x, y⟩ of every pair of units (x down, y across), or of each unit with itself."""
    if m is None:
        return torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    if diagonal:
        return m.y_norms.double(), torch.diagonal(m.xy, dim1=-2, dim2=-1).double()
    return m.y_norms.double()[..., None, :].expand(m.xy.shape), m.xy.double()
