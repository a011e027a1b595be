"""Which group inside heads, against distance and barrier: python experiments/groups.py [PAIR …]

Queries/keys and values by rotations, by rotations and scales, and by invertible maps.

Pairs are those of pairs.py (default: vit, gpt2). Attention alone, and with all axes, from the weights. The table of
docs/matching.md is what this prints.
"""

from __future__ import annotations

import argparse
import time

import torch
from pairs import PAIRS, SEED, STARTS, Pair

import symfuse
from symfuse.alignment import Alignment
from symfuse.matching import match_models
from symfuse.model import Model

GROUPS = ("orthogonal", "conformal", "invertible")
SETTINGS = {"attention": "attention", "all axes": "attention,ffn,heads,residual,pooler,head"}


def row(pair: Pair, axes: str) -> str:
    """One pair and one choice of axes, by each group."""
    alignments: dict[str, Alignment] = {}
    seconds = []
    for group in GROUPS:
        start, models = time.perf_counter(), [Model.of(model) for model in (pair.source, pair.anchor)]
        alignments[group] = match_models(
            *models, axes=SETTINGS[axes], groups={"attention": group}, starts=STARTS, seed=SEED, threads=1
        )
        seconds.append(f"{time.perf_counter() - start:.1f}")
    paths = symfuse.barrier(
        pair.source, pair.anchor, pair.loss, alignments, points=pair.points, refine=0, build=pair.build
    )
    plain, *_ = (paths.curves[paths.baselines[group][0]] for group in GROUPS)
    curves = [paths.curves[group] for group in GROUPS]
    inside = [g for i, g in alignments["invertible"].elements.items() if i.axis in ("qk", "v")]
    condition = max(float(g.condition().max()) for g in inside)
    distances = " / ".join(f"{curve.distance / plain.distance:.3f}" for curve in curves)
    barriers = " / ".join(f"{curve.barrier:.3f}" for curve in curves)
    parts = (pair.name, axes, distances, f"{plain.barrier:.3f}", barriers, f"{condition:.3g}", " / ".join(seconds))
    return f"| {' | '.join(parts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=f"of {', '.join(PAIRS)} (default: vit gpt2)")
    names = parser.parse_args().pairs or ["vit", "gpt2"]
    if strange := [name for name in names if name not in PAIRS]:
        parser.error(f"no pair is called {strange[0]!r}")
    torch.set_num_threads(1)
    print("| pair | axes | distance left | plain barrier | barrier | condition | seconds |\n|" + "---|" * 7)
    for name in names:
        pair = PAIRS[name]()
        for axes in SETTINGS:
            print(row(pair, axes), flush=True)


if __name__ == "__main__":
    main()
