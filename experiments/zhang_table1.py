"""Zhang et al. 2025, Table 1: merges of fine-tuned encoders in and out of domain, with and without matching."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from families import held, on_device
from finetune import Tuned
from fusing import APART, MATCHINGS, MOVED, WAYS, Member, Way, labels, probabilities, score, seconds
from study import Claim, Key, Part, Row, Study, better, mean_error, table
from torch import Tensor

import symfuse
from symfuse.alignment import random_alignment

NAMES = {"accuracy": "accuracy", "f1": "F1"}
PLACES = {"in": "in domain", "out": "out of domain"}
REFERENCES = ("single", "own", "ensemble")
LEAST = 0.005  # of accuracy or F1, that is called a gain
CLAIMED = ("simple", "Fisher", "RegMean")
# Without and with matching, by method and place: named entities with DeBERTa-large.
PAPER = {
    ("simple", "out"): (10.80, 23.30),
    ("Fisher", "out"): (12.53, 18.33),
    ("RegMean", "out"): (10.80, 14.06),
}


@dataclass(frozen=True)
class Cell:
    """The models of one `tuned` and seed, by domain, and the test parts. texts: how many of those that a model was
    trained on methods with data look at. tested: how many of a test part are taken, None: all."""

    tuned: Tuned
    seed: int
    texts: int
    tested: int | None

    @functools.cached_property
    def members(self) -> dict[str, Member]:
        part = functools.partial(self.tuned.part, split="train", limit=self.texts)
        return {d: Member(held(self.tuned.model(d, self.seed)), part(d)) for d in self.tuned.kind.trained}

    @functools.cached_property
    def tests(self) -> dict[str, Any]:
        domains = (*self.tuned.kind.trained, self.tuned.kind.held_out)
        return {domain: self.tuned.part(domain, "test", limit=self.tested) for domain in domains}

    def says(self, member: Member, tested: Sequence[str]) -> dict[str, Tensor]:
        """Probabilities, by test part."""
        module = (on_device(self.tuned.device) or symfuse.to_module)(member.model)
        return {where: probabilities(module, self.tests[where]) for where in tested}

    @functools.cached_property
    def alone(self) -> dict[str, dict[str, Tensor]]:
        """What each model says of each test part."""
        return {domain: self.says(member, list(self.tests)) for domain, member in self.members.items()}

    def settings(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """The models that are merged, and the domains on which the result is measured."""
        kind = self.tuned.kind
        yield from ((pair, pair) for pair in combinations(kind.trained, 2))
        yield kind.trained, (kind.held_out,)

    def reference(self, models: Sequence[str], method: str, which: str, tested: Sequence[str]) -> Row:
        """The scores of models as they are."""
        predictions = {}
        for where in tested:
            if method == "ensemble":
                predictions[where] = torch.stack([self.alone[domain][where] for domain in models]).mean(0)
            else:
                predictions[where] = self.alone[where if method == "own" else which][where]
        spent = {"train": self.tuned.seconds(which, self.seed)} if method == "single" else {}
        return {"scores": self._scores(predictions), "costs": spent}

    def matched(self, source: str, anchor: str, matching: str) -> Member:
        """One model moved onto another."""
        a, b = self.members[source], self.members[anchor]
        if source == anchor:
            return a
        if matching in APART:
            plant = random_alignment(symfuse.declare(a.model), self.seed, axes=MOVED)
            a = Member(held(plant(a.model)), a.data)
        options = (MATCHINGS | APART)[matching]
        if not options:
            return a
        aligned, spent = seconds(lambda: held(symfuse.match(a.model, to=b.model, **options)(a.model)))
        return Member(aligned, a.data, spent)

    def merged(self, way: Way, members: Sequence[Member], tested: Sequence[str]) -> Row:
        collecting = way.collecting(members)
        result, merging = seconds(lambda: way(members))
        *others, anchor = members
        spent = {
            "match": sum(member.seconds for member in others),
            "statistics": collecting,
            "merge": merging,
            "distance": statistics.fmean(symfuse.relate(m.model, anchor.model).distance.euclidean for m in others),
        }
        return {"scores": self._scores(self.says(Member(result, anchor.data), tested)), "costs": spent}

    def _scores(self, predictions: Mapping[str, Tensor]) -> Row:
        return {where: score(predicted, labels(self.tests[where])) for where, predicted in predictions.items()}


class Fusion(Study):
    """Options: tuned: names of the config's. seeds. matchings, methods: of `fusing`. statistics: how many texts
    methods with data look at. tests: of how many texts a test part is, null: of all. apart: of which tuned the first
    seed has the control."""

    name = "zhang_table1"
    paper = "zhang"
    title = "Zhang et al., Table 1"
    keys = ("task", "seed", "models", "method", "matching")
    known = ("tuned", "seeds", "matchings", "methods", "statistics", "tests", "apart")
    about = """
One pretrained encoder with a new head, fine-tuned on three domains of a task.

- Tasks. sentiment: positive or negative, on movie reviews, tweets and Amazon reviews; held out: editorials. pos:
  parts of speech, on news, adventure and learned writing; held out: government.
- The encoder is all-MiniLM-L6-v2 (6 layers, 384 wide), and for names that end in -l3 paraphrase-MiniLM-L3-v2 (3
  layers, 384 wide).
- in: for each pair of models, the mean over the tests of both domains. out: all three merged, on the test of the
  domain that none was trained on.
- Models are matched from the weights, to the last; "both" is attention and feed-forward, with scales in turns and
  translations of biases, which are symfuse's defaults.
- Methods have their defaults. Fisher and RegMean use texts that a model was trained on, after matching.
- Gains are against the same method without matching, seed by seed; all in percent.
- single: each model alone; own: each on its own domain only; ensemble: the mean of their probabilities.

Differences from the paper. Its F1 of named entities is of entities; ours is the mean over the classes of words. It
fine-tunes larger encoders (RoBERTa, DeBERTa-large) on emotions and named entities. The table shows those of its
figures whose cell we know. There are two more: named entities in domain, 27.54 → 31.31, and RoBERTa on emotions,
RegMean, 35.87 → 39.95. In 12 of the 18 matched cells of its table the gain is a point at most; its RegMean rows
without matching equal the simple average. The control is ours: all models but the anchor are first transformed by a
random exact element, which takes them far away and keeps their function.
"""

    def parts(self) -> Iterator[Part]:
        yield from itertools.product(self.options["tuned"], self.options["seeds"])

    def models(self) -> Iterator[tuple[str, tuple[str, int]]]:
        for name, seed in self.parts():
            yield from ((name, (domain, seed)) for domain in self.config.tune(name).kind.trained)

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        name, seed = part
        cell = Cell(self.config.tune(name), seed, self.options["statistics"], self.options["tests"])

        def row(models: Sequence[str], method: str, matching: str) -> Row | None:
            known_row = {"task": name, "seed": seed, "models": list(models), "method": method, "matching": matching}
            return None if self.key(known_row) in done else known_row

        for models, tested in cell.settings():
            each = [("single", domain) for domain in models] + [("ensemble", "none")]
            for method, which in each + [("own", "none")] * (models == tested):
                if known := row(models, method, which):
                    yield known | cell.reference(models, method, which, tested)
        for matching in self._matchings(name, seed):
            aligned = functools.cache(functools.partial(cell.matched, matching=matching))
            for models, tested in cell.settings():
                for method in self.options["methods"]:
                    way = WAYS[method]
                    if matching in way.matchings and (known := row(models, method, matching)):
                        yield known | cell.merged(way, [aligned(model, models[-1]) for model in models], tested)

    def _matchings(self, name: str, seed: int) -> list[str]:
        apart = APART if name in self.options["apart"] and seed == self.options["seeds"][0] else ()
        return [*self.options["matchings"], *apart]

    def tables(self, rows: Sequence[Row]) -> str:
        tables = {name: self._of(rows, name) for name in self.options["tuned"]}
        caption = "Without → with matching (both): accuracy, or the mean F1 of the classes where words are classified"
        parts = [f"{caption}:\n\n{self._beside(tables)}"]
        for name, its in tables.items():
            parts.append(f"**{name}**\n\n{self._scores(its)}\n\n{its.largest()}")
            if name in self.options["apart"]:
                parts.append(f"Moved apart first (seed {self.options['seeds'][0]}):\n\n{self._control(its)}")
        return "\n\n".join([*parts, f"**Costs and distances**\n\n{self._costs(tables)}"])

    def _of(self, rows: Sequence[Row], name: str) -> Scores:
        of_words = self.config.tune(name).kind.task == "token-classification"
        return Scores([row for row in rows if row["task"] == name], "f1" if of_words else "accuracy")

    def _beside(self, tables: Mapping[str, Scores]) -> str:
        lines = []
        for method, place in itertools.product(self.options["methods"], PLACES):
            cells = [method, place]
            for its in tables.values():
                metric = its.metric
                before, after = (its.values(place, metric, method, m).values() for m in ("none", "both"))
                gains = mean_error(its.gains(place, metric, method, "both"), 2, 100, "+")
                cells.append(f"{100 * statistics.fmean(before):.2f} → {100 * statistics.fmean(after):.2f} ({gains})")
            paper = PAPER.get((method, place))
            cells.append(f"{paper[0]:.2f} → {paper[1]:.2f} ({paper[1] - paper[0]:+.2f})" if paper else "–")
            lines.append(cells)
        return table(["method", "domain", *tables, "paper: DeBERTa-large, named entities"], lines)

    def _scores(self, its: Scores) -> str:
        """Both places, by both metrics, and what matching changes in them."""
        merges = itertools.product(self.options["methods"], self.options["matchings"])
        lines = [[method, "–", *its.cells(method, None)] for method in REFERENCES]
        lines += [[method, m, *its.cells(method, m)] for method, m in merges if m in WAYS[method].matchings]
        columns = (f"{place}: {what}" for place in PLACES for what in ("accuracy", "gain", "F1", "gain"))
        return table(["method", "matching", *columns], lines)

    def _control(self, its: Scores) -> str:
        """Accuracies of the first seed as the models are, moved apart, and matched again."""
        seed, columns = self.options["seeds"][0], list(itertools.product(PLACES, ("none", *APART)))
        lines = []
        for method in self.options["methods"]:
            by_column = [its.values(place, "accuracy", method, matching) for place, matching in columns]
            lines.append(
                [method, *(mean_error([values[seed]], 1, 100) if seed in values else "–" for values in by_column)]
            )
        return table(["method", *(f"{place}: {matching}" for place, matching in columns)], lines)

    def _costs(self, tables: Mapping[str, Scores]) -> str:
        """Seconds of fine-tuning a model, of matching one and of merging two; and how far these are then apart."""
        wanted = [("fine-tuning, s of wall clock", "train", "single", None)]
        wanted += [(f"matching ({m}), s", "match", "simple", m) for m in self.options["matchings"] if m != "none"]
        for method in self.options["methods"]:
            if WAYS[method].statistics:
                wanted.append((f"statistics of two ({method}), s", "statistics", method, "none"))
            wanted.append((f"merging two ({method}), s", "merge", method, "none"))
        wanted += [(f"distance ({m})", "distance", "simple", m) for m in self.options["matchings"]]
        lines = [[name, *(f"{its.cost(*which):.3f}" for its in tables.values())] for name, *which in wanted]
        return table(["", *tables], lines)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Of all three methods alike, or undecided."""
        claims = []
        for name, place in itertools.product(self.options["tuned"], PLACES):
            its = self._of(rows, name)
            gains = {method: its.gains(place, its.metric, method, "both") for method in CLAIMED}
            verdicts = {better(values, LEAST) for values in gains.values()}
            here = ", ".join(f"{method} {mean_error(values, 2, 100, '+')}" for method, values in gains.items())
            says = f"matching improves simple, Fisher and RegMean averages {place} of domain".replace("in of", "in")
            claims.append(
                Claim(
                    says, f"{name}: {here} points of {NAMES[its.metric]}", *(verdicts if len(verdicts) == 1 else [None])
                )
            )
        return claims


@dataclass(frozen=True)
class Scores:
    """The rows of one `tuned`. metric: by which claims are decided, as in the paper."""

    rows: Sequence[Row]
    metric: str

    def values(self, place: str, metric: str, method: str, matching: str | None) -> dict[int, float]:
        """By seed the mean over the merged models of the mean over the domains that they are measured on."""
        by_seed: dict[int, list[float]] = {}
        for row in self.rows:
            inside = set(row["scores"]) == set(row["models"])
            if row["method"] == method and matching in (None, row["matching"]) and inside == (place == "in"):
                value = statistics.fmean(score[metric] for score in row["scores"].values())
                by_seed.setdefault(row["seed"], []).append(value)
        return {seed: statistics.fmean(values) for seed, values in by_seed.items()}

    def gains(self, place: str, metric: str, method: str, matching: str) -> list[float]:
        """By matching, for each seed."""
        here, plain = (self.values(place, metric, method, m) for m in (matching, "none"))
        return [here[seed] - plain[seed] for seed in sorted(here) if seed in plain]

    def cells(self, method: str, matching: str | None) -> Iterator[str]:
        for place, metric in itertools.product(PLACES, ("accuracy", "f1")):
            yield mean_error(self.values(place, metric, method, matching).values(), 1, 100)
            gains = [] if matching in (None, "none") else self.gains(place, metric, method, matching)
            yield mean_error(gains, 1, 100, "+")

    def cost(self, what: str, method: str, matching: str | None) -> float:
        """Of two models, the mean."""
        own = (row for row in self.rows if len(row["models"]) == 2 and row["method"] == method)
        return statistics.fmean(row["costs"][what] for row in own if matching in (None, row["matching"]))

    def largest(self) -> str:
        """In one line the most that matching changed any score of any merged model."""

        def of(row: Row, matching: str) -> tuple[Any, ...]:
            return row["seed"], tuple(row["models"]), row["method"], matching

        plain, most = (
            {of(row, row["matching"]): row["scores"] for row in self.rows},
            dict.fromkeys(("accuracy", "f1", "loss"), 0.0),
        )
        for row in (row for row in self.rows if row["matching"] not in APART):
            before = plain.get(of(row, "none"))
            for where, metric in itertools.product(row["scores"], most) if before else ():
                most[metric] = max(most[metric], abs(row["scores"][where][metric] - before[where][metric]))
        return (
            f"The most that matching changed of any one merged model on any one test part: accuracy by "
            f"{100 * most['accuracy']:.2f}, F1 by {100 * most['f1']:.2f}, the loss by {most['loss']:.5f} nats."
        )
