"""Match a narrow model to a wide one: expand it, align it, and choose its copies again after the alignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from symfuse.alignment import Alignment
from symfuse.errors import SymmetryError
from symfuse.matching import match_models
from symfuse.matching.problem import rotatable
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.rewriting.ties import tied_heads
from symfuse.spec import Instance
from symfuse.widths.copies import Pair, match_copies
from symfuse.widths.expansion import expand, widened
from symfuse.widths.maps import Duplication


def match_widths(narrow: Model, wide: Model, **options: Any) -> tuple[Model, Alignment]:
    """The first two of `match_alike`."""
    expanded, alignment, _ = match_alike(narrow, wide, **options)
    return expanded, alignment


def match_alike(
    narrow: Model,
    wide: Model,
    *,
    axes: str | tuple[str, ...] = "all",
    frame: Sequence[str] | None = None,
    rounds: int = 1,
    even: bool = False,
    **options: Any,
) -> tuple[Model, Alignment, Callable[[Model], Model]]:
    """The narrow model in the shape of the wide one, the alignment of that with the wide one, from the weights, and
    what expands another model of the narrow one's shape alike.

    It is expanded evenly and matched (`match_models`, with these axes and options). Then, `rounds` times, the copies of
    neurons and heads are chosen again after the alignment of the stream (`match_copies`; even: with equal shares), and
    the result is matched again from there; a round that increases the distance is discarded. frame: the rewrites before
    matching, by default those of the rotatable frame where both models allow it; a tied head is untied where its stream
    grows. The average of `alignment(expanded.checkpoint)` and `alignment.in_frame(wide.checkpoint)` is then that of two
    models of one shape. Raises as `expand` and `match_models` do.
    """
    frame = _frame(narrow, wide) if frame is None else tuple(frame)
    small, large = canonical(narrow, frame), canonical(wide, frame)
    expanded = expand(small, large)
    if not frame and bool(tied_heads(large)) != bool(tied_heads(expanded)):
        frame = ("untie",)
        small, large = canonical(narrow, frame), canonical(wide, frame)
        expanded = expand(small, large)
    maps, chosen = widened(small, large), dict[Instance, Duplication]()
    best = expanded, match_models(expanded, large, axes=axes, frame=frame, **options)
    distance = _distance(*best, large)
    for _ in range(rounds):
        copies = match_copies(Pair(small, large, maps, best[1]), even=even)
        if not copies:
            break
        other = expand(small, large, copies)
        initial = _shared(other, best[1])
        aligned = Model(initial.on(other), other.spec)
        again = match_models(aligned, large, axes=axes, frame=frame, **options)
        candidate = other, replace(again @ initial, provenance=again.provenance)
        new_distance = _distance(*candidate, large)
        if new_distance >= distance:
            break
        best, distance, maps, chosen = candidate, new_distance, {**maps, **copies}, dict(copies)
    kept = frame
    return *best, lambda other: expand(canonical(other, kept), large, chosen)


def _frame(narrow: Model, wide: Model) -> tuple[str, ...]:
    """The rotatable frame, if both models can be rewritten to it."""
    frame = rotatable(narrow.spec)
    if not narrow.spec.reads:
        return ()
    try:
        for model in (narrow, wide):
            canonical(model, frame)
    except SymmetryError:
        return ()
    return frame


def _shared(expanded: Model, alignment: Alignment) -> Alignment:
    """The part of an alignment that acts on axes that all layers share: the stream."""
    spec = expanded.spec
    kept = {i: g for i, g in alignment.elements.items() if spec.is_shared(i.axis) and not spec.batch_axes(i.axis)}
    return Alignment(spec, kept, frame=alignment.frame)


def _distance(expanded: Model, alignment: Alignment, wide: Model) -> float:
    """The squared distance over the tensors that both models have."""
    aligned = Model(alignment.on(expanded), expanded.spec)
    names = [name for name in expanded.spec.tensors if expanded.spec.shares(name, wide.spec)]
    return sum(float((aligned.read(name).double() - wide.read(name).double()).square().sum()) for name in names)
