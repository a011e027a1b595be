"""Verma & Elbayad 2024, Table 1: the barrier of masked language models by what is matched of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from matchings import rebasin
from study import Claim, Row, table
from verma import HEAD, INSIDE, PLAIN, Permuted, permuted

import symfuse
from symfuse.io import Checkpoint

FFN, INDEX, IGNORED, AWARE = "feed-forward", "+ heads by index", "+ heads ignored", "+ heads, head-aware"
ROTATED = "+ heads, head-aware, rotations inside (ours)"
PEER = "Git Re-Basin from activations, residual kept"
PAPER = {FFN: "4.31", INDEX: "4.13", IGNORED: "3.97", AWARE: "3.71"}


class Table1(Permuted):
    name = "verma_table1"
    paper = "verma"
    title = "Verma & Elbayad, Table 1: matching attention"
    known = ("models", "pairs", "points", "heard")
    about = """
Pairs of independently trained masked language models. The source is permuted by Pearson's correlations of activations
on training data; the residual stream is not matched.

- Heads by index: a permutation inside of each head; heads keep their order. Heads ignored: one permutation over all
  dimensions of a layer's attention, which changes the function. Head-aware: permutations inside of each pair of
  heads, then the best assignment of heads.
- The paper has ten pairs of MultiBERTs on Wikipedia's text. Here are character BERTs of three layers (`bert`), which
  were trained here, and the published SCEPTR checkpoints (`sceptr`), models of receptors, of which two pairs share
  one model.
- In the paper queries and keys follow the permutation of the values; here they have one of their own.
- The paper's barrier is over the mean of both models' losses, the second column; over the chord between them it is
  the fourth. We do not have its barrier with nothing matched (its Table 2 has 4.95 for a residual stream that is not
  permuted).
- The last line is the reference of this repository's tests, written without symfuse.
"""
    ways: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        PLAIN: {},
        FFN: permuted("ffn"),
        INDEX: permuted("attention", "ffn"),
        IGNORED: permuted("attention", "ffn", variants=("heads-ignored",)),
        AWARE: INSIDE,
        ROTATED: {"axes": INSIDE["axes"]},
        PEER: {},
    }

    def ways_of(self, models: str) -> Sequence[str]:
        """The reference knows models of `transformers` only."""
        return [way for way in self.ways if way != PEER or models != "sceptr"]

    def aligned(self, way: str, models: Sequence[Checkpoint], data: Mapping[str, object]) -> Checkpoint:
        if way != PEER:
            return super().aligned(way, models, data)
        source, anchor = (symfuse.to_module(model) for model in models)
        tensors = rebasin.activation_matching(
            source, anchor, data["data"], "bert", models[0].config["num_attention_heads"]
        )
        return models[0].replace(tensors={name: tensors[name] for name in models[0]})

    def tables(self, rows: Sequence[Row]) -> str:
        parts = []
        for name in self.options["models"]:
            lines = table(["matched", *HEAD, "paper, MultiBERTs"], self.lines(rows, name, PAPER))
            parts.append(f"{name} (accuracy of the models {self.accuracy(rows, name)} %):\n\n{lines}")
        return "\n\n".join(parts)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        claims = {
            (FFN, PLAIN): "matching feed-forward neurons alone lowers the barrier",
            (INDEX, FFN): "heads by index lower it further (4.31 → 4.13)",
            (IGNORED, INDEX): "ignoring heads lowers it more than heads by index (4.13 → 3.97)",
            (AWARE, IGNORED): "head-aware matching lowers it most (3.97 → 3.71)",
            (AWARE, PLAIN): "feed-forward neurons and heads together lower the barrier",
        }
        return [self.lower(rows, name, ways, says) for name in self.options["models"] for ways, says in claims.items()]
