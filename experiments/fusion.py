"""Merges of fine-tuned models, with and without matching: python experiments/fusion.py [--task TASK] [--write]

The comparison of Zhang et al. (2025), Table 1, small: the models of `finetune.py`. Pairs of them are measured in domain
(the mean over the test parts of both domains), all three together out of domain (the test part of the fourth, on which
none was trained). Every method is tried as it is, with its defaults, and after matching; nothing was tuned on the test
parts. The last model of a pair or triple is the anchor, onto which the others are matched from the weights. What a
method learns from data, it learns on STATISTICS texts that a model was trained on, by the model as it is merged.
Rows go to data/fusion.json, as they are made; those that it has are not made again. `--write` puts the tables in
docs/fusion.md. Two runs may share the work by `--task`.

single: each of the models alone; own: each of them on its own domain; ensemble: the mean of their probabilities.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import itertools
import json
import math
import statistics
import subprocess
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import domains
import finetune
import pairs
import torch
from torch import Tensor, nn

import symfuse
from symfuse.alignment import random_alignment
from symfuse.evaluate import Task
from symfuse.evaluate.tasks.base import IGNORED, output_of
from symfuse.io import Checkpoint
from symfuse.stats.statistics import Statistics

DATA = Path(__file__).parent / "data" / "fusion.json"
DOCUMENT = Path(__file__).parents[1] / "docs" / "fusion.md"
MARKS = ("<!-- tables: python experiments/fusion.py --write -->", "<!-- end of tables -->")
SEEDS = (0, 1, 2)
STATISTICS = 256

MATCHINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "attention": {"axes": "attention"},
    "feed-forward": {"axes": "ffn"},
    "both": {"axes": ("attention", "ffn")},
    "both, no scales": {"axes": ("attention", "ffn"), "scaling": False},
}
# A control, of the first seed: all models but the anchor are first moved by a random element of these axes, far from
# where they were, computing what they did; then matched, or not.
APART = {"apart": {}, "apart, both": MATCHINGS["both"]}
MOVED = ("qk", "v", "ffn")
REFERENCES = ("single", "own", "ensemble")
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Tuned:
    """A fine-tuned model as it is merged. data: what it was trained on, for statistics. seconds: of matching it."""

    model: Checkpoint
    data: Task
    seconds: float = 0.0
    found: dict[str, tuple[Statistics, float]] = field(default_factory=dict)

    def statistics(self, kind: str) -> tuple[Statistics, float]:
        """What a method reads, and the seconds that it took to collect, once."""
        if kind not in self.found:
            start = time.process_time()
            statistics = symfuse.collect(self.model, self.data, kind)
            self.found[kind] = statistics, time.process_time() - start
        return self.found[kind]


@dataclass(frozen=True)
class Way:
    """How models are merged. method: its name in symfuse. statistics: the kind that it reads. transport: whether models
    are moved onto the last by optimal transport before. matchings: with which it is tried."""

    method: str
    statistics: str | None = None
    transport: bool = False
    matchings: tuple[str, ...] = (*MATCHINGS, *APART)

    def __call__(self, tuned: Sequence[Tuned]) -> Checkpoint:
        *models, anchor = [t.model for t in tuned]
        if self.transport:
            models = [symfuse.match(model, to=anchor, variants=["transport"])(model) for model in models]
        given = [t.statistics(self.statistics)[0] for t in tuned] if self.statistics else None
        return held(symfuse.merge([*models, anchor], method=self.method, statistics=given))


WAYS = {
    "simple": Way("linear"),
    "Fisher": Way("fisher", statistics="fisher"),
    "RegMean": Way("regmean", statistics="gram"),
    "OT": Way("linear", transport=True, matchings=("none", "both", *APART)),
}


class Cell:
    """One task and seed: its models as they are, by domain, and the test parts."""

    def __init__(self, task: str, seed: int) -> None:
        kind = domains.TASKS[task]
        self.task, self.seed, self.trained, self.held_out = task, seed, kind.trained, kind.held_out
        self.tuned = {domain: self._tuned(domain) for domain in kind.trained}
        model = self.tuned[kind.trained[0]].model
        self.tests = {d: finetune.part(task, d, "test", model) for d in (*kind.trained, kind.held_out)}

    def _tuned(self, domain: str) -> Tuned:
        model = symfuse.open(finetune.finetuned(self.task, domain, self.seed))
        return Tuned(held(model), finetune.part(self.task, domain, "train", model, limit=STATISTICS))

    @functools.cached_property
    def alone(self) -> dict[str, dict[str, Tensor]]:
        """What each model says of each test part."""
        modules = {domain: symfuse.to_module(tuned.model) for domain, tuned in self.tuned.items()}
        return {d: {where: probabilities(m, task) for where, task in self.tests.items()} for d, m in modules.items()}

    def matched(self, source: str, anchor: str, matching: str) -> Tuned:
        """One model moved onto another."""
        a, b = self.tuned[source], self.tuned[anchor]
        if source == anchor:
            return a
        if matching in APART:
            plant = random_alignment(symfuse.declare(a.model), self.seed, axes=MOVED)
            a = Tuned(held(plant(a.model)), a.data)
        options = (MATCHINGS | APART)[matching]
        if not options:
            return a
        start = time.process_time()
        moved = held(symfuse.match(a.model, to=b.model, **options)(a.model))
        return Tuned(moved, a.data, time.process_time() - start)

    def settings(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """The models that are merged, and the domains on which the result is measured."""
        for pair in combinations(self.trained, 2):
            yield pair, pair
        yield self.trained, (self.held_out,)

    def references(self, done: Container[tuple[Any, ...]]) -> Iterator[Row]:
        """Of the models as they are, but those rows that are done."""
        for models, tested in self.settings():
            rows = [("single", domain) for domain in models] + [("ensemble", "none")]
            for method, which in rows + [("own", "none")] * (models == tested):
                row = self._row(models, method, which)
                if key(row) not in done:
                    said = {where: self._said(models, method, which, where) for where in tested}
                    spent = {"train": finetune.seconds(self.task, which, self.seed)} if method == "single" else {}
                    yield row | {"scores": self._scores(said), "costs": spent}

    def _said(self, models: Sequence[str], method: str, which: str, where: str) -> Tensor:
        if method == "ensemble":
            return torch.stack([self.alone[domain][where] for domain in models]).mean(0)
        return self.alone[where if method == "own" else which][where]

    def merges(self, done: Container[tuple[Any, ...]]) -> Iterator[Row]:
        """Of each matching and method, but those rows that are done."""
        for matching in (*MATCHINGS, *(APART if self.seed == SEEDS[0] else ())):
            moved = functools.cache(functools.partial(self.matched, matching=matching))
            for models, tested in self.settings():
                for name, way in WAYS.items():
                    row = self._row(models, name, matching)
                    if matching in way.matchings and key(row) not in done:
                        yield row | self._merged(way, [moved(model, models[-1]) for model in models], tested)

    def _merged(self, way: Way, tuned: Sequence[Tuned], tested: Sequence[str]) -> Row:
        collecting = sum(t.statistics(way.statistics)[1] for t in tuned) if way.statistics else 0.0
        start = time.process_time()
        result = way(tuned)
        merging = time.process_time() - start
        module = symfuse.to_module(result)
        said = {where: probabilities(module, self.tests[where]) for where in tested}
        *others, anchor = tuned
        spent = {
            "match": sum(t.seconds for t in others),
            "statistics": collecting,
            "merge": merging,
            "distance": statistics.fmean(symfuse.distance(t.model, anchor.model).euclidean for t in others),
        }
        return {"scores": self._scores(said), "costs": spent}

    def _row(self, models: Sequence[str], method: str, matching: str) -> Row:
        return {
            "task": self.task, "seed": self.seed, "models": list(models), "method": method, "matching": matching,
        }  # fmt: skip

    def _scores(self, said: Mapping[str, Tensor]) -> Row:
        return {where: score(found, labels(self.tests[where])) for where, found in said.items()}


def held(checkpoint: Checkpoint) -> Checkpoint:
    """With all tensors in memory: what is lazy is done now."""
    return checkpoint.replace(tensors=dict(checkpoint.items()))


def probabilities(module: nn.Module, task: Task) -> Tensor:
    """[counted texts or words, classes]."""
    found = []
    with torch.inference_mode():
        for batch in task.batches:
            logits = output_of(module, batch, "logits")
            found.append(logits[batch["labels"] != IGNORED].softmax(-1))
    return torch.cat(found)


def labels(task: Task) -> Tensor:
    return torch.cat([batch["labels"][batch["labels"] != IGNORED] for batch in task.batches])


def score(found: Tensor, truth: Tensor) -> dict[str, float]:
    """Accuracy; F1, the mean over the classes that occur; loss in nats."""
    said = found.argmax(-1)
    f1 = []
    for label in truth.unique():
        hits = ((said == label) & (truth == label)).sum()
        f1.append(float(2 * hits / ((said == label).sum() + (truth == label).sum())))
    loss = nn.functional.nll_loss(found.clamp_min(1e-12).log(), truth)
    return {"accuracy": float((said == truth).float().mean()), "f1": statistics.fmean(f1), "loss": float(loss)}


def key(row: Row) -> tuple[Any, ...]:
    return row["task"], row["seed"], tuple(row["models"]), row["method"], row["matching"]


def known(file: Path) -> list[Row]:
    return json.loads(file.read_text("utf-8"))["rows"] if file.exists() else []


def record(file: Path, row: Row) -> None:
    """Add a row to the file, which another run may be adding to."""
    file.touch()
    with file.open("r+", encoding="utf-8") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        text = opened.read()
        rows = json.loads(text)["rows"] if text else []
        about = pairs.about("python experiments/fusion.py") | {"seed": list(SEEDS), "statistics": STATISTICS}
        opened.seek(0)
        opened.truncate()
        json.dump(about | {"rows": [*rows, row]}, opened, indent=1)
        opened.write("\n")


def run(cell: Cell, file: Path) -> None:
    done = {key(row) for row in known(file)}
    for row in itertools.chain(cell.references(done), cell.merges(done)):
        record(file, row | {"commit": commit()})
        print(*key(row), {where: round(score["accuracy"], 3) for where, score in row["scores"].items()}, flush=True)


@functools.cache
def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=DATA.parent, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True)
class Table:
    """The rows of one task."""

    rows: Sequence[Row]

    def values(self, place: str, metric: str, method: str, matching: str | None) -> dict[int, float]:
        """By seed the mean over the merged models of the mean over the domains that they are measured on."""
        found: dict[int, list[float]] = {}
        for row in self.rows:
            inside = set(row["scores"]) == set(row["models"])
            if row["method"] == method and matching in (None, row["matching"]) and inside == (place == "in"):
                value = statistics.fmean(score[metric] for score in row["scores"].values())
                found.setdefault(row["seed"], []).append(value)
        return {seed: statistics.fmean(values) for seed, values in found.items()}

    def line(self, method: str, matching: str | None) -> str:
        """Both places, by both metrics, and what matching changes in them."""
        cells = []
        for place in ("in", "out"):
            for metric in ("accuracy", "f1"):
                here, plain = (self.values(place, metric, method, m) for m in (matching, "none"))
                cells.append(of_seeds(list(here.values())))
                gains = [here[seed] - plain[seed] for seed in here if seed in plain]
                cells.append(of_seeds(gains, "+") if matching not in (None, "none") else "–")
        return f"| {method} | {matching or '–'} | {' | '.join(cells)} |"

    def __str__(self) -> str:
        head = ("method", "matching", *(f"{p}: {x}" for p in ("in", "out") for x in ("accuracy", "gain", "F1", "gain")))
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        lines += [self.line(method, None) for method in REFERENCES]
        lines += [self.line(method, m) for method, way in WAYS.items() for m in way.matchings if m not in APART]
        return "\n".join(lines)

    def control(self) -> str:
        """Of the first seed, as the models are, moved apart, and matched again: accuracy in and out of domain."""
        head = ("method", *(f"{place}: {m}" for place in ("in", "out") for m in ("none", *APART)))
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for method in WAYS:
            found = [
                self.values(p, "accuracy", method, m).get(SEEDS[0]) for p in ("in", "out") for m in ("none", *APART)
            ]
            cells = ["–" if value is None else f"{100 * value:.1f}" for value in found]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        return "\n".join(lines)


def of_seeds(values: Sequence[float], sign: str = "") -> str:
    """Mean ± standard error, in percent."""
    if not values:
        return "–"
    error = 100 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{100 * statistics.fmean(values):{sign}.1f} ± {error:.1f}"


def costs(rows: Sequence[Row]) -> str:
    """Seconds of fine-tuning and of matching a model, and of merging two; and how far these are apart when matched."""
    lines = ["|  | " + " | ".join(domains.TASKS) + " |", "|---" * (1 + len(domains.TASKS)) + "|"]
    two = [row for row in rows if len(row["models"]) == 2]

    def mean(task: str, what: str, method: str, matching: str | None) -> float:
        own = (row for row in two if row["task"] == task and row["method"] == method)
        found = [row["costs"][what] for row in own if matching in (None, row["matching"])]
        return statistics.fmean(found) if found else math.nan

    def line(name: str, *which: Any) -> None:
        lines.append(f"| {name} | {' | '.join(f'{mean(task, *which):.3f}' for task in domains.TASKS)} |")

    line("fine-tuning, s", "train", "single", None)
    for matching in tuple(MATCHINGS)[1:]:
        line(f"matching ({matching}), s", "match", "simple", matching)
    for method, way in WAYS.items():
        if way.statistics:
            line(f"statistics of two ({method}), s", "statistics", method, "none")
        line(f"merging two ({method}), s", "merge", method, "none")
    for matching in MATCHINGS:
        line(f"distance ({matching})", "distance", "simple", matching)
    return "\n".join(lines)


def largest(rows: Sequence[Row]) -> str:
    """In one line the most that matching changed any score of any merged model."""
    plain = {key(row): row["scores"] for row in rows}
    most = {"accuracy": 0.0, "f1": 0.0, "loss": 0.0}
    for row in (row for row in rows if row["matching"] not in APART):
        before = plain.get(key(row | {"matching": "none"}))
        for where, metric in itertools.product(row["scores"], most) if before else ():
            most[metric] = max(most[metric], abs(row["scores"][where][metric] - before[where][metric]))
    return (
        f"The most that matching changed of any one merged model on any one test part: accuracy by "
        f"{100 * most['accuracy']:.2f}, F1 by {100 * most['f1']:.2f}, the loss by {most['loss']:.5f} nats."
    )


def report(rows: Sequence[Row]) -> str:
    parts = []
    for task in domains.TASKS:
        own = [row for row in rows if row["task"] == task]
        moved = "Moved apart by a random exact element first (seed 0), and matched again, or not:"
        parts.append(f"### {task}\n\n{Table(own)}\n\n{largest(own)}\n\n{moved}\n\n{Table(own).control()}")
    return "\n\n".join([*parts, f"### Costs\n\n{costs(rows)}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=domains.TASKS, help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--write", action="store_true", help="only put what is in the file in docs/fusion.md")
    parser.add_argument("--data", type=Path, default=DATA, help="the file of rows (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.write:
        pairs.write(DOCUMENT, report(known(options.data)), MARKS)
        return
    for seed in options.seeds:
        for task in [options.task] if options.task else domains.TASKS:
            run(Cell(task, seed), options.data)
    print(report(known(options.data)))


if __name__ == "__main__":
    main()
