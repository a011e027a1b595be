"""The pairs of models that `connect.py` connects, and the ways in which it moves them towards each other."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pairs
import receptor_task
import torch
import train
from torch import nn

import symfuse
from symfuse.alignment import Alignment
from symfuse.architectures import Model
from symfuse.canonical import canonical
from symfuse.demo import page
from symfuse.demo.packages import cache
from symfuse.evaluate import barrier
from symfuse.evaluate.tasks.predicting import Predicting
from symfuse.io import Checkpoint
from symfuse.learning import Learning, learn_universe, match_learned
from symfuse.matching.chosen import ROTATABLE
from symfuse.widths import expand, match_widths

VERSION = 1  # of what is kept in the cache folder
SEED = 0
BATCHES = 600  # of training data, to learn on
HEARD = 32  # of them, to take activations from
VALIDATED = 512  # images of the part "match" by which learning stops


@dataclass(frozen=True)
class Moved:
    """Two models as they are connected. about: how they were led there, if it took any learning."""

    source: Checkpoint
    anchor: Checkpoint
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """source, anchor: names in `train.KINDS`. seeds: of each pair, or names of SCEPTR checkpoints. steps, rate, distil:
    of learning. heard: whether it starts from activations."""

    source: str
    anchor: str
    seeds: tuple[tuple[Any, Any], ...]
    steps: int
    rate: float = 0.01
    distil: float = 0.0
    heard: bool = False


SCEPTR = "SCEPTR"
APART = ((0, 1), (2, 3), (4, 5))
KINDS = {
    "vit": Kind("vit", "vit", APART, steps=2000),
    "fashion": Kind("fashion", "fashion", APART, steps=1500),
    "gpt2": Kind("gpt2", "gpt2", APART, steps=3000),
    "vit-half": Kind("vit-half", "vit", ((0, 1), (1, 3), (2, 5)), steps=2000),
    "gpt2-half": Kind("gpt2-half", "gpt2", ((0, 1), (1, 3), (2, 5)), steps=3000),
    # Post-norm: rates and the share of distillation were chosen on the first pair of SCEPTR.
    "bert": Kind("bert", "bert", APART, steps=2000, rate=0.02, distil=0.5, heard=True),
    "sceptr": Kind(
        SCEPTR,
        SCEPTR,
        (("dropout_noise_only", "MLM_only"), ("synthetic_data", "MLM_only"), ("average_pooling", "shuffled_data")),
        steps=2000,
        rate=0.03,
        distil=0.5,
        heard=True,
    ),
}
POST_NORM = ("bert", "sceptr")
HALVES = ("vit-half", "gpt2-half")


@dataclass(frozen=True)
class Pair:
    """kind, number: of its seeds in KINDS. steps: of learning."""

    kind: str
    number: int
    steps: int

    @property
    def name(self) -> str:
        return "-".join(map(str, KINDS[self.kind].seeds[self.number]))

    @functools.cached_property
    def models(self) -> Moved:
        """As they were trained; the narrower one expanded."""
        kind = KINDS[self.kind]
        if kind.source == SCEPTR:
            names = kind.seeds[self.number]
            return Moved(*(receptor_task.checkpoint(f"{SCEPTR}_{name}") for name in names))
        source, anchor = (
            symfuse.open(train.train(name, seed))
            for name, seed in zip((kind.source, kind.anchor), kind.seeds[self.number], strict=True)
        )
        if kind.source != kind.anchor:
            source = expand(Model.of(source), Model.of(anchor)).checkpoint
        return Moved(source, anchor)

    def task(self, split: Any) -> Predicting:
        if KINDS[self.kind].source == SCEPTR:
            return receptor_task.task(self.models.anchor.config, split)
        found = train.KINDS[KINDS[self.kind].anchor].task(split)
        assert isinstance(found, Predicting)
        return found

    @property
    def learned_on(self) -> Predicting:
        """Batches as the models were trained on, drawn once."""
        if KINDS[self.kind].source == SCEPTR:
            return self.task("train")
        return training(KINDS[self.kind].anchor)

    @property
    def inputs(self) -> list[dict[str, torch.Tensor]]:
        """What to take activations from: no labels."""
        if KINDS[self.kind].source == SCEPTR:
            tokens = [batch["tokens"] for batch in self.learned_on.batches[:HEARD]]
            return [{"src": t, "attention_mask": t[..., 0] != 0} for t in tokens]
        batches = self.learned_on.batches[:HEARD]
        return [{name: field for name, field in batch.items() if name != "labels"} for batch in batches]

    @property
    def build(self) -> Callable[[Checkpoint], nn.Module] | None:
        """Makes the module, where `transformers` has none."""
        return page.build_receptors if KINDS[self.kind].source == SCEPTR else None

    def hears(self) -> dict[str, Any]:
        """For matching from activations."""
        build = {"build": pairs.listen_receptors} if KINDS[self.kind].source == SCEPTR else {}
        return {"data": self.inputs, **build}

    def learning(self, journal: str, **options: Any) -> Learning:
        kind = KINDS[self.kind]
        task, validation = self.learned_on, first(self.task("match"), VALIDATED)
        file = cache() / f"connect-{VERSION}" / f"{journal}.journal"
        file.parent.mkdir(parents=True, exist_ok=True)
        own = {"steps": self.steps, "rate": kind.rate, "distil": kind.distil, "build": self.build}
        return Learning(task, validation, **own, seed=SEED, journal=file, progress=say, **options)

    def folder(self, method: str) -> Path:
        """Where the moved models are kept."""
        return cache() / f"connect-{VERSION}" / f"{self.kind} {self.name} {method} {self.steps}".replace(" ", "_")


def say(progress: Any) -> None:
    print(f"step {progress.step}: loss {progress.loss:.4f}, barrier {progress.barrier:.4f}", flush=True)


@functools.cache
def training(kind: str) -> Predicting:
    rng, task = torch.Generator().manual_seed(SEED), train.KINDS[kind].task("match")
    assert isinstance(task, Predicting)
    return type(task)([train.KINDS[kind].draw(rng) for _ in range(BATCHES)], f"{kind}, train")


def said_by(task: Predicting, moved: Moved) -> Predicting:
    """The task with labels drawn, once, from what the models predict in the mean: no label of the data is used.

    The loss is then, up to the draw, the cross entropy to those predictions."""
    modules = [symfuse.to_module(model) for model in (moved.source, moved.anchor)]
    rng, batches = torch.Generator().manual_seed(SEED), []
    with torch.inference_mode():
        for batch in task.batches:
            mean = torch.stack([task.predicted(module, batch)[0].softmax(-1) for module in modules]).mean(0)
            drawn = torch.multinomial(mean.flatten(0, -2), 1, generator=rng).reshape(mean.shape[:-1])
            labels = batch["labels"].clone()
            labels[..., labels.shape[-1] - drawn.shape[-1] :] = drawn  # of texts all but the first token
            batches.append({**batch, "labels": labels})
    return type(task)(batches, f"{task.source}, labels as models say")


def first(task: Predicting, count: int) -> Predicting:
    """As many batches as have `count` rows together."""
    rows = itertools.accumulate(len(batch["labels"]) for batch in task.batches)
    return type(task)([b for b, total in zip(task.batches, rows, strict=True) if total <= count], task.source)


def plain(pair: Pair) -> Moved:
    return pair.models


def plain_in_frame(pair: Pair) -> Moved:
    """As the models are, in the parametrisation in which the others move them."""
    source, anchor = pair.models.source, pair.models.anchor
    frame = Alignment(symfuse.declare(source), {}, frame=ROTATABLE)
    return Moved(frame.in_frame(source), frame.in_frame(anchor))


def matched(pair: Pair, *ways: Mapping[str, Any]) -> Moved:
    """One matching after the other, each from where the last one led; from activations where a way says so."""
    source, anchor = pair.models.source, pair.models.anchor
    for way in ways:
        options = dict(way)
        heard = pair.hears() if options.pop("activations", False) else {}
        found = symfuse.match(source, to=anchor, **heard, **options)
        source, anchor = (held(model) for model in (found(source), found.in_frame(anchor)))
    return Moved(source, anchor)


def held(model: Checkpoint) -> Checkpoint:
    """With all tensors in memory: what is lazy is done now."""
    return model.replace(tensors=dict(model.items()))


def chosen(pair: Pair, names: Sequence[str]) -> Moved:
    """Of several the one with the least barrier where labels are drawn from what the models say of the inputs."""
    task = pair.learned_on
    unlabelled = said_by(type(task)(task.batches[:HEARD], task.source), pair.models)
    tried = {name: matched(pair, *FREE[name]) for name in names}
    paths = {name: (moved.source, moved.anchor) for name, moved in tried.items()}
    curves = barrier(paths, unlabelled, points=5, refine=0, build=pair.build).curves
    best = min(curves, key=lambda name: curves[name].barrier)
    return replace(tried[best], about={"chosen": best, "barriers": {n: c.barrier for n, c in curves.items()}})


def learned(pair: Pair, name: str, *, dual: bool = False, learning: Mapping[str, Any], **options: Any) -> Moved:
    source, anchor = pair.models.source, pair.models.anchor
    learn = replace(pair.learning(pair.folder(name).name), **learning)
    options |= pair.hears() if KINDS[pair.kind].heard else {}
    if dual:
        found = symfuse.align([source, anchor], anchor="universe", axes="all", learn=learn, **options)
        first, last = found.checkpoints
        return Moved(first, last, _about(found.alignments[0]))
    one_sided = symfuse.match(source, to=anchor, axes="all", learn=learn, **options)
    return Moved(one_sided(source), one_sided.in_frame(anchor), _about(one_sided))


def without_gauges(pair: Pair, name: str) -> Moved:
    """Learned dual, of models declared without the freedom of what reads a norm."""
    models = [Model.of(model) for model in (pair.models.source, pair.models.anchor)]
    bare = [replace(model, spec=replace(model.spec, gauges={})) for model in models]
    heard = pair.hears()
    learn, batches = pair.learning(pair.folder(name).name), heard.pop("data")
    found = learn_universe(bare, learn, batches=batches, axes="all", **heard)
    first, last = (g(model.checkpoint) for g, model in zip(found, models, strict=True))
    return Moved(first, last, _about(found[0]))


def _about(found: Alignment | None) -> dict[str, Any]:
    """What was told to learning, and where it stopped."""
    assert found is not None
    return {"learning": {key: value for key, value in found.provenance["learning"].items() if key != "history"}}


PERMUTED: dict[str, Any] = {"groups": {"residual": "permutation", "attention": "none"}, "frame": ()}
ALL: dict[str, Any] = {"axes": "all"}
HEARD_ALL = ALL | {"activations": True}
STREAM = {"axes": ("residual",)}
HEARD_STREAM = STREAM | {"activations": True}
INSIDE = {"axes": ("attention", "heads", "ffn")}
INVERTIBLE: dict[str, Any] = {"groups": {"attention": "invertible"}}


def _free(name: str, pair: Pair) -> Moved:
    return matched(pair, *FREE[name])


# Ways without labels: from activations, from weights, or from one after the other.
FREE: dict[str, tuple[Mapping[str, Any], ...]] = {
    "activations": (HEARD_ALL,),
    "activations, invertible": (HEARD_ALL | INVERTIBLE,),
    "weights": (ALL,),
    "weights, invertible": (ALL | INVERTIBLE,),
    "activations, then weights": (HEARD_ALL, ALL),
    "weights, then activations": (ALL, HEARD_ALL),
    "stream from activations, inside from weights": (HEARD_STREAM, INSIDE),
    "stream from activations, inside from weights, invertible": (HEARD_STREAM, INSIDE | INVERTIBLE),
    "the same, then the stream and inside from weights": (HEARD_STREAM, INSIDE, STREAM, INSIDE | INVERTIBLE),
    "stream from the first activations, inside from weights": (HEARD_STREAM | {"residual": "first"}, INSIDE),
    "stream from the last activations, inside from weights": (HEARD_STREAM | {"residual": "last"}, INSIDE),
    "stream from activations, heads from weights, neurons from activations": (
        HEARD_STREAM,
        {"axes": ("attention", "heads")},
        {"axes": ("ffn",), "activations": True},
    ),
}
DISTILLED = {"distil": 0.5, "steps": 4000}
BEST_FREE = "stream from activations, inside from weights, invertible"
CANDIDATES = (
    BEST_FREE,
    "weights",
    "weights, invertible",
    "activations, then weights",
    "the same, then the stream and inside from weights",
)
TRIALS: dict[str, Callable[[Pair], Moved]] = {name: functools.partial(_free, name) for name in FREE}
METHODS: dict[str, Callable[[Pair], Moved]] = {
    "plain": plain,
    "plain, rotatable": plain_in_frame,
    "activation matching": lambda pair: matched(pair, HEARD_ALL | PERMUTED),
    "weight matching": lambda pair: matched(pair, ALL),
    "label-free": TRIALS[BEST_FREE],
    "label-free, chosen": lambda pair: chosen(pair, CANDIDATES),
    "learned permutations": lambda pair: learned(
        pair,
        "learned permutations",
        learning={"permutations": "straight-through"},
        groups={"residual": "permutation", "attention": "permutation"},
        frame=(),
    ),
    "learned orthogonal": lambda pair: learned(pair, "learned orthogonal", learning={}),
    "learned orthogonal, no labels": lambda pair: learned(
        pair, "learned orthogonal, no labels", learning={"distil": 1.0}
    ),
    "learned dual": lambda pair: learned(pair, "learned dual", dual=True, learning={}),
    "learned orthogonal, distilled": lambda pair: learned(pair, "learned orthogonal, distilled", learning=DISTILLED),
    "learned dual, distilled": lambda pair: learned(pair, "learned dual, distilled", dual=True, learning=DISTILLED),
}
# Of post-norm models, whose stream is only permuted: the maps that are learned lie inside of heads.
OF_POST_NORM: dict[str, Callable[[Pair], Moved]] = {
    "plain": plain,
    "activation matching": lambda pair: matched(pair, HEARD_ALL),
    "weight matching": lambda pair: matched(pair, ALL),
    "learned": lambda pair: learned(pair, "learned", learning={}),
    "learned dual": METHODS["learned dual"],
    "learned dual, no labels": lambda pair: learned(
        pair, "learned dual, no labels", dual=True, learning={"distil": 1.0}
    ),
    "learned dual, labels only": lambda pair: learned(
        pair, "learned dual, labels only", dual=True, learning={"distil": 0.0}
    ),
    "learned dual, permutations too": lambda pair: learned(
        pair, "learned dual, permutations too", dual=True, learning={"permutations": "straight-through"}
    ),
    "learned dual, no gauges": lambda pair: without_gauges(pair, "learned dual, no gauges"),
}


# Of models of half the width, expanded.
OF_HALVES: dict[str, Callable[[Pair], Moved]] = {
    "plain": plain,
    "weight matching": lambda pair: of_widths(pair, None),
    "learned orthogonal": lambda pair: of_widths(pair, "learned orthogonal"),
}


def of_widths(pair: Pair, learned: str | None) -> Moved:
    """Expanded, matched from the weights with its copies chosen, and learned from there."""
    kind, (first, last) = KINDS[pair.kind], KINDS[pair.kind].seeds[pair.number]
    narrow, wide = (
        Model.of(symfuse.open(train.train(name, seed))) for name, seed in ((kind.source, first), (kind.anchor, last))
    )
    expanded, found = match_widths(narrow, wide)
    if learned is not None:
        learning = pair.learning(pair.folder(learned).name)
        found = match_learned(expanded, canonical(wide, found.frame), learning, start=found, axes="all")
    about = {} if learned is None else _about(found)
    return Moved(found(expanded.checkpoint), found.in_frame(wide.checkpoint), about)


def ways_of(kind: str) -> dict[str, Callable[[Pair], Moved]]:
    return OF_POST_NORM if kind in POST_NORM else OF_HALVES if kind in HALVES else METHODS


def learned_universe(models: Sequence[Checkpoint], pair: Pair) -> Sequence[Checkpoint]:
    learn = pair.learning(f"{pair.kind}_simplex_{pair.steps}")
    return symfuse.align(models, anchor="universe", axes="all", learn=learn).checkpoints


SIMPLEX: dict[str, Callable[[Sequence[Checkpoint], Pair], Sequence[Checkpoint]]] = {
    "simplex, plain": lambda models, _: models,
    "simplex, weight matching": lambda models, _: symfuse.align(models, anchor="universe", axes="all").checkpoints,
    "simplex, learned": learned_universe,
}
THREE = ("vit", "fashion", "gpt2")
