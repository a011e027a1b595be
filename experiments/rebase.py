"""A fine-tune moved onto another base: whom it helps, and how much (docs/rebase.md)."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import corpora
import torch
from families import Trained
from study import Claim, Key, Part, Row, Study, better, mean_error, table
from torch import Tensor, nn

import symfuse
from symfuse.demo.packages import cache, publishing
from symfuse.io import Checkpoint

sys.path.append(str(Path(__file__).parents[1] / "tests" / "reference"))
import transfusion

VERSION = 1  # of how models are trained here
ALPHAS = (0.2, 0.4, 0.6, 0.8, 1.0)
COUNTS: dict[corpora.Split, int | None] = {"train": None, "match": 500, "test": 1000}

State = dict[str, Tensor]
Labelled = tuple[Tensor, Tensor]

TASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda x: x.rot90(1, (-2, -1)),
    "upside down": lambda x: x.flip(-2),
    "inverted": lambda x: -x,
    "plain": lambda x: x,
}
CASES = {
    "later": "B is A trained on, on the same data",
    "more data": "B is A trained on, on data that A never saw",
    "larger": "B is wider, trained longer, apart from A",
    "apart": "B is another seed of A",
}


class Rebase(Study):
    """Options: families: {NAME: {pairs, cases, tasks, wide: FAMILY}}; steps, rate: of a fine-tune; later: steps of B
    where it is A trained on; less: how many images A has seen where B has seen all; samples, few: labelled images and
    the steps on them."""

    name = "rebase"
    paper = "own"
    title = "A fine-tune moved onto another base"
    keys = ("family", "case", "source", "anchor", "task", "way")
    known = ("families", "pairs", "cases", "tasks", "wide", "steps", "rate", "later", "less", "samples", "few")
    about = """
A is a small vision transformer, FT its fine-tune on the same images turned by 90° (or inverted, upside down); B is
another base. g aligns A with B, and g(τ) = g(FT) − g(A). The share of the gain is that of B + α g(τ) over that of a
fine-tune of B itself, both less the accuracy of B; α is chosen on one part of the data, and the share is of another.
Beside it stand plain τ, random numbers with the norms of each tensor of g(τ), and the peers: TransFusion's
permutations, and GradFix's mask from 64 labelled images. Training on the same 64 images, 30 steps, begins at B, B + τ,
B + g(τ), or half of the way from B to g(A) with g(τ). Kept is the accuracy on B's own task, as a share of B's.
"""

    def parts(self) -> Iterator[Part]:
        for name, options in self.options["families"].items():
            for case in options["cases"]:
                for first, second in options["pairs"]:
                    both = ((first, second), (second, first))
                    pairs = both if case == "apart" else ((first, second),) if case == "larger" else ((first, first),)
                    for source, anchor in pairs:
                        yield from ((name, case, source, anchor, task) for task in options["tasks"])

    def models(self) -> Iterator[tuple[str, int]]:
        for name, options in self.options["families"].items():
            wide = {second for _, second in options["pairs"]} if "larger" in options["cases"] else ()
            yield from ((name, seed) for pair in options["pairs"] for seed in pair)
            yield from ((options["wide"], seed) for seed in wide)

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        name, case, source, anchor, task = part
        about = {"family": name, "case": case, "source": source, "anchor": anchor, "task": task}
        missing = [way for way in self._ways(case) if self.key(about | {"way": way}) not in done]
        if not missing:
            return
        pair = _Pair(self, name, case, source, anchor, task)
        for way in missing:
            yield about | {"way": way} | pair.measured(way)

    def _ways(self, case: str) -> list[str]:
        here = list(WAYS)
        return [way for way in here if case != "larger" or way not in SAME_WIDTH]

    def tables(self, rows: Sequence[Row]) -> str:
        cases = [case for case in CASES if any(row["case"] == case for row in rows)]
        head = ["way", *(f"{case} ({_count(rows, case)})" for case in cases)]
        lines = [[way, *(self._cell(rows, case, way) for case in cases)] for way in WAYS]
        about = "; ".join(f"{case}: {CASES[case]}" for case in cases)
        facts = [
            [
                case,
                mean_error((row["relative"] for row in of(rows, case, "g(τ), weights")), 2),
                mean_error((row["units"] for row in of(rows, case, "g(τ), weights")), 2),
                mean_error((row["before"] for row in of(rows, case, "g(τ), weights")), 1, 100),
                mean_error((row["tuned"] for row in of(rows, case, "g(τ), weights")), 1, 100),
                mean_error((row["accuracy"] for row in of(rows, case, "FT of A")), 1, 100),
                mean_error((row["kept"] for row in of(rows, case, "g(τ), weights")), 2),
            ]
            for case in cases
        ]
        columns = ["case", "g(A) from B", "cosine of units", "B, %", "FT of B, %", "FT of A, %", "kept with g(τ)"]
        return f"Share of the gain ({about}):\n\n{table(head, lines)}\n\n{table(columns, facts)}"

    def _cell(self, rows: Sequence[Row], case: str, way: str) -> str:
        return mean_error(shares(of(rows, case, way)))

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        claims = []
        for case in CASES:
            moved = shares(of(rows, case, "g(τ), weights"))
            for says, other in (
                ("g(τ) carries more of the gain than plain τ", "plain τ"),
                ("g(τ) carries more than training on the few labelled images", "30 steps from B"),
                ("training from B + g(τ) gains more than from B", None),
            ):
                first = moved if other else shares(of(rows, case, "30 steps from B + g(τ)"))
                second = shares(of(rows, case, other or "30 steps from B"))
                if first and len(first) == len(second):
                    gains = [a - b for a, b in zip(first, second, strict=True)]
                    here = f"{case}: {mean_error(first)} against {mean_error(second)}"
                    claims.append(Claim(f"{case}: {says}", here, better(gains)))
        return claims


def of(rows: Sequence[Row], case: str, way: str) -> list[Row]:
    found = [row for row in rows if (row["case"], row["way"]) == (case, way)]
    return sorted(found, key=lambda row: (row["family"], row["source"], row["anchor"], row["task"]))


def shares(rows: Iterable[Row]) -> list[float]:
    return [(row["accuracy"] - row["before"]) / (row["tuned"] - row["before"]) for row in rows]


def _count(rows: Sequence[Row], case: str) -> int:
    return len(of(rows, case, "g(τ), weights"))


@dataclass(eq=False)
class _Pair:
    """A fine-tune of A, and B, of which all is made when it is first asked for."""

    study: Rebase
    name: str
    case: str
    source: int
    anchor: int
    task: str

    @functools.cached_property
    def options(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], self.study.options)

    @functools.cached_property
    def family(self) -> Trained:
        return cast(Trained, self.study.config.family(self.name))

    def data(self, split: corpora.Split, task: str | None = None) -> Labelled:
        images, labels = corpora.images(self.family.kind.data, split)
        count = COUNTS[split]
        return TASKS[task or self.task](corpora.scaled(images[:count])), labels[:count]

    # -- the models

    @functools.cached_property
    def base(self) -> Checkpoint:
        model = self.family.model(self.source)
        if self.case != "more data":
            return model
        return self.made(f"less-{self.source}", None, "plain", self.family.kind.steps, slice(0, self.options["less"]))

    @functools.cached_property
    def onto(self) -> Checkpoint:
        if self.case == "larger":
            wide = self.study.options["families"][self.name]["wide"]
            return self.study.config.family(wide).model(self.anchor)
        if self.case == "apart":
            return self.family.model(self.anchor)
        return self.made(f"{self.case}-{self.source}", self.base, "plain", self.options["later"])

    @functools.cached_property
    def finetune(self) -> Checkpoint:
        return self.tuned(self.base, self.source)

    @functools.cached_property
    def target(self) -> Checkpoint:
        """The fine-tune of B itself."""
        return self.tuned(self.onto, self.anchor)

    def tuned(self, base: Checkpoint, seed: int) -> Checkpoint:
        return self.made(f"{self.task}-of-{_label(base)}", base, self.task, self.options["steps"], seed=seed)

    def made(
        self, name: str, start: Checkpoint | None, task: str, steps: int, part: slice = slice(None), seed: int = 0
    ) -> Checkpoint:
        """A model that is trained here, kept by what it is made of."""
        about = [VERSION, name, task, steps, self.options["rate"], part.stop, seed, self.family.kind.folder.name]
        folder = cache() / f"rebase-{VERSION}" / f"{name.replace(' ', '_')}-{corpora.digest(about)}"
        if not folder.is_dir():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.source)
                module = self.family.kind.build() if start is None else symfuse.to_module(start)
            images, labels = self.data("train", task)
            rate = self.family.kind.rate if start is None else self.options["rate"]
            train(module, (images[part], labels[part]), steps, rate, seed=seed)
            with publishing(folder) as scratch:
                module.save_pretrained(scratch)
        return symfuse.open(folder)

    # -- the vectors, in the frame of B where they are moved

    @functools.cached_property
    def by_weights(self) -> symfuse.Rebased:
        return symfuse.rebase(self.finetune, self.base, self.onto)

    @functools.cached_property
    def by_activations(self) -> symfuse.Rebased:
        images, _ = self.data("train", "plain")
        batches = [{"pixel_values": part} for part in images[:512].split(128)]
        return symfuse.rebase(self.finetune, self.base, self.onto, axes="all", data=batches)

    def parts(self, done: symfuse.Rebased) -> tuple[State, State, State]:
        """B in the frame, g(τ) and g(A) − B."""
        if self.case == "larger":
            one, zero, there = (
                symfuse.rebase(self.finetune, self.base, self.onto, alpha=a, towards=b).checkpoint
                for a, b in ((1.0, 0.0), (0.0, 0.0), (0.0, 1.0))
            )
            states = [state_of(zero), state_of(one), state_of(there)]
            return states[0], less(states[1], states[0]), less(states[2], states[0])
        g = done.alignment
        onto, tuned, base = (state_of(one) for one in (g.in_frame(self.onto), g(self.finetune), g(self.base)))
        return onto, less(tuned, base), less(base, onto)

    @functools.cached_property
    def moved(self) -> tuple[State, State, State]:
        return self.parts(self.by_weights)

    @functools.cached_property
    def plain(self) -> tuple[State, State]:
        states = [state_of(one) for one in (self.onto, self.finetune, self.base)]
        return states[0], less(states[1], states[2])

    @functools.cached_property
    def permuted(self) -> tuple[State, State]:
        onto, tau = self.plain
        heads = int(self.onto.config["num_attention_heads"])
        steps = transfusion.transfusion(state_of(self.base), onto, "vit", heads)
        return onto, transfusion.moved(tau, "vit", steps)

    def random(self, tau: State) -> State:
        """Of the norm of each tensor."""
        rng = torch.Generator().manual_seed(0)
        noise = {name: torch.randn(t.shape, generator=rng) for name, t in tau.items()}
        return {name: n * (tau[name].norm() / n.norm().clamp(min=1e-30)) for name, n in noise.items()}

    def masked(self, onto: State, tau: State) -> State:
        """GradFix's."""
        module, (images, labels) = self.module(onto), self.few
        gradients: list[State] = []
        for image, label in zip(images[:, None], labels[:, None], strict=True):
            module.zero_grad()
            nn.functional.cross_entropy(module(image).logits, label).backward()
            gradients.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        return transfusion.gradfix(tau, gradients)

    @functools.cached_property
    def few(self) -> Labelled:
        images, labels = self.data("train")
        chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))[: self.options["samples"]]
        return images[chosen], labels[chosen]

    # -- what is measured

    @functools.cached_property
    def blank(self) -> Any:
        """Of B's class, to set weights in."""
        return symfuse.to_module(self.onto).eval()

    def module(self, state: State) -> Any:
        self.blank.load_state_dict(state)
        return self.blank

    def accuracy(self, state: State, split: corpora.Split, task: str | None = None) -> float:
        return accuracy(self.module(state), self.data(split, task))

    @functools.cached_property
    def facts(self) -> Row:
        plain, relation = state_of(self.onto), self.by_weights.relation
        return {
            "before": self.accuracy(plain, "test"),
            "tuned": self.accuracy(state_of(self.target), "test"),
            "own": self.accuracy(plain, "test", "plain"),
            "relative": relation.relative,
            "units": relation.units,
            "kind": relation.kind,
        }

    def measured(self, way: str) -> Row:
        start = time.process_time()
        alpha, state = WAYS[way](self)
        seconds = time.process_time() - start
        module = self.module(state) if way != "FT of A" else symfuse.to_module(self.finetune)
        found = {"alpha": alpha, "accuracy": accuracy(module, self.data("test")), "seconds": round(seconds, 2)}
        kept = accuracy(module, self.data("test", "plain")) / self.facts["own"]
        return found | self.facts | {"kept": kept}

    def best(self, onto: State, tau: State) -> tuple[float, State]:
        """By the part "match"."""
        found = {alpha: self.accuracy(added(onto, tau, alpha), "match") for alpha in ALPHAS}
        alpha = max(found, key=lambda one: (found[one], -one))
        return alpha, added(onto, tau, alpha)

    def several(self, of: Callable[[_Pair], tuple[State, State]]) -> tuple[float, State]:
        """With the fine-tune on another task beside this one, by the part "match" of both."""
        other = replace(self, task="turned" if self.task == "inverted" else "inverted")
        (onto, tau), (_, more) = of(self), of(other)
        both = added(tau, more, 1.0)

        def score(alpha: float) -> float:
            state = added(onto, both, alpha)
            return sum(self.accuracy(state, "match", task) for task in {self.task, other.task})

        alpha = max(ALPHAS, key=score)
        return alpha, added(onto, both, alpha)

    def trained(self, start: tuple[float, State]) -> tuple[float, State]:
        """From there, on the few images."""
        module = self.module(start[1])
        train(module, self.few, self.options["few"], self.options["rate"], seed=0)
        return start[0], {name: t.detach().clone() for name, t in module.state_dict().items()}


def _dial(pair: _Pair, by: float) -> tuple[float, State]:
    onto, tau, gap = pair.moved
    return 1.0, added(added(onto, gap, by), tau, 1.0)


WAYS: dict[str, Callable[[_Pair], tuple[float, State]]] = {
    "FT of A": lambda pair: (1.0, pair.plain[0] if pair.case != "larger" else pair.moved[0]),
    "plain τ": lambda pair: pair.best(*pair.plain),
    "random τ": lambda pair: pair.best(pair.moved[0], pair.random(pair.moved[1])),
    "g(τ), weights": lambda pair: pair.best(*pair.moved[:2]),
    "g(τ), activations": lambda pair: pair.best(*pair.parts(pair.by_activations)[:2]),
    "TransFusion": lambda pair: pair.best(*pair.permuted),
    "GradFix, τ": lambda pair: pair.best(pair.plain[0], pair.masked(*pair.plain)),
    "GradFix, g(τ)": lambda pair: pair.best(pair.moved[0], pair.masked(*pair.moved[:2])),
    "GradFix, random τ": lambda pair: pair.best(pair.moved[0], pair.masked(pair.moved[0], pair.random(pair.moved[1]))),
    "τ of two tasks": lambda pair: pair.several(lambda one: one.plain),
    "g(τ) of two tasks": lambda pair: pair.several(lambda one: one.moved[:2]),
    "dial ½ + g(τ)": lambda pair: _dial(pair, 0.5),
    "30 steps from B": lambda pair: pair.trained((0.0, pair.moved[0])),
    "30 steps from B + τ": lambda pair: pair.trained(pair.best(*pair.plain)),
    "30 steps from B + g(τ)": lambda pair: pair.trained(pair.best(*pair.moved[:2])),
    "30 steps from dial ½ + g(τ)": lambda pair: pair.trained(_dial(pair, 0.5)),
}
SAME_WIDTH = {"plain τ", "τ of two tasks", "g(τ), activations", "TransFusion", "GradFix, τ", "30 steps from B + τ"}


def _label(checkpoint: Checkpoint) -> str:
    folder = Path(str(checkpoint.folder))
    return f"{folder.parent.name}-{folder.name}"


def state_of(checkpoint: Checkpoint) -> State:
    return {name: t.detach() for name, t in symfuse.to_module(checkpoint).state_dict().items()}


def less(one: State, other: State) -> State:
    return {name: t - other[name] for name, t in one.items()}


def added(state: State, tau: State, alpha: float) -> State:
    return {name: t + alpha * tau[name] for name, t in state.items()}


@torch.no_grad()
def accuracy(module: Any, data: Labelled) -> float:
    images, labels = data
    right = sum(
        int((module(part).logits.argmax(-1) == answer).sum())
        for part, answer in zip(images.split(500), labels.split(500), strict=True)
    )
    return right / len(labels)


def train(module: Any, data: Labelled, steps: int, rate: float, seed: int, batch: int = 64) -> None:
    """AdamW, half a cosine; with as many images as a batch all of them in each step."""
    images, labels = data
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    module.train()
    for _ in range(steps):
        chosen = torch.randint(len(labels), (batch,), generator=rng) if len(labels) > batch else slice(None)
        loss = nn.functional.cross_entropy(module(images[chosen]).logits, labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    module.eval()
