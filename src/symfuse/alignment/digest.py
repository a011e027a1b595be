"""The digest of a model up to its symmetries: a hash of its canonical form, by axis and layer.

A number is hashed only after rounding, and a number on the edge of two steps rounds either way; so few numbers are
taken of each part, and `Digest.margin` is the distance of the nearest from such an edge. The numbers are the norm of a
tensor's canonical form and inner products with fixed vectors on each axis; where an axis is ordered by the norms of its
units, the vector is a smooth function of the norm, so that two units of nearly one norm may change places.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symfuse.alignment.order import TIES, Order, canonical_frame, canonical_order
from symfuse.errors import SymmetryError
from symfuse.messages import shown, some
from symfuse.model import Model
from symfuse.rewriting.ties import declared_ties
from symfuse.spec import Spec, layer_of

PROBES = 2  # inner products of each tensor
STEP = 2e-3  # of rounding, of the share that one of n units has of the norm of all, 1/√n
NOTHING = 1e-9  # of the largest root mean square of a part's tensors: what is below it, is rounding


@dataclass(frozen=True)
class Digest:
    """The digest of one model. parts: by axis and layer ("ffn[3]"), the hash of all tensors of which that axis is the
    innermost; two models that share a part have equal weights there, up to symmetry. margin: how far the nearest number
    is from the edge of its step, in steps, at most ½: rounding that moves numbers by more may give another digest.
    sure: how far the canonical form is determined, the least of all axes, and `at` where. notes: what was folded, and
    axes that nothing fixed reaches."""

    name: str
    family: str
    hash: str
    parts: Mapping[str, str]
    margin: float
    sure: float
    at: str
    notes: tuple[str, ...] = ()

    __repr__, _repr_html_ = shown(lambda self: {"model": self.name, "hash": self.hash[:16], "margin": self.margin})

    def same(self, other: Digest) -> tuple[str, ...]:
        """The parts that both models have alike."""
        return tuple(part for part, own in self.parts.items() if other.parts.get(part) == own)

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        about = {"margin": self.margin, "sure": self.sure, "least_sure": self.at, "notes": list(self.notes)}
        return {"kind": "digest", "model": self.name, "family": self.family, "digest": self.hash} | {
            "parts": dict(self.parts), **about
        }  # fmt: skip


def digest(model: Model) -> Digest:
    """The digest; SymmetryError if eigenvalues, singular values or entries that orient an axis tie."""
    name = model.name
    model, frame = canonical_frame(model)
    order = canonical_order(model)
    tied = [str(i) for i, sure in order.sure.items() if i not in order.sizes and not sure >= TIES]  # NaN of zeros
    if tied:
        raise SymmetryError(
            f"{name}: {some(tied)}: values that orient these axes tie, so that the canonical form is not determined; "
            "such a model has symmetries of its own, or weights that were never trained"
        )
    parts = _numbers(model, order)
    steps = {part: [value / step for value in values] for part, (values, step) in parts.items()}
    hashes = {part: _hash([round(v) for v in values]) for part, values in steps.items()}
    margin = min((0.5 - abs(v - round(v)) for values in steps.values() for v in values), default=0.5)
    oriented = {str(i): sure for i, sure in order.sure.items() if i not in order.sizes}
    at = min(oriented, key=oriented.__getitem__, default="")
    notes = [f"{some(frame)} first"] if frame else []
    notes += [f"{some(map(str, order.loose))}: no fixed axis reaches these"] if order.loose else []
    whole = _hash([model.spec.family, sorted(model.spec.sizes.items()), sorted(hashes.items())])
    return Digest(name, model.spec.family, whole, hashes, margin, oriented.get(at, 1.0), at, tuple(notes))


def _hash(data: object) -> str:
    return sha256(json.dumps(data).encode()).hexdigest()[:32]


@dataclass
class _Part:
    """What is known of a part: of each tensor the norm, the root mean square and the inner products."""

    units: int = 1
    tensors: list[tuple[float, float, list[float]]] = field(default_factory=list)


def _numbers(model: Model, order: Order) -> dict[str, tuple[list[float], float]]:
    """The numbers of each part, and the step to which they are rounded."""
    spec = model.spec
    parts: dict[str, _Part] = {}
    base = order.alignment
    copied = set(declared_ties(model.checkpoint).values())  # nothing reads what an untied head is a copy of, but others
    for name, declared in spec.tensors.items():
        if name in spec.tied or (spec.file_name(name) in copied and not spec.touched[name]):
            continue
        linear = lru_cache(maxsize=4)(lambda n: base.move(n, model.read(n).double()))
        tensor = base.shift(name, linear(name), linear)
        axis = next(iter(spec.touched[name]), "fixed")
        layer = layer_of(declared.index)
        part = parts.setdefault(axis if layer is None else f"{axis}[{layer}]", _Part())
        norm = float(torch.linalg.vector_norm(tensor))
        if axis != "fixed":
            part.units = math.prod((*spec.batch(axis), spec.axes[axis].size))
        part.tensors.append((norm, norm / max(tensor.numel(), 1) ** 0.5, _sketch(spec, name, tensor, order)))
    return {key: (_summed(part), STEP / part.units**0.5) for key, part in parts.items()}


def _summed(part: _Part) -> list[float]:
    """The logarithm of the norms of a part's tensors, summed, and their inner products, each relative to its norm."""
    largest = max(rms for _, rms, _ in part.tensors)
    kept = [(norm, products) for norm, rms, products in part.tensors if rms > NOTHING * largest]
    products = [sum(one[k] / norm for norm, one in kept) for k in range(PROBES)]
    return [sum(math.log(norm) for norm, _ in kept), *products]


def _sketch(spec: Spec, name: str, tensor: Tensor, order: Order) -> list[float]:
    """Inner products of a tensor with products of vectors, one on each of its axes."""
    out = [0.0] * PROBES
    for segment in spec.segments(name, tensor):
        names = [atom.name for atom in segment.atoms]
        for k in range(PROBES):
            view = segment.view
            for dim, atom in enumerate(segment.atoms):
                axis = atom.name
                sizes = None if axis.isdigit() else order.sizes.get(spec.instance(axis, spec.tensors[name].index))
                if sizes is None:
                    weights, at = _probe(view.shape[dim], k), [dim]
                else:
                    weights, at = _smooth(sizes, k), [*map(names.index, spec.batch_axes(axis)), dim]
                shape = [view.shape[i] if i in at else 1 for i in range(view.ndim)]
                view = view * weights.permute([*np.argsort(at)]).reshape(shape)
            out[k] += float(view.sum())
    return out


def _smooth(sizes: Tensor, k: int) -> Tensor:
    """A smooth function of norms, relative to their mean."""
    return 2**0.5 * torch.cos((2 + k) * sizes / sizes.mean().clamp_min(1e-300) + k)


@lru_cache(maxsize=256)
def _probe(n: int, k: int) -> Tensor:
    """A fixed vector of n numbers (numpy keeps the stream of RandomState for ever)."""
    return torch.from_numpy(np.random.RandomState(1000 + k).randn(n))
