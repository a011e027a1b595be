"""Learned matching: of a source with an anchor, or of several models with each other."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as Folder
from typing import Any

import torch

from symfuse.alignment import Alignment
from symfuse.device import CPU
from symfuse.errors import OptionError
from symfuse.evaluation import Batch, open_space
from symfuse.evaluation.task import describe
from symfuse.evaluation.weights import name_of
from symfuse.groups import Coupling, Group, Permutation
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.io.target import overlap
from symfuse.matching import match_by_activations, match_models, match_universe
from symfuse.matching.axes import choose_groups
from symfuse.matching.learned.latents import Latents, reorders
from symfuse.matching.learned.loop import descend, summary
from symfuse.matching.learned.path import Path, point_of
from symfuse.matching.learned.settings import Learning
from symfuse.matching.problem import Problem, problem_of, steps_of
from symfuse.model import TRANSPORT, Model
from symfuse.spec import Instance


def match_learned(
    source: Model,
    anchor: Model,
    learning: Learning,
    *,
    batches: Iterable[Batch] | None = None,
    start: Alignment | None = None,
    **options: Any,
) -> Alignment:
    """The alignment that moves `source` towards `anchor`, learned from `start`: by default the matching from weights,
    or with `batches` from activations.

    options: of `match_models` or `match_by_activations`. The elements of each axis are learned in the largest group
    that may act on it (inside of heads, all invertible maps), unless `groups` names another. The result is not worse
    than its start on the validation data, and exact, except with soft permutations (the variant "transport").
    """
    if start is None:
        start = _start(source, anchor, batches, options, learning)
    return learn([source, anchor], [start, None], learning, **options)[0]


def learn_universe(
    models: Sequence[Model], learning: Learning, *, batches: Iterable[Batch] | None = None, **options: Any
) -> tuple[Alignment, ...]:
    """Alignments that move all models: two towards each other ("dual", Li & Shen 2026), more of them so that the loss
    is low on the simplex between them. Learning starts from `match_universe`; for two models from the first matched to
    the second; with `batches` from all others matched to the last by activations.

    The same element applied to all models changes no output between them either. So moving all models reaches no lower
    barrier than moving all but one; only the optimisation differs.
    """
    if len(models) == 2 or batches is not None:
        data = None if batches is None else list(batches)
        starts = [_start(model, models[-1], data, options, learning) for model in models[:-1]]
        starts.append(Alignment(starts[0].spec, {}, frame=starts[0].frame, variants=starts[0].variants))
    else:
        starts = list(match_universe(models, **options).alignments)
    return learn(models, starts, learning, **options)


def learn(
    models: Sequence[Model], starts: Sequence[Alignment | None], learning: Learning, **options: Any
) -> tuple[Alignment, ...]:
    """Alignments of the models, each learned from its start. None marks an anchor, whose alignment is its frame
    alone."""
    if options.get("variants"):
        raise OptionError(
            f"variants {', '.join(options['variants'])}: what is learned keeps the function; leave them out, or learn "
            'soft permutations (permutations="soft")'
        )
    _require_apart(learning, models)
    point_of(learning.keep, len(models))
    first = next((s for s in starts if s is not None), None)
    if first is None:
        raise OptionError("learning: every model is an anchor, so that there is nothing to learn; name a source")
    problem = _problem(models[0], models[-1], first, options)
    groups = _groups(problem, options, learning)
    frame = Alignment(first.spec, {}, frame=first.frame, variants=first.variants)
    initial = [frame if start is None else start for start in starts]
    if learning.permutations == "soft":
        _require_unscaled(initial, groups)
    with tempfile.TemporaryDirectory(prefix="symfuse-") as scratch, torch.random.fork_rng(devices=[]):
        sources = [g(model.checkpoint) for g, model in zip(initial, models, strict=True)]
        names = [model.name for model in models]
        space = open_space(sources, names, learning.task, Folder(scratch), learning.build)
        how = (learning.permutations, _DTYPE, learning.device)
        biases = bool(options.get("biases", True))
        latents = [None if s is None else Latents.of(first.spec, groups, *how, biases=biases) for s in starts]
        if not any(one is not None and one.leaves for one in latents):
            raise OptionError(
                f"learning: nothing that moves {', '.join(sorted(_names(groups)))} can be learned while permutations "
                'are kept; name more axes, or learn them too (permutations="straight-through")'
            )
        starting_models = [Model(source, first.spec) for source in sources]
        about: dict[str, Any] = {"groups": {str(i): group.name for i, group in groups.items()}, "biases": biases}
        teacher, taught = _teacher(learning, names, Folder(scratch) / "teacher")
        about |= taught
        if learning.journal is not None:  # as the digests read all weights
            about |= {"models": [_digest(g, model) for g, model in zip(initial, models, strict=True)]}
        run = descend(Path(space, starting_models, latents, learning.device), learning, about, teacher)
    validation = learning.validation
    record = {
        **summary(learning),
        **taught,
        "data": describe(learning.task),
        "validation": "a fifth of the data" if validation is None else describe(validation),
        "stopped_at": run.step,
        "ends": run.ends,
        "history": [
            {"step": step, "loss": None if math.isnan(loss) else loss, "barrier": barrier, "decides": measured}
            for step, loss, barrier, measured in run.history
        ],
    }
    out = []
    alone = starts.index(None) if starts.count(None) == 1 else None
    for i, (start, learned) in enumerate(zip(initial, latents, strict=True)):
        total = start if learned is None else _then(learned, start)
        other = alone if alone not in (None, i) else 0 if i == len(models) - 1 else -1
        pair = _problem(models[i], models[other], first, options)
        pair = replace(pair, groups=groups, variants=total.variants)
        steps = [] if learned is None else steps_of(pair, total)
        origin: dict[str, Any] = {"start": dict(start.provenance), "learning": record}
        others = [m.name for j, m in enumerate(models) if j != i and latents[j] is not None]
        origin |= {"together_with": others} if others else {}
        out.append(pair.alignment(total, "learned", {"groups": _names(groups)}, steps, **origin))
    return tuple(out)


_DTYPE = torch.float32


def _start(
    source: Model, anchor: Model, batches: Iterable[Batch] | None, options: Mapping[str, Any], learning: Learning
) -> Alignment:
    if batches is None:
        return match_models(source, anchor, **options)
    return match_by_activations(source, anchor, batches, **{"build": learning.build, **options})


def _teacher(
    learning: Learning, names: Sequence[str], scratch: Folder
) -> tuple[int | torch.nn.Module | None, dict[str, Any]]:
    """The teacher as a module or the number of a model, and its record for the provenance."""
    teacher = learning.teacher
    if teacher is None:
        return None, {}
    if isinstance(teacher, int):
        if not 0 <= teacher < len(names):
            raise OptionError(f"learning: teacher {teacher}: there are models 0 to {len(names) - 1}")
        return teacher, {"teacher": names[teacher]}
    source = teacher if isinstance(teacher, torch.nn.Module | Checkpoint) else open_checkpoint(teacher)
    name = name_of(source)
    space = open_space([source], [name], learning.task, scratch, learning.build, device=learning.device)
    return space.set([1.0]), {"teacher": name}


def _then(learned: Latents, start: Alignment) -> Alignment:
    """The start followed by the learned elements, without those that are the identity."""
    elements, soft = learned.elements(), learned.permutations == "soft"
    shifts, gauges = (
        {name: t.detach().cpu().double() for name, t in vectors.items() if bool(t.any())}
        for vectors in (learned.shifts(), learned.gauges)
    )
    variants = (TRANSPORT,) if soft and TRANSPORT not in start.variants else ()
    start = replace(start, variants=(*start.variants, *variants))
    total = Alignment(start.spec, elements, shifts, variants=start.variants, gauges=gauges) @ start
    return replace(total, elements={i: g for i, g in total.elements.items() if not g.is_identity()})


def _require_unscaled(starts: Sequence[Alignment], groups: Mapping[Instance, Group]) -> None:
    """OptionError if soft permutations are learned on an axis whose start has scales or signs."""
    for start in starts:
        for instance, group in groups.items():
            element = start.elements.get(instance)
            kept = element is None or isinstance(element, Coupling) or Permutation().contains(element, 0.0)
            if group == Permutation() and not kept:
                raise OptionError(
                    f"learning: {instance.axis} starts with scales or signs, and soft permutations follow permutations "
                    f'only; start from those, groups={{"{instance.axis}": "permutation"}}, or learn otherwise'
                )


def _names(groups: Mapping[Instance, Group]) -> dict[str, str]:
    """Axis → the name of its group."""
    return {instance.axis: group.name for instance, group in groups.items()}


def _require_apart(learning: Learning, models: Sequence[Model]) -> None:
    """OptionError if the journal lies in the folder of a model, as inputs are never written to."""
    folders = [folder for model in models for folder in model.checkpoint.sources]
    if learning.journal is not None and (
        inside := [f for f in folders if overlap(Folder(learning.journal), f) in ("is", "lies inside")]
    ):
        raise OptionError(f"learning: the journal {learning.journal} is in {inside[0]}, an input; name another place")


def _digest(start: Alignment, model: Model) -> dict[str, Any]:
    """The identity of a model and of its start, for the journal."""
    weights, tensors = hashlib.sha256(), model.checkpoint.on(CPU)
    for name in sorted(tensors):
        weights.update(name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    initial = hashlib.sha256(start.to_bytes())
    return {"name": model.name, "start": initial.hexdigest(), "weights": weights.hexdigest()}


def _problem(source: Model, anchor: Model, first: Alignment, options: Mapping[str, Any]) -> Problem:
    """The instances to match, from the options of the learning and the frame of the first start."""
    own = {key: options[key] for key in ("layers", "groups", "variants") if key in options}
    problem_options: dict[str, Any] = {"axes": "auto", "layers": None, "scaling": True} | own
    problem_options |= {key: options[key] for key in ("axes", "scaling") if options.get(key) is not None}
    return problem_of(source, anchor, **problem_options, frame=first.frame)


def _groups(problem: Problem, options: Mapping[str, Any], learning: Learning) -> dict[Instance, Group]:
    """The group that each instance is learned in."""
    asked = choose_groups(options.get("groups") or {}, problem.spec)
    by_instance: dict[Instance, Group] = {}
    for instance, group in problem.hard.items():
        axis = problem.spec.axes[instance.axis]
        assert axis.group is not None
        if instance.axis not in asked and options.get("scaling") is not False:
            group = axis.group
        if learning.permutations == "soft" and reorders(group, axis.size):
            group = Permutation()
        by_instance[instance] = group
    return by_instance
