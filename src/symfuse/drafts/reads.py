"""Find which weights read each norm of a pre-norm stream: guessed from names, and tested by folding the gains into
them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from symfuse.architectures import ARCHITECTURES, Architecture
from symfuse.drafts.bench import Bench
from symfuse.drafts.draft import Draft, Trial
from symfuse.errors import SymfuseError
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import NormKind

Reads = Mapping[str, tuple[str, ...]]

# Which of two norms is applied before attention, where names tell.
_FIRST = re.compile(r"input|before|attn|attention\.|_1$|1$")
_SECOND = re.compile(r"post|after|mlp|ffn|final|feed|_2$|2$")


def with_reads(draft: Draft, bench: Bench) -> Draft:
    """The draft with `reads`, if all gains can be folded into the weights that read the norms; then the stream may be
    rotated.

    Not for classes that `transformers` does not build: a folded model is another checkpoint of the class.
    """
    if draft.groups.get("residual") is None or bench.foreign:
        return draft
    trial = None
    for kind, reads in itertools.product(_kinds(draft), _candidates(draft)):
        tried = replace(draft, reads=reads, norm=kind)
        error = _error(tried, bench)
        if error is None:
            continue
        new = Trial("residual, folded", "rotation", error, error <= bench.tolerance, f"norms: {kind}")
        if new.holds:
            return replace(tried, trials=(*draft.trials, new))
        trial = new if trial is None else min(trial, new, key=lambda one: one.error)
    return replace(draft, trials=(*draft.trials, *([trial] if trial else [])))


def _error(draft: Draft, bench: Bench) -> float | None:
    """The change by folding, or by a rotation after it, whichever is larger; None if the norms cannot be folded so."""
    with _declared(draft):
        try:
            folded = canonical(Model.of(bench.checkpoint), ("untie", "fold_norms"))
            error = bench.change(folded.checkpoint)
            if error <= bench.tolerance:
                rotation = replace(bench.random(folded.spec, {"residual"}, 4), shifts={})
                error = max(error, bench.change(rotation.on(folded), rotation))
        except (SymfuseError, ValueError):  # a norm that is not of the stream, or a reader that is no map
            return None
    return error


@contextmanager
def _declared(draft: Draft) -> Iterator[None]:
    """Register the family as in the draft, so that rewrites find its declaration."""
    name = draft.facts.model_type
    before = ARCHITECTURES.get(name)
    family = draft.family
    ARCHITECTURES[name] = Architecture(
        name, lambda c: family if c.tied == draft.facts.tied else replace(family, tied={}), tied=draft.facts.tied
    )
    try:
        yield
    finally:
        del ARCHITECTURES[name]
        if before is not None:
            ARCHITECTURES[name] = before


def _kinds(draft: Draft) -> tuple[NormKind, ...]:
    norms = [p for p in draft.facts.parts.values() if draft.facts.roles.get(p.module) == "norm"]
    return ("layer",) if any(p.kind == "bias" for p in norms) else ("rms", "layer", "rms+1")


def _candidates(draft: Draft) -> Iterator[Reads]:
    """The norms of layers, each with its readers, and the last one with the heads."""
    parts, roles = draft.facts.parts, draft.facts.roles
    texts = draft.layouts.tensors
    gains = [t for t, text in texts.items() if text == "|residual|" and roles.get(parts[t].module) == "norm"]
    readers = [t for t, text in texts.items() if "residual*" in text]
    inside = [t for t in readers if "{l}" in t]
    attention = [t for t in inside if any("attn" in word or "attention" in word for word in parts[t].words[:-1])]
    others = [t for t in inside if t not in attention]
    outside = [t for t in readers if "{l}" not in t]
    layered = [t for t in gains if "{l}" in t]
    last = [t for t in gains if "{l}" not in t and not re.search(r"embed", t)]

    def bare(names: list[str]) -> tuple[str, ...]:
        experts = range(max(1, draft.facts.templates.experts))
        each = (name.replace("{e}", str(e)) for name in names for e in experts if "{e}" in name or e == 0)
        return tuple(name.removeprefix(draft.prefix) for name in each)

    heads = (*draft.outputs, *bare(outside), *(n for n, text in draft.parts[2].items() if "residual*" in text))
    for final in last:
        end = {bare([final])[0]: tuple(dict.fromkeys(heads))}
        if len(layered) == 1:
            yield {bare(layered)[0]: bare(inside), **end}
        elif len(layered) == 2:
            named = sorted(layered, key=lambda t: (_SECOND.search(_leaf(t)) is not None, not _FIRST.search(_leaf(t))))
            for one, two in (named, named[::-1]):
                yield {bare([one])[0]: bare(attention), bare([two])[0]: bare(others), **end}


def _leaf(template: str) -> str:
    return template.removesuffix(".weight").rpartition(".")[2]
