"""Monomial maps: permute, then scale each row. One element class serves six groups.

Permutation       index only
Sign              the same ±1 for all
Signed            index and ±1
Scaling           scales > 0 only
PositiveMonomial  index and scales > 0: the neurons of a ReLU feed-forward
SignedMonomial    index and scales other than 0: the neurons of a gated feed-forward
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
        return self._weighted(torch.take_along_dim(c, self.index[..., None], -1)[..., 0])

    def cross(self, moments: Moments) -> Tensor:
        return self._weighted(moments.picked(self.index))

    def _weighted(self, picked: Tensor) -> Tensor:
        return (picked.double() if self.scale is None else picked.double() * self.scale.double()).sum(-1)

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
        sizes = torch.ones_like(self.index, dtype=torch.float64) if self.scale is None else self.scale.double().abs()
        return sizes.amax(-1) / sizes.amin(-1)

    def is_identity(self) -> bool:
        fixed = bool((self.index == torch.arange(self.size, device=self.device)).all())
        return fixed and (self.scale is None or bool((self.scale == 1).all()))


def identity_index(n: int, batch: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    return torch.arange(n, device=device).expand(*batch, n)


def random_index(n: int, batch: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.argsort(torch.rand(*batch, n, generator=rng), dim=-1)


def is_permutation(g: Element) -> bool:
    if not isinstance(g, Monomial):
        return False
    return torch.equal(g.index.sort(dim=-1).values, identity_index(g.size, g.batch, g.device))


def random_scales(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Log-uniform in [½, 2], float64."""
    return torch.exp2(2 * torch.rand(shape, generator=rng, dtype=torch.float64) - 1)


def random_signs(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """±1, float64."""
    return torch.randint(0, 2, shape, generator=rng, dtype=torch.float64) * 2 - 1


def positive(scale: Tensor) -> bool:
    """All of it in (0, ∞)."""
    return bool(((scale > 0) & scale.isfinite()).all())


class Monomials(Group):
    """A group of monomial maps."""

    def identity(self, n: int, batch: tuple[int, ...]) -> Monomial:
        return Monomial(identity_index(n, batch))


class Permutation(Monomials):
    """Reorders the units: g has one 1 in each row and column.

    best: the linear assignment that maximises ⟨g, C⟩, C the sum of all cross-Grams.
    """

    moments_dtype: ClassVar[torch.dtype] = torch.float32
    self_dual: ClassVar[bool] = True

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Monomial:
        return Monomial(random_index(n, batch, rng))

    def contains(self, g: Element, atol: float) -> bool:
        return (
            is_permutation(g)
            and isinstance(g, Monomial)
            and (g.scale is None or bool(((g.scale - 1).abs() <= atol).all()))
        )

    def best(self, moments: PartMoments) -> Monomial:
        return Monomial(assign_batch(total(moments).xy))


class Sign(Monomials):
    """1 and −1 for all units alike: of a plane of queries and keys that are normalised, or of any axis.

    best: the sign of the trace of C, the sum of the cross-Grams of the parts that feel signs.
    """

    self_dual: ClassVar[bool] = True

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Monomial:
        return Monomial(identity_index(n, batch), random_signs((*batch, 1), rng).expand(*batch, n).clone())

    def contains(self, g: Element, atol: float) -> bool:
        if not Signed().contains(g, atol) or not isinstance(g, Monomial):
            return False
        alike = g.scale is None or bool((g.scale.sign() == g.scale[..., :1].sign()).all())
        return alike and torch.equal(g.index, identity_index(g.size, g.batch, g.device))

    def best(self, moments: PartMoments) -> Monomial:
        c = _felt(moments)
        sign = _sign(torch.diagonal(c, dim1=-2, dim2=-1).double().sum(-1))
        index = identity_index(c.shape[-1], tuple(c.shape[:-2]), c.device)
        return Monomial(index, sign[..., None].expand(c.shape[:-1]).clone())


class Signed(Monomials):
    """Reorders the units and flips signs: the units of an odd activation, such as a tanh pooler's.

    best: assignment on |C| for the parts that feel signs plus C for those that do not; then the signs of C.
    """

    moments_dtype: ClassVar[torch.dtype] = torch.float32
    self_dual: ClassVar[bool] = True
    below: ClassVar[tuple[str, ...]] = ("permutation", "sign")

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Monomial:
        signs = random_signs((*batch, n), rng)
        return Monomial(random_index(n, batch, rng), signs)

    def contains(self, g: Element, atol: float) -> bool:
        return (
            is_permutation(g)
            and isinstance(g, Monomial)
            and (g.scale is None or bool(((g.scale.abs() - 1).abs() <= atol).all()))
        )

    def best(self, moments: PartMoments) -> Monomial:
        c = _felt(moments)
        plain = moments["plain"].xy if "plain" in moments else 0
        index = assign_batch(c.abs() + plain)
        matched = torch.take_along_dim(c, index[..., None], -1)[..., 0].double()
        return Monomial(index, _sign(matched))


def _felt(moments: PartMoments) -> Float[Tensor, "*b n n"]:
    """The sum of the cross-Grams of the parts that feel signs."""
    felt: PartMoments = {part: m for part, m in moments.items() if part != "plain"}
    return total(felt).xy if felt else torch.zeros_like(moments["plain"].xy)


def _sign(t: Tensor) -> Tensor:
    """±1, float64; 1 for 0."""
    return torch.where(t < 0, -1.0, 1.0).double()
