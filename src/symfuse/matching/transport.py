"""Fusion by optimal transport: a source is softly aligned with an anchor, to be averaged with it (Singh & Jaggi 2020,
arXiv 1910.05653; Imfeld et al. 2024, arXiv 2310.05719). Inexact.

The cost of a pair of units is their squared distance: of all their weights, those that write and those that read them
(in the papers only those that write them), or of their activations on the same inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from itertools import pairwise

import torch
from torch import Tensor, nn

from symfuse.alignment import Alignment
from symfuse.device import CPU
from symfuse.errors import OptionError
from symfuse.groups import Coupling, Element, Sinkhorn
from symfuse.groups.coupling import coupling
from symfuse.matching.problem import Problem
from symfuse.model import Model
from symfuse.spec import Instance, Spec
from symfuse.stats import weight_moments
from symfuse.stats.activations import Batch, magnitudes, moments_of, record
from symfuse.stats.taps import Tap, taps

# How the map at a point of the residual stream follows from that of the stream before it and that of the branch that is
# added there (the residual policies of Imfeld et al.).
POLICIES = ("branch", "mean", "weighted-scalar", "weighted-matrix")


def soften(problem: Problem, hard: Alignment, pool: Executor) -> Alignment:
    """Replace the permutations of axes that are to be transported by plans. Each plan is computed with all other axes
    aligned by `hard`: so soft plans of axes that meet do not blur each other, and without entropy the plans are the
    permutations.
    """
    spec, aligned = problem.spec, Model(hard.on(problem.source), problem.spec)

    def one(instance: Instance, group: Sinkhorn) -> Element:
        return group.best(weight_moments(spec, instance, problem.anchor.read, aligned.read, group)).to(CPU)

    soft = {i: group for i, group in problem.groups.items() if isinstance(group, Sinkhorn)}
    plans = dict(zip(soft, pool.map(one, soft, soft.values()), strict=True))
    return Alignment(spec, plans) @ hard


def along_the_stream(
    problem: Problem,
    anchor: nn.Module,
    source: nn.Module,
    batches: Sequence[Batch],
    elements: Mapping[Instance, Element],
    policy: str,
    kind: str,
) -> dict[Instance, Coupling]:
    """The map at each point of the residual stream. The first is taken from the elements, the next are M ← s M +
    (1 − s) B, where B is the map of the sublayer's output that is added there. The share s depends on the policy:

    "branch": 0. "mean": 1/2. "weighted-scalar": the mean |activation| of the anchor's stream over the sum of that and
    the branch's. "weighted-matrix": the same for each unit; then rows sum to one, and columns need not.
    """
    spec = problem.spec
    points = [i for i in problem.groups if i.axis.partition("_")[0] == "residual"]
    points.sort(key=lambda i: int(i.axis.partition("_")[2] or 0))
    if not points:
        raise OptionError(f"residual is {policy!r}, and the residual stream is not matched; name it among the axes")
    skips = {point: _skip(spec, anchor, point) for point in points[:-1]}
    writers = taps(spec, anchor, points[1:], written=True)
    branches = [tap for written in writers.values() for tap in written]
    recorded = record(spec, anchor, source, batches, branches)
    sizes: Mapping[Tap, Tensor] = {}
    if policy.startswith("weighted"):
        sizes = magnitudes(spec, anchor, batches, [*skips.values(), *branches])
    n = spec.axes[points[0].axis].size
    maps = {points[0]: coupling(elements.get(points[0], Sinkhorn().identity(n, ())))}
    for before, point in pairwise(points):
        group = problem.groups[point]
        added = {tap: recorded[tap] for tap in writers[point]}
        branch = coupling(group.best(moments_of(spec, point, added, group, kind))).matrix
        share = torch.tensor(0.0 if policy == "branch" else 0.5, dtype=torch.float64)
        if sizes:
            stream, own = sizes[skips[before]], torch.stack([sizes[tap] for tap in added]).sum(0)
            if policy == "weighted-scalar":
                stream, own = stream.mean(), own.mean()
            share = (stream / (stream + own)).nan_to_num(0.5)[..., None]  # of a unit that is always 0
        maps[point] = Coupling(share * maps[before].matrix + (1 - share) * branch)
    return maps


def _skip(spec: Spec, module: nn.Module, point: Instance) -> Tap:
    """The tap that records the stream at a point, before the norm of the next sublayer if there is one."""
    readers_of_stream = taps(spec, module, [point])[point]
    reader = min(readers_of_stream, key=lambda tap: not spec.tensors[tap.weight].index)  # a tied decoder is in no layer
    gain = next((gain for gain, readers in spec.reads.items() if reader.weight in readers), None)
    return reader if gain is None else Tap(gain, "in", spec.tensors[gain].layout)
