"""The published ways, derived anew from their papers in tests/reference, as ways of the studies of Theus et al. 2025:
Git Re-Basin (permutations from weights, or from activations) and GLMC's circuits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matchings import aligned_by, circuits, rebasin, shape
from paths import of_curve
from study import Row
from ways import RECORDED, Apart, Outcome, Way, outcome_of

import symfuse
from symfuse.evaluation import Curve, Point

POINTS = 11  # of a path between circuits


def rebasin_weights(apart: Apart, _: Path) -> Outcome:
    source, anchor = apart.models
    return Outcome((aligned_by("Git Re-Basin", source, anchor), anchor))


def rebasin_activations(apart: Apart, _: Path) -> Outcome:
    source, anchor = apart.models
    modules = (symfuse.to_module(model) for model in apart.models)
    batches = apart.family.for_activations(RECORDED)["data"]
    permutations = rebasin.activation_permutations(*modules, batches, *shape(source), residual="all")
    return Outcome(
        (source.replace(tensors=rebasin.permute(dict(source.items()), shape(source)[0], permutations)), anchor)
    )


def measured_in_circuits(apart: Apart, name: str, way: Way, split: Any) -> Row:
    """The path between the circuits of two models as a way moves them."""
    outcome, shape_ = outcome_of(apart, name, way), shape(apart.models[0])
    ends = [circuits.to_circuits(dict(model.items()), *shape_) for model in reversed(outcome.models)]
    module, task = symfuse.to_module(outcome.models[1]), apart.family.task(split)
    points = []
    for number in range(POINTS):
        at = number / (POINTS - 1)
        inner = circuits.circuit_module(module, circuits.interpolate(*ends, at), *shape_)
        points.append(Point(at, task(inner.to(apart.config.device))))
    gap = sum(float((ends[0][key].double() - other.double()).square().sum()) for key, other in ends[1].items())
    row = of_curve(Curve("circuits", tuple(points), gap**0.5))
    return {**row, "seconds": outcome.about["seconds"]}


WAYS: dict[str, Way] = {
    "Git Re-Basin, weights": rebasin_weights,
    "Git Re-Basin, activations": rebasin_activations,
}
CIRCUITS = {f"{name}, circuits": name for name in ("plain", "weight matching", "learned orthogonal")}
NAMES = (*WAYS, *CIRCUITS)
