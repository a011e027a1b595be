"""The peers of `symfuse rebase`: planted permutations are found, and the mask keeps what descends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

sys.path.append(str(Path(__file__).parent))
import rebasin
import spaces
import transfusion
from peer_cases import HEADS, KINDS, tiny


@pytest.mark.parametrize("kind", KINDS)
def test_planted_permutations_are_found(kind: str) -> None:
    """Of heads, and of units inside of heads, one for queries, keys and values; of neurons; not of the stream."""
    state = {name: t.double() for name, t in tiny(kind, 0, KINDS[kind]).state_dict().items()}
    rng, planted = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    where = rebasin.by_space(state, kind)
    for step in rebasin.chosen_spaces(where, False, True, True):
        size = len(where[step[0]][0].units(state))
        if len(step) == 1:
            planted[step[0]] = torch.randperm(size, generator=rng)
            continue
        per = size // HEADS
        order = torch.randperm(HEADS, generator=rng)
        one = torch.cat([torch.randperm(per, generator=rng) + int(j) * per for j in order])
        planted |= dict.fromkeys(step, one)
    anchor = rebasin.permute(state, kind, planted)
    found = transfusion.moved(state, kind, transfusion.transfusion(state, anchor, kind, HEADS))
    assert spaces.distance(found, anchor, kind) < 1e-9
    assert spaces.distance(state, anchor, kind) > 1
    tau = {
        name: torch.randn(t.shape, generator=rng, dtype=t.dtype) for name, t in state.items() if t.is_floating_point()
    }
    steps = transfusion.transfusion(state, anchor, kind, HEADS)
    there = transfusion.moved({n: t + tau.get(n, 0) for n, t in state.items()}, kind, steps)
    alone = transfusion.moved({n: tau.get(n, t) for n, t in state.items()}, kind, steps)
    assert_close({n: there[n] - found[n] for n in tau}, {n: alone[n] for n in tau})


def test_the_mask_keeps_what_most_samples_descend() -> None:
    tau = {"w": torch.tensor([1.0, -2.0, 3.0, -4.0]), "b": torch.tensor([5.0])}
    gradients = [{"w": torch.tensor(row)} for row in ([-1.0, 1, 1, -9], [-1, 1, 1, 1], [9, 1, 1, -1])]
    kept = transfusion.gradfix(tau, gradients)
    assert kept["w"].tolist() == [1.0, -2.0, 0.0, 0.0]
    assert kept["b"].tolist() == [5.0]
