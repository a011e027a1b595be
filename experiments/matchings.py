"""Matchings by name, and studies that try them on pairs of models.

Those of Zhang et al. (2025) are as published: rotations of queries with keys and of values with outputs, each head with
that of its number; a permutation of feed-forward neurons; "scaled": then once a scale for each, where the units allow
it. The residual stream stays, and biases only move along. "all axes" is symfuse's own: also the order of heads, the
residual stream (rotated in pre-norm models, in a frame; permuted in others), heads of tasks, scales in turns, and
translations of biases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from config import Config
from corpora import Split
from families import Build, held, on_device
from study import Part, Row, Study
from torch import Tensor

import symfuse
from symfuse.alignment import Alignment
from symfuse.evaluation import Task
from symfuse.io import Checkpoint

sys.path.append(str(Path(__file__).parents[1] / "tests" / "reference"))
import circuits  # noqa: F401 - of peers.py
import otfusion
import rebasin

INSIDE: dict[str, Any] = {"attention": "attention", "ffn": "ffn", "both": ("attention", "ffn")}
MATCHINGS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    **{name: {"axes": axes, "scaling": False, "biases": False} for name, axes in INSIDE.items()},
    **{f"{name}, scaled": {"axes": axes, "one_pass": True, "biases": False} for name, axes in INSIDE.items()},
    "all axes": {"axes": "all"},
}
# Other methods, written without symfuse: what they make of a source, its anchor, their kind and number of heads.
PEERS: Mapping[str, Callable[..., dict[str, Tensor]]] = {
    "per-head permutation": partial(rebasin.weight_matching, residual=False, ffn=False),
    "Git Re-Basin, residual kept": partial(rebasin.weight_matching, residual=False),
    "Git Re-Basin": rebasin.nearest_weight_matching,
    "OT, hard": partial(otfusion.transport, residual="stream"),
    "OT, soft": partial(otfusion.transport, solver="sinkhorn", residual="stream"),
    "OT, soft, residual kept": partial(otfusion.transport, solver="sinkhorn"),
}


@dataclass(frozen=True, eq=False)
class Matched:
    """source: moved. anchor, plain: the anchor and the source as they were, in the frame of the moved one. alignment:
    None if nothing was matched."""

    source: Checkpoint
    anchor: Checkpoint
    plain: Checkpoint
    alignment: Alignment | None = None

    @property
    def framed(self) -> bool:
        """Whether the models are rewritten: the residual stream was rotated."""
        return self.alignment is not None and bool(self.alignment.frame)

    @property
    def mean(self) -> Checkpoint:
        """Of both: the simple merge."""
        return symfuse.merge([self.source, self.anchor])


def matched(name: str, source: Checkpoint, anchor: Checkpoint, layers: Sequence[int] | None = None) -> Matched:
    """By a matching of MATCHINGS, in memory. layers: only these."""
    options = MATCHINGS[name]
    if not options:
        return Matched(source, anchor, source)
    alignment = symfuse.match(source, to=anchor, layers=layers, threads=torch.get_num_threads(), **options)
    return Matched(
        *(held(model) for model in (alignment(source), alignment.in_frame(anchor), alignment.in_frame(source))),
        alignment,
    )


def aligned_by(peer: str, source: Checkpoint, anchor: Checkpoint) -> Checkpoint:
    """The source as one of PEERS moves it towards the anchor: BERT, ViT and GPT-2."""
    tensors = PEERS[peer](dict(source.items()), dict(anchor.items()), *shape(source))
    return source.replace(tensors=tensors)


def shape(model: Checkpoint) -> tuple[str, int]:
    """What the peers call its class, and its heads."""
    config = model.config
    return config["model_type"], config["n_head"] if "n_head" in config else config["num_attention_heads"]


@dataclass(frozen=True, eq=False)
class Pair:
    """Two models of a family, or of what is fine-tuned. build: as of a family."""

    config: Config
    name: str
    seeds: tuple[Any, Any]

    @property
    def models(self) -> tuple[Checkpoint, Checkpoint]:
        """Source and anchor."""
        source, anchor = (held(self._model(seed)) for seed in self.seeds)
        return source, anchor

    def _model(self, seed: Any) -> Checkpoint:
        if self.name in self.config.tuned:
            return self.config.tune(self.name).model(*seed)
        return self.config.family(self.name).model(seed)

    @property
    def build(self) -> Build | None:
        if self.name in self.config.tuned:
            return on_device(self.config.device)
        return self.config.family(self.name).build

    def tasks(self, split: Split) -> list[Task]:
        """What a merge of them is measured on: the data of the family, or both domains on which they were tuned."""
        if self.name not in self.config.tuned:
            return [self.config.family(self.name).task(split)]
        return [self.config.tune(self.name).part(domain, split) for domain, _ in self.seeds]

    def accuracy(self, model: Checkpoint, split: Split = "test") -> float:
        """The mean over the tasks."""
        return fmean(symfuse.evaluate(model, one, build=self.build).metrics["accuracy"] for one in self.tasks(split))


class PairStudy(Study):
    """A study whose options have `models: {NAME: {pairs: [[seed, seed], …]}}`: names of families, and of what is
    fine-tuned, whose seeds are [domain, seed]."""

    def parts(self) -> Iterator[Part]:
        for name, about in self.options["models"].items():
            yield from ((name, number) for number in range(len(about["pairs"])))

    def models(self) -> Iterator[tuple[str, Any]]:
        for part in self.parts():
            pair = self.pair(part)
            yield from ((pair.name, tuple(seed) if isinstance(seed, list) else seed) for seed in pair.seeds)

    def pair(self, part: Part) -> Pair:
        name, number = part
        source, anchor = self.options["models"][name]["pairs"][number]
        return Pair(self.config, name, (source, anchor))

    def start(self, pair: Pair) -> Row:
        """How the rows of a pair begin."""
        source, anchor = pair.seeds
        return {"models": pair.name, "source": source, "anchor": anchor}

    def values(self, rows: Sequence[Row], of: str, **where: Any) -> list[float]:
        """One figure of all rows that have these values, by pairs."""
        selected = [row for row in rows if all(row.get(key) == value for key, value in where.items())]
        names = list(self.options["models"])
        order = sorted(selected, key=lambda row: (names.index(row["models"]), str(row["source"]), str(row["anchor"])))
        return [row[of] for row in order]


def gains(here: Sequence[float], before: Sequence[float]) -> list[float]:
    """By pairs."""
    return [after - plain for after, plain in zip(here, before, strict=True)]
