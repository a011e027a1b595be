"""Two published ways to move a task vector τ = FT − A onto a base B that was trained apart, derived anew from the
papers and from what their code does. Without symfuse.

TransFusion (Rinaldi et al. 2025, arXiv 2505.22697; github.com/aimagelab/TransFusion, WeightMatcher): permutations found
by weight matching, coordinate descent over the stream, the heads and the neurons. Heads are assigned at least cost

    D[i, j] = Σ over W in {W_q, W_k, W_v, W_o} of ‖σ(W_B of head i) − σ(W_A of head j)‖₂,    σ: the singular values,

which no invertible map inside of a head that keeps lengths changes, and then the units of each pair of heads by their
inner products, one permutation for queries, keys and values. Here the stream has one permutation, as function and
residual connections demand; theirs has one for each block and corrects the skip connections by what is between them.

GradFix (Rinaldi et al. 2025, arXiv 2510.09658, equation 4 and its vote; github.com/fillo-rinaldi/GradFix): the entries
of τ that have the sign of the descent on few labelled samples of B, by a majority of the samples:

    τ'ᵢ = τᵢ if sign(τᵢ) = sign(Σ over samples of sign(−∂L/∂θᵢ at B)), else 0.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import torch
from rebasin import Permutations, assign, by_space, chosen_spaces, gram, permute
from scipy.optimize import linear_sum_assignment
from spaces import Place, State
from torch import Tensor


def transfusion(
    source: State, anchor: State, kind: str, heads: int, *, seed: int = 0, sweeps: int = 20
) -> list[Permutations]:
    """The permutations that move the source onto the anchor, to be applied one after the other (`moved`)."""
    state, where = dict(source), by_space(source, kind)
    steps, order, found = chosen_spaces(where, True, True, True), random.Random(seed), list[Permutations]()
    for _ in range(sweeps):
        order.shuffle(steps)
        changed = False
        for step in steps:
            if len(step) > 1:
                one = _heads(anchor, state, [p for name in step for p in where[name]], heads)
                best: Permutations = dict.fromkeys(step, one)
            else:
                best = {step[0]: assign(gram(anchor, state, where[step[0]]))[0]}
            if any(bool((index != torch.arange(len(index))).any()) for index in best.values()):
                changed = True
                found.append(best)
                state = permute(state, kind, best)
        if not changed:
            break
    return found


def moved(state: State, kind: str, permutations: Iterable[Permutations]) -> dict[str, Tensor]:
    """A model or a task vector, permuted."""
    out = dict(state)
    for one in permutations:
        out = permute(out, kind, one)
    return out


def _heads(anchor: State, source: State, places: Sequence[Place], heads: int) -> Tensor:
    """Of all units of a layer's heads: heads by their singular values, then units inside of each pair."""
    weights = [place for place in places if place.name.endswith("weight")]
    pairs = [(place.units(anchor), place.units(source)) for place in weights]
    by_head = [tuple(w.reshape(heads, -1, w.shape[-1]).double() for w in pair) for pair in pairs]
    spectra = [tuple(map(torch.linalg.svdvals, pair)) for pair in by_head]
    cost = sum((torch.cdist(a, b) for a, b in spectra), start=torch.zeros(heads, heads, dtype=torch.float64))
    order = linear_sum_assignment(cost.numpy())[1].tolist()
    size = by_head[0][0].shape[1]
    inside = [
        assign(sum((a[i] @ b[j].T for a, b in by_head), start=torch.zeros(size, size).double()))[0]
        for i, j in enumerate(order)
    ]
    return torch.cat([index + j * size for index, j in zip(inside, order, strict=True)])


def gradfix(tau: Mapping[str, Tensor], gradients: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The entries of a task vector that descend, by a vote of the gradients of single samples."""
    votes: dict[str, Tensor] = {}
    for gradient in gradients:
        for name, value in gradient.items():
            votes[name] = votes.get(name, torch.zeros_like(value)) - value.sign()
    return {
        name: torch.where(votes[name].sign() == t.sign(), t, 0.0) if name in votes else t for name, t in tau.items()
    }
