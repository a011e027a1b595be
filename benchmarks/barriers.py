"""Barriers of the demo's three pairs of models, under each alignment: python benchmarks/barriers.py

The models and texts are those of `symfuse demo`: a sentence encoder and its fine-tune, the encoder and a copy that is
moved by random symmetries (seed 0), and two receptor models that were trained independently.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import symfuse
from symfuse.alignment import random_alignment
from symfuse.cli.evaluate import NAMED
from symfuse.demo import packages, page, receptors
from symfuse.demo.run import MOVED, SCEPTR_PAIR, SEED
from symfuse.evaluation import Loss

Build = Callable[[symfuse.Checkpoint], torch.nn.Module]


def table(title: str, a: symfuse.Checkpoint, b: symfuse.Checkpoint, loss: Loss, build: Build | None = None) -> None:
    alignments = {name: symfuse.match(a, to=b, **options) for name, options in NAMED.items()}
    start = time.perf_counter()
    found = symfuse.barrier(a, b, loss, alignments, build=build)
    seconds = time.perf_counter() - start
    count = next(iter(found.curves.values())).points[0].score.count
    print(f"\n{title} ({count} counted, {seconds:.0f} s)\n")
    print(
        "| alignment | distance | loss of A | loss of B | barrier | over the mean | at λ | left of the plain barrier |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, curve in found.curves.items():
        share = found.share(name, "none")
        left = "" if name == "none" else "–" if share is None else f"{share:.1%}"
        at = f"{curve.peak.at:g}" if curve.barrier > curve.rounding else "–"
        end, start_loss = curve.ends
        print(
            f"| {name} | {curve.distance:.4g} | {start_loss:.4f} | {end:.4f} | {curve.barrier:.4f} "
            f"| {curve.barrier_over_mean:.4f} | {at} | {left} |"
        )


def main() -> None:
    torch.set_num_threads(1)
    base = symfuse.open(packages.minilm(), name="MiniLM")
    tuned = symfuse.open(packages.minilm_finetuned(), name="fine-tune")
    loss = page.retrieval(base)
    table("A fine-tune (A) and the model it was tuned from (B), retrieval of 34 pairs", tuned, base, loss)
    with TemporaryDirectory() as folder:
        plant = random_alignment(symfuse.declare(base), SEED, axes=MOVED)
        planted = symfuse.open(plant(base).save(Path(folder) / "planted"), name="planted")
        table("A planted copy (A) and the model itself (B), the same pairs", planted, base, loss)
    a, b = (symfuse.open(receptors.convert(name), name=name) for name in SCEPTR_PAIR)
    title = f"{SCEPTR_PAIR[0]} (A) and {SCEPTR_PAIR[1]} (B), masked amino acids of 400 sampled receptors"
    table(title, a, b, page.masked_receptors, page.build_receptors)
    print(f"\n11 points and two refinements on each path; one thread, torch {torch.__version__}")


if __name__ == "__main__":
    main()
