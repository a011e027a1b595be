"""Zhang et al. 2025, Table 3: what matching costs beside merging."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from families import held
from fusing import MATCHINGS, WAYS, Member, seconds
from study import Claim, Key, Part, Row, Study, mean_error, table

import symfuse
from symfuse.io import Checkpoint

MATCHED = ("attention", "feed-forward", "both")
METHODS = ("Fisher", "RegMean")
MOST = 0.05  # of a merge with data, as the paper has it
PAPER = ["paper: on an A100", "1.6 to 3.5", "–", "–"]


class Times(Study):
    """Options: tuned: {NAME: [seed, …]}, of each the models of its first two domains. shapes: {NAME: {class, config,
    noise, seeds, methods, texts}}: a random model and its like, moved by noise, of so many standard deviations of each
    tensor; texts: how many its statistics are collected on, the time of more is proportional. texts_of: the tuned whose
    first domain these are of. statistics: how many texts methods with data look at."""

    name = "zhang_table3"
    paper = "zhang"
    title = "Zhang et al., Table 3"
    keys = ("pair", "seed", "what")
    known = ("tuned", "shapes", "texts_of", "statistics")
    about = """
CPU seconds of one thread: to match one model to another from the weights, and to merge the two, including the
collection of statistics.

- The models are fine-tunes of Table 1 on two domains of a task. For its size only, there is also a pair in the shape
  of RoBERTa-base: random weights, and the same with a little noise, because fine-tunes are as close.
- What takes less than a second is the median of three. The statistics of the random pair are collected on a few
  texts, and their time, including its constant part, is scaled up to the stated number.
- A share is the time of matching relative to that of the merge with its statistics, which grows with the number of
  texts.
- Matching is symfuse's default (scales in turns, translations of biases), on the CPU whatever the config's device.

The paper's matching times are of attention alone, on a GPU; it reports less than 5 % of Fisher's or RegMean's.
"""

    def parts(self) -> Iterator[Part]:
        for name, seeds in self._seeds().items():
            yield from ((name, seed) for seed in seeds)

    def models(self) -> Iterator[tuple[str, tuple[str, int]]]:
        for name, seeds in self.options["tuned"].items():
            for seed, domain in itertools.product(seeds, self.config.tune(name).kind.trained[:2]):
                yield name, (domain, seed)

    def _seeds(self) -> dict[str, list[int]]:
        return self.options["tuned"] | {name: about["seeds"] for name, about in self.options["shapes"].items()}

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        name, seed = part
        pair = self._drawn(name, seed) if name in self.options["shapes"] else self._tuned(name, seed)
        source, anchor = (member.model for member in pair)

        def match(options: dict[str, Any]) -> Checkpoint:
            return held(symfuse.match(source, to=anchor, **options)(source))

        for what in (*MATCHED, *self._methods(name)):
            row: Row = {"pair": name, "seed": seed, "what": what}
            if self.key(row) in done:
                continue
            if what in MATCHED:
                yield row | {"seconds": usual(lambda options=MATCHINGS[what]: match(options)), "statistics": 0.0}
            else:
                collecting = WAYS[what].collecting(pair) * self.options["statistics"] / self._texts(name)
                yield row | {"seconds": usual(lambda way=WAYS[what]: way(pair)), "statistics": collecting}

    def _methods(self, name: str) -> Sequence[str]:
        methods: Sequence[str] = self.options["shapes"].get(name, {}).get("methods", tuple(WAYS))
        return methods

    def _texts(self, name: str) -> int:
        return int(self.options["shapes"].get(name, {}).get("texts", self.options["statistics"]))

    def _tuned(self, name: str, seed: int) -> list[Member]:
        its = self.config.tune(name)
        part = {d: its.part(d, "train", limit=self.options["statistics"]) for d in its.kind.trained[:2]}
        return [Member(held(its.model(domain, seed)), data) for domain, data in part.items()]

    def _drawn(self, name: str, seed: int) -> list[Member]:
        """A random model and its like; the data are texts as another's tokenizer cuts them, which serves for times."""
        about, texts = self.options["shapes"][name], self.config.tune(self.options["texts_of"])
        data = texts.part(texts.kind.trained[0], "train", limit=about["texts"])
        first = drawn(about["class"], about["config"], seed)
        rng = torch.Generator().manual_seed(seed)
        noisy = {key: t + about["noise"] * t.std() * torch.randn(t.shape, generator=rng) for key, t in first.items()}
        return [Member(first, data), Member(first.replace(tensors=noisy), data)]

    def tables(self, rows: Sequence[Row]) -> str:
        methods = list(WAYS)
        lines, shares = [], []
        for name in self._seeds():
            whole = {what: self._whole(rows, name, what) for what in (*MATCHED, *methods)}
            lines.append([name, *(mean_error(whole[what], 2) for what in (*MATCHED, *methods))])
            pairs = itertools.product(("attention", "both"), METHODS)
            shares.append([name, *(mean_error(self._shares(rows, name, *pair), 1, 100) for pair in pairs)])
        lines.append([*PAPER, *["–"] * len(methods)])
        shares.append(["paper", "< 5", "< 5", "–", "–"])
        head = ["pair", *(f"match {what}" for what in MATCHED), *(f"merge: {method}" for method in methods)]
        columns = [f"{what}, of {method}" for what, method in itertools.product(("attention", "both"), METHODS)]
        note = f"Seconds; Fisher and RegMean with statistics of {self.options['statistics']} texts of each model"
        below = f"Matching, in percent of such a merge:\n\n{table(['pair', *columns], shares)}"
        return f"{note}:\n\n{table(head, lines)}\n\n{below}"

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Of all pairs, or none, or undecided."""
        claims = []
        for what, method in itertools.product(("attention", "both"), METHODS):
            shares = {name: self._shares(rows, name, what, method) for name in self._seeds()}
            few = [share < MOST for some in shares.values() for share in some]
            axes = "attention" if what == "attention" else "attention and feed-forward"
            here = ", ".join(f"{name} {mean_error(some, 1, 100)} %" for name, some in shares.items())
            holds = True if all(few) else None if any(few) else False
            claims.append(Claim(f"matching ({axes}) takes less than 5 % of a {method} merge's time", here, holds))
        return claims

    def _whole(self, rows: Sequence[Row], name: str, what: str) -> list[float]:
        """Seconds by seed, with those of statistics."""
        own = sorted((row for row in rows if (row["pair"], row["what"]) == (name, what)), key=self.key)
        return [row["seconds"] + row["statistics"] for row in own]

    def _shares(self, rows: Sequence[Row], name: str, what: str, method: str) -> list[float]:
        pairs = zip(self._whole(rows, name, what), self._whole(rows, name, method), strict=True)
        return [matching / merging for matching, merging in pairs]


def usual(call: Callable[[], Any]) -> float:
    """Seconds: of one call, or if that is less than one the median of three."""
    times = [seconds(call)[1]]
    while len(times) < 3 and times[0] < 1.0:
        times.append(seconds(call)[1])
    return statistics.median(times)


def drawn(kind: str, config: dict[str, Any], seed: int) -> Checkpoint:
    """A model of a class of `transformers` with random weights."""
    import transformers

    of = getattr(transformers, kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = of(of.config_class(**config))
    return Checkpoint(dict(module.state_dict()), {**module.config.to_dict(), "architectures": [kind]}, name=kind)
