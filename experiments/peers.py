"""The published ways, derived anew from their papers in tests/reference, as ways of the studies of Theus et al. 2025:
Git Re-Basin (permutations from weights, or from activations) and GLMC's circuits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paths import of_curve
from study import Row
from ways import HEARD, Apart, Moved, Way, moved

import symfuse
from symfuse.evaluate import Curve, Point

sys.path.append(str(Path(__file__).parents[1] / "tests" / "reference"))
import circuits
import rebasin

POINTS = 11  # of a path between circuits
KINDS = {"ViTForImageClassification": "vit", "GPT2LMHeadModel": "gpt2", "BertForMaskedLM": "bert"}


def rebasin_weights(apart: Apart, _: Path) -> Moved:
    source, anchor = apart.models
    kind, heads = shape(apart)
    found = rebasin.nearest_weight_matching(dict(source.items()), dict(anchor.items()), kind, heads)
    return Moved((source.replace(tensors=found), anchor))


def rebasin_activations(apart: Apart, _: Path) -> Moved:
    source, anchor = apart.models
    modules = (symfuse.to_module(model) for model in apart.models)
    batches = apart.family.heard(HEARD)["data"]
    found = rebasin.activation_permutations(*modules, batches, *shape(apart), residual="all")
    return Moved((source.replace(tensors=rebasin.permute(dict(source.items()), shape(apart)[0], found)), anchor))


def shape(apart: Apart) -> tuple[str, int]:
    """What the references call the class, and its heads."""
    config = apart.models[0].config
    return KINDS[config["architectures"][0]], config.get("num_attention_heads") or config["n_head"]


def measured_in_circuits(apart: Apart, name: str, way: Way, split: Any) -> Row:
    """The path between the circuits of two models as a way moves them."""
    found, shape_ = moved(apart, name, way), shape(apart)
    ends = [circuits.to_circuits(dict(model.items()), *shape_) for model in reversed(found.models)]
    module, task = symfuse.to_module(found.models[1]), apart.family.task(split)
    points = []
    for number in range(POINTS):
        at = number / (POINTS - 1)
        inner = circuits.circuit_module(module, circuits.interpolate(*ends, at), *shape_)
        points.append(Point(at, task(inner.to(apart.config.device))))
    gap = sum(float((ends[0][key].double() - other.double()).square().sum()) for key, other in ends[1].items())
    row = of_curve(Curve("circuits", tuple(points), gap**0.5))
    return {**row, "seconds": found.about["seconds"]}


WAYS: dict[str, Way] = {
    "Git Re-Basin, weights": rebasin_weights,
    "Git Re-Basin, activations": rebasin_activations,
}
CIRCUITS = {f"{name}, circuits": name for name in ("plain", "weight matching", "learned orthogonal")}
NAMES = (*WAYS, *CIRCUITS)
