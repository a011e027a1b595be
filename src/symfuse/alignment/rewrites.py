"""The rewrites of one model that the verb `rewrite` takes, by name: exact rewrites, rotations, and the canonical order.

A rotation or an order is an element of the model's own group on each axis, applied as an alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symfuse.alignment.alignment import Alignment
from symfuse.alignment.order import TIES, by_size, canonical_frame, canonical_order
from symfuse.errors import OptionError, SymmetryError
from symfuse.groups import Element
from symfuse.io import Checkpoint
from symfuse.messages import some, suggestion
from symfuse.model import Model
from symfuse.rewriting import REWRITES, applied
from symfuse.rewriting.residual import WITHOUT_ALL, WITHOUT_FOLDING
from symfuse.rewriting.rotations import KINDS, head_rotations, rotatable_streams, stream_rotations
from symfuse.spec import Instance

ROTATE, HEADS, ORDER, CANONICAL = "rotate", "heads", "order", "canonical"
FOLDED = ("untie", "fold_scales", "fold_norms")  # what makes a pre-norm stream rotatable
IDLE = {  # why a rewrite does nothing to some model
    "untie": "its head is not tied",
    "fold_scales": "it has no scales of layers",
    "fold_norms": "it has no gains of norms left",
    "centre": "its norms do not subtract the mean",
    "drop_gauges": "its norms put out a mean",
    "balance": "it has no pair of spaces that may be rescaled",
}
# Reads the matrix of a file.
Load = Callable[[str], Tensor]


@dataclass(frozen=True)
class Rewritten:
    """A model after rewrites. frame: the exact rewrites, those that others needed too. moves: those that are elements
    of its group. notes: what was done beside what was asked for, and what changed nothing."""

    model: Model
    frame: tuple[str, ...]
    moves: tuple[str, ...]
    notes: tuple[str, ...]


def rewrite(model: Model, rewrites: Sequence[str], seed: int, load: Load) -> Rewritten:
    """The model after the rewrites of these names, in whatever order: those of REWRITES; "rotate=hadamard",
    "rotate=random" or "rotate=FILE" (the residual streams, folded first); "heads=hadamard" or "heads=random"; "order"
    (units by size); "canonical" (folded, balanced, ordered and oriented).

    Raises OptionError for an unknown name, or one that is there twice; SymmetryError where the model does not allow it.
    """
    settings = parse(rewrites)
    frame = tuple(name for name in settings if name in REWRITES)
    model, changed = applied(model, frame)
    notes = [f"{name} changes nothing here: {IDLE[name]}" for name in frame if name not in changed]
    needed: tuple[str, ...] = ()
    if CANONICAL in settings or (ROTATE in settings and not rotatable_streams(model.spec)):
        name = CANONICAL if CANONICAL in settings else ROTATE
        model, needed = canonical_frame(model) if name == CANONICAL else _folded(model)
        if needed:
            notes.append(f"{name} needs {some(needed)}, which {'are' if len(needed) > 1 else 'is'} applied first")
    rng = torch.Generator().manual_seed(seed)
    for find in _finders(settings, load):
        alignment, more = find(model, rng)
        model = replace(model, checkpoint=alignment.on(model))
        notes += more
    moves = tuple(f"{name}={value}" if value else name for name, value in settings.items() if name not in REWRITES)
    return Rewritten(model, (*needed, *frame), moves, tuple(notes))


def _folded(model: Model) -> tuple[Model, tuple[str, ...]]:
    """The model with its norms folded, and the names of what that took."""
    try:
        return applied(model, FOLDED)
    except SymmetryError as error:
        why, out = str(error), f"leave {ROTATE!r} out"
        for advice in (WITHOUT_FOLDING, WITHOUT_ALL):
            why = why.replace(advice, out)
        raise SymmetryError(f"rotate needs norms without gains: {why}") from error


def parse(rewrites: Sequence[str]) -> dict[str, str]:
    """Name → value of each; OptionError for one that is unknown or there twice, and for two that exclude each other."""
    settings: dict[str, str] = {}
    words = [*REWRITES, ORDER, CANONICAL, *(f"{name}={kind}" for name in (ROTATE, HEADS) for kind in KINDS)]
    for word in rewrites:
        name, _, value = word.partition("=")
        if word not in words and not (name == ROTATE and value):
            known = [*words, f"{ROTATE}=FILE"]
            raise OptionError(f"no rewrite is called {word!r}{suggestion(word, known)}; there are {', '.join(known)}")
        if name in settings:
            raise OptionError(f"the rewrite {name!r} is named twice; once is enough")
        settings[name] = value
    if CANONICAL in settings and (undone := [name for name in (ROTATE, HEADS, ORDER) if name in settings]):
        raise OptionError(f"canonical is the same after {some(undone)}; leave one of them out")
    return settings


def spread(checkpoint: Checkpoint) -> dict[str, dict[str, float]]:
    """For each tensor of floating-point numbers: "max", its largest entry by size, and "kurtosis", the mean of fourth
    powers over the squared mean of squares (3 of a normal distribution, n where one of n entries is all)."""
    out = {}
    for name in checkpoint:
        if checkpoint.info(name).dtype.is_floating_point:
            tensor = checkpoint[name].double()
            squares = tensor.square().mean()
            kurtosis = float(tensor.pow(4).mean() / squares**2) if squares > 0 else 0.0
            out[name] = {"max": float(tensor.abs().max()) if tensor.numel() else 0.0, "kurtosis": kurtosis}
    return out


Finder = Callable[[Model, torch.Generator], tuple[Alignment, list[str]]]


def _finders(settings: Mapping[str, str], load: Load) -> Iterator[Finder]:
    """What finds each move, in the order in which they are made."""
    if how := settings.get(ROTATE):
        given = next((kind for kind in KINDS if kind == how), None) or load(how)
        yield lambda model, rng: _of(model, *stream_rotations(model, given, rng))
    if kind := next((kind for kind in KINDS if kind == settings.get(HEADS)), None):
        yield lambda model, rng: _of(model, *head_rotations(model, kind, rng))
    if ORDER in settings:
        yield lambda model, _: (by_size(model, model.spec.shown), [])
    if CANONICAL in settings:
        yield lambda model, _: _canonical(model)


def _of(model: Model, elements: Mapping[Instance, Element], notes: list[str]) -> tuple[Alignment, list[str]]:
    return Alignment(model.spec, elements), notes


def _canonical(model: Model) -> tuple[Alignment, list[str]]:
    order = canonical_order(model, model.spec.shown)
    notes = [f"{some(sorted(model.spec.shown))}: the model's outputs are there; left as it is"] * bool(model.spec.shown)
    if tied := [str(i) for i, sure in order.sure.items() if sure < TIES]:
        notes.append(f"{some(tied)}: units tie, so that another copy of this model may come out in another order")
    if order.loose:
        notes.append(f"{some(map(str, order.loose))}: no fixed axis reaches these, which may be oriented otherwise")
    return order.alignment, notes
