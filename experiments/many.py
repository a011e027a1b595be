"""Averages of several models that were trained apart: python experiments/many.py [--write] [KIND …]

The mean of 3, 4 or 5 models as they are, each moved onto one of them (pairwise anchoring: every model in turn is the
anchor), and all moved onto their running mean (universe matching). From the weights, all axes; pre-norm models with
their norms folded and writers centred, so that the residual stream is rotated. The models are those of `train.py`, with
more seeds, and the SCEPTR checkpoints that were trained independently. Rows go to data/many.json, where those of other
kinds stay; `--write` puts the table in docs/pairs.md.

spread: the squared distances to the mean, as a share of those of the unaligned models in the same frame.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pairs
import torch
import train
from torch import nn

import symfuse
from symfuse.alignment import Alignment
from symfuse.demo import page, receptors
from symfuse.evaluation import Loss
from symfuse.io import Checkpoint
from symfuse.matching import match_models, match_universe
from symfuse.matching.problem import ROTATABLE
from symfuse.matching.universe import spread
from symfuse.model import Model

DATA = Path(__file__).parent / "data" / "many.json"
MARKS = ("<!-- table: python experiments/many.py --write -->", "<!-- end of table -->")
AXES = ("attention", "ffn", "heads", "residual")
INDEPENDENT = ("MLM_only", "average_pooling", "dropout_noise_only", "shuffled_data", "synthetic_data")
COUNTS = (3, 4, 5)

Build = Callable[[Checkpoint], nn.Module] | None


def models_of(kind: str) -> tuple[list[Model], Loss, Build]:
    if kind == "sceptr":
        checkpoints = [symfuse.open(receptors.convert(f"SCEPTR_{name}")) for name in INDEPENDENT]
        return [Model.of(c) for c in checkpoints], page.masked_receptors, page.build_receptors
    checkpoints = [symfuse.open(train.train(kind, seed)) for seed in range(max(COUNTS))]
    return [Model.of(c) for c in checkpoints], train.KINDS[kind].task("test"), None


def rows_of(kind: str, count: int) -> list[dict[str, Any]]:
    models, loss, build = models_of(kind)
    models = models[:count]
    frame = ROTATABLE if models[0].spec.reads else ()
    options: dict[str, Any] = {"axes": AXES, "frame": frame, "threads": torch.get_num_threads(), "seed": pairs.SEED}

    def score(alignments: Sequence[Alignment]) -> tuple[float, float, float]:
        aligned = [g(m.checkpoint) for g, m in zip(alignments, models, strict=True)]
        merged = symfuse.evaluate(symfuse.merge(aligned), loss, build=build)
        return merged.loss, merged.metrics["accuracy"], spread([Model.of(c) for c in aligned])

    def anchored(number: int) -> tuple[list[Alignment], float]:
        start = time.perf_counter()
        matched = [match_models(model, models[number], **options) for model in models]
        return matched, time.perf_counter() - start

    ends = [symfuse.evaluate(m.checkpoint, loss, build=build) for m in models]
    by_anchor = [anchored(number) for number in range(count)]
    plain = [Alignment(g.spec, {}, frame=g.frame) for g in by_anchor[0][0]]
    start = time.perf_counter()
    universe = match_universe(models, **options)
    seconds = time.perf_counter() - start
    results = {
        "none": [(*score(plain), 0.0)],
        "pairwise": [(*score(alignments), spent) for alignments, spent in by_anchor],
        "universe": [(*score(universe.alignments), seconds)],
    }
    whole = results["none"][0][2]
    return [
        {
            "kind": kind,
            "models": count,
            "how": how,
            "loss": [loss for loss, *_ in scores],
            "accuracy": [accuracy for _, accuracy, *_ in scores],
            "spread": [spread / whole for _, _, spread, _ in scores],
            "seconds": [round(spent, 2) for *_, spent in scores],
            "end losses": [score.loss for score in ends],
            "end accuracies": [score.metrics["accuracy"] for score in ends],
            "curve": list(universe.curve) if how == "universe" else None,
        }
        for how, scores in results.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: one row for each kind, number of models and way; of pairwise anchoring the mean and the range."""
    lines = ["| models | how | spread | loss of the mean | accuracy | seconds |", "|---" * 6 + "|"]
    for row in rows:
        mean = {key: sum(row[key]) / len(row[key]) for key in ("loss", "accuracy", "spread", "seconds")}
        ends = sum(row["end losses"]) / row["models"]
        several = f" ({min(row['loss']):.3f} to {max(row['loss']):.3f})" if len(row["loss"]) > 1 else ""
        lines.append(
            f"| {row['models']} {row['kind']} (each {ends:.3f}) | {row['how']} | {mean['spread']:.3f} "
            f"| {mean['loss']:.3f}{several} | {mean['accuracy']:.3f} | {mean['seconds']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(train.KINDS)}, sceptr (default: all)")
    parser.add_argument("--write", action="store_true", help="only put what is in the file in docs/pairs.md")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    known: dict[str, Any] = json.loads(DATA.read_text("utf-8")) if DATA.exists() else {"rows": []}
    for kind in () if options.write else options.kinds or (*train.KINDS, "sceptr"):
        rows = [row for count in COUNTS for row in rows_of(kind, count)]
        known = pairs.about("python experiments/many.py") | {
            "rows": [*(row for row in known["rows"] if row["kind"] != kind), *rows]
        }
        DATA.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if options.write:
        pairs.write(pairs.DOCUMENT, table(known["rows"]), MARKS)
    else:
        print(table(known["rows"]))


if __name__ == "__main__":
    main()
