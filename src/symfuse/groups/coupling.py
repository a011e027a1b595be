"""Couplings: each anchor unit a weighted mean of source units, by optimal transport (Singh & Jaggi 2020; Imfeld et al.
2024). No symmetry: units are averaged, so that the aligned model computes something else, and there is no inverse.

Of equal numbers of units with equal weights the transport without entropy is a permutation (Birkhoff), the one that
`Permutation` finds: it is a symmetry, and needs nothing of this file. Plans have an entropy, and doubly stochastic
matrices a gradient (Cuturi 2013).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.errors import OptionError, SymmetryError
from symfuse.groups.base import Dense, Element, Group, PartMoments, total
from symfuse.groups.monomial import Monomial, Permutation, random_index

# Of Sinkhorn's iterations: the most, and the error of a marginal, as a share of it, at which they end. What is left of
# it is rounded away.
ITERATIONS, ERROR = 1000, 1e-4
CENTRING = 20  # of prices
# Of iterations with a gradient: rows then sum to one, and columns nearly, at low temperatures within a few hundredths.
SWEEPS = 20
LEAST = 1e-9  # regularisation, below which exp(−C/ε) is nothing but zeros and ones


def plan(cost: Float[Tensor, "n n"], regularisation: float) -> Float[Tensor, "n n"]:
    """n times the plan of least cost with the entropy."""
    ot = require_pot()
    cost, device = cost.cpu(), cost.device  # POT is of the processor
    n, mean = len(cost), float(cost.mean())
    if mean == 0 or n == 1:  # all units are the same one
        return torch.full_like(cost, 1 / n, device=device)
    weights = cost.new_full((n,), 1 / n).numpy()
    hard, log = ot.emd(weights, weights, cost.numpy(), numItermax=10**9, log=True)
    left = _centred(cost - torch.as_tensor(log["u"])[:, None] - torch.as_tensor(log["v"]), torch.as_tensor(hard))
    soft = ot.sinkhorn(
        weights, weights, left.numpy(), regularisation * mean, numItermax=ITERATIONS, stopThr=ERROR / n**0.5, warn=False
    )
    return _rounded(n * torch.as_tensor(soft)).to(device)


def require_pot() -> Any:
    """POT, the package; OptionError without it."""
    try:
        import ot
    except ImportError as error:
        raise OptionError("optimal transport needs POT: pip install 'symfuse[ot]'") from error
    return ot


def _centred(left: Float[Tensor, "n n"], hard: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Costs less prices, 0 where the hard plan is and nowhere negative, by prices that lie in the middle of those that
    would do. A solver's lie at a corner, with zeros elsewhere too, which Sinkhorn leaves by steps of ε only."""
    index = hard.argmax(1)
    d = left[:, index].fill_diagonal_(torch.inf)
    t = left.new_zeros(len(left))
    for _ in range(CENTRING):  # each half of the way to the middle between what the others allow, which keeps all ≥ 0
        t = (t + ((d + t).amin(1) + (t[:, None] - d).amax(0)) / 2) / 2
    return (left - t[:, None] + t[torch.argsort(index)]).clamp_min(0)


def _rounded(plan: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """The nearest that is easily had whose rows and columns sum to one."""
    plan = plan / plan.sum(1, keepdim=True).clamp_min(1)
    plan = plan / plan.sum(0).clamp_min(1)
    rows, columns = 1 - plan.sum(1), 1 - plan.sum(0)
    left = rows.sum()
    return plan if left <= 0 else plan + torch.outer(rows, columns).clamp_min(0) / left


def doubly_stochastic(scores: Float[Tensor, "*b n n"], temperature: float) -> Float[Tensor, "*b n n"]:
    """exp((scores − u − v) / temperature), whose rows sum to one and columns nearly, by Sinkhorn's iterations."""
    log = scores / temperature
    for _ in range(SWEEPS):
        log = log - log.logsumexp(-1, keepdim=True)
        log = log - log.logsumexp(-2, keepdim=True)
    return (log - log.logsumexp(-1, keepdim=True)).exp()


@dataclass(frozen=True, eq=False)
class Coupling(Dense):
    """w → M w with M ≥ 0 whose rows sum to one: n times a transport plan, anchor units × source units.

    Its dual is itself: weights that read the units are transformed by the same map, W Mᵀ (Singh & Jaggi, Algorithm 1).
    For a permutation that is g⁻ᵀ; of anything else it is not. So is what it makes of gains of norms.
    """

    matrix: Float[Tensor, "*b n n"]

    def dual(self) -> Coupling:
        return self

    def forget(self) -> Coupling:
        return self

    def inverse(self) -> Coupling:
        raise SymmetryError(
            "a transport averages units, and nothing tells them apart again: it has no inverse. Match by a group "
            "(`emd` or `permutation` in the place of `sinkhorn`), or go the other way by matching the other way"
        )

    def __matmul__(self, other: Coupling) -> Coupling:
        return Coupling(self.matrix @ other.matrix)

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    def rebuild(self, tensors: Mapping[str, Tensor]) -> Coupling:
        return Coupling(tensors["matrix"])


def coupling(g: Element) -> Coupling:
    """A permutation as a coupling; SymmetryError for any other element of a group."""
    if isinstance(g, Coupling):
        return g
    if not Permutation().contains(g, 0.0):
        raise SymmetryError("a transport follows permutations only: signs, scales and rotations are not averaged")
    return Coupling(g.to_dense())


@dataclass(frozen=True)
class Sinkhorn(Group):
    """Transport with an entropy. Not a group, and in no table of them: there is no inverse. Named by `sinkhorn`.

    best: n times the plan T with marginals 1/n that minimises ⟨T, C⟩ − ε H(T), C_ij = |x_i − y_j|² (Cuturi 2013), and
    ε `regularisation` times the mean of C: towards 0 the assignment, towards ∞ all entries 1/n. C is taken less the
    prices of the plan without entropy, which makes no difference to T and leaves a 1 in each row of exp(−C/ε): it does
    not underflow, however small ε is. Rows and columns sum to one exactly (Altschuler et al. 2017, Algorithm 2).
    """

    regularisation: float = 0.05

    moments_dtype: ClassVar[torch.dtype] = torch.float64
    self_dual: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"transport (Sinkhorn, {self.regularisation:g})"

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Coupling:
        """The mean of three permutations."""
        several = [Monomial(random_index(n, batch, rng)).to_dense() for _ in range(3)]
        return Coupling(torch.stack(several).mean(0))

    def identity(self, n: int, batch: tuple[int, ...]) -> Coupling:
        return Coupling(torch.eye(n, dtype=torch.float64).expand(*batch, n, n))

    def contains(self, g: Element, atol: float) -> bool:
        if not isinstance(g, Coupling):
            return False
        rows = g.matrix.sum(-1)
        return bool((g.matrix >= -atol).all() and ((rows - 1).abs() <= atol * g.size).all())

    def best(self, moments: PartMoments) -> Coupling:
        m = total(moments)
        x, y, xy = (t.double() for t in (m.x_norms, m.y_norms, m.xy))
        costs = (x[..., :, None] + y[..., None, :] - 2 * xy).clamp_min(0)
        if not bool(costs.isfinite().all()):
            raise SymmetryError(
                f"{int((~costs.isfinite()).sum())} of {costs.numel()} costs of transport are not finite; look for NaN "
                "or infinity in the weights or statistics they come from"
            )
        flat = costs.reshape(-1, *costs.shape[-2:])
        return Coupling(torch.stack([plan(cost, self.regularisation) for cost in flat]).reshape(costs.shape))

    def reach(self, c: Tensor, plain: Tensor | None = None) -> Tensor:
        """As of permutations: pairs of heads are scored by what their units would gain unsoftened."""
        return Permutation().reach(c, plain)


def sinkhorn(name: str) -> Sinkhorn | None:
    """What "sinkhorn" stands for, or with its regularisation "sinkhorn:0.1"; None if the name is another.
    OptionError if what follows the colon is no positive number."""
    kind, sign, value = name.partition(":")
    if kind != "sinkhorn":
        return None
    require_pot()  # not first in a worker's thread
    if not sign:
        return Sinkhorn()
    try:
        regularisation = float(value)
    except ValueError:
        regularisation = -1
    if not LEAST <= regularisation < math.inf:
        raise OptionError(
            f"{name!r}: what follows the colon is the regularisation, at least {LEAST:g}; for less, take emd"
        )
    return Sinkhorn(regularisation)
