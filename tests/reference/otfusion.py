"""OT fusion (Singh & Jaggi 2020, arXiv 1910.05653, Algorithm 1) of transformers (Imfeld et al. 2024, arXiv
2310.05719): the source transported onto the anchor, to be averaged with it. On weights, without symfuse.

Layer by layer from the embeddings on: the units of one space are compared by the weights that write them, whose inputs
have been transported already; the map T, n times the plan of uniform marginals, is applied to these outputs, and Tᵀ to
the inputs of what reads them (W ← W Tᵀ, since diag(1/β) is n). Costs are squared distances. Norms are passed through.
"""

from __future__ import annotations

from collections.abc import Sequence

import ot
import spaces
import torch
from scipy.optimize import linear_sum_assignment
from spaces import Place, State
from torch import Tensor


def transport(
    source: State,
    anchor: State,
    kind: str,
    heads: int,
    *,
    solver: str = "emd",
    regularisation: float = 0.05,
    residual: str | None = None,
    attention: bool = True,
    ffn: bool = True,
    cost: str = "writers",
) -> dict[str, Tensor]:
    """The transported source state dict.

    kind: "bert", "vit" or "gpt2". heads: of the config; they are assigned one to one by the cost of the transport
    inside of them, queries with keys, and values; 1: features are transported across heads, as Imfeld et al. do, and
    then nothing keeps the function. solver: "emd" (hard) or "sinkhorn", with ε `regularisation` times the mean cost.
    residual: None: left as it is. "stream": a map for each point of the stream, the mean of that of the stream before
    and that of the branch which is added there (their averaging policy; skip connections are not transported). "one":
    the mean of these for the whole stream. cost: "writers", as published, or "all": everything that touches the units
    inside of a layer.
    """
    if solver not in ("emd", "sinkhorn") or cost not in ("writers", "all") or residual not in (None, "stream", "one"):
        raise ValueError(f"no such solver, cost or residual: {solver!r}, {cost!r}, {residual!r}")
    where = spaces.places(source, kind)
    fusion = _Fusion(source, anchor, where, None if solver == "emd" else regularisation, cost == "all")
    inner = [("qk", "v")] if attention else []
    points = fusion.run(heads, inner, ffn, [] if residual is None else None)
    if residual == "one":
        fusion = _Fusion(source, anchor, where, fusion.regularisation, fusion.all_costs)
        fusion.run(heads, inner, ffn, [torch.stack(points).mean(0)] * len(points))
    return spaces.retied(fusion.state, spaces.tied(source, kind))


class _Fusion:
    """A pass through the layers. regularisation: None for hard maps."""

    def __init__(
        self, source: State, anchor: State, where: Sequence[Place], regularisation: float | None, all_costs: bool
    ) -> None:
        self.state, self.anchor, self.where = dict(source), anchor, where
        self.regularisation, self.all_costs = regularisation, all_costs

    def run(self, heads: int, inner: Sequence[tuple[str, ...]], ffn: bool, stream: list[Tensor] | None) -> list[Tensor]:
        """The maps of the points of the stream. stream: these, if they are known; empty: none are applied."""
        last = max(place.point for place in self.where if place.point is not None)
        maps: list[Tensor] = []
        for point in range(last + 1):
            if point:
                layer, half = divmod(point - 1, 2)
                steps = ([("ffn",)] if ffn else []) if half else inner
                for step in steps:
                    self.move_heads([f"{layer}.{space}" for space in step], 1 if half else heads)
            here = [place for place in self.where if place.point == point]
            if stream is None:
                branch = self.plan(self.cost([place for place in here if place.role == "writes"]))[0]
                maps.append((maps[-1] + branch) / 2 if maps else branch)
            elif stream:
                maps.append(stream[point])
            if maps:
                self.state = spaces.moved(self.state, here, maps[-1])
        return maps

    def cost(self, where: Sequence[Place]) -> Tensor:
        """|anchor unit − source unit|², over all these places."""
        rows = [torch.cat([p.units(state) for p in where], 1) for state in (self.anchor, self.state)]
        return torch.cdist(rows[0], rows[1], compute_mode="donot_use_mm_for_euclid_dist").square()

    def plan(self, cost: Tensor) -> tuple[Tensor, float]:
        """n times the plan, anchor × source, and what it costs."""
        n = len(cost)
        weights = torch.full((n,), 1 / n, dtype=torch.float64).numpy()
        if self.regularisation is None:
            found = ot.emd(weights, weights, cost.numpy())
        else:
            strength = self.regularisation * float(cost.mean())
            found = ot.sinkhorn(
                weights,
                weights,
                cost.numpy(),
                strength,
                method="sinkhorn_log",
                numItermax=1000,
                stopThr=1e-8,
                warn=False,
            )
        plan = n * torch.as_tensor(found)
        return plan, float((plan * cost).sum())

    def move_heads(self, names: Sequence[str], heads: int) -> None:
        """Transport inside of heads, which are assigned to each other by its cost in all these spaces together."""
        totals = torch.zeros(heads, heads, dtype=torch.float64)
        plans: dict[tuple[str, int, int], Tensor] = {}
        for name in names:
            writers = [p for p in self.where if p.space == name and (self.all_costs or p.role == "writes")]
            cost = self.cost(writers)
            size = len(cost) // heads
            for i in range(heads):
                for j in range(heads):
                    block = cost[i * size : (i + 1) * size, j * size : (j + 1) * size].contiguous()
                    plans[name, i, j], value = self.plan(block)
                    totals[i, j] += value
        rows, columns = linear_sum_assignment(totals.numpy())
        for name in names:
            size = len(plans[name, 0, 0])
            whole = torch.zeros(heads * size, heads * size, dtype=torch.float64)
            for i, j in zip(rows, columns, strict=True):
                whole[i * size : (i + 1) * size, j * size : (j + 1) * size] = plans[name, i, j]
            self.state = spaces.moved(self.state, [p for p in self.where if p.space == name], whole)
