"""Models that were trained apart, and the ways in which studies of Theus et al. 2025 move them towards each other."""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import corpora
import torch
from config import Config
from families import Family, Seed, held
from study import commit

import symfuse
from symfuse.alignment import Alignment
from symfuse.demo.packages import cache, publishing
from symfuse.evaluation import barrier
from symfuse.evaluation.tasks.base import Predicting
from symfuse.groups import Monomial
from symfuse.io import Checkpoint
from symfuse.matching.learned import Learning, learn_universe
from symfuse.matching.problem import ROTATABLE
from symfuse.model import Model

VERSION = 2  # of what is kept in the cache folder
SEED = 0
BATCHES = 600  # of training data, to learn on
RECORDED = 32  # of them, to take activations from
VALIDATED = 512  # images or windows of the part "match" by which learning stops
OPTIONS = ("steps", "rate", "distil", "batches", "heard")  # of learning


@dataclass(frozen=True)
class Outcome:
    """Models as they are connected. about: how they were led there, in JSON's types."""

    models: tuple[Checkpoint, ...]
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Apart:
    """Models that are to be connected: of a family of a config, by their seeds; the last is the anchor.

    options: OPTIONS among others: of learning its steps, rate, share of distillation, number of batches, and whether it
    starts from activations. narrow: the family of the first, if that is of another width. seed: of learning, which
    decides the order of the data and the points of the path.
    """

    config: Config
    name: str
    seeds: tuple[Seed, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    narrow: str | None = None
    seed: int = SEED

    @functools.cached_property
    def family(self) -> Family:
        return self.config.family(self.name)

    @functools.cached_property
    def models(self) -> tuple[Checkpoint, ...]:
        """As they were trained."""
        first = self.family if self.narrow is None else self.config.family(self.narrow)
        return first.model(self.seeds[0]), *map(self.family.model, self.seeds[1:])

    @property
    def learned_on(self) -> Predicting:
        return self.family.training(self.options.get("batches", BATCHES))

    def learning(self, journal: Path, **own: Any) -> Learning:
        options = {key: self.options[key] for key in OPTIONS[:3] if key in self.options} | own
        validation = first(self.family.task("match"), VALIDATED)
        options |= {"build": self.family.build, "device": self.config.device, "journal": journal, "progress": say}
        return Learning(self.learned_on, validation, seed=self.seed, **options)

    def file(self, way: str) -> Path:
        """Of what is kept of a way, without its ending: by the models, options and data."""
        sources = [str(source) for model in self.models for source in model.sources]
        options = {key: self.options.get(key) for key in OPTIONS}
        digest = corpora.digest([sources, options, self.config.families[self.name]])
        name = f"{self.narrow or self.name} {'-'.join(map(str, self.seeds))} {way}".replace(" ", "_")
        name += f"_{self.seed}" if self.seed != SEED else ""
        return cache() / f"connect-{VERSION}" / f"{name}-{digest}"


Way = Callable[[Apart, Path], Outcome]  # with a journal, by which a learning that was stopped goes on


def say(progress: Any) -> None:
    print(f"step {progress.step}: loss {progress.loss:.4f}, barrier {progress.barrier:.4f}", flush=True)


def outcome_of(apart: Apart, name: str, way: Way) -> Outcome:
    """The models as a way moves them. about: the seconds of the processor that it took, beside what it says itself.

    What is learned is kept, and learned once: who else asks for it meanwhile waits. A stopped learning goes on; its
    seconds are then of the rest alone.
    """
    start, folder = time.process_time(), apart.file(name)
    journal = folder.with_suffix(".journal")
    if not name.startswith("learned"):
        outcome = way(apart, journal)
        return replace(outcome, about={**outcome.about, "seconds": round(time.process_time() - start, 2)})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with publishing(folder) as scratch:
                outcome = way(apart, journal)
                for number, model in enumerate(outcome.models):
                    model.save(scratch / str(number))
                seconds = round(time.process_time() - start, 2)
                about = {**outcome.about, "seconds": seconds, "learned by": commit()}
                (scratch / "about.json").write_text(json.dumps(about), "utf-8")
    models = tuple(symfuse.open(folder / str(number)) for number in range(len(apart.models)))
    return Outcome(models, json.loads((folder / "about.json").read_text("utf-8")))


def labelled_by(task: Predicting, apart: Apart) -> Predicting:
    """The task with labels drawn, once, from what the models predict in the mean: no label of the data is used.

    The loss is then, up to the draw, the cross entropy to those predictions."""
    build = apart.family.build or symfuse.to_module
    modules = [build(model) for model in apart.models]
    rng, batches = torch.Generator().manual_seed(SEED), []
    with torch.inference_mode():
        for batch in task.batches:
            mean = torch.stack([task.predicted(module, batch)[0].softmax(-1) for module in modules]).mean(0).cpu()
            drawn = torch.multinomial(mean.flatten(0, -2), 1, generator=rng).reshape(mean.shape[:-1])
            labels = batch["labels"].clone()
            labels[..., labels.shape[-1] - drawn.shape[-1] :] = drawn  # of texts all but the first token
            batches.append({**batch, "labels": labels})
    return type(task)(batches, f"{task.source}, labels as models say")


def first(task: Predicting, count: int) -> Predicting:
    """As many batches as have `count` rows together; one at least."""
    rows = itertools.accumulate(len(batch["labels"]) for batch in task.batches)
    kept = [batch for batch, total in zip(task.batches, rows, strict=True) if total <= count]
    return type(task)(kept or task.batches[:1], task.source)


def plain(apart: Apart, _: Path) -> Outcome:
    return Outcome(apart.models)


def plain_in_frame(apart: Apart, _: Path) -> Outcome:
    """As the models are, in the parametrisation in which the others move them."""
    frame = Alignment(symfuse.declare(apart.models[0]), {}, frame=ROTATABLE)
    return Outcome(tuple(map(frame.in_frame, apart.models)))


def matched(*steps: Mapping[str, Any]) -> Way:
    """One matching after the other, each from where the last one led; from activations where a step says so."""

    def way(apart: Apart, _: Path) -> Outcome:
        source, anchor = apart.models
        for step in steps:
            options = dict(step)
            data = apart.family.for_activations(RECORDED) if options.pop("activations", False) else {}
            alignment = symfuse.match(source, to=anchor, **data, **options)
            source, anchor = (held(model) for model in (alignment(source), alignment.in_frame(anchor)))
        return Outcome((source, anchor))

    return way


def best_without_labels(apart: Apart, journal: Path) -> Outcome:
    """Of several the one with the least barrier where labels are drawn from what the models say of the inputs."""
    task = apart.learned_on
    unlabelled = labelled_by(type(task)(task.batches[:RECORDED], task.source), apart)
    tried = {name: FREE[name](apart, journal) for name in CANDIDATES}
    paths = {name: (outcome.models[0], outcome.models[1]) for name, outcome in tried.items()}
    curves = barrier(paths, unlabelled, points=5, refine=0, build=apart.family.build).curves
    best = min(curves, key=lambda name: curves[name].barrier)
    return replace(tried[best], about={"chosen": best, "barriers": {n: c.barrier for n, c in curves.items()}})


def learned(*, dual: bool = False, learning: Mapping[str, Any] | None = None, **options: Any) -> Way:
    """All axes, from what matching finds of the weights, or of activations. learning: other than its defaults."""

    def way(apart: Apart, journal: Path) -> Outcome:
        source, anchor = apart.models
        learn = apart.learning(journal, **(learning or {}))
        data = apart.family.for_activations(RECORDED) if apart.options.get("heard") else {}
        if dual:
            both = symfuse.align([source, anchor], anchor="universe", axes="all", learn=learn, **options, **data)
            return Outcome(tuple(both.checkpoints), learning_record(both.alignments[0]))
        alignment = symfuse.match(source, to=anchor, axes="all", learn=learn, **options, **data)
        about = learning_record(alignment)
        if learn.permutations != "kept" and not data:
            about |= {"kept places": places_kept(symfuse.match(source, to=anchor, axes="all", **options), alignment)}
        return Outcome((alignment(source), alignment.in_frame(anchor)), about)

    return way


def without_gauges(apart: Apart, journal: Path) -> Outcome:
    """Learned dual, of models declared without the freedom of what reads a norm."""
    models = [Model.of(model) for model in apart.models]
    bare = [replace(model, spec=replace(model.spec, gauges={})) for model in models]
    data = apart.family.for_activations(RECORDED)
    alignments = learn_universe(bare, apart.learning(journal), batches=data.pop("data"), axes="all", **data)
    return Outcome(
        tuple(g(model.checkpoint) for g, model in zip(alignments, models, strict=True)), learning_record(alignments[0])
    )


def learning_record(alignment: Alignment | None) -> dict[str, Any]:
    """What was told to learning, where it stopped, and its history."""
    assert alignment is not None
    kept = {key: value for key, value in alignment.provenance["learning"].items() if key not in ("data", "validation")}
    return {"learning": kept}


def places_kept(before: Alignment, after: Alignment) -> float:
    """The share of neurons of feed-forward blocks to which two alignments give the same place."""
    same = count = 0
    for instance in before.spec.movable:
        if instance.axis == "ffn":
            one, other = (places(alignment, instance) for alignment in (before, after))
            same, count = same + int((one == other).sum()), count + len(one)
    return same / count


def places(alignment: Alignment, instance: Any) -> torch.Tensor:
    """Where the units of an axis come from, whatever their scales."""
    element = alignment.elements.get(instance)
    assert element is None or isinstance(element, Monomial)
    return torch.arange(alignment.spec.axes[instance.axis].size) if element is None else element.index.flatten()


PERMUTED: dict[str, Any] = {"groups": {"residual": "permutation", "attention": "none"}, "frame": ()}
ALL: dict[str, Any] = {"axes": "all"}
HEARD_ALL = ALL | {"activations": True}
STREAM = {"axes": ("residual",)}
HEARD_STREAM = STREAM | {"activations": True}
INSIDE = {"axes": ("attention", "heads", "ffn")}
INVERTIBLE: dict[str, Any] = {"groups": {"attention": "invertible"}}
STRAIGHT = {"permutations": "straight-through"}
DISTILLED = {"distil": 0.5, "steps": 4000}

# Ways without labels: from activations, from weights, or from one after the other.
FREE: dict[str, Way] = {
    "activations": matched(HEARD_ALL),
    "activations, invertible": matched(HEARD_ALL | INVERTIBLE),
    "weights": matched(ALL),
    "weights, invertible": matched(ALL | INVERTIBLE),
    "activations, then weights": matched(HEARD_ALL, ALL),
    "weights, then activations": matched(ALL, HEARD_ALL),
    "stream from activations, inside from weights": matched(HEARD_STREAM, INSIDE),
    "stream from activations, inside from weights, invertible": matched(HEARD_STREAM, INSIDE | INVERTIBLE),
    "the same, then the stream and inside from weights": matched(HEARD_STREAM, INSIDE, STREAM, INSIDE | INVERTIBLE),
    "stream from the first activations, inside from weights": matched(HEARD_STREAM | {"residual": "first"}, INSIDE),
    "stream from the last activations, inside from weights": matched(HEARD_STREAM | {"residual": "last"}, INSIDE),
    "stream from activations, heads from weights, neurons from activations": matched(
        HEARD_STREAM, {"axes": ("attention", "heads")}, {"axes": ("ffn",), "activations": True}
    ),
}
CANDIDATES = (
    "stream from activations, inside from weights, invertible",
    "weights",
    "weights, invertible",
    "activations, then weights",
    "the same, then the stream and inside from weights",
)

PERMUTATIONS: dict[str, Any] = {"groups": {"residual": "permutation", "attention": "permutation"}, "frame": ()}
WAYS: dict[str, Way] = {
    "plain": plain,
    "plain, rotatable": plain_in_frame,
    "activation matching": matched(HEARD_ALL | PERMUTED),
    "activation matching, all axes": FREE["activations"],
    "weight matching": FREE["weights"],
    "label-free": FREE[CANDIDATES[0]],
    "label-free, chosen": best_without_labels,
    "learned permutations": learned(learning=STRAIGHT, **PERMUTATIONS),
    "learned orthogonal": learned(),
    "learned orthogonal, permutations too": learned(learning=STRAIGHT),
    "learned orthogonal, no labels": learned(learning={"distil": 1.0}),
    "learned dual": learned(dual=True),
    "learned orthogonal, distilled": learned(learning=DISTILLED),
    "learned dual, distilled": learned(dual=True, learning=DISTILLED),
    # Of post-norm models, whose stream is only permuted: the maps that are learned lie inside of heads.
    "learned": learned(),
    "learned dual, no labels": learned(dual=True, learning={"distil": 1.0}),
    "learned dual, labels only": learned(dual=True, learning={"distil": 0.0}),
    "learned dual, permutations too": learned(dual=True, learning=STRAIGHT),
    "learned dual, no gauges": without_gauges,
}
