"""Optimal transport: plans with an entropy, and doubly stochastic matrices with a gradient (Cuturi 2013)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.errors import OptionError

# Of Sinkhorn's iterations: the most, and the error of a marginal, as a share of it, at which they end. What is left of
# it is rounded away.
ITERATIONS, ERROR = 1000, 1e-4
CENTRING = 20  # of prices
# Of iterations with a gradient: rows then sum to one, and columns nearly, at low temperatures within a few hundredths.
SWEEPS = 20


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
