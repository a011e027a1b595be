"""Planted cases: a model, in the frame of all its axes, moved by random elements of all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

import torch

from contract.tiny import Case, case, real
from symfuse.alignment import Alignment, random_alignment
from symfuse.io import Checkpoint
from symfuse.matching import match_models
from symfuse.matching.problem import rotatable
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.verification import Outputs, run

EVERYTHING = "attention,ffn,scan,heads,residual,pooler,head,experts,projection"


@dataclass(frozen=True)
class Planted:
    """case: the anchor; home: in the frame. moved: the source, the anchor (with noise) in the frame, then moved. own:
    the squared distance that the noise alone makes, in the frame. axes: those that are moved, None: all."""

    case: Case
    frame: tuple[str, ...]
    home: Model
    moved: Checkpoint
    own: float
    axes: Collection[str] | None

    def match(self, axes: str = EVERYTHING, **options: object) -> Alignment:
        anchor = Model.of(self.case.checkpoint)
        return match_models(Model.of(self.moved), anchor, axes=axes, frame=self.frame, threads=1, **options)  # type: ignore[arg-type]

    def left(self, alignment: Alignment) -> float:
        """The squared distance of the moved source to the anchor, in the frame."""
        return squared(alignment(self.moved), self.home.checkpoint)


def frame_of(model: Model) -> tuple[str, ...]:
    """The frame of all axes: of a pre-norm model with a head the one in which its residual stream may be rotated."""
    outputs = {reader for readers in model.spec.reads.values() for reader in readers} & model.spec.outputs.keys()
    return rotatable(model.spec) if model.spec.reads and not outputs else ()


def squared(a: Checkpoint, b: Checkpoint) -> float:
    names = [name for name in b if name in a]
    return sum(float((a.read(name).double() - b.read(name).double()).square().sum()) for name in names)


def size(checkpoint: Checkpoint) -> float:
    return sum(float(checkpoint.read(name).double().square().sum()) for name in checkpoint)


def noisy(checkpoint: Checkpoint, share: float, seed: int = 0) -> Checkpoint:
    """Every weight with Gaussian noise of a share of the standard deviation of its tensor."""
    rng = torch.Generator().manual_seed(seed)
    with_noise = {
        name: t + share * t.std(correction=0) * torch.randn(t.shape, generator=rng, dtype=t.dtype)
        for name, t in checkpoint.items()
    }
    return checkpoint.replace(tensors=with_noise)


def kept(checkpoint: Checkpoint) -> Checkpoint:
    """The same in memory, so that nothing is moved again each time that it is read."""
    return checkpoint.replace(tensors=dict(checkpoint))


@cache
def planted(
    label: str,
    noise: float = 0.0,
    seed: int = 3,
    axes: Collection[str] | None = None,
    frame: tuple[str, ...] | None = None,
) -> Planted:
    """frame: by default that of `frame_of`."""
    found = case(label)
    original = Model.of(found.checkpoint)
    frame = frame_of(original) if frame is None else frame
    home = Model.of(kept(canonical(original, frame).checkpoint)) if frame else original
    home = Model(home.checkpoint, canonical(original, frame).spec)
    source = home
    if noise:
        shaken = canonical(Model.of(noisy(found.checkpoint, noise)), frame)
        source = Model(kept(shaken.checkpoint), shaken.spec)
    moved = kept(random_alignment(home.spec, seed, axes).on(source))
    return Planted(found, frame, home, moved, squared(source.checkpoint, home.checkpoint), axes)


def runner(found: Case) -> Callable[[Checkpoint], Outputs] | None:
    """How `prove` is to run a model that symfuse has no live class of."""
    if found.checkpoint.config["model_type"] != "sceptr":
        return None
    return lambda checkpoint: run(real(checkpoint), found.inputs)
