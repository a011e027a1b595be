"""Find which choices and groups hold: for each axis from the largest that names, shapes and config suggest, down to
none; and which weights read each norm of a pre-norm stream: guessed from names, and tested by folding the gains into
them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from symfuse.alignment import Alignment
from symfuse.architectures import ARCHITECTURES
from symfuse.architectures.blocks import neurons
from symfuse.architectures.own import own
from symfuse.drafts.bench import Bench
from symfuse.drafts.draft import Draft, Trial
from symfuse.drafts.facts import Facts
from symfuse.drafts.layouts import Choice, Layouts
from symfuse.errors import LayoutError, SpecError, SymfuseError
from symfuse.groups import (
    Centred,
    Group,
    Invertible,
    Orthogonal,
    Permutation,
    Phase,
    Rotary,
    Sign,
    Signed,
    SignedMonomial,
)
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import NormKind, Shift, parse

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act", "afn")
# One step of a ladder: the choice, the groups of some axes, and the choice in words.
Step = tuple[Choice, dict[str, Group | None], str]
Reads = Mapping[str, tuple[str, ...]]

# Which of two norms is applied before attention, where names tell.
_FIRST = re.compile(r"input|before|attn|attention\.|_1$|1$")
_SECOND = re.compile(r"post|after|mlp|ffn|final|feed|_2$|2$")


def settled(facts: Facts, bench: Bench | None) -> Draft:
    """The draft of which every group holds on the bench; without a bench, the first guess: the groups that names and
    config allow."""
    draft = _climbed(facts, bench)
    loud = None if bench is None or not draft.verified else bench.louder()
    if bench is None or loud is None:
        return draft
    spec = draft.spec(bench.checkpoint)
    if loud.error(spec, bench.random(spec, None, 2)) <= loud.tolerance:
        return draft
    bench.loud = loud  # something is clipped, which the first weights do not reach
    return _climbed(facts, bench)


def _climbed(facts: Facts, bench: Bench | None) -> Draft:
    draft = Draft(facts, Choice(), {})
    for steps in (_neurons, _values, _queries, _heads, _residual, _outer, _experts):
        for ladder in steps(draft):
            draft = _climb(draft, ladder, bench)
    return _shifted(draft, bench)


def _climb(draft: Draft, ladder: Sequence[Step], bench: Bench | None) -> Draft:
    """The draft after the first step that holds; if none does, no group acts on these axes."""
    if not ladder:
        return draft
    if bench is None:
        choice, groups, _ = ladder[0]
        return replace(draft, choice=choice, groups={**draft.groups, **groups})
    failed: dict[tuple[str, str], Trial] = {}
    for choice, groups, how in ladder:
        tried = replace(draft, choice=choice, groups={**draft.groups, **groups})
        trial = _trial(tried, groups, how, bench)
        if trial is not None and trial.holds:
            return replace(tried, trials=(*draft.trials, *failed.values(), trial))
        if trial is not None:  # of several orders, the one with the least error
            key = (trial.group, "" if "as " in how else how)
            failed[key] = min(trial, failed.get(key, trial), key=lambda one: one.error)
    draft = replace(draft, trials=(*draft.trials, *failed.values()))
    axes = {axis: None for _, groups, _ in ladder for axis in groups}
    return replace(draft, groups={**draft.groups, **axes})


def _trial(draft: Draft, groups: dict[str, Group | None], how: str, bench: Bench) -> Trial | None:
    """The effect of random elements of these groups; None if the model has no such axis, or the choice is
    impossible."""
    try:
        spec = draft.spec(bench.checkpoint)
    except (LayoutError, SpecError):
        return None
    axes = set(groups) & {instance.axis for instance in spec.movable}
    if not axes:
        return None
    words = ", ".join(dict.fromkeys(g.label for axis in sorted(axes) if (g := groups[axis]) is not None))
    alignment = replace(bench.random(spec, axes, 1), shifts={})
    if all(element.is_identity() for element in alignment.elements.values()):
        return None  # there is only one of it
    error = bench.error(spec, alignment)
    holds = error <= bench.tolerance
    if holds and not bench.notices(spec, alignment):
        return Trial(", ".join(sorted(axes)), words, error, False, "the outputs do not depend on it")
    return Trial(", ".join(sorted(axes)), words, error, holds, how)


# -- the ladders --


def _neurons(draft: Draft) -> Iterator[list[Step]]:
    configs = (draft.facts.config, draft.facts.traced.config)
    activations = [config[key] for config in configs for key in ACTIVATIONS if isinstance(config.get(key), str)]
    for axis, block in draft.layouts.axes.neurons.items():
        ways = range(0 if not block.gated else 3 if block.fused else 2)
        gates = [replace(draft.choice, gates={**draft.choice.gates, axis: way}) for way in ways]
        words = ("gate first", "gate second", "gate and up alternate")
        ladder: list[Step] = [(c, {axis: SignedMonomial()}, words[i]) for i, c in enumerate(gates[:2])]
        if not block.gated:
            with suppress(SpecError):  # an activation that is not known
                ladder.append((draft.choice, {axis: neurons(activations[0] if activations else "relu")}, ""))
            gates = [draft.choice]
        ladder += [(c, {axis: Permutation()}, words[i] if block.gated else "") for i, c in enumerate(gates)]
        yield ladder


def _values(draft: Draft) -> Iterator[list[Step]]:
    """Values, and with them the order in which a fused projection has queries, keys and values."""
    if draft.facts.head is None:
        return
    orders = Layouts(draft.facts, draft.choice).orders
    yield [
        (replace(draft.choice, order=i), {"v": group}, text and f"as {text}")
        for group in (Invertible(), Signed(), Permutation())
        for i, text in enumerate(orders)
    ]


def _queries(draft: Draft) -> Iterator[list[Step]]:
    """Queries and keys: free, or as rotary positions leave them; in any order that leaves values where they are."""
    facts, choice = draft.facts, draft.choice
    if facts.head is None or not {"k", "qkv"} & set(facts.roles.values()):
        return
    normed = "q_norm" in facts.roles.values() or "k_norm" in facts.roles.values()
    free: list[tuple[str, Group]] = [] if normed else [("whole", Invertible())]
    turned: list[tuple[str, Group]] = [(place, Rotary()) for place in ("halves", "neighbours") if not normed]
    small: list[tuple[str, Group]] = [("whole", Orthogonal())] if not normed else []
    small += [(place, Phase()) for place in ("halves", "neighbours")]  # behind norms without gains
    small += [("whole", Signed())] if not normed else []
    small += [(place, Sign()) for place in ("halves", "neighbours", "whole")]
    rungs = [*turned, *free, *small] if facts.turns else [*free, *turned, *small]
    ladder: list[Step] = []
    for place, group in rungs:
        for order in draft.layouts.with_values_there():
            rest: Group = (
                Sign() if isinstance(group, Sign) else Orthogonal() if isinstance(group, Phase) else Invertible()
            )
            groups: dict[str, Group | None] = {"qk": group} if place == "whole" else {"c": group, "p": rest}
            how = "" if place == "whole" else f"rotary, {place}"
            ladder.append((replace(choice, order=order, place=place), groups, how))
    yield ladder


def _heads(draft: Draft) -> Iterator[list[Step]]:
    for axis in ("h", "kv", "q"):
        if axis in draft.axes:
            yield [(draft.choice, {axis: Permutation()}, "")]


def _experts(draft: Draft) -> Iterator[list[Step]]:
    if "e" in draft.axes and not draft.facts.templates.experts:  # in one tensor: those in tensors of their own stay
        yield [(draft.choice, {"e": Permutation()}, "")]


def _residual(draft: Draft) -> Iterator[list[Step]]:
    """The stream, and with it what a head reads: the stream, a pooler, or its own transform."""
    facts = draft.facts
    norms = [
        p for p in facts.parts.values() if facts.roles.get(p.module) == "norm" and p.shape == (facts.hidden.value,)
    ]
    biased = any(p.kind == "bias" for p in norms)
    groups: list[Group] = [Permutation()] if biased else [Signed(), Permutation()]
    if not norms:
        groups = [Orthogonal(), Centred(), *groups]
    known = draft.layouts.axes.sizes if "head" in facts.roles.values() else ()
    sources = [*(axis for axis in ("lm", "pool") if axis in known), "residual"]
    yield [
        (replace(draft.choice, source=source), {"residual": group}, f"heads read {source}" if len(sources) > 1 else "")
        for group in groups
        for source in sources
    ]


def _outer(draft: Draft) -> Iterator[list[Step]]:
    for axis in ("pool", "lm", "embedding"):
        if axis in draft.axes:
            groups: tuple[Group, ...] = (Permutation(),) if axis == "embedding" else (Signed(), Permutation())
            yield [(draft.choice, {axis: group}, "") for group in groups]


# -- biases, and all at once --


def _shifted(draft: Draft, bench: Bench | None) -> Draft:
    """The draft with the biases that may be translated, one kind after the other; whether all of it holds at once."""
    if bench is None:
        return draft
    for rule in _rules(draft):
        tried = replace(draft, shifts=(*draft.shifts, rule))
        try:
            spec = replace(draft, shifts=(rule,)).spec(bench.checkpoint)
            alignment = Alignment(spec, {}, bench.random(spec, None, 1).shifts)
            if not alignment.shifts:
                continue
            error = bench.error(spec, alignment)
        except (LayoutError, SpecError):
            continue
        holds = error <= bench.tolerance
        words = "keys" if rule.into is None else "values"
        trial = Trial(f"biases of {words}", "translation", error, holds)
        draft = replace(tried if holds else draft, trials=(*draft.trials, trial))
    spec = draft.spec(bench.checkpoint)
    errors = [bench.error(spec, bench.random(spec, None, seed)) for seed in (2, 3)]
    holds = max(errors) <= bench.tolerance and bool(spec.movable)
    trial = Trial("all at once", "all of these", max(errors), holds)
    reason = f"run as the real class with random weights, in {str(bench.dtype).removeprefix('torch.')}"
    if not holds:
        reason = "all groups at once change the outputs" if spec.movable else "no symmetry was found"
    untouched = tuple(_untouched(draft, bench)) if holds else ()
    return replace(draft, trials=(*draft.trials, trial), verified=holds, reason=reason, untouched=untouched)


def _untouched(draft: Draft, bench: Bench) -> Iterator[str]:
    """Templates of tensors on which the outputs do not depend, except biases that may have any value."""
    free = {draft.prefix + rule.bias for rule in draft.shifts if rule.into is None}
    for template, text in draft.layouts.tensors.items():
        transformed = any(draft.groups.get(axis) is not None for axis in parse(text).names)
        if transformed and template not in free and template not in draft.facts.ties and not bench.depends_on(template):
            yield template


def _rules(draft: Draft) -> Iterator[Shift]:
    """Translations of key biases that no position turns, and of value biases into that of the output."""
    facts = draft.facts
    at: dict[tuple[str | None, str], str] = {}  # by role and kind
    for name, p in facts.parts.items():
        weight = facts.weight_of(p) if p.kind == "bias" else p
        at.setdefault((facts.roles.get(weight.module) if weight else None, p.kind), name.removeprefix(draft.prefix))
    key, value = (at.get((role, "bias"), at.get(("qkv", "bias"))) for role in "kv")
    if key and draft.groups.get("qk") is not None:
        yield Shift(key, "qk*")
    if key and draft.choice.place != "whole" and draft.layouts.axes.rest:
        yield Shift(key, "p*")
    out = at.get(("o", "weight")), at.get(("o", "bias"))
    if value and all(out) and draft.groups.get("v") is not None:
        yield Shift(value, "v", *out)


def with_reads(draft: Draft, bench: Bench) -> Draft:
    """The draft with `reads`, if all gains can be folded into the weights that read the norms; then the stream may be
    rotated."""
    if draft.groups.get("residual") is None:
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
    with _declared(draft, bench):
        try:
            folded = canonical(Model.of(bench.checkpoint), ("untie", "fold_scales", "fold_norms"))
            error = bench.change(folded.checkpoint)
            if error <= bench.tolerance:
                rotation = replace(bench.random(folded.spec, {"residual"}, 4), shifts={})
                error = max(error, bench.change(rotation.on(folded), rotation))
        except (SymfuseError, ValueError):  # a norm that is not of the stream, or a reader that is no map
            return None
    return error


@contextmanager
def _declared(draft: Draft, bench: Bench) -> Iterator[None]:
    """Register the family as in the draft, so that rewrites find its declaration."""
    name = draft.facts.model_type
    before = ARCHITECTURES.get(name)
    ARCHITECTURES[name] = own(name, draft.family, tied=draft.facts.tied, build=bench.build)
    try:
        yield
    finally:
        del ARCHITECTURES[name]
        if before is not None:
            ARCHITECTURES[name] = before


def _kinds(draft: Draft) -> tuple[NormKind, ...]:
    norms = [p for p in draft.facts.parts.values() if draft.facts.roles.get(p.module) == "norm"]
    return ("layer", "layer+1") if any(p.kind == "bias" for p in norms) else ("rms", "layer", "rms+1")


def _candidates(draft: Draft) -> Iterator[Reads]:
    """By names, which know other classes of the family too, and as a run shows it, which is first where there are
    none."""
    shown = {
        norm.removeprefix(draft.prefix): tuple(name.removeprefix(draft.prefix) for name in readers)
        for norm, readers in draft.facts.traced.reads.items()
    }
    own = [shown] if shown else []
    named = _by_names(draft)
    return itertools.chain(named, own) if draft.facts.class_name else itertools.chain(own, named)


def _by_names(draft: Draft) -> Iterator[Reads]:
    """The norms of layers, each with its readers by their names, and the last one with the heads."""
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
