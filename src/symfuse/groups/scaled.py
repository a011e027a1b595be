"""Units that are rescaled, each by a factor of its own: alone, or reordered too, or reordered and flipped too."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symfuse.groups.assignment import assign_batch
from symfuse.groups.base import Element, Moments, PartMoments
from symfuse.groups.monomial import (
    Monomial,
    Monomials,
    Permutation,
    Signed,
    identity_index,
    is_permutation,
    positive,
    random_index,
    random_scales,
    random_signs,
)
from symfuse.groups.scale import LIMIT, best_scale, least_cost, scale_cost

# How many pairs of units are scored at once: what bounds the memory of scoring.
PAIRS = 1 << 20
# Beyond so many units their moments are not kept: of a feed-forward of 14336 they would take 5 GB. Scores are formed of
# ROWS units of the anchor at a time, in float32: a permutation is exact whatever rounding its scores had.
LARGE, ROWS = 2048, 512


class Scales(Monomials):
    """A group of monomial maps in which all positive scales are."""

    def tangent(self, n: int) -> dict[str, tuple[int, ...]]:
        return {"log": (n,)}

    def near(self, at: Mapping[str, Tensor]) -> Monomial:
        """Each unit times the exponential of its `log`."""
        log = at["log"]
        return Monomial(identity_index(log.shape[-1], tuple(log.shape[:-1]), log.device), log.exp())


class Scaling(Scales):
    """Rescales each unit by a positive factor: w[i] → a[i] w[i], and the dual by 1/a[i].

    best: for each unit the positive root of a quartic with the least objective (Zhang et al. 2025, Eq.
    11–12).
    """

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Monomial:
        return Monomial(identity_index(n, batch), random_scales((*batch, n), rng))

    def contains(self, g: Element, atol: float) -> bool:  # noqa: ARG002 - any positive scale belongs
        return (
            isinstance(g, Monomial)
            and torch.equal(g.index, identity_index(g.size, g.batch, g.device))
            and (g.scale is None or positive(g.scale))
        )

    def best(self, moments: PartMoments) -> Monomial:
        n, batch = _shape(moments)
        like = next(iter(moments.values())).x_norms
        terms = [t for part in ("primal", "dual") for t in _diagonal(moments.get(part), like)]
        return Monomial(identity_index(n, batch, like.device), best_scale(*terms))

    def reach(self, c: Float[Tensor, "*b n n"], plain: Float[Tensor, "*b n n"] | None = None) -> Float[Tensor, "*b"]:
        both = c if plain is None else c + plain
        return torch.diagonal(both, dim1=-2, dim2=-1).double().sum(-1)  # the identity alone keeps norms


class _Rescaled(Scales):
    """Reorders the units and rescales each: every pair of units has a cost, an assignment the least sum of costs."""

    def best(self, moments: PartMoments) -> Monomial:
        index = assign_batch(self._scores(moments))
        terms = [t for part in ("primal", "dual") for t in _picked(moments.get(part), index)]
        return Monomial(index, self._scales(*terms))

    def _scores(self, moments: PartMoments) -> Float[Tensor, "*b n n"]:
        """What is to be assigned: the negative costs of all pairs, formed some rows at a time."""
        n, batch = _shape(moments)
        dtype = torch.float32 if self.streams(n) else torch.float64
        scores = torch.empty(*batch, n, n, dtype=dtype, device=next(iter(moments.values())).device)
        start, rows = 0, (m.rows(scores.dtype, ROWS) for m in moments.values())
        for blocks in zip(*rows, strict=True):
            cross = dict(zip(moments, blocks, strict=True))
            stop = start + blocks[0].shape[-2]
            terms = [t for part in ("primal", "dual") for t in _terms(moments.get(part), cross.get(part), blocks[0])]
            cost = self._costs(moments, terms, slice(start, stop))
            if "plain" in cross:
                cost -= 2 * cross["plain"]
            scores[..., start:stop, :] = cost.neg_()
            start = stop
        return scores

    @abstractmethod
    def _costs(self, moments: PartMoments, terms: Sequence[Tensor], rows: slice) -> Float[Tensor, "*b k n"]:
        """What each pair of units costs, of the parts that feel scales: of the rows that `terms`, p, q, r and s of
        `scale_cost`, are of."""

    @abstractmethod
    def _scales(self, p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> Tensor:
        """The best scales of pairs."""


class PositiveMonomial(_Rescaled):
    """Reorders the units and rescales each by a positive factor: the neurons of a ReLU feed-forward.

    best: every pair of units is scored at its own best scale, then assigned: the exact joint optimum.
    """

    below: ClassVar[tuple[str, ...]] = ("permutation", "scaling")

    name = "monomial"
    label = "permutation, scale"

    def without_scaling(self) -> Permutation:
        return Permutation()

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Monomial:
        return Monomial(random_index(n, batch, rng), random_scales((*batch, n), rng))

    def contains(self, g: Element, atol: float) -> bool:  # noqa: ARG002 - any positive scale belongs
        return is_permutation(g) and isinstance(g, Monomial) and (g.scale is None or positive(g.scale))

    def streams(self, n: int) -> bool:
        return n > LARGE

    def _costs(self, moments: PartMoments, terms: Sequence[Tensor], rows: slice) -> Tensor:  # noqa: ARG002
        return _in_blocks(least_cost, terms)

    def _scales(self, p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> Tensor:
        return best_scale(p, q, r, s)


@dataclass(frozen=True)
class SignedMonomial(_Rescaled):
    """Reorders the units and rescales each by a factor other than 0: the neurons of a gated feed-forward (SwiGLU,
    GEGLU; Shazeer 2020), a(gate x) ⊙ (up x). The gate follows the permutation alone, its part is plain; `up` is primal
    and what reads the product dual.

    best: up to `largest_exact` units, every pair is scored at its own best sign and scale, then assigned: the exact
    joint optimum. Of more units a pair is scored at the scale that gives both sides of the source the balance of the
    anchor's, which units that are alike have (there the score is the plain cross-Gram and |primal + dual| of balanced
    sides), or one step of Newton's from it. Then the pairs so assigned get their own best signs and scales. Scoring
    takes a twentieth of the time; of what the exact way gains it fell short by nothing on units with noise of their own
    size, and by about 1 % at most with more noise or without relation.
    """

    largest_exact: int = 1024
    below: ClassVar[tuple[str, ...]] = ("signed", "monomial")

    name = "signed-monomial"
    label = "permutation, scale, sign"

    def without_scaling(self) -> Signed:
        return Signed()

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Monomial:
        scales = random_scales((*batch, n), rng) * random_signs((*batch, n), rng)
        return Monomial(random_index(n, batch, rng), scales)

    def contains(self, g: Element, atol: float) -> bool:  # noqa: ARG002 - any scale but 0 belongs
        return is_permutation(g) and isinstance(g, Monomial) and (g.scale is None or positive(g.scale.abs()))

    def streams(self, n: int) -> bool:
        return n > self.largest_exact

    def _costs(self, moments: PartMoments, terms: Sequence[Tensor], rows: slice) -> Tensor:
        like = terms[0]
        if like.shape[-1] <= self.largest_exact:
            return _in_blocks(_least_of_both, terms)
        down, across = (_balance(moments, side).to(like.dtype) for side in ("x_norms", "y_norms"))
        balance = [t.expand(like.shape) for t in (down[..., rows, None], 1 / across[..., None, :])]
        return _in_blocks(_balanced_cost, [*terms, *balance])

    def _scales(self, p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> Tensor:
        kept, flipped = best_scale(p, q, r, s), best_scale(p, -q, r, -s)
        better = scale_cost(flipped, p, -q, r, -s) < scale_cost(kept, p, q, r, s)
        return torch.where(better, -flipped, kept)


def _least_of_both(p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> Tensor:
    """The least cost over scales of both signs."""
    return torch.minimum(least_cost(p, q, r, s), least_cost(p, -q, r, -s))


def _balanced_cost(p: Tensor, q: Tensor, r: Tensor, s: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """The cost at one scale, with the better sign, or after a step of Newton's in its logarithm, whichever is less."""
    a = (down * across).clamp(1 / LIMIT, LIMIT)
    sign = torch.where(q * a + s / a < 0, -1.0, 1.0)
    q, s = sign * q, sign * s
    slope = p * a**2 - r / a**2 - q * a + s / a
    curvature = 2 * (p * a**2 + r / a**2) - q * a - s / a
    step = slope / curvature.abs().clamp_min(torch.finfo(p.dtype).tiny)
    nearer = (a * (-step.clamp(-1, 1)).exp()).clamp(1 / LIMIT, LIMIT)
    return torch.minimum(scale_cost(a, p, q, r, s), scale_cost(nearer, p, q, r, s))


def _balance(moments: PartMoments, side: str) -> Float[Tensor, "*b n"]:
    """For each unit √(|primal| / |dual|), or of one part alone its share; 1 where a norm is zero."""
    norms = {part: getattr(m, side).double() for part, m in moments.items() if part != "plain"}
    logs = [norm.log() if part == "primal" else -norm.log() for part, norm in norms.items()]
    zero = torch.zeros_like(next(iter(moments.values())).x_norms, dtype=torch.float64)
    mean = torch.stack(logs).mean(0) / 2 if logs else zero
    return mean.where(mean.isfinite(), 0.0).exp()


def _in_blocks(cost: Callable[..., Tensor], terms: Sequence[Tensor]) -> Float[Tensor, "*b k n"]:
    """The cost of all pairs, some rows of them at a time."""
    rows = zip(*(torch.split(t, PAIRS // t.shape[-1] + 1, dim=-2) for t in terms), strict=True)
    return torch.cat([cost(*block) for block in rows], dim=-2)


def _shape(moments: PartMoments) -> tuple[int, tuple[int, ...]]:
    *batch, _, n = next(iter(moments.values())).shape
    return n, tuple(batch)


def _terms(m: Moments | None, cross: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """|y|² and ⟨x, y⟩ of pairs of units (x down, y across), of rows of their cross-Gram; 0 of a part that is absent."""
    if m is None or cross is None:
        return like.new_zeros(()).expand(like.shape), like.new_zeros(()).expand(like.shape)
    return m.y_norms[..., None, :].to(cross.dtype).expand(cross.shape), cross


def _picked(m: Moments | None, index: Int[Tensor, "*b n"]) -> tuple[Tensor, Tensor]:
    """|y|² and ⟨x, y⟩ of each unit with the one of that index, float64."""
    if m is None:
        return torch.zeros_like(index, dtype=torch.float64), torch.zeros_like(index, dtype=torch.float64)
    return torch.take_along_dim(m.y_norms.double(), index, -1), m.picked(index).double()


def _diagonal(m: Moments | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """|y|² and ⟨x, y⟩ of each unit with itself."""
    if m is None:
        return torch.zeros_like(like, dtype=torch.float64), torch.zeros_like(like, dtype=torch.float64)
    return m.y_norms.double(), torch.diagonal(m.xy, dim1=-2, dim2=-1).double()
