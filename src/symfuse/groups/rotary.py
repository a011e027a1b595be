"""What commutes with rotary position embeddings (Su et al. 2021): turning and scaling a plane of queries and keys.
Where queries and keys are normalised, what is left of it is `symfuse.groups.Sign`.

A position turns each plane by an angle of its own. In the plane as complex numbers an element multiplies by z, and its
dual by 1/z̄.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.groups.base import Element, PartMoments, total
from symfuse.groups.monomial import random_scales
from symfuse.groups.orthogonal import (
    Conformal,
    Orthogonal,
    Rotations,
    Similarity,
    balance,
    refuse_plain,
    similar,
    terms,
)
from symfuse.groups.scale import LIMIT, best_scale, scale_cost

ROUNDS = 30
RTOL = 1e-12


class Phase(Rotations):
    """Rotations of a plane, without reflections: SO(2).

    best: the phase of Σ conj(y) x, that is of (C₀₀ + C₁₁) + i (C₁₀ − C₀₁), C the sum of all cross-Grams.
    """

    self_dual: ClassVar[bool] = True
    size: ClassVar[int | None] = 2
    below: ClassVar[tuple[str, ...]] = ("sign",)

    label = "phase"

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Similarity:  # noqa: ARG002
        angle = 2 * torch.pi * torch.rand(batch, generator=rng, dtype=torch.float64)
        return Similarity(_rotation(angle))

    def tangent(self, n: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        return {"angle": ()}

    def near(self, at: Mapping[str, Tensor]) -> Similarity:
        """The rotation by `angle`, in radians."""
        return Similarity(_rotation(at["angle"]))

    def contains(self, g: Element, atol: float) -> bool:
        q = similar(g)
        if q is None or q.size != self.size or not Orthogonal().contains(q, atol):
            return False
        return bool((torch.linalg.det(q.matrix) > 0).all())

    def best(self, moments: PartMoments) -> Similarity:
        refuse_plain(moments)
        return Similarity(_matrix(_unit(_complex(total(moments).xy))))

    def reach(self, c: Float[Tensor, "*b n n"], plain: Float[Tensor, "*b n n"] | None = None) -> Float[Tensor, "*b"]:
        assert plain is None  # it has no permutation part
        return _complex(c.double()).abs()


class Rotary(Rotations):
    """Rotations of a plane times one positive scale: the complex numbers without 0.

    best: with z_x and z_y the complex cross-Grams of both parts, the least of p a² + r / a² − 2 |a z_x + z_y / a|,
    phase and scale in turns, from the scale that balances the norms, from 1 and from both limits, of which the least.
    """

    size: ClassVar[int | None] = 2
    below: ClassVar[tuple[str, ...]] = ("phase",)

    label = "phase, scale"

    def without_scaling(self) -> Phase:
        return Phase()

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Similarity:
        return Similarity(Phase().random(n, batch, rng).matrix, random_scales(batch, rng))

    def tangent(self, n: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        return {"angle": (), "log": ()}

    def near(self, at: Mapping[str, Tensor]) -> Similarity:
        """The rotation by `angle`, in radians, times the exponential of `log`."""
        return Similarity(_rotation(at["angle"]), at["log"].exp())

    def contains(self, g: Element, atol: float) -> bool:
        q = similar(g)
        return q is not None and Conformal().contains(q, atol) and Phase().contains(Similarity(q.matrix), atol)

    def best(self, moments: PartMoments) -> Similarity:
        refuse_plain(moments)
        like = next(iter(moments.values())).xy
        (cx, p, xx), (cy, r, yy) = (terms(moments.get(part), like) for part in ("primal", "dual"))
        zx, zy, start = _complex(cx), _complex(cy), balance(p, r, xx, yy)
        a = torch.stack([start, *(torch.full_like(start, other) for other in (1, LIMIT, 1 / LIMIT))])
        before = torch.full_like(a, torch.inf)
        for _ in range(ROUNDS):
            z = _unit(a * zx + zy / a)
            q, s = (z.conj() * zx).real, (z.conj() * zy).real
            a = best_scale(p.expand_as(q), q, r.expand_as(s), s)
            cost = scale_cost(a, p, q, r, s)
            if bool((before - cost <= RTOL * (p + r + xx + yy)).all()):
                break
            before = cost
        least = cost.argmin(0, keepdim=True)
        return Similarity(_matrix(z.gather(0, least)[0]), a.gather(0, least)[0])


def _complex(c: Float[Tensor, "*b 2 2"]) -> Tensor:
    """⟨R(θ), C⟩ is the real part of e^{−iθ} times this."""
    return torch.complex(c[..., 0, 0] + c[..., 1, 1], c[..., 1, 0] - c[..., 0, 1])


def _matrix(z: Tensor) -> Float[Tensor, "*b 2 2"]:
    """Multiplication by z."""
    return torch.stack((torch.stack((z.real, -z.imag), -1), torch.stack((z.imag, z.real), -1)), -2)


def _rotation(angle: Tensor) -> Float[Tensor, "*b 2 2"]:
    return _matrix(torch.polar(torch.ones_like(angle), angle))


def _unit(z: Tensor) -> Tensor:
    size = z.abs()
    return torch.where(size > 0, z / torch.where(size > 0, size, 1.0), torch.ones_like(z))
