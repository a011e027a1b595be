"""What rounding the weights of a model costs, as it is and rewritten: rotated, its units in another order. Each form
computes the same before it is rounded, so that only the basis differs in which it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.alignment.rewrites import rewrite
from symfuse.errors import CheckpointError, OptionError, SymmetryError
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.modules import live
from symfuse.rewriting.computed import Read, computed
from symfuse.spec import Spec, Variance
from symfuse.verification.outputs import Outputs, random_inputs, run

# The rewrites of each form.
FORMS: Mapping[str, tuple[str, ...]] = {
    "as it is": (),
    "folded": ("untie", "fold_scales", "fold_norms"),
    "rotated": ("rotate=hadamard",),
    "heads rotated": ("heads=hadamard",),
    "rotated, heads too": ("rotate=hadamard", "heads=hadamard"),
    "units by size": ("order",),
    "canonical": ("canonical",),
}
BITS, GROUPS = (4, 8), (128, 64, 0)


@dataclass(frozen=True)
class Rounding:
    """form: of FORMS. bits: of each weight. group: entries that share a scale, 0 for a whole row. weights: the norm of
    what rounding changes in the weights, relative to theirs. outputs: the same of the model's outputs, relative to
    those of the model that is not rounded."""

    form: str
    bits: int
    group: int
    weights: float
    outputs: float


def rounded(w: Float[Tensor, "*rows k"], bits: int, group: int) -> Float[Tensor, "*rows k"]:
    """The nearest multiples of a scale, for each `group` entries of a row (the last may be shorter; 0: of the whole
    row), symmetric: the largest entry by size is 2^(bits − 1) − 1 steps."""
    most = 2 ** (bits - 1) - 1
    parts = []
    for part in torch.split(w, group or max(w.shape[-1], 1), dim=-1):
        step = part.abs().amax(-1, keepdim=True) / most
        parts.append(torch.where(step > 0, (part / torch.where(step > 0, step, 1.0)).round() * step, part))
    return torch.cat(parts, -1)


def rounding_of(
    model: Model,
    *,
    forms: Mapping[str, Sequence[str]] = FORMS,
    bits: Sequence[int] = BITS,
    groups: Sequence[int] = GROUPS,
    outputs: Callable[[Checkpoint], Outputs] | None = None,
    seed: int = 0,
) -> tuple[list[Rounding], list[str]]:
    """The errors of every form that the model allows, and notes of those that it does not.

    Rounded are the weights of linear maps between spaces, without heads and embeddings. outputs: what the model
    computes; by default the real class in float32, on random inputs. CheckpointError if that is zero or not finite.
    """
    outputs = outputs or _on_random_inputs(model.checkpoint)
    exact = outputs(model.checkpoint)
    if not 0 < _squared(exact) < math.inf:
        raise CheckpointError(
            f"{model.name}: on random inputs all its outputs are zero, or some are not finite, so that no error "
            "relative to them is defined; look at its weights (symfuse check)"
        )
    rows: list[Rounding] = []
    notes = []
    for form, words in forms.items():
        try:
            new = rewrite(model, words, seed, _no_file).model
        except SymmetryError as error:
            notes.append(f"{form}: {error}")
            continue
        values = {name: new.read(name) for name in linear_maps(new.spec)}
        size = sum(float(w.square().sum()) for w in values.values())
        for count in bits:
            for group in groups:
                low = {name: _in_rows(new.spec, name, w, count, group) for name, w in values.items()}
                lost = sum(float((low[name] - w).square().sum()) for name, w in values.items())
                found = outputs(_with(new, low))
                rows.append(
                    Rounding(form, count, group, (lost / size) ** 0.5 if size else 0.0, _distance(exact, found))
                )
    return rows, notes


def linear_maps(spec: Spec) -> Iterator[str]:
    """The weights that read a space of the model, but for heads."""
    for name, declared in spec.tensors.items():
        reads = any(atom.variance is Variance.DUAL for atom in declared.layout.atoms)
        if reads and len(declared.layout.dims) > 1 and name not in spec.heads and name not in spec.tied:
            yield name


def _in_rows(spec: Spec, name: str, w: Tensor, bits: int, group: int) -> Tensor:
    """Rounded in rows along what it reads: the last dimension, or the one before it, as GPT-2 stores it."""
    reads = [i for i, part in enumerate(spec.tensors[name].layout.dims) if str(part).strip("()").endswith("*")]
    dim = reads[-1] if reads else w.ndim - 1
    return rounded(w.movedim(dim, -1), bits, group).movedim(-1, dim)


def _with(model: Model, values: Mapping[str, Tensor]) -> Checkpoint:
    def held(name: str) -> Callable[[Read], Tensor]:
        return lambda _: values[name]

    return computed(model, {name: held(name) for name in values}).checkpoint


def _on_random_inputs(checkpoint: Checkpoint) -> Callable[[Checkpoint], Outputs]:
    module = live(checkpoint, torch.float32)
    inputs = random_inputs(module, checkpoint.config)
    return lambda one: run(live(one, torch.float32), inputs)


def _distance(exact: Outputs, found: Outputs) -> float:
    """The norm of the difference of all outputs, relative to that of the exact ones."""
    gaps = sum(float((found[name].double() - value.double()).square().sum()) for name, value in exact.items())
    return float((gaps / _squared(exact)) ** 0.5)


def _squared(outputs: Outputs) -> float:
    return sum(float(value.double().square().sum()) for value in outputs.values())


def _no_file(name: str) -> Tensor:
    raise OptionError(f"rotate={name}: a form of the table is rotated by hadamard or random")
