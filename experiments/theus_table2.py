"""Theus et al. 2025, Table 2: barriers between models that were trained apart, by way of matching.

The mean of two models, saved: python experiments/theus_table2.py vit 0 1 "learned dual" FOLDER [--config long]
"""

from __future__ import annotations

import argparse
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
from config import Config
from drawing import figure, legend
from families import Seed
from paths import NOTHING, Paths, draw_curves, measured, ordered
from study import Claim, Key, Part, Row, Study, better, mean_error
from ways import FREE, OPTIONS, SEED, WAYS, Apart, Way, outcome_of

import symfuse
from symfuse.errors import SymfuseError

# Its barriers on the test split, from the chord.
OF_PAPER = ("plain", "activation matching", "weight matching", "learned permutations", "learned orthogonal")
PAPER = {
    column: dict(zip(OF_PAPER, barriers, strict=True))
    for column, barriers in {
        "CIFAR-10": (1.69, 1.27, 0.36, 0.45, 0.00),
        "CIFAR-100": (2.46, 2.11, 0.69, 0.53, 0.00),
        "Tiny ImageNet": (2.84, 1.86, 0.47, 0.29, 0.00),
        "Tiny Shakespeare": (2.02, 1.43, 0.34, 0.63, 0.02),
        "BookCorpus": (4.34, 4.05, 1.56, 1.60, 0.42),
    }.items()
}
DRAWN = (
    "plain", "activation matching", "weight matching", "label-free", "learned permutations", "learned orthogonal",
    "learned dual", "activation matching, all axes",
)  # fmt: skip
FEW = 0.1  # of what learning gains


class Table2(Study):
    """Options: families: {NAME: {pairs: [[seed, seed], …], methods: […] of WAYS and PEERS, once: […] (on the first pair
    alone), seeds: {METHOD: number of seeds of learning, 1 if not named}, trials: whether the ways without labels are
    compared on the first pair and the part "match", paper: columns of its table, and the options of `Apart`}}."""

    name = "theus_table2"
    paper = "theus"
    title = "Theus et al., Table 2: barriers by method"
    keys = ("family", "source", "anchor", "method", "split")
    known = ("families", "pairs", "methods", "once", "seeds", "trials", "paper", *OPTIONS)
    about = """
The barrier on the straight path between two independently trained models: the largest rise of the test loss above the
chord between the ends, in nats, on 11 points and the halved intervals around the highest. "Over the mean": above the
mean of the ends. "Least accuracy": on the path. Seconds: CPU time to match and transform the models.

- Plain, rotatable: in the form in which the stream can be rotated, with norms folded and writers centred.
- Activation matching: permutations of the stream, heads and neurons. Weight matching: all axes, the stream rotated.
  Ways that rotate the stream are in the rotatable form; shares are of the plain barrier in the models' own form.
- Learned: starts from there and minimises the loss of random points of the path on training data, λ in [0.1, 0.9]
  (paper: [0.4, 0.6]), stopped by the barrier on the part "match". Learned permutations: all axes, by permutations
  only (and translations of biases). Learned orthogonal: the stream rotated, invertible maps in heads, permutations
  kept from the weights, or learned too. Dual: both models are transformed.
- Git Re-Basin, implemented from its paper: permutations of the stream, of heads, inside of heads, of neurons.
- "Circuits": as in the paper, queries are multiplied with keys and values with outputs, and these products are
  averaged (on 11 points); everything else stays a checkpoint of its class.

The paper's models are larger (6 layers of width 256), and so are its data; its ViTs are of three datasets.
"""

    def parts(self) -> Iterator[Part]:
        for name, about in self.options["families"].items():
            for number, (first, second) in enumerate(about["pairs"]):
                once = about.get("once", []) if number == 0 else []
                for method in [*about["methods"], *once]:
                    part = (name, first, second, method, "test")
                    yield from (with_seed(part, seed) for seed in range(about.get("seeds", {}).get(method, 1)))
            if about.get("trials"):
                yield from ((name, *about["pairs"][0], method, "match") for method in ("plain", *FREE))

    def models(self) -> Iterator[tuple[str, Seed]]:
        for name, about in self.options["families"].items():
            yield from ((name, seed) for pair in about["pairs"] for seed in pair)

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        if part not in done:
            named = dict(zip((*self.keys, "seed"), (*part, SEED), strict=False))
            yield {**named, **self.measured(part)}

    def key(self, row: Mapping[str, Any]) -> Key:
        """With the seed of learning, if it is not the first."""
        return with_seed(super().key(row), row.get("seed", SEED))

    def measured(self, part: Part) -> Row:
        name, first, second, method, split, seed = (*part, SEED)[:6]
        apart = replace(self.apart(name, first, second), seed=seed)
        if method in peers.CIRCUITS:
            inner = peers.CIRCUITS[method]
            return peers.measured_in_circuits(apart, inner, way(inner), split)
        return measured(apart, method, way(method), split)

    def apart(self, name: str, *seeds: Seed) -> Apart:
        return Apart(self.config, name, seeds, self.options["families"][name])

    def tables(self, rows: Sequence[Row]) -> str:
        parts, rows = [], ordered(rows, [*WAYS, *peers.NAMES, *FREE])
        for name in self.options["families"]:
            paths = self.paths(rows, name)
            parts.append(f"**{name}**. {paths.ends()}\n\n{paths.table()}")
        for name, about in self.options["families"].items():
            without_labels = Paths.of(rows, family=name, split="match")
            if without_labels.rows:
                pair = "-".join(map(str, about["pairs"][0]))
                parts.append(
                    f'**{name}**, tried without labels on pair {pair} and the part "match":\n\n{without_labels.table()}'
                )
        return "\n\n".join(parts)

    def paths(self, rows: Sequence[Row], name: str) -> Paths:
        columns = self.options["families"][name].get("paper", [])
        return Paths.of(rows, {column: PAPER[column] for column in columns}, family=name, split="test")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        return [claim for name in self.options["families"] for claim in _claims(name, self.paths(rows, name))]

    def draw(self, rows: Sequence[Row], file: Path) -> None:
        names = list(self.options["families"])
        with figure(file, 2, len(names), (2.2, 1.9)) as axes:
            draw_curves(axes, [self.paths(rows, name) for name in names], DRAWN)
            for one, name in zip(axes[0], names, strict=True):
                one.set_title(name)
            legend(axes)


def with_seed(part: Part, seed: int) -> Part:
    return part if seed == SEED else (*part, seed)


def way(method: str) -> Way:
    return {**FREE, **WAYS, **peers.WAYS}[method]


def _claims(name: str, paths: Paths) -> Iterator[Claim]:
    order = (
        ("activation matching", "plain", "activation matching leaves a lower barrier than plain averaging"),
        (
            "weight matching",
            "activation matching",
            "weight matching with a rotated stream leaves less than activation matching",
        ),
        ("learned orthogonal", "learned permutations", "learned permutations leave more than learned orthogonal maps"),
    )
    for good, worse, says in order:
        if paths.way(good) and paths.way(worse):
            here, holds = paths.less(good, worse)
            yield Claim(says, f"{name}: {here}", holds)
    if paths.way("learned orthogonal"):
        here, holds = paths.none("learned orthogonal")
        says = f"learned orthogonal maps leave no barrier (at most {NOTHING:.0%} of the plain one; BookCorpus: 10 %)"
        yield Claim(says, f"{name}: {here}", holds)
    too = "learned orthogonal, permutations too"
    if paths.gains("learned orthogonal", too):
        all_of_it, more = paths.gains("weight matching", "learned orthogonal"), paths.gains("learned orthogonal", too)
        places = [row["kept places"] for row in paths.way(too)]
        here = (
            f"{name}: learning them too leaves {mean_error(more, 1, -100, '+')} points of plain; learning gained "
            f"{mean_error(all_of_it, 1, 100)}; neurons that kept their place {mean_error(places, 0, 100)} %"
        )
        says = (
            f"permutations of weight matching are final: learning them too gains under {FEW:.0%} of what learning gains"
        )
        yield Claim(says, here, better(paths.few("weight matching", "learned orthogonal", too, FEW)))


def save_mean(study: Table2, name: str, seeds: Sequence[Seed], method: str, folder: Path) -> None:
    """Write the mean of the models as a way moves them, and measure what `transformers` loads of it."""
    import transformers

    apart = study.apart(name, *seeds)
    symfuse.merge(outcome_of(apart, method, way(method)).models).save(folder)
    task = apart.family.task("test")
    module, about = getattr(transformers, task.auto).from_pretrained(folder, output_loading_info=True)
    score = task(module.eval())
    wrong = {key: len(value) for key, value in about.items()}
    print(f"{folder}: {type(module).__name__}, loss {score.loss:.4f}, {dict(score.metrics)}, {wrong}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Save the mean of two models of a family, moved towards each other.")
    parser.add_argument("family")
    parser.add_argument("seeds", nargs=2)
    parser.add_argument("method", choices=[*WAYS, *FREE], metavar="WAY", help=f"of {', '.join(WAYS)}")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", default="long", help="a name in experiments/configs, or a file (default: long)")
    options = parser.parse_args()
    seeds: list[Any] = [int(seed) if seed.isdigit() else seed for seed in options.seeds]
    try:
        study = Table2(Config.read(options.config))
        if options.family not in (known := study.options["families"]):
            parser.error(f"no family is called {options.family!r}; there are {', '.join(known)}")
        save_mean(study, options.family, seeds, options.method, options.folder)
    except SymfuseError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
